"""In the process of the script: start the agent beside it, and report to it how this process ends.

Python does not tell with which code it is about to end: `raise SystemExit(3)` passes no hook. The
GNU C library does. It can call a function with the exit code, on_exit(3), and this one is
fputc(code, file): it writes the code to a socket. Functions that are registered before are called
after that, and one is fgetc(file): it waits until the sidecar has passed the code on, and answers.
So the exit code is known in time also in a container whose process 1 is the script, and where all
ends with it.

Some scripts must end with the code of the job in place of their own. They ask the sidecar at exit
(`_end_with_job`), and register _exit with that code.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import fcntl
import json
import os
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import Any

from ..base.settings import SupervisionSettings
from ..base.text import log_line
from ..rendezvous.membership import JoinPlan
from ..script import crash_hooks, progress
from .link import AgentLink
from .link_messages import Begin
from .session import Session

# The first process ends at once: the script must not find a child that it did not start. The second
# has a session of its own, as Open MPI kills the script's whole process group before there is time
# to report why.
_PROGRAM = """
import os, sys
try:
    if os.fork():
        os._exit(0)
except OSError as error:
    os._exit(error.errno)
os.setsid()
sys.path.append(sys.argv[1])
from importlib import import_module
import_module(sys.argv[2]).main(*map(int, sys.argv[4:]))
"""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_START_LIMIT = 20  # seconds for the first process to end
_ANSWER_LIMIT = 15  # seconds; rank 0 waits 5 for the others
_UNBUFFERED = 2  # _IONBF, stdio.h

_current: Sidecar | None = None  # of this process
# Of this process: the C library writes the exit code there, and then waits for the answer
_exit_file: int | None = None


class Sidecar:
    """The agent of this process; `OSError`: it does not start."""

    def __init__(self) -> None:
        self._files: list[int] = []
        try:
            self._start()
        except OSError:
            self.close()
            raise
        except (ValueError, TypeError) as error:  # such as an interpreter without a name
            self.close()
            raise OSError(str(error)) from None

    def begin(self, plan: JoinPlan, settings: SupervisionSettings) -> None:
        """Let it join; see `AgentLink.joined`."""
        self._detects = settings.detects
        self._who = f"rank {plan.own.rank}"
        self.link.tell(Begin(plan, os.getpid(), settings))

    @property
    def is_current(self) -> bool:
        """Whether it has taken over."""
        return _current is self

    def take_over(self, job: Session) -> None:
        """All ranks are ready: report to it from now on how this process ends."""
        global _current  # noqa: PLW0603 - a process has one
        if _current is not None:
            _current.close()
        _current = self
        if self._detects and sys.platform == "linux":
            try:
                report_exit_code(self._status)
            except (OSError, AttributeError) as error:
                log_line(
                    self._who, f"warning: rank 0 may learn the exit code of this rank late: {error}"
                )
            crash_hooks.install(self._reports, term=True)
            crash_hooks.is_of_another = lambda: bool(self._ask(crash_hooks.ASK_FIRST))
            progress.install()
            job.is_watched = True
        tell_steps(job)

    def exit_code(self) -> int:
        """The code of the job, if this process must not end with its own; 0: it may."""
        if not hasattr(sys, "last_type"):  # no exception has ended the script
            flags = fcntl.fcntl(self._files[0], fcntl.F_GETFL)
            if not flags & crash_hooks.JOB_ENDS:
                return 0
        return self._ask(crash_hooks.ASK)

    @staticmethod
    def _ask(question: str) -> int:
        """The agent's answer, 0 to 255, which it gives once it knows which rank failed first."""
        crash_hooks.emit(question)
        # Not read from `_status`: if the script has closed all files, its number may be another's.
        if _exit_file is None:
            return 0
        return int.from_bytes(os.read(_exit_file, 1), "big")

    def close(self) -> None:
        """End the agent of a rank that has left the job; or one that is not needed."""
        if hasattr(self, "link"):
            self.link.end()
        for file in self._files:
            os.close(file)
        self._files.clear()

    def _start(self) -> None:
        import subprocess  # here, as a rank below the wrapper has no need of it

        control, its_control = socket.socketpair()
        # Both ends stay open here: writing to an agent that was killed must not end the script.
        reading, self._reports = map(crash_hooks.out_of_the_way, os.pipe())
        self._files += [reading, self._reports]
        os.set_blocking(self._reports, False)  # whatever the agent does, the script can end
        its_status, status = socket.socketpair()
        # The C library waits there for the answer, but not for an agent that a user has stopped.
        status.setsockopt(
            socket.SOL_SOCKET,
            socket.SO_RCVTIMEO,
            struct.pack("ll", _ANSWER_LIMIT, 0),
        )
        # A number, as the C library needs it when Python's objects are gone
        self._status = crash_hooks.out_of_the_way(status.detach())
        self._files.append(self._status)
        with _moved(its_control) as its_control, _moved(its_status) as its_status:
            files = (its_control.fileno(), reading, its_status.fileno())
            try:
                if getattr(sys, "frozen", False):  # the application would run again
                    raise OSError("this program is frozen, so there is no Python to run it")
                subprocess.run(
                    self._command(files),
                    pass_fds=files,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    timeout=_START_LIMIT,
                    check=True,
                )
            except subprocess.TimeoutExpired:
                raise OSError(f"it did not start within {_START_LIMIT:g} s") from None
            except subprocess.CalledProcessError as error:
                why = "its first process failed"
                if error.returncode == errno.EAGAIN:
                    why = "this user may not start more processes (ulimit -u)"
                raise OSError(why) from None
        self.link = AgentLink(_moved(control))

    @staticmethod
    def _command(files: tuple[int, ...]) -> list[str]:
        # Isolated, as the modules in the working directory are not for it; that hides
        # PYTHONDONTWRITEBYTECODE.
        options = ["-I", "-S"]
        if sys.dont_write_bytecode:
            options.append("-B")
        # The id of this process is for `ps` and `distboot stacks`.
        module = ["distboot.agent.sidecar", str(os.getpid())]
        arguments = [_PACKAGE, *module, *map(str, files)]
        return [sys.executable, *options, "-c", _PROGRAM, *arguments]


def tell_steps(job: Session) -> None:
    """Report to the agent which steps of the start this process has taken so far."""
    # A message `Phases`, without the modules of the agent's messages, which no script needs.
    crash_hooks.emit(crash_hooks.STEPS, json.dumps({"kind": "Phases", "times": job.steps}))


def _moved(one: socket.socket) -> socket.socket:
    """A socket whose file is none of the standard streams, which may be closed here."""
    file = crash_hooks.out_of_the_way(one.detach())
    return socket.socket(fileno=file)


def report_exit_code(socket_file: int) -> None:
    """At the exit of this process, write its code to a socket as one byte, and wait for an answer.

    The answer is a byte, or the end of the connection. A second call replaces the socket.
    `OSError`, `AttributeError`: this C library cannot do it.
    """
    global _exit_file  # noqa: PLW0603 - a process ends once
    if _exit_file is None:
        file = crash_hooks.out_of_the_way(os.dup(socket_file))
        _register(file)
        atexit.register(_end_with_job)
        os.register_at_fork(after_in_child=_forget_exit)
        _exit_file = file
    else:
        os.dup2(socket_file, _exit_file, inheritable=False)


def _end_with_job() -> None:
    """At exit: if this process must end with the code of the job, register _exit with that."""
    if _current is None or _exit_file is None:
        return
    with suppress(OSError, IndexError):  # the agent was killed, or has been closed
        code = _current.exit_code()
        if code:
            # Sent to a rank that fails because of a peer
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _register(_exit_file, instead=code)


def _register(file: int, instead: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    on_exit = libc.on_exit
    at_exit = libc["__cxa_atexit"]  # atexit(3) with an argument for the function
    libc.fdopen.restype = ctypes.c_void_p
    libc.fdopen.argtypes = [ctypes.c_int, ctypes.c_char_p]
    libc.setvbuf.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t]
    writing = libc.fdopen(file, b"w")
    reading = libc.fdopen(file, b"r")
    if not writing or not reading:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    libc.setvbuf(writing, None, _UNBUFFERED, 0)
    # The function that was registered last is called first.
    if instead:
        at_exit(_address(libc._exit), ctypes.c_void_p(instead), None)  # noqa: SLF001
        at_exit(_address(libc.fflush), None, None)
    at_exit(_address(libc.fgetc), ctypes.c_void_p(reading), None)
    on_exit(_address(libc.fputc), ctypes.c_void_p(writing))
    if os.getpid() == 1:
        from ..base.process import LAST_RESORT

        # The kernel keeps SIGKILL away from process 1 of a container, and every signal without a
        # handler. This handler is _exit(2), which takes the number of the signal as its exit code.
        libc.signal(LAST_RESORT, _address(libc._exit))  # noqa: SLF001


def _address(function: Any) -> ctypes.c_void_p:
    return ctypes.cast(function, ctypes.c_void_p)


def _forget_exit() -> None:
    """In a forked process: its exit is not that of the rank."""
    if _exit_file is not None:
        crash_hooks.quiet(_exit_file)
