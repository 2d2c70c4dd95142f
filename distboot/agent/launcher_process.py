"""The process of the launcher above this rank: if it is gone and the rank is not, the rank was left behind.

A launcher's daemon or agent (mpirun or orted, Hydra's proxy, slurmstepd, the agent of torchrun) waits for the processes
that it has started, and ends after them. So one that ends before was killed, by SIGKILL or for want of memory; and what
it has started would go on, hold its accelerator, and be unknown to whoever starts the job again.

It is looked for once, at the start, among the processes above this one, by the programs that the launcher's record
names. What is above a rank need not be its launcher: a shell, ssh, nohup or setsid may end on purpose while the rank
goes on. So that

- only a program of the launcher that has claimed the rank counts, and where none is above it (a container, a process
  in the background whose shell has ended) none is watched;
- a process between the launcher's and the rank that ends releases the rank: to the launcher it has ended.

PR_SET_PDEATHSIG would not do: it is about the thread that has started a process, about its parent alone, and is lost
when a program with other rights is run.
"""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from typing import NamedTuple

from ..base.errors import DistbootError
from ..base.process import proc_stat
from ..base.text import escape_control, log_line
from ..base.threads import start_without_signals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

# Of proc_pid_stat(5), counted from the state
_STATE, _PARENT, _START_TIME = 0, 1, 19
_LONGEST_NAME = 15  # bytes of a name in comm, proc_pid_comm(5)
_MOST_ABOVE = 64  # processes


class _Identity(NamedTuple):
    """A process, whose number may be that of another one later."""

    pid: int
    started: str  # in clock ticks since the host has booted

    def runs(self) -> bool:
        stat = proc_stat(self.pid)
        return len(stat) > _START_TIME and self._is(stat) and stat[_STATE] not in "ZX"

    def _is(self, stat: Sequence[str]) -> bool:
        return stat[_START_TIME] == self.started


class LauncherProcess:
    """A process of the launcher, and those between it and the rank."""

    def __init__(self, name: str, own: _Identity, between: Sequence[_Identity]) -> None:
        self.name = name
        self._own, self._between = own, between
        # Is readable once it has ended; None: the kernel has none (before Linux 5.3)
        self.file: int | None = None
        with suppress(OSError, AttributeError):
            self.file = os.pidfd_open(own.pid)

    @property
    def text(self) -> str:
        """What is said of it when it is gone."""
        return f"its launcher is gone: {escape_control(self.name)} (process {self._own.pid})"

    def has_ended(self) -> bool:
        if self.file is None:
            return not self._own.runs()
        poll = select.poll()
        poll.register(self.file, select.POLLIN)
        return bool(poll.poll(0))

    def has_left_rank(self) -> bool:
        """Whether it has ended before what it had started."""
        return self.has_ended() and all(process.runs() for process in self._between)

    def refuse_if_gone(self) -> None:
        """Do not wait for other ranks any more: nothing is to become of this one."""
        if self.has_left_rank():
            raise DistbootError(
                "launcher-gone",
                self.text,
                "look for what killed it: a limit of memory, a signal, or another job's clean-up",
            )


def find(pid: int, programs: Sequence[str]) -> LauncherProcess | None:
    """The nearest process above this one that runs one of these programs; None: there is none, or it cannot be seen."""
    between: list[_Identity] = []
    stat = proc_stat(pid)
    while programs and len(stat) > _START_TIME and len(between) < _MOST_ABOVE:
        parent = int(stat[_PARENT])
        if parent == 0:
            break
        stat = proc_stat(parent)
        if len(stat) <= _START_TIME:  # it has ended just now
            break
        process = _Identity(parent, stat[_START_TIME])
        name = _program(parent, programs)
        if name is not None:
            found = LauncherProcess(name, process, between)
            return found if process.runs() else None
        between.append(process)
    return None


def end_if_left(who: str | None, programs: Sequence[str]) -> None:
    """End this process, which has no agent and passes SIGTERM on, if its launcher ends before it."""
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


def _program(pid: int, programs: Sequence[str]) -> str | None:
    """Which of these programs a process runs: a binary, a script, or a module of Python (`python -m`)."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
            short = file.read().rstrip("\n")
        with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
            words = file.read().split("\0")
    except OSError:
        return None
    for program in programs:
        if short == program[:_LONGEST_NAME] or program in _names(words):
            return program
    return None


def _names(words: Sequence[str]) -> list[str]:
    """What a command line runs: the program, and, if that is Python, its script or module."""
    program = os.path.basename(words[0])
    if not program.startswith("python"):
        return [program]
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            return [next(rest, "")]
        if not word.startswith("-"):
            return [os.path.basename(word)]
    return []
