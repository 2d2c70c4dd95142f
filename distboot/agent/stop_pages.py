"""The page of memory that a script shares with its agent, and what the agent does with it when the job stops.

A page has how often the script has begun to read `ctx.preempted`, until when a read waits for rank 0's answer (0: no
stop is asked for), and the read from which on it is true (0: not known yet). So the agent knows how far the script is
while that sits in a collective operation, and a read that no stop concerns costs no system call.

A script may write there what it likes: its agent takes any number, and the page keeps its size.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterable
from math import inf
from typing import TypeAlias

# The numbers of a page; ASKED is a time of `time.monotonic_ns`
READS, ASKED, STOP, STEPS = range(4)
LARGEST = (1 << 64) - 1
_SIZE = 4096  # bytes
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a page has no name there
# linux/fcntl.h, which a Python need not have: neither the size nor the seals can be changed
_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
# Seconds. What a script has written before it looked is seen by then: a store waits in a processor for microseconds.
_SETTLING = 0.01

Page: TypeAlias = "memoryview | list[int]"
_NO_PAGE = [0, 0, 0, 0]


def answer(page: Page, count: int, now: int) -> bool | None:
    """Whether this read is true, when a stop is asked for; None: that is not known yet."""
    is_late = now >= page[ASKED]
    stop = page[STOP]
    if not stop:
        return is_late or None
    # A rank that is further behind by then does not train in step with the others, and stops where it is.
    is_left_behind = is_late and count < stop - 1
    return count >= stop or is_left_behind


def new_page() -> tuple[int, Page]:
    """A page for a script, as a file descriptor, which is the caller's, and mapped."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("distboot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, _SIZE)
        # A script that cut it short would end its agent by SIGBUS
        fcntl.fcntl(file, _F_ADD_SEALS, _SEALS)
    else:  # a Python that was built on an old system, as those of conda are
        file = os.open(_SHARED_MEMORY, os.O_TMPFILE | os.O_RDWR, 0o600)
        os.ftruncate(file, _SIZE)
    return file, mapped(os.dup(file))


def mapped(file: int) -> Page:
    """The numbers in a page, whose file is closed."""
    try:
        return memoryview(mmap.mmap(file, _SIZE)).cast("Q")
    finally:
        os.close(file)


def _set_once(page: Page, index: int, value: int) -> None:
    if not page[index]:
        page[index] = value


class StopPages:
    """The pages that an agent shares with its scripts. All times are those of `time.monotonic`."""

    def __init__(self, limit: float) -> None:
        self._limit = limit  # seconds for the answer, and for the scripts to reach their read
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
            self._late_at = now + self._limit
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
        return f"warning: {what} within {self._limit:g} s: {where}"

    def _until(self) -> int:
        """Until when a read waits, of those that begin now."""
        return time.monotonic_ns() + round(self._limit * 1e9)
