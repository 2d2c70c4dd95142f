"""Jobs of a few ranks on this machine that go on until a test makes one of them fail."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distboot.agent.hook_reader import HookReader
from distboot.agent.shell import Shell
from distboot.base.settings import SupervisionSettings
from distboot.job.exit_status import ExitStatus, UncaughtException
from distboot.job.facts import Facts
from distboot.job.root_cause import RankState
from distboot.script.crash_hooks import EXCEPTION
from distboot.script.exceptions import describe_text

_BEGIN = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
if {init}:
    import distboot
    ctx = distboot.init({framework!r}, join_timeout=int(os.environ.get("JOIN_TIMEOUT", "60")))
def ready():
    Path(f"pid-{{rank}}.part").write_text(str(os.getpid()))
    Path(f"pid-{{rank}}.part").rename(f"pid-{{rank}}")
def until(name):
    while not os.access(name, os.F_OK): time.sleep(0.02)  # one line and no other function, for those who read stacks
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
# What the rank does that fails, its exit code, and what is said of it.
ENDS = {
    "exception": ("raise ValueError('boom')", 1, "uncaught exception: ValueError: boom"),
    "sys.exit": ("sys.exit(3)", 3, "exit code 3"),
    "SystemExit": ("raise SystemExit(7)", 7, "exit code 7"),
    "text": ("sys.exit('no dataset\\x07')", 1, "exited: no dataset\\x07, on "),
    "text of SystemExit": ("raise SystemExit('no dataset')", 1, "exited: no dataset, on "),
    "os._exit": ("os._exit(4)", 4, "exit code 4"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL (out of memory, "),
    "SIGSEGV": ("import ctypes; ctypes.string_at(0)", 139, "killed by SIGSEGV"),
    "abort": ("os.abort()", 134, "killed by SIGABRT"),
}


def raised(text: str, place: str = "", when: float = 0.0) -> ExitStatus:
    """How a rank ends with an exception, `"ValueError: boom"` for example, as its script describes it."""
    type_name, _, message = text.partition(": ")
    found = describe_text(type_name, message)
    found.place = place
    return ExitStatus(exception=UncaughtException.described(found), when=when)


_HOOKED = """
import atexit, os, signal, sys, threading, traceback
from distboot.script.crash_hooks import install
os.environ["DISTBOOT_SECRET"] = "s3cret-word"
install(%d)
%s
"""


def exceptions_of(script: str, folder: Path, **variables: str) -> list[UncaughtException]:
    """Runs a script, `train.py`, with our hooks in its process: the exceptions that it has reported."""
    (reading, writing) = os.pipe()
    train = folder / "train.py"
    with open(reading), open(writing):
        train.write_text(_HOOKED % (writing, script))
        subprocess.run(
            [sys.executable, "train.py"],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **variables},
            cwd=folder,
            stderr=subprocess.DEVNULL,
            pass_fds=[writing],
            timeout=60,
            check=False,
        )
        texts = [text for kind, _, text in HookReader(reading).read() if kind == EXCEPTION]
    found = [UncaughtException.received(text) for text in texts]
    assert None not in found
    return [one for one in found if one is not None]


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def shell_of_ranks(
    ranks: list[RankState],
    settings: SupervisionSettings,
    say: Callable[..., None],
    *,
    is_held: bool = False,
) -> Shell:
    """The shell of an agent in this process, which knows these ranks."""
    facts = Facts({member.rank: member for member in ranks}, settings, is_held)
    return Shell(facts, say)


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def wait_to_read(ours: socket.socket) -> None:
    """Return once there is something to read, or the other end has closed; leaves it non-blocking."""
    ours.settimeout(5)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    with suppress(ConnectionResetError):
        ours.recv(1, socket.MSG_PEEK)
    ours.setblocking(False)


class Started:
    """Processes that were started side by side in one folder, one a rank, each with its output in a file."""

    limit = 60  # seconds for them to end

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        environs: Sequence[Mapping[str, str]],
        stderr: int | None = None,
    ) -> None:
        self.folder = folder
        self.command = command
        self.environs = environs
        self.stderr = stderr
        self.processes = [self._started(rank, "wb") for rank in range(len(environs))]

    def _started(self, rank: int, mode: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"output-{rank}", mode) as output:
            return subprocess.Popen(
                self.command,
                env=self.environs[rank],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=self.stderr or output,
                start_new_session=True,
            )

    def replace(self, rank: int) -> None:
        """Kill what was started for a rank, with all of its processes, and start it once more."""
        with suppress(ProcessLookupError):
            os.killpg(self.processes[rank].pid, signal.SIGKILL)
        self.processes[rank].wait(10)
        self.processes[rank] = self._started(rank, "ab")

    def codes(self, seconds: float | None = None) -> list[int]:
        """The exit codes of what was started, by rank, once all have ended; 128 + n for a signal."""
        codes = [process.wait(seconds or self.limit) for process in self.processes]
        return [128 - code if code < 0 else code for code in codes]

    def output(self, rank: int) -> str:
        return (self.folder / f"output-{rank}").read_text(errors="replace")

    def end(self) -> None:
        """End everything that was started."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


class Job(Started):
    """Ranks that run one script, started as by hand, in a folder of their own: `start(script, 2, DISTBOOT_GRACE="1")`.

    `init` is whether the script calls it, for this framework; else it is unmodified, under the wrapper.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        port: int,
        folder: Path,
        script: str = DEFAULT,
        ranks: int = 3,
        *,
        init: bool = False,
        stderr: int | None = None,
        before: Sequence[str] = (),
        framework: str = "none",
        **more: str,
    ) -> None:
        self.ranks = ranks
        (folder / "train.py").write_text(_BEGIN.format(init=init, framework=framework) + script)
        job = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
            "DISTBOOT_REPORT": "report.json",
            "DISTBOOT_GRACE": "10",
            **env,
            **more,
        }
        command = [*before, sys.executable, *([] if init else ["-m", "distboot"]), "train.py"]
        super().__init__(
            folder,
            command,
            [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)],
            stderr,
        )

    def pid(self, rank: int) -> int:
        path = self.folder / f"pid-{rank}"
        until(lambda: path.exists() or self.processes[rank].poll() is not None)
        assert path.exists(), self.output(rank)
        return int(path.read_text())

    def all_ready(self) -> list[int]:
        return [self.pid(rank) for rank in range(self.ranks)]

    def send(self, rank: int, number: int) -> None:
        os.kill(self.all_ready()[rank], number)

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def fail(self) -> list[int]:
        """The exit codes, when the script has failed as it does once all are ready."""
        self.all_ready()
        self.touch("fail")
        return self.codes()

    def finish(self) -> list[int]:
        """The exit codes, when all were told to end once all are ready."""
        self.all_ready()
        self.touch("end")
        return self.codes()

    def first(self, rank: int) -> str:
        """What a rank says of the first failure, without its own name, and without lines of a traceback."""
        others = (
            r"summary|warning|the script has not ended|\d+/\d+ "
            r"(?:rank|node)s joined|all ranks are there"
        )
        said = re.findall(
            rf"^distboot: rank {rank} on \S+: (?!{others})(.*)$", self.output(rank), re.MULTILINE
        )
        assert len(said) == 1, self.output(rank)
        return str(said[0])

    def summary(self) -> str:
        until(lambda: ": summary: " in self.output(0), 20)
        said = re.findall(r"^distboot: rank 0 on \S+: summary: (.*)$", self.output(0), re.MULTILINE)
        assert len(said) == 1, self.output(0)
        return str(said[0])

    def report(self) -> dict[str, Any]:
        path = self.folder / "report.json"
        until(path.exists, 20)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def end(self) -> None:
        super().end()
        for path in self.folder.glob("pid-*[0-9]"):
            with suppress(OSError, ValueError):
                if os.readlink(f"/proc/{path.read_text()}/cwd") == str(self.folder.resolve()):
                    os.kill(int(path.read_text()), signal.SIGKILL)


Start = Callable[..., Job]


@contextmanager
def job(*arguments: Any, **options: Any) -> Iterator[Job]:
    started = Job(*arguments, **options)
    try:
        yield started
    finally:
        started.end()
