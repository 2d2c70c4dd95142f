"""The wrapper in the trees of processes that containers have, each in a PID namespace that ends with the test.

A mode says what is above the wrapper, and how it was told to run the command. Signals go where a container runtime
sends them: to process 1, from outside. One mode is without a container, and so needs no namespace.
"""

import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

LIMIT = 60  # seconds that anything here may take

# With the rights of root also where we are not: PID namespaces need them.
NAMESPACE = [
    "unshare",
    *(["--user", "--map-root-user"] if os.geteuid() else []),
    "--mount",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
]
WRAPPER = [sys.executable, "-m", "distboot", "run"]


@dataclass(frozen=True)
class Mode:
    """What starts the wrapper in the namespace."""

    name: str  # as in the name of a test
    above: tuple[str, ...] = ()  # the command that starts it; none: the wrapper is process 1
    options: tuple[str, ...] = ()  # its own
    below: int = 0  # how many processes below process 1 our signals go to
    is_contained: bool = True


BARE = Mode("no container", is_contained=False)
PROCESS_1 = Mode("process 1")
# docker run --init is tini, podman run --init is catatonit; -g and dumb-init signal the whole group of the wrapper.
INITS = (
    Mode("tini", ("tini", "--")),
    Mode("tini -g", ("tini", "-g", "--")),
    Mode("dumb-init", ("dumb-init", "--")),
    Mode("catatonit", ("catatonit", "--")),
)
_SHELL = ("sh", "-c", '"$@"; exit $?', "sh")
NOT_PROCESS_1 = Mode("not process 1", _SHELL, below=1)
EXEC = Mode("--exec", _SHELL, ("--exec",), below=1)
EXEC_PROCESS_1 = Mode("--exec, process 1", (), ("--exec",))
SUPERVISED = (PROCESS_1, *INITS)
IN_CONTAINERS = (*SUPERVISED, EXEC, EXEC_PROCESS_1)


def in_modes(*modes: Mode) -> pytest.MarkDecorator:
    """Run a test in each of these; in those that cannot be had here, say why it is skipped."""
    params = [
        pytest.param(mode, id=mode.name, marks=pytest.mark.skipif(why is not None, reason=str(why)))
        for mode in modes
        for why in [_missing(mode)]
    ]
    return pytest.mark.parametrize("mode", params)


@functools.cache
def no_namespace() -> str | None:
    """Why there can be no PID namespace here, or None."""
    try:
        tried = subprocess.run(
            [*NAMESPACE, "true"], capture_output=True, text=True, check=False, timeout=LIMIT
        )
    except OSError as error:
        return f"no PID namespace here: {error}"
    return f"no PID namespace here: {tried.stderr.strip()}" if tried.returncode else None


needs_namespace = pytest.mark.skipif(no_namespace() is not None, reason=str(no_namespace()))


def _missing(mode: Mode) -> str | None:
    if not mode.is_contained or no_namespace() is not None:
        return no_namespace() if mode.is_contained else None
    return (
        None
        if not mode.above or shutil.which(mode.above[0])
        else f"no {mode.above[0]} (tests/cluster/packages.txt)"
    )


class Wrapped:
    """A wrapper that runs: the process that was started here, and what it prints; of a terminal, also what is typed."""

    def __init__(self, process: subprocess.Popen[bytes], output: int, below: int) -> None:
        self._process = process
        self._output = output
        self._below = below  # how many processes below it our signals go to
        self._text = b""
        self._end = time.monotonic() + LIMIT

    def read_until(self, text: str) -> str:
        """What it prints, up to and with `text`."""
        wanted = text.encode()
        while wanted not in self._text:
            assert self._more(), f"it ended, and has never said {text!r}: {self._text!r}"
        found, _, self._text = self._text.partition(wanted)
        return (found + wanted).decode()

    def line(self) -> str:
        return self.read_until("\n").strip()

    def rest(self) -> str:
        """What it prints until it and everything below have ended."""
        while self._more():
            pass
        rest, self._text = self._text, b""
        return rest.decode()

    def type(self, text: str) -> None:
        """Type into its terminal."""
        os.write(self._output, text.encode())

    def send(self, name: str) -> None:
        """Send the signal to process 1, as a container runtime does, or to the wrapper below a shell."""
        os.kill(self.pid, getattr(signal, f"SIG{name}"))

    @property
    def pid(self) -> int:
        pid = self._process.pid
        for _ in range(self._below):
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
        return pid

    def code(self) -> int:
        """The exit code, once it has ended."""
        return self._process.wait(LIMIT)

    def _more(self) -> bool:
        ready, _, _ = select.select([self._output], [], [], max(0, self._end - time.monotonic()))
        assert ready, f"it does not go on after {self._text!r}"
        try:
            data = os.read(self._output, 65536)
        except OSError:  # a terminal that nobody has open any more
            return False
        self._text += data
        return bool(data)


@contextmanager
def wrapped(
    mode: Mode,
    env: Mapping[str, str],
    *command: str,
    options: Sequence[str] = (),
    terminal: bool = False,  # as with `docker run -it`
    before: Sequence[str] = (),  # what prepares the namespace and then starts the rest
) -> Iterator[Wrapped]:
    """The wrapper around a command, ended with everything in its namespace when the block ends, however it ends."""
    ours, theirs = os.openpty() if terminal else os.pipe()
    before = [*before, *(["setsid", "--ctty"] if terminal else [])]
    before = [*(NAMESPACE if mode.is_contained else []), *before]
    whole = [*before, *mode.above, *WRAPPER, *mode.options, *options, "--", *command]
    process = subprocess.Popen(
        whole,
        env=dict(env),
        stdin=theirs if terminal else subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        start_new_session=not (mode.is_contained or terminal),
    )
    os.close(theirs)
    try:
        yield Wrapped(process, ours, mode.below + mode.is_contained)
    finally:
        process.kill()  # --kill-child: and process 1 with it, and so all of them
        process.wait(LIMIT)
        os.close(ours)


def python(program: str, *arguments: str) -> list[str]:
    """A command for a program in Python that starts quickly."""
    return [sys.executable, "-ISE", "-c", program, *arguments]
