"""The stop pages of an agent's scripts (`script/stop_page`): how all stop at the same read.

A page is memory that an agent shares with one script. The script counts its reads of
`ctx.preempted` there, and a read is true from the number that the agent writes. When a stop is
asked for, reads wait (`ask`); a moment later the agent reports how many reads each script has begun
(`counted`); rank 0 answers with a read that no script has passed (`stop_at`); the agent writes it
(`publish`).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from math import inf

from ..script.stop_page import ASKED, END, READS, STEPS, STOP, Page, blank_page, new_page

# Seconds after which the counts are read. A script that has not seen the request has written its
# count by then: a store waits in a processor for microseconds.
_SETTLING = 0.01
_NO_PAGE = blank_page()


def _set_once(
    page: Page,
    index: int,
    value: int,
) -> None:
    if not page[index]:
        page[index] = value


class StopPages:
    """The pages of an agent. All times are those of `time.monotonic`."""

    def __init__(self, limit: float) -> None:
        self.limit = limit  # seconds for the answer, and for the scripts to reach their read
        self.pages: dict[int, Page] = {}  # by rank
        self._open: set[int] = set()  # the ranks whose scripts have a context
        self._forget()

    @property
    def due(self) -> float:
        """When `counted` or `late` is to be called next."""
        return min(self._count_at, self._late_at)

    def new(self, rank: int, *, stops: bool) -> int | None:
        """A new page, as a file, for a script that begins to read; `stops`: its first read is true.

        None if it could not be made. All scripts begin together: an earlier stop is forgotten.
        """
        self._forget()
        try:
            file, page = new_page()
        except (OSError, AttributeError):  # macOS has neither
            return None
        self.pages[rank] = page
        self._open.add(rank)
        if stops:
            page[STOP] = 1
            page[ASKED] = time.monotonic_ns()
        return file

    def _forget(self) -> None:
        self._is_asked = False
        self._answer = 0
        self._count_at = inf
        self._late_at = inf

    def ask(self, now: float) -> None:
        """A stop is asked for: let reads wait from now on."""
        if self._is_asked:
            return
        self._is_asked = True
        self._count_at = now + _SETTLING
        self._late_at = now + self.limit
        for page in self.pages.values():
            page[ASKED] = self._until()

    def counted(
        self,
        ranks: Iterable[int],
        now: float,
    ) -> dict[int, int]:
        """How many reads each of these ranks has begun, once, when that is due."""
        if now < self._count_at:
            return {}
        self._count_at = inf
        found = {}
        for rank in ranks:
            reads, _ = self.numbers(rank)
            found[rank] = reads
        return found

    def stop_at(self, read: int) -> None:
        """The answer, for `publish`."""
        if not self._answer:
            self._answer = read

    def publish(self) -> None:
        """Write the answer to the pages; after SIGTERM, which would kill a Python that ends."""
        if not self._answer:
            return
        until = self._until()
        for page in self.pages.values():
            _set_once(page, STOP, self._answer)
            _set_once(page, ASKED, until)

    def release(self) -> None:
        """Rank 0 is gone: reads that wait return True."""
        for page in self.pages.values():
            if page[ASKED]:
                _set_once(page, STOP, 1)

    def close(self, rank: int) -> None:
        """The script of this rank has closed its context: it reads no more."""
        self._open.discard(rank)

    def end(self, rank: int) -> None:
        """Let the script of a rank end without another read."""
        if rank in self.pages:
            self.pages[rank][END] = signal.SIGTERM

    def is_read(self, rank: int) -> bool | None:
        """Whether the script of a rank reads `ctx.preempted`, and so needs no signal.

        None: not known yet.
        """
        if self.is_told(rank):  # a signal now would kill a Python that is about to end
            return True
        if rank not in self._open:
            return False
        reads, _ = self.numbers(rank)
        if reads > 0:
            return True
        if self._answer:
            # Above 1, other scripts have read it, and this one is in its first step
            return self._answer > 1
        return None

    def is_told(self, rank: int) -> bool:
        """Whether the script has reached the read that is true."""
        page = self.pages.get(rank, _NO_PAGE)
        return 0 < page[STOP] <= page[READS]

    def numbers(self, rank: int) -> tuple[int, int]:
        """How many reads and steps the script has begun."""
        page = self.pages.get(rank, _NO_PAGE)
        return page[READS], page[STEPS]

    def late(
        self,
        ranks: Iterable[int],
        now: float,
    ) -> dict[int, str]:
        """A warning for each of these ranks that has not reached the read in time, once."""
        if now < self._late_at:
            return {}
        self._late_at = inf
        found = {}
        for rank in self._open.intersection(ranks):
            page = self.pages[rank]
            is_behind = 0 < page[READS] < page[STOP]
            if is_behind:
                found[rank] = self._behind(page)
        return found

    def was_missed(self, rank: int) -> bool:
        """Whether other ranks were told to stop at a read, and this one has never come to any."""
        reads, _ = self.numbers(rank)
        return reads < 1 < self._answer  # at read 1 all may be in their first step

    def _behind(self, page: Page) -> str:
        what = "it has not reached its next read of ctx.preempted"
        where = f"it is at read {page[READS]}, and all ranks stop at read {page[STOP]}"
        limit = round(self.limit, 1)  # a third of DISTBOOT_GRACE
        return f"warning: {what} within {limit:g} s: {where}"

    def _until(self) -> int:
        """Until when a read waits that begins now; nanoseconds."""
        timeout = round(self.limit * 1e9)
        return time.monotonic_ns() + timeout
