"""Jobs of a few ranks on this machine that go on until a test makes one of them fail."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

_BEGIN = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
if {init}:
    import distboot
    ctx = distboot.init(join_timeout=60)
def ready():
    Path(f"pid-{{rank}}.part").write_text(str(os.getpid()))
    Path(f"pid-{{rank}}.part").rename(f"pid-{{rank}}")
def until(name):
    while not Path(name).exists():
        time.sleep(0.02)
"""
DEFAULT = """
ready()
until("end")
"""


FAILING = """
ready()
if rank == int(os.environ["CULPRIT"]):
    until("fail")
    %s
until("end")
"""

# The survivors wait in a collective operation of Gloo, which no handler written in Python interrupts.
FAILING_TORCH = """
import torch, torch.distributed as dist
ready()
if rank == int(os.environ["CULPRIT"]):
    until("fail")
    %s
dist.all_reduce(torch.ones(1))
until("end")
"""
# What the rank does that fails, its exit code, and what is said of it.
ENDS = {
    "exception": ("raise ValueError('boom')", 1, "uncaught exception: ValueError: boom"),
    "sys.exit": ("sys.exit(3)", 3, "exit code 3"),
    "SystemExit": ("raise SystemExit(7)", 7, "exit code 7"),
    "os._exit": ("os._exit(4)", 4, "exit code 4"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL (by the kernel when memory ran out, "),
    "SIGSEGV": ("import ctypes; ctypes.string_at(0)", 139, "killed by SIGSEGV"),
    "abort": ("os.abort()", 134, "killed by SIGABRT"),
}


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait for a condition, bounded in time."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


class Start(Protocol):
    """Starts a job in a folder of its own: `start(script, ranks=2, DISTBOOT_GRACE="1")`; it ends with the test."""

    def __call__(
        self,
        script: str = DEFAULT,
        ranks: int = 3,
        stderr: int | None = None,
        before: Sequence[str] = (),
        **env: str,
    ) -> Job: ...


class Job:
    """Ranks that run one script, started as by hand, in a folder of their own."""

    def __init__(
        self,
        env: dict[str, str],
        port: int,
        folder: Path,
        script: str,
        ranks: int,
        *,
        init: bool,
        stderr: int | None,
        before: Sequence[str],
    ) -> None:
        self.folder, self.ranks = folder, ranks
        (folder / "train.py").write_text(_BEGIN.format(init=init) + script)
        job = {
            "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "DISTBOOT_REPORT": "report.json", "DISTBOOT_GRACE": "10",
        }  # fmt: skip
        command = [*before, sys.executable, *([] if init else ["-m", "distboot"]), "train.py"]
        self.processes = []
        for rank in range(ranks):
            own = {**job, **env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with open(folder / f"output-{rank}", "wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        command, env=own, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=stderr or output,
                        start_new_session=True,
                    )
                )  # fmt: skip

    def pid(self, rank: int) -> int:
        """The process of the script, once it is ready."""
        path = self.folder / f"pid-{rank}"
        until(lambda: path.exists() or self.processes[rank].poll() is not None)
        assert path.exists(), self.output(rank)
        return int(path.read_text())

    def all_ready(self) -> list[int]:
        """The processes of all scripts, by rank."""
        return [self.pid(rank) for rank in range(self.ranks)]

    def send(self, rank: int, number: int) -> None:
        """A signal for a script, once all are ready."""
        os.kill(self.all_ready()[rank], number)

    def touch(self, name: str) -> None:
        """Make a file that scripts wait for."""
        (self.folder / name).touch()

    def codes(self, seconds: float = 60) -> list[int]:
        """The exit codes of what was started, by rank, once all have ended; 128 + n for a signal."""
        codes = [process.wait(seconds) for process in self.processes]
        return [128 - code if code < 0 else code for code in codes]

    def output(self, rank: int) -> str:
        """What a rank has printed, errors included."""
        return (self.folder / f"output-{rank}").read_text(errors="replace")

    def first(self, rank: int) -> str:
        """What a rank says of the first failure, without its own name, and without lines of a traceback."""
        others = r"summary|warning|the script has not ended|\d+/\d+ joined|all ranks are there"
        said = re.findall(
            rf"^distboot: rank {rank} on \S+: (?!{others})(.*)$",
            self.output(rank),
            re.MULTILINE,
        )
        assert len(said) == 1, self.output(rank)
        return str(said[0])

    def summary(self) -> str:
        """The summary, once it is there."""
        until(lambda: ": summary: " in self.output(0), 20)
        said = re.findall(r"^distboot: rank 0 on \S+: summary: (.*)$", self.output(0), re.MULTILINE)
        assert len(said) == 1, self.output(0)
        return str(said[0])

    def report(self) -> dict[str, Any]:
        """The report, once it is there."""
        path = self.folder / "report.json"
        until(path.exists, 20)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def end(self) -> None:
        """End everything that was started."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        for path in self.folder.glob("pid-*"):
            if path.suffix == "":
                with suppress(ProcessLookupError, ValueError):
                    _kill_ours(int(path.read_text()), self.folder)


def _kill_ours(pid: int, folder: Path) -> None:
    with suppress(OSError):
        if os.readlink(f"/proc/{pid}/cwd") == str(folder.resolve()):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def job(
    env: dict[str, str],
    port: int,
    folder: Path,
    script: str = DEFAULT,
    ranks: int = 3,
    *,
    init: bool = False,
    stderr: int | None = None,
    before: Sequence[str] = (),
) -> Iterator[Job]:
    """Such a job, ended when the block ends."""
    started = Job(env, port, folder, script, ranks, init=init, stderr=stderr, before=before)
    try:
        yield started
    finally:
        started.end()
