"""Jobs of four ranks on two hosts, under each launcher, with distboot or without, that something happens to.

All that their launchers print is kept with its time. Of `diagnosis.py`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hosts import Hosts
from measure import PYTHON, UnmeasuredError, last_line

BOUND = 60  # seconds, in which whoever has not spoken is silent
_START_LIMIT = 240
# How a line may name the rank that is missing or dead; or the host that is lost, or one of its ranks.
_RANK_2 = r"\brank\s*[:=]?\s*2\b|\btask 2\b|missing 2\b"
_NODE_B = r"\bnodeb\b|\bnode 1\b|\branks?\s*[:=]?\s*[23]\b|\btasks? [23]\b"
_NAMES = {
    case: re.compile(text, re.IGNORECASE)
    for case, text in (("missing", _RANK_2), ("dead", _RANK_2), ("lost", _NODE_B))
}
_OWN = re.compile(r"^\[(?:rank|default)\d+\]:?|^distboot: rank \d on node.: ")  # whose line it is
# Lines, and what torch says where there is no name server, which is this machine's doing.
_EMPTY = re.compile(r"^[\W_]*$|.*The hostname of the client socket cannot be retrieved")

_BEGIN = """
import os, signal, sys, time
from pathlib import Path
def of(*names):
    return next(int(os.environ[name]) for name in names if name in os.environ)
rank = of("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
def until(name):
    while not Path(name).exists():
        time.sleep(0.01)
def come():
    Path(f"come-{rank}").touch()
    if rank == 2 and os.environ["BENCH_CASE"] == "missing":
        until("end")
def ready():
    Path(f"ready-{rank}").touch()
    if rank == 2:
        until("die")
        os.kill(os.getpid(), signal.SIGKILL)
"""
_OURS = """
import torch.distributed as dist
import distboot
come()
ctx = distboot.init()
ready()
dist.barrier()
"""
_TORCH = """
import torch.distributed as dist
os.environ.setdefault("RANK", str(rank))
os.environ.setdefault("WORLD_SIZE", str(of("WORLD_SIZE", "SLURM_NTASKS")))
come()
dist.init_process_group("gloo")
ready()
dist.barrier()
"""
_MPI = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
come()
MPI.Init()
MPI.COMM_WORLD.Barrier()
ready()
request = MPI.COMM_WORLD.Ibarrier()
while not request.Test():  # a blocking one would keep a core busy, and what is measured beside it late
    time.sleep(0.01)
"""


@dataclass(frozen=True)
class Way:
    """A launcher, with distboot or without.

    Attributes:
        name: as the table says it.
        script: what every rank runs.
        commands: for each terminal the host and the command, given the host of rank 0, a port and the script.
        needs_slurm: whether Slurm has to be up.
    """

    name: str
    script: str
    commands: Callable[[str, str], Sequence[tuple[str, Sequence[str]]]]
    needs_slurm: bool = False


def _mpirun(port: str, script: str) -> Sequence[tuple[str, Sequence[str]]]:
    names = ("PATH", "PYTHONPATH", "OMP_NUM_THREADS", "BENCH_CASE", "OMPI_MCA_btl", "OMPI_MCA_mtl")
    exports = [word for name in names for word in ("-x", name)]
    address = ["-x", "MASTER_ADDR=nodea", "-x", f"MASTER_PORT={port}"]
    places = ["--bind-to", "none", "-H", "nodea:2,nodeb:2"]
    return [
        (
            "nodea",
            [
                "mpirun",
                *places,
                "--wdir",
                str(Path(script).parent),
                *exports,
                *address,
                PYTHON,
                script,
            ],
        )
    ]


def _srun(port: str, script: str) -> Sequence[tuple[str, Sequence[str]]]:
    export = f"--export=ALL,MASTER_ADDR=nodea,MASTER_PORT={port}"
    return [("head", ["srun", "-N2", "-n4", "--ntasks-per-node=2", export, PYTHON, script])]


def _torchrun(port: str, script: str) -> Sequence[tuple[str, Sequence[str]]]:
    common = [
        "torchrun",
        "--nnodes=2",
        "--nproc-per-node=2",
        "--master-addr=nodea",
        f"--master-port={port}",
    ]
    return [
        (host, [*common, f"--node-rank={index}", script])
        for index, host in enumerate(("nodea", "nodeb"))
    ]


WAYS = (
    Way("distboot, mpirun", _OURS, _mpirun),
    Way("mpirun, mpi4py", _MPI, _mpirun),
    Way("distboot, torchrun", _OURS, _torchrun),
    Way("torchrun, torch", _TORCH, _torchrun),
    Way("distboot, srun", _OURS, _srun, needs_slurm=True),
    Way("srun, torch", _TORCH, _srun, needs_slurm=True),
)


def names(case: str, line: str) -> bool:
    """Whether a line names the culprit; the rank that it begins with is the one that speaks."""
    return _NAMES[case].search(_OWN.sub("", line)) is not None


class Job:
    """A job that is starting, and what it prints."""

    def __init__(self, hosts: Hosts, way: Way, case: str, folder: Path, port: int) -> None:
        self._folder, self._case = folder, case
        folder.mkdir()
        script = folder / "train.py"
        script.write_text(_BEGIN + way.script)
        environ = hosts.environment({
            "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1",
            "OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi", "BENCH_CASE": case, "PYTHONUNBUFFERED": "1",
        })  # fmt: skip
        self._lines: list[tuple[float, str]] = []
        self._since, self._ends = 0.0, list[float]()
        self._processes = [
            subprocess.Popen(
                hosts.command(host, command, folder), env=environ, stdin=subprocess.DEVNULL, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace", start_new_session=True,
            )
            for host, command in way.commands(str(port), str(script))
        ]  # fmt: skip
        for process in self._processes:
            for target in (self._read, self._wait):
                threading.Thread(target=target, args=(process,), daemon=True).start()

    def _wait(self, process: subprocess.Popen[str]) -> None:
        process.wait()
        self._ends.append(time.time())

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._lines.append((time.time(), line.rstrip()))

    def until_there(self) -> None:
        """Return when all that will come have come; the clock runs from the last of them."""
        name = "come" if self._case == "missing" else "ready"
        signs = [self._folder / f"{name}-{rank}" for rank in range(4)]
        end = time.monotonic() + _START_LIMIT
        while not all(sign.exists() for sign in signs):
            if time.monotonic() > end or any(
                process.poll() is not None for process in self._processes
            ):
                said = "\n".join(text for _, text in self._lines)
                sys.stderr.write(f"bench: did not start:\n{said}\n")
                raise UnmeasuredError(f"did not start: {last_line(said)}")
            time.sleep(0.02)
        self._since = max(sign.stat().st_mtime for sign in signs)

    def kill_rank(self) -> None:
        (self._folder / "die").touch()
        self.begin()

    def begin(self) -> None:
        """The clock runs from now."""
        self._since = time.time()

    def until_told(self, seconds: float = BOUND) -> None:
        """Wait until a line has named the rank, so long at most."""
        while self.named is None and time.time() < self._since + seconds:
            time.sleep(0.02)

    def until_over(self) -> None:
        """Wait until all launchers have ended, as long as the bound at most."""
        while self.over is None and time.time() < self._since + BOUND:
            time.sleep(0.02)

    @property
    def over(self) -> float | None:
        """Seconds until the last launcher had ended."""
        return max(self._ends) - self._since if len(self._ends) == len(self._processes) else None

    def _said(self) -> list[tuple[float, str]]:
        lines = [(when - self._since, text) for when, text in self._lines if self._since <= when]
        return [(when, text) for when, text in lines if when <= BOUND and not _EMPTY.match(text)]

    @property
    def named(self) -> float | None:
        return next((when for when, text in self._said() if names(self._case, text)), None)

    @property
    def words(self) -> str:
        """The line that names the rank, or else the first."""
        said = [text for _, text in self._said()]
        return next((text for text in said if names(self._case, text)), said[0] if said else "")

    def end(self) -> None:
        """Whatever is left of it; the ranks on the hosts end with these."""
        (self._folder / "end").touch()
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
