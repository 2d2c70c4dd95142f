"""Rank 0's part of the agreed stop: it asks all agents how far their scripts are, and picks the read."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from ..script.stop_page import LARGEST


class StopAgreement:
    """The read of `ctx.preempted` at which all ranks stop. Pure; times are those of `time.monotonic`."""

    def __init__(self, ranks: Iterable[int], limit: float) -> None:
        self.read: int | None = None  # the answer, once it is known
        self.missing: list[int] = []  # the ranks whose agents did not say in time how far they are
        self._ranks = frozenset(ranks)
        self._limit = limit  # seconds for all agents to report
        self._awaited: set[int] = set()  # once a stop is asked for
        self._gone: set[int] = set()
        self._most = 0  # reads of any rank
        self._end = inf
        self._lasts = False  # whether the stop is also one for the next context

    @property
    def due(self) -> float:
        return self._end if self.read is None else inf

    @property
    def is_asked(self) -> bool:
        return self._end < inf

    @property
    def is_read(self) -> bool:
        """Whether a script reads it at all, as far as is known."""
        return self._most > 0

    def ask(self, now: float, *, lasts: bool = True) -> bool:
        """A rank is asked to stop: whether all are to be counted, as it is the first."""
        is_first = not self.is_asked
        if is_first:  # what was counted until now is of the context before
            self._awaited = set(self._ranks - self._gone)
            self._most = 0
        self._end = min(self._end, now + self._limit)
        self._lasts |= lasts
        return is_first

    def count(self, rank: int, reads: int) -> None:
        self._most = max(self._most, reads)
        self._awaited -= {rank}

    def leave(self, rank: int) -> None:
        """A rank has ended, or its agent is not connected any more."""
        self._awaited -= {rank}
        self._gone.add(rank)

    def begin(self) -> bool:
        """All ranks have got ready, and begin to count again: whether a stop is left, which is for the first read."""
        self._gone = set()
        self._most = 0
        self.missing = []
        if self._lasts:
            self.read = 1
        else:
            self.read = None
            self._end = inf
        return self._lasts

    def decide(self, now: float) -> bool:
        """Whether the answer is known just now."""
        is_open = self.is_asked and self.read is None
        is_complete = not self._awaited or now >= self._end
        if not (is_open and is_complete):
            return False
        self.read = min(self._most + 1, LARGEST)
        self.missing = sorted(self._awaited)
        return True
