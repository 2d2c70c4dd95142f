"""The stop pages of an agent's scripts (`script/stop_page`), and what it writes there when the job stops."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from math import inf

from ..script.stop_page import ASKED, END, READS, STEPS, STOP, Page, blank_page, new_page

# Seconds. What a script has written before it looked is seen by then: a store waits in a processor for microseconds.
_SETTLING = 0.01
_NO_PAGE = blank_page()


def _set_once(page: Page, index: int, value: int) -> None:
    if not page[index]:
        page[index] = value


class StopPages:
    """The pages that an agent shares with its scripts. All times are those of `time.monotonic`."""

    def __init__(self, limit: float) -> None:
        self.limit = limit  # seconds for the answer, and for the scripts to reach their read
        self._pages: dict[int, Page] = {}  # by rank
        self._open: set[int] = set()  # the ranks whose scripts have a context
        self._forget()

    @property
    def due(self) -> float:
        return min(self._count_at, self._late_at)

    def new(self, rank: int, *, stops: bool) -> int | None:
        """The file of a page for a script that begins to read, as all do; None: it could not be made.

        `stops` says whether its first read is true.
        """
        self._forget()
        try:
            file, page = new_page()
        except (OSError, AttributeError):  # macOS has neither
            return None
        self._pages[rank] = page
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
        """A stop is asked for: reads wait from now on."""
        if not self._is_asked:
            self._is_asked = True
            self._count_at = now + _SETTLING
            self._late_at = now + self.limit
            for page in self._pages.values():
                page[ASKED] = self._until()

    def counted(self, ranks: Iterable[int], now: float) -> dict[int, int]:
        """How many reads each of these has begun, once it is time to report it."""
        if now < self._count_at:
            return {}
        self._count_at = inf
        return {rank: self.numbers(rank)[0] for rank in ranks}

    def stop_at(self, read: int) -> None:
        """The answer, for `publish`."""
        self._answer = self._answer or read

    def publish(self) -> None:
        """Let the scripts know the answer: after SIGTERM, which would kill a Python that is about to end."""
        if not self._answer:
            return
        for page in self._pages.values():
            _set_once(page, STOP, self._answer)
            _set_once(page, ASKED, self._until())

    def release(self) -> None:
        """Rank 0 cannot answer any more: reads that wait, wait no longer."""
        for page in self._pages.values():
            _set_once(page, STOP, int(page[ASKED] != 0))

    def close(self, rank: int) -> None:
        """The script of this rank has closed its context: it reads no more."""
        self._open.discard(rank)

    def end(self, rank: int) -> None:
        """Let the script of a rank end without another read."""
        if rank in self._pages:
            self._pages[rank][END] = signal.SIGTERM

    def is_read(self, rank: int) -> bool | None:
        """Whether the script of a rank reads `ctx.preempted`, and so needs no signal; None: not known yet."""
        if self.is_told(rank):  # a signal now might meet a Python that is about to end
            return True
        if rank not in self._open:
            return False
        if self.numbers(rank)[0]:
            return True
        if self._answer:
            # Others have read it, and this one is in its first step; or none has
            return self._answer > 1
        return None

    def is_told(self, rank: int) -> bool:
        """Whether the script has come to the read that is true."""
        page = self._pages.get(rank, _NO_PAGE)
        return 0 < page[STOP] <= page[READS]

    def numbers(self, rank: int) -> tuple[int, int]:
        """How many reads and steps the script has begun."""
        page = self._pages.get(rank, _NO_PAGE)
        return page[READS], page[STEPS]

    def late(self, ranks: Iterable[int], now: float) -> dict[int, str]:
        """What is printed of those of these ranks that have not reached their read in time; once."""
        if now < self._late_at:
            return {}
        self._late_at = inf
        return {
            rank: self._behind(page)
            for rank, page in self._pages.items()
            if rank in ranks and 0 < page[READS] < page[STOP]
        }

    def _behind(self, page: Page) -> str:
        what = "it has not reached its next read of ctx.preempted"
        where = f"it is at read {page[READS]}, and all ranks stop at read {page[STOP]}"
        return f"warning: {what} within {self.limit:g} s: {where}"

    def _until(self) -> int:
        """Until when a read waits, of those that begin now."""
        return time.monotonic_ns() + round(self.limit * 1e9)
