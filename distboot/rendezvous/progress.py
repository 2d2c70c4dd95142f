"""How rank 0 shows who is missing while ranks join.

On a terminal one line is replaced in place. In a log each line stays: the first one after a second,
and then fewer and fewer while no rank joins.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..base import terminal
from ..host.network import LEAST_PROGRESS, PROGRESS

_STDERR = 2
_FIRST_LINE = 1.0  # seconds before the first line about missing ranks
_LEAST_RATE = 1.0  # ranks a second
_IN_PLACE = 0.5  # seconds between two views of the line on a terminal


class Lines:
    """Lines in a log.

    `show` takes how many have joined, who is missing, and for how many seconds it goes on.
    """

    def __init__(self, say: Callable[..., None]) -> None:
        # By `time.monotonic`: when it is to be shown next
        self.due = time.monotonic() + _FIRST_LINE
        self._say = say
        self._interval = PROGRESS
        self._printed = ""

    def show(self, joined: int, who: str, left: float) -> None:  # noqa: ARG002 - it is in `who`
        if who == self._printed:
            self._interval = min(self._interval * 2, LEAST_PROGRESS)
        else:
            self._interval = PROGRESS
        self.due = time.monotonic() + self._interval
        self._printed = who
        self._say(f"{who}; giving up in {left:.0f} s", event="waiting")

    def close(self) -> None:
        """The lines stay."""


class InPlace:
    """A line on a terminal; called as `Lines` is."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.due = self._begun + _FIRST_LINE

    def show(self, joined: int, who: str, left: float) -> None:
        now = time.monotonic()
        self.due = now + _IN_PLACE
        rate = joined / (now - self._begun)
        about = f"{left:.0f} s left"
        if rate >= _LEAST_RATE:
            about = f"{rate:.0f}/s, {about}"
        # In front, as the line ends where the window does
        text = who.replace("joined", f"joined ({about})", 1)
        terminal.show(_STDERR, f"distboot: {text}")

    def close(self) -> None:
        terminal.clear(_STDERR)


def progress(say: Callable[..., None]) -> Lines | InPlace:
    """The way that fits standard error."""
    if terminal.can_replace(_STDERR):
        return InPlace()
    return Lines(say)
