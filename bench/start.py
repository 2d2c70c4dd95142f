"""What a process pays: `import distboot`, the wrapper against other launchers and tini, `doctor`."""

from __future__ import annotations

import subprocess
import time
from functools import partial
from pathlib import Path

from measure import (
    PYTHON,
    Contender,
    Effort,
    Series,
    UnmeasuredError,
    clean_environ,
    interleaved,
    seconds_of,
)
from page import Limit, Section, Table, promise
from plot import Bar, bars

_PASS = (PYTHON, "-c", "pass")
_BARE, _OURS = "`python -c pass` itself", "distboot: `python -m distboot run --`"
_ACCELERATE = (
    "--cpu",
    "--num_processes=1",
    "--num_machines=1",
    "--mixed_precision=no",
    "--dynamo_backend=no",
)
# What is started with a command of one process behind it, and the rounds in which it takes part: the fast in all.
_FAST = {
    _BARE: (),
    _OURS: (PYTHON, "-m", "distboot", "run", "--"),
    "tini: `tini -s --`": ("tini", "-s", "--"),
}
_SLOW = {
    "torchrun": ("torchrun", "--standalone", "--nproc-per-node=1", "--no-python"),
    "`accelerate launch`": ("accelerate", "launch", *_ACCELERATE, "--no_python"),
    "`horovodrun --gloo`": ("horovodrun", "--gloo", "-np", "1"),
    "`deepspeed`": ("deepspeed", "--num_gpus=1", "--no_python", "--no_local_rank"),
}


def section(effort: Effort) -> Section:
    """All of it."""
    imported, bare = _import(effort)
    launchers = _launchers(effort)
    small = Table(
        "Import",
        ("what", "median (quartiles)"),
        [
            ("`python -c pass`", bare.said("ms", 1)),
            ("`import distboot`, over it", imported.said("ms", 1, sign=True)),
        ],
        f"A script that imports distboot starts {imported.median * 1e3:.1f} ms later, distributed or not.",
    )
    wrapper = launchers[_OURS].less(launchers[_BARE])
    limits = [
        promise("`import distboot` over bare Python", imported, 5e-3, "≤ 5 ms", unit="ms", digits=1, more=True),
        promise("wrapper around `python -c pass`, over it", wrapper, 40e-3, "≤ 40 ms", unit="ms", digits=1, more=True),
        _ratio(launchers),
        _doctor(effort),
        _memory(),
    ]  # fmt: skip
    return Section([_launcher_table(launchers), small], limits)


def _import(effort: Effort) -> tuple[Series, Series]:
    """What `import distboot` adds, and the bare interpreter."""
    sides = {"bare": _PASS, "import": (PYTHON, "-c", "import distboot")}
    found = interleaved([Contender(name, partial(seconds_of, words)) for name, words in sides.items()],
                        effort.rounds(40))  # fmt: skip
    return found["import"].less(found["bare"]), found["bare"]


def _launchers(effort: Effort) -> dict[str, Series]:
    """Each around `python -c pass`: the fast ones eight times a round."""
    fast = [
        Contender(name, partial(seconds_of, [*words, *_PASS]), times=8)
        for name, words in _FAST.items()
    ]
    slow = [Contender(name, partial(seconds_of, [*words, *_PASS])) for name, words in _SLOW.items()]
    return interleaved([*fast, *slow], effort.rounds(5))


def _ratio(launchers: dict[str, Series]) -> Limit:
    """The wrapper's time in those of what it runs; two interpreters are 2 of them."""
    what = "wrapper around `python -c pass`, in times of it"
    bare, ours = launchers[_BARE], launchers[_OURS]
    if not bare.values or not ours.values:
        return Limit(what, "not measured", "≤ 3.5 ×", None)
    ratio = ours.median / bare.median
    return Limit(what, f"{ratio:.2f} ×", "≤ 3.5 ×", ratio <= 3.5)


def _launcher_table(found: dict[str, Series]) -> Table:
    bare, ours = found[_BARE], found[_OURS].less(found[_BARE])
    rows = [(_BARE, bare.said("ms", 0), "", "")]
    for name, series in found.items():
        if name != _BARE:
            more = series.less(bare)
            ratio = (
                f"{more.median / ours.median:.0f} ×"
                if name in _SLOW and more.values and ours.values
                else ""
            )
            rows.append(
                (
                    name,
                    series.said("ms", 0),
                    more.said("ms", 0, sign=True) if series.values else "",
                    ratio,
                )
            )
    torchrun = found["torchrun"].less(bare)
    faster = f"; torchrun takes {torchrun.median:.1f} s" if torchrun.values else ""
    return Table(
        "Around one process",
        ("around `python -c pass`", "wall time", "more than without", "ratio"),
        rows,
        f"The wrapper delays the start of a script by {ours.median * 1e3:.0f} ms{faster}. It imports no framework for "
        "what it does; torchrun, accelerate, deepspeed and horovodrun import one before they start anything. "
        "tini is the least that process 1 of a container can cost: it is in C, forwards signals and reaps.",
        ("start.svg", _plot(found)),
    )


def _plot(found: dict[str, Series]) -> str:
    rows = []
    for name, series in found.items():
        more = series.less(found[_BARE])
        if name != _BARE and more.values:
            said = f"{more.median * 1e3:+,.0f} ms"
            rows.append(
                Bar(
                    name.partition(":")[0].replace("`", ""),
                    max(more.median, 0),
                    said,
                    ours=name == _OURS,
                )
            )
    return bars(
        "What a launcher adds to the start of one process",
        rows,
        "Wall time over python -c pass alone, median",
    )


def _doctor(effort: Effort) -> Limit:
    """How long it takes to say whether this machine is ready; whatever it finds."""

    def once() -> float:
        start = time.perf_counter()
        command = [PYTHON, "-m", "distboot", "doctor", "--json"]
        code = subprocess.run(
            command, env=clean_environ(), stdout=subprocess.DEVNULL, check=False
        ).returncode
        if code not in (0, 78):
            raise UnmeasuredError(f"exit code {code}")
        return time.perf_counter() - start

    found = interleaved([Contender("doctor", once)], effort.rounds(5))["doctor"]
    return promise("`doctor`, from start to end", found, 1, "≤ 1 s")


def _memory() -> Limit:
    """Resident memory of the wrapper while its child runs."""
    wrapper = subprocess.Popen(
        [PYTHON, "-m", "distboot", "run", "--", "sh", "-c", "echo up; read wait"],
        env=clean_environ(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert wrapper.stdout is not None
    wrapper.stdout.readline()
    status = Path(f"/proc/{wrapper.pid}/status").read_text()
    wrapper.communicate("\n")
    kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    megabytes = kib * 1024 / 1e6
    return Limit(
        "the wrapper's own resident memory, a rank",
        f"{megabytes:.1f} MB",
        "≤ 15 MB",
        megabytes <= 15,
    )
