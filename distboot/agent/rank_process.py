"""The process of a rank of this agent, with what each part that watches it needs."""

from __future__ import annotations

import signal
import time

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
        self.has_ended = False
        self.movement = Movement(
            process.pid,
            shell.facts.settings.stalls_after,
            time.monotonic(),
        )

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
