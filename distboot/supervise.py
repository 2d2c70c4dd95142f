"""The wrapper's child: started, sent every signal that we get, waited for, and its end turned into our exit code.

The whole job is one loop on `sigwait`, as in dumb-init: the signals are blocked before the child exists and taken
one by one, so none is lost and no handler runs at a bad moment. It also holds as process 1, where a signal that is
neither handled nor blocked is dropped by the kernel, and where the orphans of others have to be reaped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from .errors import DistbootError

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


def run(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a command as a child until it ends; its exit code, or 128 + n if signal n ended it.

    Raises:
        DistbootError: `command-not-found` or `command-not-executable`; nothing was started.
    """
    in_foreground = _in_foreground()
    waited_for = _FORWARDED | {signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited_for)
    try:
        child = _start(command, environ, before, own_group=not in_foreground)
        forwarded = _FORWARDED - _FROM_TERMINAL if in_foreground else _FORWARDED
        while True:
            number = signal.sigwait(waited_for)
            if number == signal.SIGCHLD:
                code = _reap(child.pid)
                if code is not None:
                    child.returncode = code  # else Popen would wait for it as well
                    return code
            elif number in forwarded:
                with suppress(ProcessLookupError):
                    os.kill(child.pid, number)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(
    command: Sequence[str], environ: Mapping[str, str], mask: set[int | signal.Signals], *, own_group: bool
) -> subprocess.Popen[bytes]:
    set_parent_death_signal = _parent_death_signal_setter()

    def in_child() -> None:
        # Without a terminal the child leads a group of its own: mpirun and others signal our whole group, and
        # the child must get each signal once, from us. With one it stays with us, for the shell's job control.
        if own_group:
            os.setpgid(0, 0)
        set_parent_death_signal()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        # Popen also gives SIGPIPE and SIGXFSZ, which Python ignores, back to the child.
        return subprocess.Popen(command, env=dict(environ), preexec_fn=in_child)  # noqa: PLW1509 - one thread
    except OSError as error:
        there = os.sep in command[0] and os.path.exists(command[0])  # then its interpreter is what is missing
        if isinstance(error, FileNotFoundError | NotADirectoryError) and not there:
            raise DistbootError(
                "command-not-found",
                f"{command[0]!r} does not exist",
                "check the spelling, PATH and the directory",
            ) from None
        raise DistbootError(
            "command-not-executable",
            f"{command[0]!r} cannot be run: {error.strerror}",
            "make it executable (chmod +x), or name its interpreter: run -- python script.py",
        ) from None


def _reap(child: int) -> int | None:
    """Collect everything that has ended; the exit code once the child itself is among it."""
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
            code = 128 - code if code < 0 else code


def _in_foreground() -> bool:
    """Whether a terminal sends its signals to our process group."""
    try:
        with open("/dev/tty", "rb") as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _parent_death_signal_setter() -> Callable[[], None]:
    """A function for the child: if we are killed outright (mpirun does that), so is it. Linux only; else nothing.

    An orphan would keep its accelerator, and nobody would know of it.
    """
    if sys.platform != "linux":
        return lambda: None
    import ctypes

    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):  # a libc that has none
        return lambda: None
    parent, pr_set_pdeathsig = os.getpid(), 1  # linux/prctl.h

    def set_it() -> None:
        prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died in between
            os.kill(os.getpid(), signal.SIGKILL)

    return set_it
