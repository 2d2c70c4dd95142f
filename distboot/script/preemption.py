"""`ctx.preempted` in the process of the script: it turns true at the same read on all ranks.

A script reads it once a step. The reads are counted, in a page of memory that the script shares
with its agent (`stop_page`), and a stop goes like this:

1. Something asks a rank to stop: a signal, `ctx.request_stop()`, a notice of the platform. Its
   agent reports that to rank 0's agent, which asks all agents.
2. Each agent marks the pages of its scripts. From then on a read waits.
3. After a moment each agent reports how many reads its scripts have begun (`agent/stop_pages`).
4. Rank 0's agent answers with the largest of these numbers plus 1 (`job/stop_agreement`). Each
   agent writes that to the pages; the read with this number is true, and those before are false.

No read goes past the answer, because it waits for it. And the answer always comes, because it
depends on agents only: they answer while their scripts are in a collective operation.
docs/explanation/stopping.md has the argument.

A closed context reads no more: signals that end a program get their earlier handlers back, so that
SIGTERM ends the script again. A notice such as SIGUSR1 is still taken, for the next context: its
default effect would end a script that is only asked to stop.

Several threads may read: each read counts once, whichever thread it is in. A process without an
agent (one rank, or failure detection is off) asks itself only, and has a page of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from functools import partial

from ..base.text import log_line
from . import crash_hooks, workers
from .stop_page import (
    ASKED,
    READS,
    STEPS,
    STOP,
    answer,
    blank_page,
    mapped,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, Protocol

    class Agent(Protocol):
        """The agent of this process, as this module uses it."""

        page: int | None  # the file of the stop page

        def request_stop(self, why: str, *, lasts: bool) -> object: ...


_PAUSE = 0.001  # seconds between two checks for the answer
# Nanoseconds for the answer if this process marks the page before its agent does, which then
# writes a limit of its own
_AGENT_LIMIT = 10_000_000_000
_TWO_THREADS = (
    "warning: two threads read ctx.preempted: it turns true at the same read on all ranks, "
    "which is the same step only if one thread reads it"
)

# The signals that end any program. The others of DISTBOOT_STOP_SIGNALS are notices.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_current: Preemption | None = None  # of the newest context
# The signals that distboot handles, with the handlers that were there before
_earlier: dict[int, Any] = {}
_in_threads: set[int] = set()  # those of them that `stop_signals` handles
# Where a handler of the script runs for one of them
_running: list[tuple[int, FrameType | None]] = []
_held = threading.local()  # the signal mask of a thread that forks
# Whether one of them has arrived in this process, in this context or an earlier one
_was_signalled = False


class Preemption:
    """Whether the script of a context is to stop."""

    def __init__(self, agent: Agent | None, who: str | None) -> None:
        self._agent: Agent | None = None  # none: only this process is asked
        self._page = blank_page()
        self._who = who  # this process in what is printed
        self._process = os.getpid()
        self._is_true = False
        self._why = ""  # this process was asked to stop; empty: rank 0 prints that
        self._count = 0  # of reads
        self._lock = threading.RLock()  # of `read`; a signal handler may read, too
        self._reader = 0  # the thread that read last
        self._readers: set[int] = set()  # those that read before it
        self._is_warned = False  # of several threads that read
        self._over = threading.Event()  # set once the context is closed
        self.is_closed = False  # whether its context is, so that signals end the script as before
        self._watches_end = False
        self._listens: set[int] = set()  # to these signals
        if agent is not None and agent.page is not None:
            self._agent = agent
            self._page = mapped(agent.page)
            agent.page = None
        _make_current(self)
        crash_hooks.note_context(is_closed=False)
        if _was_signalled:
            self.request("before init()")

    def read(self) -> bool:
        """Whether to stop. From the first call on SIGTERM does not end this process by itself."""
        with self._lock:
            self._count += 1
            count = self._count
            # Before the mark is checked: the agent writes the mark first, and then reads the count
            self._page[READS] = count
            if self._reader != threading.get_ident():
                self._read_in_new_thread()
            if self._page[ASKED] and not self._is_true:
                self._is_true = self._await_answer(count)
                self._describe_stop(count)
            return self._is_true

    def step(self) -> None:
        """Count a step of the script."""
        self._page[STEPS] += 1

    def request(self, why: str, *, lasts: bool = True) -> None:
        """Ask all ranks to stop; with `lasts`, those of the next context as well."""
        is_fork = os.getpid() != self._process
        if is_fork:  # which is not the rank
            return
        if not self._page[ASKED]:
            limit = time.monotonic_ns() + _AGENT_LIMIT
            self._page[ASKED] = limit
            self._why = why
        if self._agent is None:
            self._page[STOP] = 1
        else:
            self._why = ""
            self._agent.request_stop(why, lasts=lasts)

    def listen(self, numbers: Iterable[int]) -> None:
        """Let these signals ask the script to stop, instead of ending it."""
        if self.is_closed:
            return
        new = set(numbers) - self._listens
        self._listens |= new
        for number in sorted(new):
            if not _is_handled(number):
                _handle(number)
        if signal.SIGTERM in numbers:
            self._watch_end()

    def _watch_end(self) -> None:
        """End this process if it waits in C for ranks that have failed: no handler runs there."""
        if self._agent is None or self._watches_end:
            return
        self._watches_end = True
        from . import stop_signals  # here, as many scripts do not listen

        stop_signals.watch_end(self._page, self._over, _is_term_ours)

    def expect_reads(self) -> None:
        """From now on SIGTERM ends neither this process nor its workers: the script reads."""
        self.listen([signal.SIGTERM])
        workers.install_for_reader()

    def close(self) -> None:
        """The context is closed: signals have their earlier effect again."""
        self.is_closed = True
        self.detach()
        for number in filter(_is_handled, _ENDING):
            _give_back(number)
        if self._watches_end:
            crash_hooks.emit(crash_hooks.TERM_HANDLER, crash_hooks.OF_SCRIPT)

    def detach(self) -> None:
        """From now on ask no other rank."""
        self._agent = None
        self._why = ""
        self._over.set()
        # An exception that leaves the block of a context closes it, and may be about a peer
        crash_hooks.note_context(is_closed=sys.exc_info()[0] is None)
        page = blank_page()
        page[READS] = self._page[READS]
        page[ASKED] = self._page[ASKED]
        page[STOP] = self._page[STOP]
        is_answered = page[STOP] or not page[ASKED]
        if not is_answered:  # nor will it be any more
            page[STOP] = 1
        self._page = page

    @property
    def has_agent(self) -> bool:
        """Whether an agent asks before the job's end, and when the machine will be taken away."""
        return self._agent is not None

    def request_at(self, end: float, why: str) -> None:
        """Ask at this time, in seconds since the epoch."""
        seconds = max(end - time.time(), 0.0)
        seconds = min(seconds, threading.TIMEOUT_MAX)
        timer = threading.Timer(seconds, self.request, [why])
        timer.daemon = True
        timer.start()

    def request_at_notice(self, provider: str, address: str) -> None:
        """Ask when the provider's metadata service, at host and port, announces the end."""
        from .stop_notices import watch  # here, as few scripts do

        warn = partial(log_line, self._who)
        watch(provider, address, self.request, warn, self._over)

    def forget_parent(self) -> None:
        """In a fork: read without an agent, whatever the threads of the parent were doing."""
        self._lock = threading.RLock()
        self._over = threading.Event()
        self.detach()

    def _await_answer(self, count: int) -> bool:
        # This read has not been answered, and may be the one at which all stop
        self._page[READS] = count - 1
        found = answer(self._page, count, time.monotonic_ns())
        while found is None:
            time.sleep(_PAUSE)
            found = answer(self._page, count, time.monotonic_ns())
        self._page[READS] = count
        return found

    def _describe_stop(self, count: int) -> None:
        """Print, once and where no agent does, why this read is true."""
        if self._is_true and self._why:
            text = f"asked to stop ({self._why}): this process stops at read {count}"
            log_line(self._who, f"{text} of ctx.preempted")

    def _read_in_new_thread(self) -> None:
        thread = threading.get_ident()
        is_first_read = self._reader == 0
        if is_first_read:
            self.expect_reads()
        elif thread in self._readers and not self._is_warned:
            self._is_warned = True
            log_line(self._who, _TWO_THREADS)
        self._readers.add(self._reader)
        self._reader = thread


def _make_current(preemption: Preemption) -> None:
    global _current  # noqa: PLW0603 - a process has one context
    is_first = _current is None
    if is_first:
        os.register_at_fork(
            before=_hold_signals,
            after_in_parent=_release_signals,
            after_in_child=_forget,
        )
    _current = preemption


def _hold_signals() -> None:
    """A signal for a process that is just being forked would be taken for one of the rank."""
    _held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _earlier.keys())


def _release_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _held.mask)


def _forget() -> None:
    """In a fork, which is not the rank: it reads for itself, and signals have their earlier effect."""
    assert _current is not None
    _current.forget_parent()
    _in_threads.clear()
    for number, before in _earlier.items():
        if _is_ours(number):
            signal.signal(number, before)
    _release_signals()


def _handle(number: int) -> None:
    """Handle a signal; a handler of the script runs as well."""
    # Python does not know, and has no way back to, a handler that a library has set in C
    before = signal.getsignal(number) or signal.SIG_DFL
    _earlier[number] = before
    try:
        signal.signal(number, _receive_in_handler)
    except ValueError:  # only the main thread may set a handler
        from . import stop_signals  # here, as most scripts call `init` there

        stop_signals.listen(number, partial(_receive, number), chain=_is_of_script(before))
        _in_threads.add(number)


def _give_back(number: int) -> None:
    """Give a signal, which distboot handles, the handler that was there before."""
    before = _earlier[number]
    if number in _in_threads:
        _in_threads.discard(number)
        from . import stop_signals  # here, as most scripts call `init` in the main thread

        stop_signals.stop_listening(number, before)
    elif threading.current_thread() is threading.main_thread():
        signal.signal(number, before)
    # Else only the handler itself, which runs in the main thread, can do so: `_act_as_before`


def _act_as_before(number: int, frame: FrameType | None) -> None:
    """A signal arrives after another thread has closed the context: do what it did before."""
    before = _earlier[number]
    if _is_ours(number):
        signal.signal(number, before)
        signal.raise_signal(number)
    elif callable(before):  # a handler of the script calls this one
        _run_handler(before, number, frame)


def _receive_in_handler(number: int, frame: FrameType | None) -> None:
    is_called_by_handler = (number, frame) in _running
    if is_called_by_handler:  # of the script, which calls the one that was there before: this
        return
    assert _current is not None
    if _current.is_closed and number in _ENDING:
        _act_as_before(number, frame)
        return
    before = _earlier[number]
    _receive(number)
    if _is_of_script(before):
        _run_handler(before, number, frame)


def _run_handler(
    handler: Callable[[int, FrameType | None], object],
    number: int,
    frame: FrameType | None,
) -> None:
    _running.append((number, frame))
    try:
        handler(number, frame)
    finally:
        _running.pop()


def _is_of_script(handler: object) -> bool:
    """Not Python's own for SIGINT, which would end the script by `KeyboardInterrupt`."""
    if handler is signal.default_int_handler:
        return False
    return callable(handler)


def _is_handled(number: int) -> bool:
    """Whether distboot handles a signal since an earlier context, and the script has not changed that."""
    if _is_ours(number):
        return True
    is_lost = number == signal.SIGTERM and not crash_hooks.term_is_held
    if is_lost or number not in _in_threads:
        return False

    return crash_hooks.is_caught(number)


def _is_ours(number: int) -> bool:
    """Whether the script has set no other handler since."""
    return signal.getsignal(number) is _receive_in_handler


def _receive(number: int) -> None:
    """Ask the script to stop: a signal has arrived."""
    global _was_signalled  # noqa: PLW0603 - set once
    _was_signalled = True
    assert _current is not None
    name = signal.Signals(number).name
    _current.request(name)
    if number == signal.SIGTERM:
        crash_hooks.note_term()
        crash_hooks.emit(crash_hooks.TERM)


def _is_term_ours() -> bool:
    """Whether distboot still handles SIGTERM."""
    if crash_hooks.term_is_held:
        return True
    return _is_ours(signal.SIGTERM)
