"""What both sides of the lifeline have in common: rank 0's, and that of every other rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from .ends import End
from .line import Line
from .verdict import Verdict

AFTER_THE_FIRST = 0.15  # seconds; torchrun looks 10 times a second who has ended, and lists them in that order
_FINISHING = 5.0  # seconds for the rank that failed first to end by itself, with its own exit code
_FOLLOWING = 0.6  # seconds for another one that fails, too


@dataclass(frozen=True, slots=True)
class Order:
    """That the process of this rank has to stop.

    Attributes:
        at: when, as `time.monotonic` has it.
        is_failure: whether it is for the failure of a rank; else somebody outside stops the job.
    """

    at: float
    is_failure: bool

    @classmethod
    def after(cls, verdict: Verdict, rank: int, failing: bool, now: float, before: Order | None) -> Order:
        """What a verdict means for a rank, which may be about to fail by itself, and has had an order before."""
        first = rank in verdict.ranks
        delay = (_FINISHING if first else _FOLLOWING) if failing else 0.0 if first else verdict.delay
        at = now + delay
        return cls(at if before is None else min(at, before.at), verdict.is_failure)


class Role(Protocol):
    """One side of the lifeline, as the loop drives it. All times are those of `time.monotonic`."""

    say: Callable[[str], None]
    verdict: Verdict | None
    order: Order | None

    def lines(self) -> Collection[Line]:
        """The open connections; none is added later."""

    def start(self, pid: int) -> None:
        """The process of this rank is running."""

    def read(self, line: Line, now: float) -> None:
        """Take what has come on a line."""

    def tick(self, now: float) -> None:
        """Once a second: say that we are here, and see who has not."""

    def turn(self, now: float) -> None:
        """Do what is due."""

    def due(self, now: float) -> float:
        """When something is."""

    def steps(self, taken: Mapping[str, float]) -> None:
        """It has begun, and says when it took which step, in seconds since the epoch."""

    def trouble(self, end: End, now: float) -> None:
        """The process of this rank fails, and will end soon, or cannot go on."""

    def ending(self, now: float) -> None:
        """It is about to end, well or not, and its connections to other ranks end first."""

    def stopping(self, number: int, now: float) -> None:
        """It got a signal from outside that asks it to stop."""

    def ended(self, end: End, now: float) -> None:
        """It has ended."""

    def leave(self) -> None:
        """This rank leaves the job, in good order."""

    def hurry(self) -> None:
        """Somebody does not want to wait any longer."""

    def over(self, now: float) -> bool:
        """Whether nothing is left to do."""

    def finish(self) -> None:
        """The last thing before the end."""

    def close(self) -> None:
        """End all connections."""
