"""From the start of the launcher until all ranks are in their group: `init` against each framework's own way.

    python bench/frameworks.py [--runs N] [deepspeed] [horovod] [torch]

Both sides import the same framework in the same environment, and are run in turn. The clock starts with the launcher,
and stops when rank 0 is through the first barrier of all ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from captured import without_launchers  # noqa: E402 - shared with the tests

from distboot.rendezvous import free_port  # noqa: E402

BIN = Path(sys.executable).parent
LIMIT = 0.85  # must be reached: our time over theirs
_TIME_LIMIT = 180  # seconds for one start

_READY = """
if rank == 0:
    import time
    print("ready at", time.time(), flush=True)
"""
_INIT = """
import distboot
ctx = distboot.init({framework!r})
ctx.barrier()
rank = ctx.rank
{ready}
ctx.close()
"""
_DEEPSPEED = """
import sys
import deepspeed
deepspeed.init_distributed(distributed_port=int(sys.argv[1]))
deepspeed.comm.barrier()
rank = deepspeed.comm.get_rank()
{ready}
deepspeed.comm.destroy_process_group()
"""
_HOROVOD = """
import horovod.torch as hvd
hvd.init()
hvd.barrier()
rank = hvd.rank()
{ready}
hvd.shutdown()
"""
_MPIRUN = ("mpirun", "--map-by", ":OVERSUBSCRIBE", "-n", "4", sys.executable, "SCRIPT")


@dataclass(frozen=True)
class Side:
    """One way to start a group.

    Attributes:
        script: what every rank runs.
        command: what is started, with SCRIPT in it, and PORT for one that is free.
        by_hand: how many times, each as another rank; 0: once, it is a launcher.
    """

    script: str
    command: tuple[str, ...]
    by_hand: int = 0


# A row of the table, our side, and the other one.
CASES = {
    "deepspeed": (
        'init("deepspeed"), 4 ranks under mpirun, over its own mpi_discovery',
        Side(_INIT.format(framework="deepspeed", ready=_READY), _MPIRUN),
        Side(_DEEPSPEED.format(ready=_READY), (*_MPIRUN, "PORT")),
    ),
    "horovod": (
        'init("horovod.torch") on Gloo, 2 ranks started by hand, over horovodrun --gloo',
        Side(_INIT.format(framework="horovod.torch", ready=_READY), (sys.executable, "SCRIPT"), by_hand=2),
        Side(_HOROVOD.format(ready=_READY), ("horovodrun", "--gloo", "-np", "2", sys.executable, "SCRIPT")),
    ),
    "torch": (
        'init("torch"), 4 ranks under mpirun, over the same script under torchrun',
        Side(_INIT.format(framework="torch", ready=_READY), _MPIRUN),
        Side(
            _INIT.format(framework="torch", ready=_READY),
            ("torchrun", "--nproc-per-node", "4", "--master-port", "PORT", "SCRIPT"),
        ),
    ),
}


def missing(case: str) -> str | None:
    """A program that a case needs and that is not there."""
    programs = [side.command[0] for side in CASES[case][1:]]
    return next((each for each in programs if shutil.which(each, path=_path()) is None), None)


def measured(case: str, runs: int) -> tuple[list[float], list[float]]:
    """Seconds until the group is ready, ours and theirs, run in turn; one round before counts for nothing."""
    _, ours, theirs = CASES[case]
    rounds = [(_ready(ours), _ready(theirs)) for _ in range(runs + 1)][1:]
    return [our for our, _ in rounds], [their for _, their in rounds]


def _ready(side: Side) -> float:
    """Seconds from the start of the first process until all ranks are through the barrier."""
    with tempfile.TemporaryDirectory() as folder:
        script, port = Path(folder, "train.py"), str(free_port())
        script.write_text(side.script)
        words = [{"SCRIPT": str(script), "PORT": port}.get(word, word) for word in side.command]
        variables = [_of_a_rank(rank, side.by_hand, port) for rank in range(side.by_hand)] or [{}]
        start = time.time()
        started = [
            subprocess.Popen(
                words, env=_environ() | more, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
            )
            for more in variables
        ]
        try:
            said = "".join(process.communicate(timeout=_TIME_LIMIT)[0] for process in started)
        finally:
            for process in started:
                process.terminate()  # if it has not ended
    found = re.search(r"ready at ([\d.]+)", said)
    if found is None or any(process.returncode for process in started):
        raise SystemExit(f"{' '.join(words)} failed:\n{said}")
    return float(found[1]) - start


def _of_a_rank(rank: int, ranks: int, port: str) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in numbers.items()}}


def _path() -> str:
    return f"{BIN}{os.pathsep}{os.environ['PATH']}"


def _environ() -> dict[str, str]:
    environ = without_launchers(os.environ) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PATH": _path()}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if os.getuid() == 0:
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return environ


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Of the medians."""
    return statistics.median(ours) / statistics.median(theirs)


def compared(ours: list[float], theirs: list[float]) -> str:
    """That ratio, that of the single rounds, and medians with quartiles."""
    pairs = statistics.median(our / their for our, their in zip(ours, theirs, strict=True))
    sides = []
    for times in (ours, theirs):
        low, middle, high = statistics.quantiles(times, n=4)
        sides.append(f"{middle:.2f} ({low:.2f} to {high:.2f}) s")
    return f"{ratio(ours, theirs):.3f} × (pairwise {pairs:.3f} ×): {' against '.join(sides)}"


def main() -> int:
    """Measure what was asked for; 1 when a limit was not reached."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--runs", type=int, default=5, help="rounds (default: 5)")
    options = parser.parse_args()
    reached = True
    for case in options.cases or CASES:
        ours, theirs = measured(case, options.runs)
        print(f"{CASES[case][0]}: {compared(ours, theirs)}, at load {os.getloadavg()[0]:.1f}", flush=True)
        reached &= ratio(ours, theirs) <= LIMIT
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
