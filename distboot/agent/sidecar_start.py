"""In the process of the script: starts the agent beside it, and ties the end of this process to that.

Python does not say with which code it is about to end: `raise SystemExit(3)` passes no hook. The GNU C library does: it
calls fputc(status, file) for us, as on_exit(3) has it, and then fgetc(file), which waits until the sidecar has passed
that on. Also in a container whose process 1 is the script, and where all ends with it.
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
from .link import AgentLink, Begin
from .session import Session

# The first process ends at once: the script must not find a child that it did not start. The second has a session of
# its own, as Open MPI kills the script's whole process group before there is time to say what there is to say.
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
# That the C library writes the status to, and then waits for; of this process
_exit_file: int | None = None


class Sidecar:
    """The agent of this process; `OSError`: it does not start."""

    def __init__(self) -> None:
        self._files: list[int] = []
        try:
            self._start()
        except (OSError, ValueError, TypeError) as error:
            self.close()
            raise error if isinstance(error, OSError) else OSError(str(error)) from None

    def begin(self, plan: JoinPlan, settings: SupervisionSettings) -> None:
        """Let it join; see `AgentLink.joined`."""
        self._detects, self._who = settings.detects, f"rank {plan.own.rank}"
        self.link.tell(Begin(plan, os.getpid(), settings))

    @property
    def is_current(self) -> bool:
        """Whether it has taken over."""
        return _current is self

    def take_over(self, job: Session) -> None:
        """All ranks are ready: from now on it hears how this process ends."""
        global _current  # noqa: PLW0603 - a process has one
        if _current is not None:
            _current.close()
        _current = self
        if self._detects and sys.platform == "linux":
            try:
                report_exit_code(self._status)
            except (OSError, AttributeError) as error:
                log_line(self._who, f"warning: this rank's exit code is not known in time: {error}")
            crash_hooks.install(self._reports, term=True)
            crash_hooks.is_of_another = lambda: bool(self._asked(crash_hooks.ASK_FIRST))
            progress.install()
            job.is_watched = True
        tell_steps(job)

    def exit_code(self) -> int:
        """That of the job, where this process, about to end, is not to end with its own; 0: it may."""
        if (
            not hasattr(sys, "last_type")
            and not fcntl.fcntl(self._files[0], fcntl.F_GETFL) & crash_hooks.JOB_ENDS
        ):
            return 0
        return self._asked(crash_hooks.ASK)

    @staticmethod
    def _asked(question: str) -> int:
        """The agent's answer, 0 to 255, which it gives once it knows which rank failed first."""
        crash_hooks.emit(question)
        # Not at `_status`, whose number may be that of another file where the script has closed all of them.
        return 0 if _exit_file is None else int.from_bytes(os.read(_exit_file, 1), "big")

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
        reading, writing = os.pipe()
        self._reports = crash_hooks.out_of_the_way(writing)
        os.set_blocking(self._reports, False)  # whatever the agent does, the script can end
        its_status, status = socket.socketpair()
        # The C library waits there for the answer, but not for an agent that a user has stopped.
        status.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _ANSWER_LIMIT, 0)
        )
        # A number, as an object of Python's would be missed at the end of the process
        self._status = status.detach()
        self._files += [reading, self._reports, self._status]
        with its_control, its_status:
            files = (its_control.fileno(), reading, its_status.fileno())
            # Isolated, as what lies around in the working directory is not for it; that hides PYTHONDONTWRITEBYTECODE.
            options = ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]
            # The id of this process is for `ps` and `distboot stacks`.
            which = ["distboot.agent.sidecar", str(os.getpid())]
            program = ["-c", _PROGRAM, _PACKAGE, *which, *map(str, files)]
            command = [sys.executable, *options, *program]
            quiet: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            try:
                subprocess.run(command, pass_fds=files, **quiet, timeout=_START_LIMIT, check=True)
            except subprocess.TimeoutExpired:
                raise OSError(f"it did not start within {_START_LIMIT:g} s") from None
            except subprocess.CalledProcessError as error:
                if error.returncode == errno.EAGAIN:
                    why = "this user may not start more processes (ulimit -u)"
                    raise OSError(why) from None
                raise OSError("its first process failed") from None
        self.link = AgentLink(socket.socket(fileno=crash_hooks.out_of_the_way(control.detach())))


def tell_steps(job: Session) -> None:
    """Tell the agent of this process how its beginning went, so far."""
    # A message `Phases`, without the modules of the agent's messages, which no script needs.
    crash_hooks.emit(crash_hooks.STEPS, json.dumps({"kind": "Phases", "times": job.steps}))


def report_exit_code(socket_file: int) -> None:
    """At the exit of this process, write its code to a socket as one byte, and wait for a byte or the end there.

    A second call replaces it. `OSError`, `AttributeError`: this C library cannot do it.
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
    """At the exit of this process: let the C library call _exit with the code of the job at its end, if it has to."""
    if _current is None or _exit_file is None:
        return
    with suppress(OSError, IndexError):  # the agent was killed, or has been closed
        code = _current.exit_code()
        if code:
            # Which comes to a rank that fails for a peer
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            _register(_exit_file, instead=code)


def _register(file: int, instead: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    # Which atexit(3) calls, and which takes an argument
    on_exit, at_exit = libc.on_exit, libc["__cxa_atexit"]
    libc.fdopen.restype = ctypes.c_void_p
    libc.fdopen.argtypes = [ctypes.c_int, ctypes.c_char_p]
    libc.setvbuf.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t]
    writing, reading = libc.fdopen(file, b"w"), libc.fdopen(file, b"r")
    if not writing or not reading:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    libc.setvbuf(writing, None, _UNBUFFERED, 0)
    # The last to be registered is called first.
    if instead:
        at_exit(ctypes.cast(libc._exit, ctypes.c_void_p), ctypes.c_void_p(instead), None)  # noqa: SLF001
        at_exit(ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)
    at_exit(ctypes.cast(libc.fgetc, ctypes.c_void_p), ctypes.c_void_p(reading), None)
    on_exit(ctypes.cast(libc.fputc, ctypes.c_void_p), ctypes.c_void_p(writing))
    if os.getpid() == 1:
        from ..base.signals import LAST_RESORT

        # The kernel keeps SIGKILL away from process 1 of a container, and every signal without a handler. This one is
        # _exit(2), which takes the number of the signal as its exit code.
        libc.signal(LAST_RESORT, ctypes.cast(libc._exit, ctypes.c_void_p))  # noqa: SLF001


def _forget_exit() -> None:
    """The exit of a forked process is not that of the rank."""
    if _exit_file is not None:
        crash_hooks.quiet(_exit_file)
