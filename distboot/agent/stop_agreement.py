"""The stop that all ranks agree on: the read of `ctx.preempted` from which on it is true, the same on all of them.

When a rank is asked to stop, rank 0 asks all agents. Each notes that in the pages of its scripts (see `preemption`),
and says after a moment how many reads c they have begun. Rank 0 answers with max(c) + 1. Until then a read waits: so
none goes past the answer, and as only agents are waited for, it comes while scripts sit in a collective operation, too.
docs/explanation/stopping.md has the argument.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from math import inf

from .preemption import ASKED, LARGEST, READS, STEPS, STOP, Page, new_page

# Seconds. What a script has written before it looked is seen by then: a store waits in a processor for microseconds.
_SETTLING = 0.01


class StopPages:
    """An agent's side: the pages that it shares with its scripts. All times are those of `time.monotonic`."""

    def __init__(self, limit: float) -> None:
        self._limit = limit  # seconds for the answer, and for the scripts to come to their read
        self._pages: dict[int, Page] = {}  # by rank
        self._forget()

    @property
    def due(self) -> float:
        return min(self._count_at, self._late_at)

    def new(self, rank: int, *, stops: bool) -> int | None:
        """The file of a page for a script that begins to read, as all do; None: there is none to be had.

        `stops` says whether its first read is true.
        """
        self._forget()
        with suppress(OSError):
            file, page = new_page()
            self._pages[rank], page[STOP], page[ASKED] = page, int(stops), time.monotonic_ns() if stops else 0
            return file
        return None

    def _forget(self) -> None:
        self._is_asked, self._answer, self._count_at, self._late_at = False, 0, inf, inf

    def ask(self, now: float) -> None:
        """A stop is asked for: reads wait from now on."""
        if not self._is_asked:
            self._is_asked = True
            self._count_at, self._late_at = now + _SETTLING, now + self._limit
            for page in self._pages.values():
                page[ASKED] = time.monotonic_ns() + round(self._limit * 1e9)

    def counted(self, ranks: Iterable[int], now: float) -> dict[int, int]:
        """How many reads each of these has begun, once it is time to say so."""
        if now < self._count_at:
            return {}
        self._count_at = inf
        return {rank: self._pages[rank][READS] if rank in self._pages else 0 for rank in ranks}

    def stop_at(self, read: int) -> None:
        """The answer, for `publish`."""
        self._answer = self._answer or read

    def publish(self) -> None:
        """Let the scripts know the answer: once SIGTERM is sent, which would kill a Python that is about to end."""
        for page in self._pages.values() if self._answer else ():
            page[STOP] = page[STOP] or self._answer
            page[ASKED] = page[ASKED] or time.monotonic_ns() + round(self._limit * 1e9)

    def release(self) -> None:
        """Rank 0 cannot answer any more: reads that wait, wait no longer."""
        for page in self._pages.values():
            page[STOP] = page[STOP] or int(page[ASKED] != 0)

    def is_told(self, rank: int) -> bool:
        """Whether the script has come to the read that is true."""
        page = self._pages.get(rank)
        return page is not None and 0 < page[STOP] <= page[READS]

    def numbers(self, rank: int) -> tuple[int, int]:
        """How many reads and steps the script has begun."""
        page = self._pages.get(rank)
        return (0, 0) if page is None else (page[READS], page[STEPS])

    def late(self, ranks: Iterable[int], now: float) -> dict[int, str]:
        """What is said of those of these ranks that have not come to their read in time; once."""
        if now < self._late_at:
            return {}
        self._late_at = inf
        said = f"warning: it has not reached its next read of ctx.preempted within {self._limit:g} s: it is at read"
        behind = {rank: page for rank, page in self._pages.items() if rank in ranks and 0 < page[READS] < page[STOP]}
        return {rank: f"{said} {page[READS]}, and all ranks stop at read {page[STOP]}" for rank, page in behind.items()}


class StopAgreement:
    """Rank 0's side. Pure."""

    def __init__(self, ranks: Iterable[int], limit: float) -> None:
        self.read: int | None = None  # the answer, once it is known
        self.missing: list[int] = []  # the ranks whose agents did not say in time how far they are
        self._ranks, self._limit = frozenset(ranks), limit
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
        if is_first:  # what has come until now is of the context before
            self._awaited, self._most = set(self._ranks - self._gone), 0
        self._end, self._lasts = min(self._end, now + self._limit), self._lasts or lasts
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
        self._gone, self._most, self.missing = set(), 0, []
        self.read = 1 if self._lasts else None
        self._end = self._end if self._lasts else inf
        return self._lasts

    def decide(self, now: float) -> bool:
        """Whether the answer is known just now."""
        if self.read is not None or not self.is_asked or (self._awaited and now < self._end):
            return False
        self.read, self.missing = min(self._most + 1, LARGEST), sorted(self._awaited)
        return True
