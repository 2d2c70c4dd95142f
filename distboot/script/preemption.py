"""`ctx.preempted` in the process of the script, which reads it once a step: true at the same read on all ranks.

When a rank is asked to stop, rank 0's agent asks all agents. Each notes that in the pages of its scripts, and reports
after a moment how many reads c they have begun (`agent/stop_pages`). Rank 0's answers
with max(c) + 1 (`stop_agreement`).
Until then a read waits: so none goes past the answer, and as only agents are waited for, the answer comes while scripts
are in a collective operation, too. docs/explanation/stopping.md has the argument.

Several threads may read: each read counts once, whichever thread it is in.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from types import CodeType, FrameType

from ..base.text import log_line
from . import crash_hooks, workers
from .exceptions import OF_LIBRARIES
from .stop_page import (
    ASKED,
    NUMBERS,
    READS,
    STEPS,
    STOP,
    Page,
    answer,
    mapped,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    class Agent(Protocol):
        """The agent of this process, as this module uses it."""

        page: int | None  # the file of the stop page

        def request_stop(self, why: str, *, lasts: bool) -> object: ...


_PAUSE = 0.001  # seconds between two looks for the answer
# Seconds for the answer where this process notes the question before its agent does, which then gives its own limit
_AGENT_LIMIT = 10.0
_NAME = "preempted"
_TWO_THREADS = (
    "warning: two threads read ctx.preempted: it turns true at the same read on all ranks, "
    "which is the same step only if one thread reads it"
)
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

_current: Preemption | None = None  # of the newest context
_signals: set[int] = set()  # those with a handler of ours
_was_told = False  # whether one of them has arrived: in this process, whatever its context


class Preemption:
    """Whether the script of a context is to stop; without an agent only this process is asked."""

    def __init__(self, agent: Agent | None, who: str | None = None) -> None:
        global _current  # noqa: PLW0603 - a process has one context
        self._agent = agent
        self._who = who  # this process in what is printed
        self._process = os.getpid()
        self._is_true = False
        self._count = 0  # of reads
        self._lock = threading.RLock()  # of `read`; a signal handler may read, too
        self._reader = 0  # the thread that has read last
        self._readers: set[int] = set()  # those that have read before it
        self._is_warned = False  # of several threads that read
        self._over = threading.Event()  # set once the context is closed
        self._watches_end = False
        self._page: Page = [0 for _ in NUMBERS]
        if agent is None or agent.page is None:
            self._agent = None
        else:
            self._page = mapped(agent.page)
            agent.page = None
        if _current is None:
            os.register_at_fork(after_in_child=_forget)
        _current = self
        if _was_told:
            self.request("before init()")

    def read(self) -> bool:
        """Whether to stop. From the first call on SIGTERM does not end this process by itself."""
        with self._lock:
            self._count = count = self._count + 1
            self._page[READS] = count  # before we look: what asks writes first, and counts then
            if self._reader != threading.get_ident():
                self._read_in_new_thread()
            if self._page[ASKED] and not self._is_true:
                self._is_true = self._await_answer(count)
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
        """Let these signals ask the script to stop, instead of ending it."""
        for number in sorted(set(numbers) - _signals):
            before = signal.getsignal(number)
            try:
                signal.signal(number, partial(_handle, before))
            except ValueError:  # only the main thread may set a handler
                from . import stop_signals  # here, as most scripts call `init` there

                stop_signals.listen(number, partial(_receive, number), chain=callable(before))
            _signals.add(number)
        if signal.SIGTERM in numbers:
            self._watch_end()

    def _watch_end(self) -> None:
        """Let this process end where it waits for ranks that have failed, and so cannot take SIGTERM."""
        if self._agent is not None and not self._watches_end:
            from . import stop_signals  # here, as many scripts do not listen

            self._watches_end = True
            stop_signals.watch_end(self._page, self._over, _is_term_ours)

    def expect_reads(self) -> None:
        """The script reads `ctx.preempted`: from now on SIGTERM ends neither this process nor its workers."""
        self.listen([signal.SIGTERM])
        workers.install_for_reader()

    def detach(self) -> None:
        """The context is closed: from now on no other rank is asked."""
        self._agent = None
        self._over.set()
        page: Page = [0 for _ in NUMBERS]
        page[READS] = self._page[READS]
        page[ASKED] = self._page[ASKED]
        page[STOP] = self._page[STOP] or int(self._page[ASKED] != 0)
        self._page = page

    def request_at(self, at: float | None, why: str) -> None:
        """Ask at a time in seconds since the epoch, where no agent does it."""
        if self._agent is None and at is not None:
            timer = threading.Timer(max(at - time.time(), 0.0), self.request, [why])
            timer.daemon = True
            timer.start()

    def request_at_notice(self, provider: str, address: str) -> None:
        """Ask when this machine will be taken away, where no agent does it; an empty provider: never."""
        if self._agent is None and provider:
            from .stop_notices import watch  # here, as few scripts do

            say = partial(log_line, self._who)
            watch(provider, address, self.request, say, self._over)

    def forget_parent(self) -> None:
        """In a fork: read without an agent, whatever the threads of the parent were doing."""
        self._lock = threading.RLock()
        self._over = threading.Event()
        self.detach()

    def _await_answer(self, count: int) -> bool:
        # This read has not been answered, and may be the one at which all stop
        self._page[READS] = count - 1
        while True:
            found = answer(self._page, count, time.monotonic_ns())
            if found is not None:
                break
            time.sleep(_PAUSE)
        self._page[READS] = count
        return found

    def _read_in_new_thread(self) -> None:
        thread = threading.get_ident()
        if self._reader == 0:
            self.expect_reads()
        elif thread in self._readers and not self._is_warned:
            self._is_warned = True
            log_line(self._who, _TWO_THREADS)
        self._readers.add(self._reader)
        self._reader = thread


def is_mentioned() -> bool:
    """Whether the code of the script reads `preempted`, as far as the stacks of this and the main thread show."""
    own = sys._getframe()  # noqa: SLF001
    main = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
    return any(_mentions(code) for code in {*_codes(own), *_codes(main)})


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    """The code of each frame of a stack that is of no library."""
    while frame is not None:
        code = frame.f_code
        frame = frame.f_back
        if not any(part in code.co_filename for part in (*OF_LIBRARIES, _OWN)):
            yield code


def _mentions(code: CodeType) -> bool:
    if _NAME in code.co_names:
        return True
    return any(_mentions(inner) for inner in code.co_consts if isinstance(inner, CodeType))


def _handle(before: object, number: int, frame: FrameType | None) -> None:
    """The handler of a signal in the main thread."""
    _receive(number)
    if callable(before):
        before(number, frame)


def _is_term_ours() -> bool:
    """Whether the script has set no other handler of SIGTERM since."""
    handler = signal.getsignal(signal.SIGTERM)
    return crash_hooks.term_is_held or getattr(handler, "func", None) is _handle


def _receive(number: int) -> None:
    """A signal has arrived that asks the script to stop."""
    global _was_told  # noqa: PLW0603 - set once
    _was_told = True
    if _current is not None:
        _current.request(signal.Signals(number).name)
    if number == signal.SIGTERM:
        crash_hooks.emit(crash_hooks.TERM)


def _forget() -> None:
    """A forked process reads for itself."""
    if _current is not None:
        _current.forget_parent()
