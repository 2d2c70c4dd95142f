"""The process of a rank of this agent, with what each part that watches it needs."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from ..base.process import LAST_RESORT, Process
from ..script.progress import Movement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .loop import EventLoop
    from .shell import Shell


class RankProcess:
    """The process of a rank, the shell that hears of it, and the loop that calls."""

    def __init__(self, rank: int, process: Process, shell: Shell, loop: EventLoop) -> None:
        self.rank = rank
        self.process = process
        self.shell = shell
        self.loop = loop
        self.member = shell.facts.members[rank]  # what is known of the rank
        self.has_ended = False
        # What is looked at: the process, or, where that is a shell, a Python below it that trains
        self.trainer = process
        self._look_at(process)

    def follow(self, pid: int) -> None:
        """A Python takes part in the training: the process itself, or one below it."""
        is_new_below = (
            self.trainer is self.process,
            pid != self.process.pid,
            # In a PID namespace of its own it has another number here
            _group(pid) == _group(self.process.pid),
        )
        if all(is_new_below):
            self._look_at(Process(pid))

    def look(self) -> None:
        """In each second: a Python that has ended is not looked at any more."""
        if self.trainer.has_ended():
            self._look_at(self.process)

    def _look_at(self, process: Process) -> None:
        if self.trainer is not self.process:
            self.trainer.close()
        self.trainer = process
        self.movement = Movement(
            process.pid,
            self.shell.facts.settings.stalls_after,
            time.monotonic(),
        )

    def close(self) -> None:
        self.trainer.close()
        self.process.close()

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if not self.has_ended:
            self.process.send(number)

    def kill(self) -> None:
        if self.has_ended and self.process.file is None:
            return  # its number may be that of another process by now
        number: int = signal.SIGKILL
        if self.process.pid == 1:
            number = LAST_RESORT
        self.process.send(number)

    def take(self, message: object, now: float) -> None:
        """The rank says something."""
        self.shell.take(self.rank, message, now)

    def say(self, text: str, event: str = "") -> None:
        """Print a text, as the rank."""
        self.shell.say(text, self.rank, event=event)


def _group(process: int) -> int:
    """The process group of a process; 0: it has ended."""
    with suppress(OSError):
        return os.getpgid(process)
    return 0
