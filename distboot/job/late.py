"""Late ranks: when rank 0's agent asks where all ranks are, and what follows from the answers.

Nothing is sent while no rank stalls. An episode begins when an agent reports that one of its ranks
has not moved for DISTBOOT_LATE_AFTER seconds (`Stalled`):

    1. question       all agents: how far are your ranks? (`Locate` without stacks)
    2. question       where in their scripts? Only if some rank may be late: to read a stack
                      disturbs its script
    judgment          `find_late` finds a `Wait` with its late ranks, or none
    witness           one rank that waits is asked once more, a second later: the reports of scripts
                      are up to that old, so the job may have gone on meanwhile
    report            if it still waits, the late ranks are reported, or the job ends for them

The witness is asked again every second: once it has moved, the episode is over, which is reported,
too. While it lasts, all agents are asked again after twice the time, since other ranks may be late
by then. Where stacks are the only evidence, a first look finds nothing and a second one follows
after `_SECOND_LOOK` seconds.

A question ends when all agents have answered, or after `_ANSWERING` seconds. A rank whose agent has
not answered by then is at an unknown place and counts as stopped: so it is late, where others wait.

Two other things start a question: a user who asks for all stacks (`_asked`), and a rank that fails
of a timeout (`_failing`). For the latter the conclusion of the job waits: `explains` is None until
the answers are there; then the job ends for the ranks that did not arrive, not for the one that
waited for them.

All times are those of `time.monotonic`. Once the job has a root cause, late ranks are of no
interest any more, and only questions of users are still answered.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import inf

from ..base.dataclass import replace
from ..rendezvous.messages import AskStacks, ShowStacks
from .effects import Conclude, Record, Say, Send
from .exit_status import ExitStatus, shown
from .facts import LONGEST_ENDING, Facts
from .messages import Exiting, Failing, Locate, Position, Stalled
from .root_cause import BY_HANG_STOP, RankState, from_late, from_late_failure, waited_at
from .service import Emit, Service
from .stacks import Stacks, from_traceback, lines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .wait import Wait

# Seconds: agents look once a second, and scripts report every two seconds
_TOLERANCE = 3.5
# Seconds: when a rank has waited twice as long, the reports of the others are newer than its wait
_UP_TO_DATE = 3.0
_ANSWERING = 8.0  # seconds for all agents to answer; a stack takes up to 6
_ASKED_A_SECOND = 2000  # ranks
# Seconds: a rank without numbers does not move if its stack stays the same for so long
_SECOND_LOOK = 3.0
_POLLING = {False: 1.0, True: _SECOND_LOOK}  # by whether the witness is busy
_SAME_WAIT = 5.0  # seconds by which the beginning of one and the same wait may differ
_EARLY = 1.0  # seconds before it is due; ranks are looked at once a second
_SILENT = "at an unknown place (its agent did not answer)"


class _Question:
    """The last question to all agents, and the answers to it."""

    def __init__(self) -> None:
        self.message = Locate(0, stacks=False)
        self.asked_at = -inf
        self.end = inf  # when it ends without the missing answers; inf: it has ended
        # Rank -> number of the question; also ranks that did not answer an earlier one
        self.awaited: dict[int, int] = {}
        self._answers: dict[int, Position] = {}

    @property
    def is_open(self) -> bool:
        return self.end < inf

    @property
    def due(self) -> float:
        """When it ends: at once if all have answered."""
        if self.is_open and not self.awaited:
            return -inf
        return self.end

    def start(
        self, now: float, ranks: Iterable[int], *, stacks: bool, known: Mapping[int, Position]
    ) -> None:
        number = self.message.number + 1
        self.message = Locate(number, stacks)
        self.asked_at = now
        self.end = now + _ANSWERING
        self.awaited = dict.fromkeys([*self.awaited, *ranks], number)
        self._answers = dict(known)

    def accept(self, rank: int, answer: Position) -> None:
        if self.awaited.get(rank) == answer.number:
            self._answers[rank] = answer
            del self.awaited[rank]

    def finish(self) -> dict[int, Position]:
        """The positions of all ranks, also of those that have not answered."""
        self.end = inf
        silent = Position(self.message.number, 0.0, {}, 0, 0, Stacks(state=_SILENT))
        return self._answers | dict.fromkeys(self.awaited, silent)


class LateService(Service):
    """Finds out for which ranks others wait, and where all are."""

    def __init__(self, facts: Facts, emit: Emit) -> None:
        super().__init__(facts, emit)
        self.wait: Wait | None = None  # as far as is known
        self._reported: Wait | None = None  # the last one, while the wait goes on
        self._notices = Notices()
        self._question = _Question()
        self._next = inf  # when all agents are asked again
        self._poll = inf  # when the witness is
        self._positions: dict[int, Position] = {}  # of all ranks, from the last answers
        self._before: dict[int, Position] = {}  # the same, with the stacks before
        self._has_failed = False  # whether a rank has failed of a timeout
        self._askers: list[int] = []  # ranks whose agents users have asked
        self._has_ended = False  # whether `_close_at_cause` has done its work
        after = facts.settings.stalls_after
        # Seconds without movement that an agent reports, at the least, of a rank that has stalled
        self._least = after - min(_TOLERANCE, after / 2)
        self._hang_after = facts.settings.hang_after or inf
        self.handlers = {
            Stalled: self._stalled,
            Position: self._located,
            AskStacks: self._asked,
            Failing: self._failing,
            Exiting: lambda member, _message, _now: self._leave(member),
        }

    def due(self) -> float:
        due = min(self._question.due, self._poll)
        if not self._question.is_open:
            return min(due, self._next)
        if self._is_ending:  # `tick` closes it
            return -inf
        return due  # the next question comes after the answers to this one

    @property
    def _is_ending(self) -> bool:
        """Whether there is a root cause, which has not closed the open question yet."""
        if self._facts.cause is None:
            return False
        return not self._has_ended

    def left(self, member: RankState, why: str) -> None:  # noqa: ARG002
        self._leave(member)

    def _stalled(self, _member: RankState, _message: Stalled, now: float) -> None:
        if self.wait is None and self._facts.cause is None:
            # Seconds between two questions to all
            interval = max(1.0, len(self._facts.members) / _ASKED_A_SECOND)
            earliest = max(now, self._question.asked_at + interval)
            self._next = min(self._next, earliest)

    def _located(self, member: RankState, message: Position, now: float) -> None:
        wait = self.wait
        if message.number:
            self._question.accept(member.rank, message)
        elif wait is not None and member.rank == wait.witness:
            if wait.is_over(message, now):
                self._over()
            elif self._reported is not wait:
                self._report(wait, now)

    def _asked(self, member: RankState, _message: AskStacks, now: float) -> None:
        """A user asks the agent of a rank where all ranks are."""
        self._close_at_cause(now)
        self._askers.append(member.rank)
        if self._question.is_open:
            self._next = now  # after the answers to another question
        else:
            self._ask_all(now, stacks=True)

    def _leave(self, member: RankState) -> None:
        """A rank ends, or its agent has disconnected."""
        if self._facts.is_undecided:  # why a rank fails may be for whom it has waited
            return
        self._question.awaited.pop(member.rank, None)
        if self.wait is None or member.rank not in self.wait.late.witnesses:
            return
        if _ends_well(member):
            self._over()
        else:
            self._drop()

    def _failing(self, member: RankState, message: Failing, now: float) -> None:
        """A rank fails. If that is a timeout, find out for which ranks it has waited."""
        is_first = member.failing is message.end and self._facts.is_detected(member)
        has_cause = self._facts.cause is not None
        is_known = any((self._has_failed, self.wait, has_cause))
        if is_first and message.end.has_waited and not is_known:
            self._has_failed = True
            self._least = _UP_TO_DATE
            self._ask_all(now, stacks=False)

    def explains(self, rank: int, end: ExitStatus, now: float) -> bool | None:
        """Whether a rank failed as it waited for late ones, or all for each other: the job ends for it.

        None: not known yet.
        """
        wait = self.wait
        has_waited = end.has_waited
        if wait is not None:
            has_waited = wait.explains(rank, end)
        if not has_waited:
            return False
        if self._question.is_open:
            return None
        members = self._facts.members
        if wait is None:
            return False
        ranks = wait.late.ranks
        kind = "late"
        if not ranks:  # they wait for each other, unless for one that is gone
            ranks = [rank]
            kind = "failed"
            if any(map(_ends_well, members.values())):
                return False
        text = wait.as_cause(members, now)
        delay = self._facts.delay(members[rank], LONGEST_ENDING)
        cause = from_late_failure(ranks, text, rank, end, delay)
        self._emit(Conclude(cause, cause.headline, kind))
        return True

    def tick(self, now: float) -> None:
        self._close_at_cause(now)
        question = self._question
        if now >= question.due:
            self._take_answers(now)
        if now >= self._next and not question.is_open:
            needs_stacks = any((self.wait, self._askers))
            self._ask_all(now, stacks=needs_stacks)
        if now >= self._poll:
            self._ask_witness(now)

    def held_up(self, now: float) -> str:
        """`"rank 1 (vm) had held up the job for 600 s"`; empty: no rank was reported as late."""
        if self._reported is None:
            return ""
        assert self.wait is not None
        return self.wait.held_up(self._facts.members, now)

    # Questions

    def _close_at_cause(self, now: float) -> None:
        """Close the open question once the job has a root cause; only users ask after that."""
        if not self._is_ending:
            return
        self._has_ended = True
        self._poll = inf
        self._next = inf
        self._question.awaited.clear()
        if self._askers and not self._question.message.stacks:
            self._next = now  # users who wait for the answers to that question

    def _ask_all(
        self,
        now: float,
        *,
        stacks: bool,
        known: Mapping[int, Position] = {},  # of ranks that may have ended since they answered
    ) -> None:
        self._next = inf
        members = self._facts.members
        running = [rank for rank, member in members.items() if member.can_be_located(now)]
        question = self._question
        question.start(now, running, stacks=stacks, known=known)
        # Some answer at once
        self._emit(Send(question.message, frozenset(question.awaited)))

    def _take_answers(self, now: float) -> None:
        question = self._question
        self._positions = question.finish()
        if not question.message.stacks:
            if self._facts.cause is None:
                self._ask_for_stacks(now)
            return
        self._use_stacks_of_exceptions()
        while self._askers:
            asker = self._askers.pop(0)
            shown_lines = tuple(self._stack_lines())
            self._emit(Send(ShowStacks(shown_lines), (asker,)))
        if self._facts.cause is None:
            self._judge(now)

    def _ask_for_stacks(self, now: float) -> None:
        """The second question, if some rank may be late."""
        from .find_late import may_be_late  # here and below, as few jobs need it

        if may_be_late(self._positions, self._least):
            self._ask_all(now, stacks=True, known=self._positions)

    def _use_stacks_of_exceptions(self) -> None:
        """Where an exception ends a rank, its position is where that was raised.

        If it waited in a call of ours, its position is as old as that.
        """
        for rank, position in self._positions.items():
            failing = self._facts.members[rank].failing
            if failing is None:
                continue
            stacks = from_traceback(failing.traceback)
            if stacks is not None:
                _, waited = waited_at(failing)
                since = max(position.since, waited)
                self._positions[rank] = replace(position, stacks=stacks, since=since)

    def _ask_witness(self, now: float) -> None:
        wait = self.wait
        assert wait is not None
        self._poll = now + _POLLING[wait.is_busy]
        question = Locate(0, stacks=wait.is_busy)
        self._emit(Send(question, (wait.witness,)))

    # Judgment

    def _judge(self, now: float) -> None:
        from .find_late import find_late
        from .wait import Wait

        before = self._before
        self._before = self._positions
        is_counted = all(one.is_counted for one in self._positions.values())
        late = find_late(self._positions, before, self._least)
        if late is not None:
            as_of = self._question.asked_at
            self.wait = Wait(late, self._positions, as_of, self._least)
            self._poll = now + _POLLING[False]
            self._next = now + self._seconds_to_next(self.wait)
        elif self.wait is not None:
            self._over()
        elif not before and not is_counted:
            self._next = now + _SECOND_LOOK
        else:
            self._before = {}

    def _seconds_to_next(self, wait: Wait) -> float:
        """Until all agents are asked again: as long as the wait has lasted, or until a hang."""
        waited = max(wait.waited, 1.0)
        if waited < self._hang_after:
            return min(waited, self._hang_after - waited)
        return waited

    def _drop(self) -> None:
        """Forget the wait: its witness has ended, which does not prove that the late ranks moved."""
        self.wait = None
        self._reported = None
        self._next = inf
        self._poll = inf
        self._before = {}

    def _over(self) -> None:
        reported = self._reported
        self._drop()
        # Once the job ends for it, nothing continues
        if reported is not None and self._facts.cause is None:
            late = reported.late
            first = [*late.ranks, 0][0]
            text = reported.describe_end()
            self._emit(Record("late_over", first, {}))
            self._emit(Say(text, event="late_over", details={"ranks": late.ranks}))

    # Reports

    def _report(self, wait: Wait, now: float) -> None:
        """Report who is late, or end the job for it."""
        self._reported = wait
        if now - wait.rest_since >= self._hang_after:
            self._log(wait, now)
            self._end_for_hang(wait, now)
        elif self._notices.is_due(wait):
            text = self._log(wait, now)
            stacks = "\n".join(self._stack_lines())
            text += shown(stacks)
            self._emit(Say(text, event="late", details={"ranks": wait.late.ranks}))

    def _log(self, wait: Wait, now: float) -> str:
        late = wait.late
        text = wait.describe("waiting for {}", self._facts.members, now)
        first = [*late.ranks, *late.waiting][0]
        details = {
            "ranks": late.ranks,
            "waiting": late.waiting,
            "seconds": round(now - wait.since, 3),
            "text": text,
            "stacks": self._stack_lines(),
        }
        self._emit(Record("late", first, details))
        return text

    def _end_for_hang(self, wait: Wait, now: float) -> None:
        stacks: Sequence[str] = ()
        if not self._notices.has_reported(wait):
            stacks = self._stack_lines()
        ranks = wait.late.ranks or wait.late.waiting
        text = wait.as_cause(self._facts.members, now)
        # In the headline, also where there is no room for the rest
        who, separator, others = text.partition("; ")
        text = f"{who}{BY_HANG_STOP}{separator}{others}"
        cause = from_late(ranks, text, stacks)
        self._emit(Conclude(cause, text))

    def _stack_lines(self) -> list[str]:
        stacks = {rank: position.stacks for rank, position in self._positions.items()}
        first: Collection[int] = ()
        if self.wait is not None:
            first = frozenset(self.wait.late.ranks)
        return lines(stacks, first)


def _ends_well(member: RankState) -> bool:
    """Whether its script is over, and not because it failed, or was killed."""
    if member.end is not None:
        return member.end.succeeded
    return member.exiting is not None and member.failing is None


class Notices:
    """When a late rank is reported again: after twice the time, while the same wait goes on."""

    def __init__(self) -> None:
        self._ranks: list[int] | None = None  # None: none was reported yet
        self._since = -inf  # since when others wait
        self._next = 0.0  # seconds of waiting at which it is reported again

    def is_due(self, wait: Wait) -> bool:
        """Whether to report a wait; then it counts as reported."""
        moved = abs(wait.since - self._since)
        if self.has_reported(wait) and moved < _SAME_WAIT and wait.waited < self._next:
            return False
        self._ranks = wait.late.ranks
        self._since = wait.since
        self._next = 2 * wait.waited - _EARLY
        return True

    def has_reported(self, wait: Wait) -> bool:
        """Whether the last report named these ranks."""
        return self._ranks == wait.late.ranks
