"""`make bench`: what the project promises, measured side by side in one run, interleaved, medians.

Every comparison alternates its two sides, so that what else the machine does falls on both alike.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import container  # noqa: E402 - beside this file, and so are the next
import frameworks  # noqa: E402
import rollcall  # noqa: E402
from captured import ALL, without_launchers  # noqa: E402 - shared with the tests

from distboot import DistbootError, detect  # noqa: E402
from distboot.hostlist import expand_hosts  # noqa: E402

PYTHON = sys.executable


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    what: str
    measured: str
    limit: str
    reached: bool


def clean_environ() -> dict[str, str]:
    """This environment without launcher variables, and as MPI needs it on a small machine."""
    environ = without_launchers(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode; the first round writes ours
    if os.getuid() == 0:
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return environ


def seconds(command: list[str]) -> float:
    """Wall time of a command that must succeed."""
    start = time.perf_counter()
    subprocess.run(command, env=clean_environ(), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def interleaved(runs: int, *commands: list[str]) -> list[list[float]]:
    """Wall times of each command, run in turn; one round before counts for nothing."""
    rounds = [[seconds(command) for command in commands] for _ in range(runs + 1)][1:]
    return [list(times) for times in zip(*rounds, strict=True)]


def spread(times: list[float], scale: float = 1e3) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle * scale:.1f} ({low * scale:.1f} to {high * scale:.1f})"


def bench_import(runs: int) -> Result:
    """What `import distboot` adds to the bare interpreter."""
    bare, with_import = interleaved(runs, [PYTHON, "-c", "pass"], [PYTHON, "-c", "import distboot"])
    more = statistics.median(with_import) - statistics.median(bare)
    said = f"{more * 1e3:+.1f} ms: {spread(with_import)} against {spread(bare)}"
    return Result("`import distboot` over the bare interpreter", said, "≤ 5 ms", more <= 5e-3)


def bench_detect(runs: int) -> Result:
    """`detect` on every captured process; refusals are timed too."""

    def timed(environ: dict[str, str]) -> float:
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            with suppress(DistbootError):
                detect(environ)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    medians = [timed(process.environ) for capture in ALL for process in capture.processes]
    said = (
        f"{statistics.median(medians) * 1e6:.0f} µs, slowest {max(medians) * 1e6:.0f} µs, of {len(medians)} processes"
    )
    return Result("`detect()` on any capture, median", said, "≤ 100 µs", max(medians) <= 100e-6)


def bench_hostlist(runs: int) -> Result:
    """100,000 host names in each way that Slurm writes them."""
    lists = (
        "n[000001-050000,050001-100000]",
        "rack[1-100]n[0001-1000]",
        "n[" + ",".join(map(str, range(0, 200_000, 2))) + "]",
        ",".join(f"host-{number}" for number in range(100_000)),
        ",".join(f"r{number}n[1-10]" for number in range(10_000)),
    )
    medians = []
    for text in lists:
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            count = len(expand_hosts(text))
            times.append(time.perf_counter() - start)
            assert count == 100_000
        medians.append(statistics.median(times))
    said = f"{min(medians) * 1e3:.0f} to {max(medians) * 1e3:.0f} ms in {len(lists)} forms"
    return Result("a Slurm hostlist of 100,000 hosts, median", said, "≤ 100 ms", max(medians) <= 0.1)


def bench_wrapper(runs: int) -> Result:
    """What the wrapper adds to the command that it runs."""
    child = [PYTHON, "-c", "pass"]
    bare, wrapped = interleaved(runs, child, [PYTHON, "-m", "distboot", "run", "--", *child])
    more = statistics.median(wrapped) - statistics.median(bare)
    said = f"{more * 1e3:+.1f} ms: {spread(wrapped)} against {spread(bare)}"
    return Result("wrapper around `python -c pass`, over it", said, "≤ 60 ms", more <= 60e-3)


def bench_torchrun(runs: int) -> Result:
    """The same for torchrun, for comparison; no limit."""
    child = ["-c", "pass"]
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "--no-python", PYTHON]
    bare, wrapped = interleaved(runs, [PYTHON, *child], [*torchrun, *child])
    more = statistics.median(wrapped) - statistics.median(bare)
    return Result("torchrun around the same, for comparison", f"{more * 1e3:+.0f} ms", "", reached=True)


def bench_memory() -> Result:
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
    return Result("the wrapper's own resident memory, a rank", f"{megabytes:.1f} MB", "≤ 20 MB", megabytes <= 20)


_INIT = """
import distboot
ctx = distboot.init()
ctx.barrier()
ctx.close()
"""

_BY_HAND = """
import os
import torch.distributed as dist
os.environ["RANK"] = os.environ["OMPI_COMM_WORLD_RANK"]
os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]
os.environ["LOCAL_RANK"] = os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]
os.environ["MASTER_ADDR"] = "127.0.0.1"
os.environ["MASTER_PORT"] = "29581"
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
"""


def bench_init(runs: int) -> Result:
    """`init("torch")` at 4 ranks under mpirun, against the same script with the environment mapped by hand."""
    what, limit = 'init("torch"), 4 ranks under mpirun, over mapping by hand', "≤ 1.03 ×"
    mpirun = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(PYTHON).parent))
    if mpirun is None:
        return Result(what, "not measured: no mpirun", limit, reached=False)
    launch = [mpirun, "--map-by", ":OVERSUBSCRIBE", "-n", "4", PYTHON]
    with tempfile.TemporaryDirectory() as folder:
        scripts = [Path(folder, name) for name in ("by_hand.py", "with_init.py")]
        for script, text in zip(scripts, (_BY_HAND, _INIT), strict=True):
            script.write_text(text)
        by_hand, with_init = interleaved(runs, *([*launch, str(script)] for script in scripts))
    ratio = statistics.median(with_init) / statistics.median(by_hand)
    pairs = statistics.median(a / b for a, b in zip(with_init, by_hand, strict=True))
    said = f"{ratio:.3f} × (pairwise {pairs:.3f} ×): {spread(with_init, 1)} s against {spread(by_hand, 1)} s"
    return Result(what, said, limit, ratio <= 1.03)


_TIMED = """
import sys, time
import torch.distributed, distboot, distboot.bootstrap, distboot.frameworks._process_group
time.sleep(max(float(sys.argv[1]) - time.time(), 0))  # all ranks begin at one moment, with their imports done
start = time.perf_counter()
ctx = distboot.init()
took = time.perf_counter() - start
ctx.barrier()
ctx.close()
sys.stdout.write(f"{took}\\n")
"""


def bench_roll_call(runs: int) -> Result:
    """What the roll call adds to `init` at 4 ranks on one machine, over the same with the roll call switched off."""
    what, limit = "the roll call in `init`, 4 ranks under mpirun, over it switched off", "≤ 50 ms"
    mpirun = shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(PYTHON).parent))
    if mpirun is None:
        return Result(what, "not measured: no mpirun", limit, reached=False)
    times: dict[str, list[float]] = {"0": [], "1": []}
    for _ in range(runs + 1):
        for setting, found in times.items():
            launch = [mpirun, "--map-by", ":OVERSUBSCRIBE", "-n", "4", "-x", f"DISTBOOT_ROLL_CALL={setting}", PYTHON]
            done = subprocess.run(
                [*launch, "-c", _TIMED, str(time.time() + 8)],
                env=clean_environ(), check=True, capture_output=True, text=True,
            )  # fmt: skip
            found.append(max(map(float, done.stdout.split())))
    off, on = times["0"][1:], times["1"][1:]
    more = statistics.median(on) - statistics.median(off)
    said = f"{more * 1e3:+.1f} ms, slowest rank: {spread(on)} against {spread(off)}"
    return Result(what, said, limit, more <= 50e-3)


def bench_scale(world_size: int, most: float | None) -> Result:
    """Rank 0's time a rank and its memory, with simulated ranks at real sockets."""
    took, peak = rollcall.scale(world_size, 5)
    limit = "≤ 0.5 ms a rank" + (f", ≤ {most:.0f} MB" if most else "")
    reached = took <= 0.5 and (most is None or peak <= most)
    what = f"rank 0 in a roll call of {world_size:,} ranks (simulated, real sockets)"
    return Result(what, f"{took:.3f} ms a rank, {peak:.0f} MB resident", limit, reached)


def bench_naming(what: str) -> Result:
    """How soon every rank has the error that names the culprit, after the last of them has arrived."""
    code, join_timeout, ranks = rollcall.CASES[what]
    codes, took = rollcall.naming(join_timeout, *ranks)
    limit = 1.0 + (join_timeout if code == "missing-rank" else 0.0)
    reached = took <= limit and codes == [code] * (len(ranks) + 1)
    return Result(f"{what} named on every rank", f"after {took:.2f} s", f"≤ {limit:g} s", reached)


def bench_container(case: str, runs: int) -> Result:
    """The image of docker/ in real containers."""
    what, limit = container.CASES[case]
    if why := container.impossible():
        return Result(what, f"not measured: {why}", limit, reached=False)
    reached, said = container.measured(case, runs)
    return Result(what, said, limit, reached)


def bench_framework(case: str, runs: int) -> Result:
    """How soon the group of a framework is ready, against the framework's own way."""
    what, limit = frameworks.CASES[case][0], f"≤ {frameworks.LIMIT} ×"
    if missing := frameworks.missing(case):
        return Result(what, f"not measured: no {missing}", limit, reached=False)
    ours, theirs = frameworks.measured(case, runs)
    return Result(what, frameworks.compared(ours, theirs), limit, frameworks.ratio(ours, theirs) <= frameworks.LIMIT)


def main() -> int:
    """Run all, print the table; 1 when a limit was not reached."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15, help="rounds of the slow comparison (default: 15)")
    runs = parser.parse_args().runs
    benches: list[Callable[[], Result]] = [
        lambda: bench_import(runs * 4),
        lambda: bench_detect(200),
        lambda: bench_hostlist(15),
        lambda: bench_wrapper(runs * 4),
        lambda: bench_torchrun(3),
        bench_memory,
        lambda: bench_init(runs),
        lambda: bench_roll_call(runs),
        lambda: bench_scale(1024, None),
        lambda: bench_scale(4096, 100),
        lambda: bench_scale(10000, None),
        *(partial(bench_naming, case) for case in rollcall.CASES),
        *(partial(bench_container, case, runs) for case in container.CASES),
        *(partial(bench_framework, case, max(runs // 3, 3)) for case in frameworks.CASES),
    ]
    print("| what | measured: median (quartiles) | must reach | |\n|---|---|---|---|", flush=True)
    results = []
    for bench in benches:
        result = bench()
        results.append(result)
        verdict = ("reached" if result.reached else "**missed**") if result.limit else ""
        print(f"| {result.what} | {result.measured} | {result.limit} | {verdict} |", flush=True)
    return 0 if all(result.reached for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
