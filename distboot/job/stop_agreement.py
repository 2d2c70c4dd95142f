"""The agreed stop: rank 0's agent picks the read of `ctx.preempted` at which all ranks stop. Pure.

Scripts read `ctx.preempted` in a loop, each the same number of times per step, but not at the same
time. All of them have to leave the loop at the same step, else some wait in a collective operation
for others that have stopped. So the answer is not "now" but a read: the first one that no script
has begun yet.

    1. A rank is asked to stop (`ask`). Rank 0 asks all agents how many reads their scripts have
       begun. From then on no script begins another read: it waits for the answer.
    2. The agents report (`count`).
    3. Once all have, or the time is over, the answer is the highest count plus one (`decide`).
       Agents that have not reported by then are named: their ranks may stop elsewhere.

Ranks that have ended, or whose agent has disconnected, are not awaited (`leave`). If a signal has
ended a rank, and so stops the job, the others agree on a read among themselves, unless exceptions
end all of them, as after Ctrl-C (`fail`).

A stop can outlive a context: a notice that the machine ends soon holds for the next `init()`, too.
When all ranks have got ready again they count from zero (`begin`); such a stop is then at their
first read. Any other one is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from ..base.process import INTERRUPT, TERM, signal_name
from ..base.text import escape_control, ranks_said
from ..rendezvous.messages import RequestStop
from ..script.stop_page import LARGEST
from .effects import Record, Say, Send
from .facts import Facts
from .messages import CountReads, Failing, Reads, StopAt, Terminating
from .root_cause import RankState, request_text
from .service import Emit, Service

_SIGTERM = signal_name(TERM)


class StopAgreement:
    """Times are those of `time.monotonic`."""

    def __init__(self, ranks: Iterable[int], limit: float) -> None:
        self.read: int | None = None  # the answer, once it is known
        self.missing: list[int] = []  # the ranks whose agents did not report in time
        self.asked: int | None = None  # the rank that was asked first, once it was
        self.why = ""  # for example "SIGUSR1"
        self._ranks = frozenset(ranks)
        self._limit = limit  # seconds for all agents to report
        self._awaited: set[int] = set()  # once a stop is asked for
        self._gone: set[int] = set()
        self._failing: set[int] = set()  # an exception ends their scripts
        self._most = 0  # reads of any rank
        self._end = inf  # when the time is over; inf: no stop is asked for
        self._lasts = False  # whether the stop also holds for the next context
        self._has_begun = False  # whether the ranks have a context

    @property
    def due(self) -> float:
        if self.read is not None:
            return inf
        return self._end

    @property
    def is_asked(self) -> bool:
        return self._end < inf

    @property
    def is_of_script(self) -> bool:
        """Whether all stop at a read, and no SIGTERM has asked for that."""
        return self.read is not None and self.why != _SIGTERM

    @property
    def is_over(self) -> bool:
        """Whether no rank is left that may stop at a read."""
        return self._ranks == self._gone | self._failing

    @property
    def is_read(self) -> bool:
        """Whether a script reads `ctx.preempted` at all, as far as is known."""
        return self._most > 0

    @property
    def may_be_read(self) -> bool:
        """The same, or it may come to its first read."""
        return self._has_begun or self.is_read

    def ask(self, now: float, *, lasts: bool = True) -> bool:
        """A rank is asked to stop; return whether it is the first: then all agents are asked."""
        is_first = not self.is_asked
        if is_first:  # the counts until now are of the context before
            self._awaited = set(self._ranks - self._gone)
            self._most = 0
        self._end = min(self._end, now + self._limit)
        self._lasts |= lasts
        return is_first

    def count(self, rank: int, reads: int) -> None:
        """The agent of a rank reports how many reads its script has begun."""
        self._most = max(self._most, reads)
        self._awaited.discard(rank)

    def leave(self, rank: int) -> None:
        """A rank has ended, or its agent has disconnected."""
        self._awaited.discard(rank)
        self._gone.add(rank)

    def fail(self, rank: int) -> None:
        """An exception ends the script of a rank: it begins no other read."""
        self._failing.add(rank)

    def begin(self) -> bool:
        """All ranks have got ready, and count from zero.

        Return whether a stop is left, which is then at their first read.
        """
        self._has_begun = True
        self._gone = set()
        self._failing = set()
        self._most = 0
        self.missing = []
        if self._lasts:
            self.read = 1
        else:
            self.read = None
            self._end = inf
        return self._lasts

    def decide(self, now: float) -> bool:
        """Pick the read if it is time; return whether this call has picked it."""
        if self.due == inf:
            return False
        if self._awaited and now < self._end:
            return False
        self.read = min(self._most + 1, LARGEST)
        self.missing = sorted(self._awaited)
        return True


class StopService(Service):
    """Asks all agents how far their scripts are, and tells all where to stop."""

    def __init__(self, facts: Facts, emit: Emit, agreement: StopAgreement) -> None:
        super().__init__(facts, emit)
        self._agreement = agreement
        self._why = ""
        self._is_of_signal = False  # which ends a script that reads nothing
        self.handlers = {
            RequestStop: self._requested,
            Reads: self._counted,
            Terminating: self._terminating,
            Failing: self._failing,
        }

    def left(self, member: RankState, why: str) -> None:  # noqa: ARG002
        self._agreement.leave(member.rank)

    def tick(self, now: float) -> None:
        """A script that was told to stop may end in any way: so the root cause is decided before."""
        if self._facts.is_undecided:
            return
        self._stop_for_signal(now)
        if self._agreement.decide(now):
            self._tell()

    def due(self) -> float:
        if self._facts.is_undecided:
            return inf
        return self._agreement.due

    def _stop_for_signal(self, now: float) -> None:
        """A signal has stopped the job: the ranks that are left stop together, too.

        A rank that a signal has ended can request no stop itself, whichever signal that was.
        """
        cause = self._facts.cause
        if cause is None or cause.external_signal is None:
            return
        if self._agreement.is_over:
            return
        request = RequestStop(signal_name(cause.external_signal))
        self._requested(self._facts.members[cause.failed], request, now)

    def _counted(self, member: RankState, message: Reads, _now: float) -> None:
        self._agreement.count(member.rank, message.count)

    def _failing(self, member: RankState, _message: Failing, _now: float) -> None:
        self._agreement.fail(member.rank)

    def _terminating(self, member: RankState, message: Terminating, now: float) -> None:
        if message.signal == INTERRUPT and not message.of_wrapper:
            self._agreement.fail(member.rank)
        if message.signal == TERM:
            self._is_of_signal |= not self._agreement.is_asked
            request = RequestStop(signal_name(message.signal))
            self._requested(member, request, now)

    def _requested(self, member: RankState, message: RequestStop, now: float) -> None:
        if not self._agreement.ask(now, lasts=message.lasts):
            return
        why = escape_control(message.why)
        self._agreement.asked = member.rank
        self._agreement.why = why
        self._why = request_text(member, why)
        self._emit(Record("stop_requested", member.rank, {"text": why}))
        self._emit(Send(CountReads(), self._facts.members))

    def _tell(self) -> None:
        read = self._agreement.read
        assert read is not None
        self._emit(Send(StopAt(read), self._facts.members))
        details = {"read": read, "missing": self._agreement.missing}
        self._emit(Record("stop_agreed", None, details))

    def settle(self, now: float) -> None:  # noqa: ARG002
        """Print once who was asked to stop, where a new context has the answer from the start, too."""
        is_due = (
            self._why != "",
            self._agreement.read is not None,
            not self._facts.is_undecided,
            not self._is_of_signal or self._agreement.may_be_read,
        )
        if all(is_due):
            self._describe()
            self._why = ""

    def _describe(self) -> None:
        if self._is_described() or self._agreement.is_over:
            return
        text = f"{self._why}: all ranks stop at read {self._agreement.read} of ctx.preempted"
        missing = self._agreement.missing
        if missing:
            text += (
                f"; {ranks_said(missing)} did not report in time, and may stop at a different read"
            )
        self._emit(Say(text))

    def _is_described(self) -> bool:
        """Whether the log has why all stop; a signal ends a script that reads nothing."""
        cause = self._facts.cause
        if cause is None:
            return False
        return cause.is_failure or not self._agreement.is_read
