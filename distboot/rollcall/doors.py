"""What both sides of the gate have in common: the names of doors, and when to say that somebody waits at one."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..errors import DistbootError

_FIRST_LINE = 10.0  # seconds; one rank may well be slower than another for a moment
_KNOWN = ("barrier()", "main_first()", "local_main_first()")
_MOST = 1 << 32  # times, and nodes
LONGEST_FAILURE = 500  # characters
_MOST_BETWEEN = 300.0  # seconds between two lines, later


@dataclass(frozen=True, slots=True)
class Door:
    """Where ranks wait.

    Attributes:
        what: what they do there, for example "main_first()".
        node: whose ranks these are; None: all.
        times: how often they have done so.
    """

    what: str
    node: int | None
    times: int

    @property
    def name(self) -> tuple[str, int | None]:
        """The same for all times."""
        return self.what, self.node

    @property
    def said(self) -> str:
        """`"local_main_first() on node 1"`."""
        return self.what if self.node is None else f"{self.what} on node {self.node}"

    def on(self, node: int) -> Door:
        """The same door of another node."""
        return Door(self.what, node, self.times)

    def as_message(self) -> list[object]:
        """As plain JSON types."""
        return [self.what, self.node, self.times]

    def failed(self, whose: str, why: str) -> DistbootError:
        """The error for whoever has waited for that rank, which failed there."""
        return DistbootError("rank-failed", f"{self.said}: the block failed on {whose}: {why}", "look at its output")

    def not_opened(self, whose: str, limit: float) -> DistbootError:
        """The error for whoever has waited so many seconds in vain for that rank to come through."""
        name = self.what.removesuffix("()")
        return DistbootError(
            "missing-rank",
            f"{self.said}: {whose} was not through within {limit:g} s",
            f"look at its output, or give its block more time: {name}(timeout=…)",
        )


def door_of(message: object) -> Door | None:
    """The door in a message of somebody who may be anybody; None if there is none."""
    what, node, times = message if isinstance(message, list) and len(message) == 3 else (None, None, None)
    known = isinstance(what, str) and what in _KNOWN and (node is None or (type(node) is int and 0 <= node < _MOST))
    return Door(str(what), node, times) if known and type(times) is int and 0 < times < _MOST else None


class Patience:
    """How long somebody still waits, and when the next line about it is due.

    Args:
        limit: seconds.
        speaks: whether this rank says what is being waited for.
    """

    def __init__(self, limit: float, *, speaks: bool = True) -> None:
        now = time.monotonic()
        self._end = now + limit
        self._between = _FIRST_LINE
        self._next = now + _FIRST_LINE if speaks else self._end

    def left(self) -> float:
        """Seconds until it is over; 0 when it is."""
        return max(self._end - time.monotonic(), 0.0)

    def pause(self) -> float:
        """Seconds until there is a line to say, or it is over."""
        return max(min(self._next, self._end) - time.monotonic(), 0.0)

    def is_due(self) -> bool:
        """Whether it is time to say a line."""
        return self.left() > 0 and time.monotonic() >= self._next

    def line(self, said: str) -> str | None:
        """What to say now, if it is time to."""
        if not self.is_due():
            return None
        self._next = time.monotonic() + self._between
        self._between = min(self._between * 2, _MOST_BETWEEN)
        return f"{said}; waiting for {self.left():.0f} s more"
