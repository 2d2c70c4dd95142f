"""`ctx.preempted`: the script asks it once a step, and its agents let it be true at the same read on all ranks.

The script shares a page of memory with its agent: how often it has begun to read, until when a read is to wait for the
answer of rank 0 (0: no stop is asked for), and the read from which on it is true (0: not known yet). So the agent
knows how far the script is while that sits in a collective operation, and a read that no stop concerns costs no system
call.

When a rank is asked to stop, rank 0 asks all agents. Each notes that in the pages of its scripts, and says after a
moment how many reads c they have begun. Rank 0 answers with max(c) + 1. Until then a read waits: so none goes past the
answer, and as only agents are waited for, it comes while scripts sit in a collective operation, too.
docs/explanation/stopping.md has the argument.
"""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from math import inf
from types import FrameType
from typing import TypeAlias

from . import crash_hooks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rendezvous.local import AgentLink

# The numbers of a page; ASKED is a time of `time.monotonic_ns`
READS, ASKED, STOP, STEPS = range(4)
LARGEST = (1 << 64) - 1  # of them: a script may write there what it likes
_SIZE = 4096  # bytes
_PAUSE = 0.001  # seconds between two looks for the answer
# Seconds. What a script has written before it looked is seen by then: a store waits in a processor for microseconds.
_SETTLING = 0.01
# Seconds for an agent that has ended without our knowledge; else it says itself until when
_AGENT_LIMIT = 10.0

Page: TypeAlias = "memoryview | list[int]"

_current: Preemption | None = None  # of the newest context
_signals: set[int] = set()  # those with a handler of ours
_was_told = False  # whether one of them has come: of this process, whatever its context


class Preemption:
    """Whether the script of a context is to stop; without an agent, which only this process then knows."""

    def __init__(self, agent: AgentLink | None) -> None:
        global _current  # noqa: PLW0603 - a process has one context
        self._agent, self._process, self._is_true, self._count = agent, os.getpid(), False, 0
        self._page: Page = [0, 0, 0, 0]
        if agent is not None and agent.page is not None:
            self._page, agent.page = mapped(agent.page), None
        else:
            self._agent = None
        if _current is None:
            os.register_at_fork(after_in_child=_forget)
        _current = self
        if _was_told:
            self.request("before init()")

    def read(self) -> bool:
        """Whether to stop. From the first call on SIGTERM does not end this process by itself."""
        self._count = count = self._count + 1
        self._page[READS] = count  # before we look: what asks writes first, and counts then
        if count == 1:
            self.listen([signal.SIGTERM])
        if self._page[ASKED] and not self._is_true:
            # It has not been answered, and may be the one at which all stop
            self._page[READS] = count - 1
            while (found := answer(self._page, count, time.monotonic_ns())) is None:
                time.sleep(_PAUSE)
            self._page[READS], self._is_true = count, found
        return self._is_true

    def step(self) -> None:
        """The script has come to its next step."""
        self._page[STEPS] += 1

    def request(self, why: str, *, lasts: bool = True) -> None:
        """Let all ranks stop at one of their next reads; `lasts`: those of the next context, too."""
        if os.getpid() != self._process:  # a fork is not the rank
            return
        self._page[ASKED] = self._page[ASKED] or time.monotonic_ns() + round(_AGENT_LIMIT * 1e9)
        if self._agent is None:
            self._page[STOP] = 1
        else:
            self._agent.request_stop(why, lasts=lasts)

    def listen(self, numbers: Iterable[int]) -> None:
        """Take these signals as a question to the script, which ends by itself."""
        for number in set(numbers) - _signals:
            with suppress(ValueError):  # only the main thread may set a handler
                signal.signal(number, partial(_take, signal.getsignal(number)))
                _signals.add(number)

    def detach(self) -> None:
        """The context is closed: from now on no other rank is asked."""
        self._agent = None
        self._page = [*self._page[:STOP], self._page[STOP] or int(self._page[ASKED] != 0), 0]

    def request_at(self, at: float | None, why: str) -> None:
        """The same at a time in seconds since the epoch, where no agent does it."""
        if self._agent is None and at is not None:
            timer = threading.Timer(max(at - time.time(), 0.0), self.request, [why])
            timer.daemon = True
            timer.start()


def answer(page: Page, count: int, now: int) -> bool | None:
    """Whether this read is true, when a stop is asked for; None: that is not known yet."""
    is_late = now >= page[ASKED]
    if page[STOP]:
        # A rank that is further behind by then does not train in step with the others, and stops where it is.
        return count >= page[STOP] or (is_late and count < page[STOP] - 1)
    return is_late or None


def new_page() -> tuple[int, Page]:
    """A page for a script, as a file descriptor, which is the caller's, and mapped."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("distboot")
    else:  # a Python that was built on an old system, as those of conda are
        file = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)  # noqa: S108 - it has no name there
    os.ftruncate(file, _SIZE)
    return file, mapped(os.dup(file))


def mapped(file: int) -> Page:
    """The numbers in a page, whose file is closed."""
    try:
        return memoryview(mmap.mmap(file, _SIZE)).cast("Q")
    finally:
        os.close(file)


def _take(before: object, number: int, frame: FrameType | None) -> None:
    global _was_told  # noqa: PLW0603 - set once
    _was_told = True
    if _current is not None:
        _current.request(signal.Signals(number).name)
    if number == signal.SIGTERM:
        crash_hooks.emit(crash_hooks.TERM)
    if callable(before):
        before(number, frame)


def _forget() -> None:
    """A forked process reads for itself."""
    if _current is not None:
        _current.detach()


class StopPages:
    """The side of an agent: the pages that it shares with its scripts. All times are those of `time.monotonic`."""

    def __init__(self, limit: float) -> None:
        self._limit = limit  # seconds for the answer, and for the scripts to come to their read
        self._pages: dict[int, Page] = {}  # by rank
        self._forget()

    @property
    def due(self) -> float:
        return min(self._count_at, self._late_at)

    def new(self, rank: int, *, stops: bool) -> int | None:
        """The file of a page for a script that begins to read, as all do; None: it could not be made.

        `stops` says whether its first read is true.
        """
        self._forget()
        with suppress(OSError, AttributeError):  # macOS has neither
            file, page = new_page()
            self._pages[rank], page[STOP], page[ASKED] = (
                page,
                int(stops),
                time.monotonic_ns() if stops else 0,
            )
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
        behind = {
            rank: page
            for rank, page in self._pages.items()
            if rank in ranks and 0 < page[READS] < page[STOP]
        }
        return {
            rank: f"{said} {page[READS]}, and all ranks stop at read {page[STOP]}"
            for rank, page in behind.items()
        }


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
