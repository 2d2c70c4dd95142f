"""The process of the launcher above this rank: if it ends first, the rank was left behind.

A launcher's daemon or agent (mpirun or orted, Hydra's proxy, slurmstepd, the agent of torchrun)
waits for the processes that it has started, and ends after them. One that ends before them was
killed, by SIGKILL or for lack of memory. The processes that it has started would go on and hold
their accelerators, unknown to the next start of the job.

The process is looked for once, at the start, among those above this one, by the programs that the
launcher's record names. A process above a rank need not be its launcher: a shell, ssh, nohup or
setsid may end on purpose while the rank goes on. So

- only a program of the launcher that has claimed the rank counts. If none is above the rank (in a
  container, or in the background of a shell that has ended), none is watched.
- if a process between the launcher's and the rank ends, the rank is released: to the launcher it
  has ended.

A launcher that ends its ranks outlives them. Where horovodrun was killed, a helper of it sends
SIGTERM to the ranks as soon as the kernel has closed its files, which may be before it can be seen to
have ended. A rank to which a signal comes in between was left behind as well.

PR_SET_PDEATHSIG would not do: it depends on the thread that has started a process, and on its
parent alone, and is lost when a program with other rights is run.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from typing import NamedTuple

from ..base.errors import DistbootError
from ..base.process import proc_stat, program_of
from ..base.text import escape_control, log_line
from ..base.threads import start_without_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Of proc_pid_stat(5), counted from the state
_STATE = 0
_PARENT = 1
_FLAGS = 6
_START_TIME = 19
_EXITING = 0x4  # of the flags: PF_EXITING of the kernel's sched.h
_MOST_ABOVE = 64  # processes


class _Identity(NamedTuple):
    """A process; its number may be that of another one later."""

    pid: int
    started: str  # in clock ticks since the host has booted

    def runs(self) -> bool:
        stat = proc_stat(self.pid)
        if len(stat) <= _START_TIME:
            return False
        is_same = stat[_START_TIME] == self.started
        has_ended = stat[_STATE] in "ZX"
        return is_same and not has_ended


def _identify(pid: int) -> tuple[_Identity, int] | None:
    """A process, and the id of its parent; None if it has ended, or cannot be seen."""
    stat = proc_stat(pid)
    if len(stat) <= _START_TIME:
        return None
    identity = _Identity(pid, stat[_START_TIME])
    parent = int(stat[_PARENT])
    return identity, parent


class LauncherProcess:
    """A process of the launcher, and those between it and the rank."""

    def __init__(
        self,
        name: str,
        own: _Identity,
        between: Sequence[_Identity],
    ) -> None:
        self.name = name
        self._own = own
        self._between = between
        # Readable once it has ended; None: the kernel lacks it (before Linux 5.3)
        self.file: int | None = None
        with suppress(OSError, AttributeError):
            self.file = os.pidfd_open(own.pid)

    @property
    def text(self) -> str:
        """What is printed when it is gone."""
        name = escape_control(self.name)
        return f"its launcher is gone: {name} (process {self._own.pid})"

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)

    def has_ended(self) -> bool:
        if self.file is None:
            return not self._own.runs()
        poll = select.poll()
        poll.register(self.file, select.POLLIN)
        ended = poll.poll(0)
        return bool(ended)

    def has_left_rank(self) -> bool:
        """Whether it has ended before the processes that it had started."""
        if not self.has_ended():
            return False
        return all(process.runs() for process in self._between)

    def is_ending(self) -> bool:
        """Whether the kernel is ending it: its files may be closed, but it has not ended."""
        if self.has_ended():
            return False
        with suppress(IndexError):  # it has ended just now
            flags = int(proc_stat(self._own.pid)[_FLAGS])
            return flags & _EXITING > 0
        return False

    def refuse_if_gone(self) -> None:
        """While this rank waits for others: refuse to go on if it was left behind."""
        if self.has_left_rank():
            raise DistbootError(
                "launcher-gone",
                self.text,
                "look for what killed it: a limit of memory, a signal, or another job's clean-up",
            )


def find(pid: int, programs: Sequence[str]) -> LauncherProcess | None:
    """The nearest process above a process that runs one of these programs.

    None if there is none, or if it cannot be seen.
    """
    own = _identify(pid)
    if own is None or not programs:
        return None
    _, parent = own
    between: list[_Identity] = []
    while parent != 0 and len(between) < _MOST_ABOVE:
        above = _identify(parent)
        if above is None:  # it has ended just now
            return None
        process, parent = above
        program = program_of(process.pid, programs)
        if program is not None:
            found = LauncherProcess(program.name, process, between)
            # If it has ended in between, its descriptor may be that of another process
            if process.runs():
                return found
            found.close()
            return None
        between.append(process)
    return None


def end_if_left(who: str | None, programs: Sequence[str]) -> None:
    """End this process, which has no agent and passes SIGTERM on, if its launcher ends first."""
    launcher = find(os.getpid(), programs)
    if launcher is None or launcher.file is None:
        return
    ended = select.poll()
    ended.register(launcher.file, select.POLLIN)

    def wait() -> None:
        ended.poll()
        if launcher.has_left_rank():
            log_line(who, f"this rank ends: {launcher.text}", event="launcher_gone")
            os.kill(os.getpid(), signal.SIGTERM)

    start_without_signals("distboot-launcher", wait)
