"""The wrapper's child: started, sent every signal that we get, waited for, and its end turned into our exit code.

The whole job is one loop on `sigwait`, as in dumb-init: the signals are blocked before the child exists and taken
one by one, so none is lost and no handler runs at a bad moment. It also holds as process 1, where a signal that is
neither handled nor blocked is dropped by the kernel, and where the orphans of others have to be reaped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from .child import start

TYPE_CHECKING = False  # type checkers take the name for typing's, whose import would slow every start
if TYPE_CHECKING:
    from typing import Protocol

    from .logs import Logs

    class Watch(Protocol):
        """Who watches the child with us: the lifeline.

        Attributes:
            file: a file descriptor for the child, under the same number.
            is_done: whether it lets us end, once the child has.
        """

        file: int
        is_done: bool

        @property
        def ending(self) -> int | None:
            """The signal with which it has made the child end; None: it has not."""

        def start(self, pid: int, done: Callable[[], None]) -> None:
            """The child runs; `done` is to be called when `is_done` comes true."""

        def asked(self, number: int) -> None:
            """We got this signal, and passed it on."""

        def ended(self, code: int) -> None:
            """The child has ended: exit code, or minus the signal."""

        def hurry(self) -> None:
            """We were asked to end, although it does not let us yet."""

        def final(self, code: int) -> int:
            """Our exit code, for that of the child."""


_FORWARDED = {
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
    signal.SIGWINCH,
}
# What the terminal sends to every process of the foreground group, the child included.
_FROM_TERMINAL = {signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH}
_WAITED_FOR = _FORWARDED | {signal.SIGCHLD, signal.SIGALRM}
_GROUP_LOOK = 0.02  # seconds
_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}  # HUP is "reload" to some


def run(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    grace: float,
    open_files: int | None = None,
    watch: Watch | None = None,
    logs: Logs | None = None,
) -> int:
    """Run a command as a child until it ends; its exit code, or 128 + n if signal n ended it.

    Args:
        command: program and arguments.
        environ: the child's environment.
        grace: seconds between a TERM for us and KILL for the child.
        open_files: its soft limit of open files, where that is not ours.
        watch: who watches it with us.
        logs: where its output goes; None: to where ours does.

    Raises:
        DistbootError: `command-not-found` or `command-not-executable`; nothing was started.
    """
    shared_group = _on_terminal()
    for quiet in (signal.SIGCHLD, signal.SIGWINCH):
        # Ignored, SIGCHLD would never come and the kernel would eat the child's exit code; and macOS drops, even
        # when they are blocked, the signals that by default are ignored. Starting a program undoes a handler.
        signal.signal(quiet, _nothing)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    try:
        file = None if watch is None else watch.file
        child = start(command, environ, before, own_group=not shared_group, open_files=open_files, file=file, logs=logs)
        done = partial(signal.pthread_kill, threading.get_ident(), signal.SIGCHLD)
        if logs is not None:
            logs.start(done)
        if watch is not None:
            watch.start(child.pid, done)
        return _Supervision(child, grace, watch, logs, shared_group=shared_group).run()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Supervision:
    """The loop on signals, from the start of the child until we may end."""

    def __init__(
        self,
        child: subprocess.Popen[bytes],
        grace: float,
        watch: Watch | None,
        logs: Logs | None,
        *,
        shared_group: bool,
    ) -> None:
        self._child, self._grace, self._watch, self._logs = child, grace, watch, logs
        self._shared_group = shared_group
        self._ending: int | None = None  # the signal that we passed on, and that asks the child to end
        self._code: int | None = None  # once it has: its exit code, or minus the signal
        self._is_over = self._is_hurried = False

    def run(self) -> int:
        """Our exit code."""
        while not self._is_over:
            number, from_kernel = _next_signal(_WAITED_FOR)
            if number == signal.SIGCHLD:
                self._reap()
            elif self._code is not None:
                self._hurry(number)
            elif number == signal.SIGALRM:
                self._kill()
            elif not (self._shared_group and from_kernel and number in _FROM_TERMINAL):
                self._forward(number)
        signal.setitimer(signal.ITIMER_REAL, 0)
        while signal.sigpending() & _WAITED_FOR:  # it has come too late; let through, it would decide our exit code
            _next_signal(_WAITED_FOR)
        assert self._code is not None
        code = 128 - self._code if self._code < 0 else self._code
        return code if self._watch is None else self._watch.final(code)

    def _reap(self) -> None:
        if self._code is None:
            self._code = self._child.returncode = _reap(self._child.pid)  # also there, else Popen would wait for it
            if self._code is None:
                return
            if self._watch is not None:
                self._watch.ended(self._code)
            ending = self._ending or (None if self._watch is None else self._watch.ending)
            if ending is not None and not self._shared_group:
                _end_group(self._child.pid, ending, self._grace)
            if self._logs is not None:
                self._logs.ended()
                if self._ending is not None:  # whoever asked us to end does not wait for a reader that has stopped
                    self._logs.hurry()
        self._is_over = all(other is None or other.is_done for other in (self._watch, self._logs))

    def _forward(self, number: int) -> None:
        if number in _ENDING:
            self._ending = self._ending or number
        if number == signal.SIGTERM and self._watch is None:  # which counts for itself
            signal.setitimer(signal.ITIMER_REAL, self._grace)
        with suppress(ProcessLookupError):
            os.kill(self._child.pid, number)
        if self._watch is not None:
            self._watch.asked(number)

    def _hurry(self, number: int) -> None:
        """Whoever is impatient need not wait for the goodbye of the lifeline, nor for a reader of the output."""
        if number in _ENDING:
            self._is_over = self._is_hurried
            self._is_hurried = True
            for other in (self._watch, self._logs):
                if other is not None:
                    other.hurry()

    def _kill(self) -> None:
        """The grace is over."""
        if self._ending is not None:
            self._child.kill()


def _nothing(number: int, frame: object) -> None:
    """A handler that is never run: the signal is always blocked."""


def _next_signal(waited_for: set[signal.Signals]) -> tuple[int, bool]:
    """The next signal, and whether the kernel sent it, as it does for the keys of a terminal."""
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        info = signal.sigwaitinfo(waited_for)
        return info.si_signo, info.si_code > 0  # SI_KERNEL; kill() and its like have 0 and less
    return signal.sigwait(waited_for), True


def _end_group(leader: int, number: int, grace: float) -> None:
    """Pass on a signal that ended the child to what is left of its group: only the child itself got it.

    What is still there after the grace is killed: it would keep its accelerator, and nobody would know of it.
    """
    # Not to all at once: a checkpoint handler needs its data loader's workers.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)
        end = time.monotonic() + grace
        while time.monotonic() < end and not signal.sigpending() & _ENDING:
            time.sleep(_GROUP_LOOK)
            _reap(leader)  # as process 1 we are the parent of orphans
            os.killpg(leader, 0)
        os.killpg(leader, signal.SIGKILL)


def _reap(child: int) -> int | None:
    """Collect everything that has ended; the exit code (minus the signal) once the child itself is among it."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == child:
            code = os.waitstatus_to_exitcode(status)


def _on_terminal() -> bool:
    """Whether a shell's job control rules our process group: we read from our terminal, or it sends us its signals."""
    try:
        # There is none in a session of its own, as torchrun's workers have, whatever their stdin is.
        with open("/dev/tty", "rb") as terminal:
            return os.isatty(0) or os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
