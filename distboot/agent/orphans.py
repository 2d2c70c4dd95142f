"""What the ranks of a round have left behind: processes that would keep a port or an accelerator.

They are children of this process by now, in whatever group or session they are, as it is their
subreaper (`child`).
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from ..base.process import proc_stat, read_proc
from ..base.text import escape_control, log_line
from .wrapper_signals import ENDING

_POLL = 0.02  # seconds
_KILLED = 5.0  # seconds for a process to end that was killed


def end_orphans(grace: float, spared: set[int]) -> None:
    """End all children but those that were there before: TERM, the grace, KILL.

    Their own children become ours when they end, and are ended, too.
    """
    end = time.monotonic() + grace
    heeded = filter(lambda number: signal.getsignal(number) != signal.SIG_IGN, ENDING)
    ending = set(heeded)
    asked: set[int] = set()
    while True:
        orphans = children() - spared
        if not orphans:
            return
        now = time.monotonic()
        if now >= end + _KILLED:  # of another user, or the kernel does not let go of it
            _warn_of(orphans)
            return
        if now >= end:
            _send(orphans, signal.SIGKILL)
        else:
            _send(orphans - asked, signal.SIGTERM)
        asked |= orphans
        request = signal.sigtimedwait(ending, _POLL)
        if request is not None:
            _send(orphans, signal.SIGKILL)
            os.kill(os.getpid(), request.si_signo)  # which is handled once signals are unblocked
            return
        _reap()


def children() -> set[int]:
    """The ids of our children, also of those that another process has started.

    Empty where there is no /proc.
    """
    if not os.path.isdir("/proc"):
        return set()
    own = [str(os.getpid())]
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        stat = proc_stat(name)
        parent = stat[1:2]
        if parent == own:
            found.add(int(name))
    return found


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _reap() -> None:
    ended = -1
    with suppress(ChildProcessError):  # none is left
        while ended != 0:
            ended, _ = os.waitpid(-1, os.WNOHANG)


def _warn_of(orphans: set[int]) -> None:
    named = [f"{pid} ({_name(pid)})" for pid in sorted(orphans)]
    left = ", ".join(named)
    log_line(None, f"warning: cannot end processes that a rank has left behind: {left}")


def _name(pid: int) -> str:
    """The name of the program that a process runs; "?" if it cannot be read."""
    name = read_proc(f"{pid}/comm").strip()
    if not name:
        return "?"
    return escape_control(name)
