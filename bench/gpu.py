"""`make gpu`: what can only be seen on a GPU, in 5 minutes at most; prints it, and writes its part of `RESULTS.md`.

    make gpu                                            with `python3` as it is; nothing is installed
    make gpu PYTHON=/opt/venv/bin/python                with another one
    make gpu ARGS="--only doctor --only visible"        some of the checks, shown and not written down

That Python needs a torch for CUDA, and the machine no network. A check that cannot be made here is a row that says why;
the exit code is 1 when one has failed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parent / "tests/lib")]

import gpu_checks as checks  # noqa: E402 - beside this file, and so are the next
from gpu_jobs import RANK, FailedError, Jobs  # noqa: E402
from measure import UnmeasuredError, last_line  # noqa: E402
from page import table, with_gpu  # noqa: E402

_SECONDS = 280  # that all jobs together may take

CHECKS: dict[str, tuple[str, Callable[[checks.Here], str]]] = {
    "device": ("`init()`, one rank: device and backend", partial(checks.device, of_all=False)),
    "devices": (
        "`init()`, a rank on each GPU: device and backend",
        partial(checks.device, of_all=True),
    ),
    "collective": ("NCCL, one rank: all-reduce", partial(checks.collective, of_all=False)),
    "collectives": (
        "NCCL, a rank on each GPU: all-reduce",
        partial(checks.collective, of_all=True),
    ),
    "loss": ("DistributedDataParallel, one rank: loss", partial(checks.loss, of_all=False)),
    "losses": (
        "DistributedDataParallel, a rank on each GPU: loss",
        partial(checks.loss, of_all=True),
    ),
    "first": (
        "`init()` to the end of the first collective, one rank",
        partial(checks.first, of_all=False),
    ),
    "firsts": (
        "the same, a rank on each GPU, the slowest of them",
        partial(checks.first, of_all=True),
    ),
    "shared": ("two ranks on one GPU", checks.shared),
    "visible": (
        "`CUDA_VISIBLE_DEVICES`: torch, distboot and `init()` see the same devices",
        checks.visible,
    ),
    "killed": ("a rank is killed in a collective of NCCL", checks.killed),
    "doctor": ("`doctor`", checks.doctor),
    "wrapper": ("the wrapper around a script without distboot", checks.wrapper),
}


def here(jobs: Jobs, rounds: int) -> checks.Here:
    """The machine.

    Raises:
        FailedError: there is no GPU, or no torch that sees it.
    """
    torch = jobs.run([RANK, "machine"])[0].line()
    if not torch["gpus"]:
        built = f"for CUDA {torch['cuda']}" if torch["cuda"] else "for the CPU"
        raise FailedError(f"torch {torch['torch']}, built {built}, sees no GPU here")
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        listed = ""
    return checks.Here(jobs, rounds, torch, *uuids(listed))


def uuids(listed: str) -> tuple[list[str], list[str]]:
    """Those of the GPUs and of their MIG devices, in what `nvidia-smi -L` lists."""
    # GPU 0: NVIDIA A100 80GB PCIe (UUID: GPU-41255406-c9af-f94b-4ebf-9d57ad1853da)
    #   MIG 2g.20gb     Device  0: (UUID: MIG-a65afc88-50b5-5ccf-b0a8-f93b3247ae9e)
    found = re.findall(r"\(UUID: ((GPU|MIG)-[^)]+)\)", listed)
    return [uuid for uuid, kind in found if kind == "GPU"], [
        uuid for uuid, kind in found if kind == "MIG"
    ]


def row(name: str, machine: checks.Here) -> tuple[str, str, str]:
    """What a check has seen, and its verdict."""
    what, check = CHECKS[name]
    begin = time.monotonic()
    try:
        seen, verdict = check(machine), "ok"
    except UnmeasuredError as why:
        seen, verdict = str(why), "not here"
    except FailedError as why:
        seen, verdict = str(why), "**failed**"
    except Exception as error:  # noqa: BLE001 - the others still have something to say
        seen, verdict = last_line(f"{type(error).__name__}: {error}"), "**failed**"
    print(
        f"gpu: {name}: {verdict.strip('*')}, {time.monotonic() - begin:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return what, seen.replace("|", "¦"), verdict


def section(machine: checks.Here, rows: list[tuple[str, str, str]], seconds: float) -> str:
    """The part of the page."""
    torch = machine.torch
    kinds = [f"{torch['gpus'].count(kind)} × {kind}" for kind in dict.fromkeys(torch["gpus"])]
    versions = f"torch {torch['torch']}, CUDA {torch['cuda']}, NCCL {torch['nccl']}, Python {torch['python']}"
    day = time.strftime("%Y-%m-%d", time.gmtime())
    how = f"Seen on {day} by `make gpu` in {seconds:.0f} s: {', '.join(kinds)}; {versions}."
    return "\n\n".join(["## On a GPU", how, table(("what", "seen", ""), rows)])


def main() -> int:
    """Check; 1 when a check has failed, or there is no GPU."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=CHECKS, metavar="NAME", help=f"of {', '.join(CHECKS)}"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often a time is taken (default: 3)"
    )
    parser.add_argument("--page", type=Path, default=FOLDER / "RESULTS.md", help="where to write")
    options = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="distboot-gpu-") as scratch:
        try:
            machine = here(Jobs(Path(scratch), _SECONDS), options.rounds)
        except FailedError as why:
            print(f"gpu: {sys.executable}: {why}", file=sys.stderr)
            return 1
        rows = [row(name, machine) for name in options.only or CHECKS]
    text = section(machine, rows, time.monotonic() - begin)
    print(text)
    if not options.only:
        options.page.write_text(with_gpu(options.page.read_text(), text))
    return int(any(verdict == "**failed**" for *_, verdict in rows))


if __name__ == "__main__":
    sys.exit(main())
