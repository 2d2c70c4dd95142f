"""Rank 0's side of the lifeline: it hears of every end first, says who failed first, and tells all the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from ..errors import printable
from ..report.history import History
from ..report.steps import own_steps
from ..rollcall.wire import WireError
from .cases import Case, Inquest, Member
from .ends import End
from .line import Line, LineEndedError, end_politely
from .lines import Lines
from .role import AFTER_THE_FIRST, Order, Role
from .settings import Settings
from .verdict import Seat, Verdict, failed, lost, pid_of, stopped

_LINGER = 5.0  # seconds after rank 0 has ended well, for the others to end, too
_LAST_WORD = 2.0  # seconds beyond the grace for ranks that were told to stop
_LAUNCHER_LOOKS = 0.25  # seconds; torchrun looks 10 times a second who has ended
_STILL_ENDING = 3.0  # seconds for a Python with torch in it to end after an uncaught exception
_FIRST_OUT = 0.5  # seconds for the rank that failed to end before the others do
_GOODBYE = 1.0  # seconds for the others to take our goodbye


@dataclass
class Hub(Role):
    """Rank 0's side.

    Args:
        seats: of all ranks, by rank.
        lines_to: every other rank; those of a node may have one together.
        settings: of rank 0.
        held: whether the ranks' exit waits for us, as in the wrapper.
        say: prints a line.
        conclude: called when all that can be known is known.
        history: how the job has begun; None: nobody wants a report.

    Attributes:
        members: what is known of each rank.
        later: how many failed after the first.
        began: seconds since the epoch.
        has_left: whether rank 0 has left the job, in good order.
    """

    seats: list[Seat]
    lines_to: Mapping[int, Line]
    settings: Settings
    held: bool
    say: Callable[[str], None]
    conclude: Callable[[Hub], None] = lambda _: None
    history: History | None = None
    verdict: Verdict | None = None
    order: Order | None = None
    later: int = 0
    has_left: bool = False
    began: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.members = [Member(seat, self.lines_to.get(seat.rank)) for seat in self.seats]
        self.own = self.members[0]
        self._lines = Lines(self.members)
        self._inquest = Inquest(self.members)
        self._left: list[Line] = []  # not used any more, and open: their end would be an alarm over there
        self._hurried = False
        self._ended_at = self._decided_at = 0.0

    def lines(self) -> Collection[Line]:
        return self._lines.open()

    def start(self, pid: int) -> None:
        self.own.begin(pid)

    def read(self, line: Line, now: float) -> None:
        if not self._lines.members(line):  # dropped in this very round
            return
        try:
            heard = line.heard(now)
        except LineEndedError:
            self._lose(line, "the connection ended without a word", now)
            return
        except WireError as error:
            self._leave(line, str(error))
            return
        for rank, kind, content in heard:
            for member in self._lines.members(line):
                if rank in (None, member.seat.rank):
                    self._hear(member, kind, content, now)

    def tick(self, now: float) -> None:
        for line in self.lines():
            self.read(line, now)
            running = [member for member in self._lines.members(line) if member.end is None]
            if running:
                line.beat(now)
                self._check(line, now)

    def turn(self, now: float) -> None:
        for line in self.lines():
            if line.is_suspect and any(member.end is None for member in self._lines.members(line)):
                self._check(line, now)
        case = self._inquest.decided(now) if self.verdict is None else None
        if case is not None:
            self._decide(case, now)

    def due(self, now: float) -> float:
        times = self._inquest.due() if self.verdict is None else []
        times += [self._limit()] if self.own.end is not None else []
        times += [now + 0.1] if any(line.is_suspect for line in self.lines()) else []
        return min(times, default=now + 3600)

    def leave(self) -> None:
        for line in self.lines():
            line.tell(None, "bye", None)
        self.has_left = True

    def hurry(self) -> None:
        self._hurried = True

    def over(self, now: float) -> bool:
        if self.has_left or self._hurried:
            return True
        if self.own.end is None or (self._inquest.cases and self.verdict is None):
            return False
        return now >= self._limit() or not any(member.is_open for member in self.members)

    def finish(self) -> None:
        """Let the others end: first whoever failed, so that the launcher sees his exit code before all others."""
        if not self.has_left:
            self.conclude(self)
        if self.verdict is None:
            for line in self.lines() if not self.has_left else ():
                line.tell(None, "bye", "rank 0 has ended")
            end_politely(self.lines(), _GOODBYE)
        elif self.held and not self._hurried:
            first = [self.members[rank].line for rank in self.verdict.ranks]
            end_politely([line for line in first if line is not None], _FIRST_OUT)
            time.sleep(0.0 if 0 in self.verdict.ranks else AFTER_THE_FIRST)

    def close(self) -> None:
        for line in (*self.lines(), *self._left):
            line.close()

    def trouble(self, end: End, now: float) -> None:
        self._trouble(self.own, end, now)

    def ending(self, now: float) -> None:
        self.own.ending = now

    def steps(self, taken: Mapping[str, float]) -> None:
        self.own.steps.update(taken)

    def stopping(self, number: int, now: float) -> None:
        for member in self.members:  # what was silent just then may be what the launcher answers
            if member.is_open and member.line is not None and member.line.is_unusually_quiet(now):
                why = "nothing was heard of it any more when SIGTERM came"
                self._note(self._inquest.lost(member, why, now, gathering=0.0))  # mpirun gives us 0.24 s to live
        self._note(self._inquest.asked(self.own, number, now))

    def ended(self, end: End, now: float) -> None:
        self._ended_at = now
        self._ended(self.own, end, now)

    def _limit(self) -> float:
        """When we stop waiting for the others, once we have ended ourselves."""
        if self.verdict is None:
            return self._ended_at + _LINGER
        patience = self.settings.grace + _LAST_WORD if self.verdict.is_failure else _LINGER
        return max(self._decided_at + patience, self._ended_at)

    def _hear(self, member: Member, kind: str, content: object, now: float) -> None:
        try:
            self._take(member, kind, content, now)
        except (WireError, TypeError) as error:
            self._let_be(member, str(error))

    def _take(self, member: Member, kind: str, content: object, now: float) -> None:
        if kind == "watch":
            self._begin(member, pid_of(content))
        elif kind == "steps":
            member.steps.update(own_steps(content))
        elif kind == "ending":
            member.ending = now
        elif kind == "trouble":
            self._trouble(member, End.from_message(content), now)
        elif kind == "stopping" and type(content) is int and 0 < content < 65:
            self._note(self._inquest.asked(member, content, now))
        elif kind == "end":
            self._ended(member, End.from_message(content), now)
        elif kind == "bye":
            self._drop(member)
        elif kind == "gone" and isinstance(content, str):
            self._gone(member, printable(content), now)
        else:
            raise WireError(f"sends a broken {kind}")

    def _begin(self, member: Member, pid: int) -> None:
        """A rank is watched from now on."""
        assert member.line is not None
        member.begin(pid)
        member.line.tell(member.seat.rank, "watch", {"pid": self.own.seat.pid})
        if self.verdict is not None:
            member.line.tell(member.seat.rank, "first", self.verdict.as_message())

    def _gone(self, member: Member, why: str, now: float) -> None:
        self._drop(member)
        if member.end is None:
            self._note(self._inquest.lost(member, why, now))

    def _trouble(self, member: Member, end: End, now: float) -> None:
        if member.trouble is None:
            member.trouble = end
            self._note(self._inquest.failed(member, end, now))

    def _ended(self, member: Member, end: End, now: float) -> None:
        if member.trouble is not None and not end.words:
            end = replace(end, words=member.trouble.words)
        member.end = end
        if self.verdict is not None and member.seat.rank in self.verdict.ranks:
            self._tell(replace(self.verdict, delay=self._delay(member)), now)
        if end.stopped_by is not None and not end.told:
            self._note(self._inquest.asked(member, end.stopped_by, now))
        elif end.is_failure and member.trouble is None:
            self._note(self._inquest.failed(member, end, now))

    def _note(self, case: Case) -> None:
        """Once it is decided who was first, the others are only counted."""
        if self.verdict is not None and case.end is not None and case.member.seat.rank not in self.verdict.ranks:
            self.later += 1

    def _decide(self, case: Case, now: float) -> None:
        member = case.member
        if case.asked is not None:
            self.verdict = stopped(member.seat, case.asked)
        elif case.end is not None:
            before = [one.seat.rank for one in self.members if one.end is not None and one.end.is_well]
            self.verdict = failed(member.seat, member.end or case.end, self._delay(member), before)
        else:
            gone = self._inquest.lost_with(case)
            for one in gone:
                one.is_lost = True
            self.verdict = lost([one.seat for one in gone], case.why)
        self.later += self._inquest.others(self.verdict.ranks)
        self._decided_at = now
        self._tell(self.verdict, now)
        if 0 not in self.verdict.ranks:
            self.say(self.verdict.text)

    def _tell(self, verdict: Verdict, now: float) -> None:
        """Tell all; a second time with a shorter delay, once the rank that failed has ended."""
        message = verdict.as_message()
        for line in self.lines():
            line.tell(None, "first", message)
        if self.own.end is None:
            failing = self.own.trouble is not None and not self.own.trouble.cause
            self.order = Order.after(verdict, 0, failing, now, self.order)

    def _delay(self, member: Member) -> float:
        """Seconds for which the others wait before they stop, so that their launcher sees first who failed."""
        if self.held or (member.trouble is not None and member.trouble.cause):  # it does not end by itself
            return 0.0
        return _LAUNCHER_LOOKS if member.end is not None else _STILL_ENDING

    def _check(self, line: Line, now: float) -> None:
        complaint = line.complaint(now, self.settings.bound)
        if complaint is None:
            return
        if complaint.is_lost:
            self._lose(line, complaint.why, now)
        else:
            self._leave(line, complaint.why)

    def _lose(self, line: Line, why: str, now: float) -> None:
        """Whoever is at the other end has gone."""
        for member in self._lines.members(line):
            self._gone(member, why, now)

    def _leave(self, line: Line, why: str) -> None:
        for member in self._lines.members(line):
            self._let_be(member, why)

    def _let_be(self, member: Member, why: str) -> None:
        """Go on without the lifeline to a rank."""
        assert member.line is not None
        member.line.tell(member.seat.rank, "bye", None)
        last = self._lines.forget(member)
        self._left += [] if last is None else [last]
        self.say(f"warning: rank {member.seat.rank} {member.seat.said()} {why}; it is not watched any more")

    def _drop(self, member: Member) -> None:
        line = self._lines.forget(member)
        if line is not None:
            line.close()
