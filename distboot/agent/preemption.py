"""`ctx.preempted` in the script: asked once a step, and true at the same read on all ranks.

The script shares a page of memory with its agent: how often it has begun to read, until when a read is to wait for the
answer of rank 0 (0: no stop is asked for), and the read from which on it is true (0: not known yet). So the agent
knows how far the script is while that sits in a collective operation, and a read that no stop concerns costs no system
call. Who decides, and why all ranks stop together, is in `stop_agreement`.
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
from types import FrameType
from typing import TypeAlias

from . import crash_hooks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rendezvous.job_info import Link

READS, ASKED, STOP, STEPS = range(4)  # the numbers of a page; ASKED is a time of `time.monotonic_ns`
LARGEST = (1 << 64) - 1  # of them: a script may write there what it likes
_SIZE = 4096  # bytes
_PAUSE = 0.001  # seconds between two looks for the answer
_AGENT_LIMIT = 10.0  # seconds for an agent that has ended without our knowledge; else it says itself until when

Page: TypeAlias = "memoryview | list[int]"

_current: Preemption | None = None  # of the newest context
_signals: set[int] = set()  # those with a handler of ours
_was_told = False  # whether one of them has come: of this process, whatever its context


class Preemption:
    """Whether the script of a context is to stop; without an agent, which only this process then knows."""

    def __init__(self, agent: Link | None) -> None:
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
        return self._page[ASKED] != 0 and self._is_agreed(count)

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
            with suppress(ValueError):  # not the main thread, which alone may say it
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

    def _is_agreed(self, count: int) -> bool:
        if not self._is_true:
            self._page[READS] = count - 1  # it has not been answered, and may be the one at which all stop
            while (found := answer(self._page, count, time.monotonic_ns())) is None:
                time.sleep(_PAUSE)
            self._page[READS], self._is_true = count, found
        return self._is_true


def answer(page: Page, count: int, now: int) -> bool | None:
    """Whether this read is true, when a stop is asked for; None: that is not known yet."""
    is_late = now >= page[ASKED]
    if page[STOP]:
        # A rank that is further behind by then does not train in step with the others, and stops where it is.
        return count >= page[STOP] or (is_late and count < page[STOP] - 1)
    return is_late or None


def new_page() -> tuple[int, Page]:
    """A page for a script, as a file descriptor, which is the caller's, and mapped."""
    if hasattr(os, "memfd_create"):  # where Python was built on an old system, it has it not
        file = os.memfd_create("distboot")
    else:
        path = f"/dev/shm/distboot-{os.urandom(8).hex()}"  # noqa: S108 - opened exclusively, and unlinked
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
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
