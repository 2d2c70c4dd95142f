"""Rank 0's side of the lifeline: it hears of every end first, says who failed first, and tells all the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..rollcall.wire import WireError
from .ends import End
from .line import Line, LineEndedError
from .role import AFTER_THE_FIRST, SETTLING, UNUSUAL, Order, Role
from .settings import Settings
from .verdict import Seat, Verdict, failed, lost, stopped

_LINGER = 5.0  # seconds after rank 0 has ended well, for the others to end, too
_LAST_WORD = 2.0  # seconds beyond the grace for ranks that were told to stop
_GATHERING = 0.1  # seconds in which the ranks of a host that died are lost
_LAUNCHER_LOOKS = 0.25  # seconds; torchrun looks 10 times a second who has ended
_STILL_ENDING = 0.6  # seconds for a Python with torch in it to end after an uncaught exception
_LEAVING = 3.0  # seconds for a Python that is about to end to do so, while other ranks have lost it already
_FIRST_OUT = 0.5  # seconds for the rank that failed to end before the others do


@dataclass(slots=True)
class Member:
    """What is known of one rank."""

    seat: Seat
    line: Line | None = None
    start: float | None = None
    trouble: End | None = None  # it fails, and has not ended yet
    ending: float | None = None  # since when it is about to end, as `time.monotonic` has it
    end: End | None = None
    lost: bool = False

    @property
    def is_open(self) -> bool:
        """Whether it is to end yet, and we would hear of it."""
        return self.end is None and (self.line is not None or self.seat.rank == 0)


@dataclass(slots=True)
class _Case:
    """Something for which the job may have to end."""

    member: Member
    due: float  # when it is decided, if nothing more important comes
    end: End | None = None  # None: the rank is lost
    asked: int | None = None
    why: str = ""

    @property
    def is_answer(self) -> bool:
        """Whether something else may have come before it."""
        return self.asked is not None or (self.end is not None and self.end.is_consequence)


@dataclass
class Hub(Role):
    """Rank 0's side.

    Args:
        seats: of all ranks, by rank.
        lines: to every other rank.
        settings: of rank 0.
        held: whether the ranks' exit waits for us, as in the wrapper.
        say: prints a line.
        conclude: called when all that can be known is known.
    """

    seats: list[Seat]
    lines_to: Mapping[int, Line]
    settings: Settings
    held: bool
    say: Callable[[str], None]
    conclude: Callable[[Hub], None] = lambda _: None
    verdict: Verdict | None = None
    order: Order | None = None
    later: int = 0
    has_left: bool = False
    began: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.members = [Member(seat, self.lines_to.get(seat.rank)) for seat in self.seats]
        self.own = self.members[0]
        self._of_line = {member.line: member for member in self.members if member.line is not None}
        self._cases: list[_Case] = []
        self._left: list[Line] = []
        self._ended_at = self._decided_at = 0.0

    # What the loop asks for

    def lines(self) -> Iterable[Line]:
        return [line for line, member in self._of_line.items() if member.line is line]

    def start(self, pid: int) -> None:
        self._seat(self.own, pid)

    def read(self, line: Line, now: float) -> None:
        member = self._of_line[line]
        if member.line is not line:  # dropped in this very round
            return
        try:
            for kind, content in line.receive():
                self._take(member, kind, content, now)
        except LineEndedError:
            self._drop(member)
            if member.end is None:
                self._add(_Case(member, now + _GATHERING, why="the connection ended without a word"), now)
        except (WireError, TypeError) as error:
            self._leave(member, f"{error}")

    def tick(self, now: float) -> None:
        for line in list(self.lines()):
            self.read(line, now)
            member = self._of_line[line]
            if member.line is not line or member.end is not None:
                continue
            if member.start is not None:
                line.beat(now)
            self._check(member, line, now)

    def turn(self, now: float) -> None:
        """Decide what is due."""
        if self.verdict is None and self._cases:
            waiting = any(member.is_open for member in self.members)
            case = min(self._cases, key=lambda case: case.due)
            if case.due <= now and case.end is not None and case.end.is_consequence and self._may_explain(case, now):
                case.due = now + SETTLING
            elif case.due <= now or not waiting:
                self._decide(case, now)

    def due(self, now: float) -> float:
        times = [case.due for case in self._cases] if self.verdict is None else []
        limits = [self._limit()] if self.own.end is not None else []
        return min([*times, *limits], default=now + 3600)

    def leave(self) -> None:
        for line in self.lines():
            line.send("bye", None)
        self.has_left = True

    def over(self, now: float) -> bool:
        if self.has_left:
            return True
        if self.own.end is None or (self._cases and self.verdict is None):
            return False
        return now >= self._limit() or not any(member.is_open for member in self.members)

    def finish(self) -> None:
        """Let the others end: first whoever failed, so that the launcher sees his exit code before all others."""
        if self.has_left:
            return
        self.conclude(self)
        for member in self.members:
            if member.is_open and member.line is not None and self.verdict is None:
                member.line.send("bye", None)
        if self.verdict is not None and self.held:
            for rank in self.verdict.ranks:
                line = self.members[rank].line
                if line is not None:
                    line.end_politely(_FIRST_OUT)
            if 0 not in self.verdict.ranks:
                time.sleep(AFTER_THE_FIRST)

    def close(self) -> None:
        for line in (*self.lines(), *self._left):
            line.close()

    # What happens on this rank

    def trouble(self, end: End, now: float) -> None:
        self._trouble(self.own, end, now)

    def ending(self, now: float) -> None:
        self.own.ending = now

    def stopping(self, number: int, now: float) -> None:
        for member in self.members:
            quiet = 0.0 if member.line is None else member.line.quiet(now)
            if member.is_open and quiet > UNUSUAL:  # then this may be the launcher's answer
                self._add(_Case(member, now, why=f"nothing was heard for {quiet:.0f} s when SIGTERM came"), now)
        self._stopping(self.own, number, now)

    def ended(self, end: End, now: float) -> None:
        self._ended_at = now
        self._ended(self.own, end, now)

    def _limit(self) -> float:
        """When we stop waiting for the others, once we have ended ourselves."""
        if self.verdict is None:
            return self._ended_at + _LINGER
        patience = self.settings.grace + _LAST_WORD if self.verdict.is_failure else _LINGER
        return max(self._decided_at + patience, self._ended_at)

    def _take(self, member: Member, kind: str, content: object, now: float) -> None:
        assert member.line is not None
        if kind == "watch" and isinstance(content, dict) and type(content.get("pid")) is int:
            self._seat(member, content["pid"])
            member.line.send("watch", {"pid": self.own.seat.pid})
            if self.verdict is not None:
                member.line.send("first", self.verdict.as_message())
        elif kind == "ending":
            member.ending = now
        elif kind == "trouble":
            self._trouble(member, End.from_message(content), now)
        elif kind == "stopping" and type(content) is int:
            self._stopping(member, content, now)
        elif kind == "end":
            self._ended(member, End.from_message(content), now)
        elif kind == "bye":
            self._drop(member)
        else:
            raise WireError(f"sends a broken {kind}")

    def _seat(self, member: Member, pid: int) -> None:
        member.seat = replace(member.seat, pid=pid)
        member.start = time.time()

    def _trouble(self, member: Member, end: End, now: float) -> None:
        if member.trouble is None:
            member.trouble = end
            self._add(_Case(member, now + (SETTLING if end.is_consequence else 0.0), end), now)

    def _stopping(self, member: Member, number: int, now: float) -> None:
        self._add(_Case(member, now + SETTLING, asked=number), now)

    def _ended(self, member: Member, end: End, now: float) -> None:
        if member.trouble is not None and not end.words:
            end = replace(end, words=member.trouble.words)
        member.end = end
        if end.stopped_by is not None and not end.told:
            self._add(_Case(member, now + SETTLING, asked=end.stopped_by), now)
        elif end.is_failure and member.trouble is None:
            self._add(_Case(member, now + (SETTLING if end.is_consequence else 0.0), end), now)

    def _add(self, case: _Case, now: float) -> None:
        if self.verdict is None:
            self._cases.append(case)
            self.turn(now)
        elif case.asked is None and case.member.seat.rank not in self.verdict.ranks:
            self.later += 1

    def _may_explain(self, case: _Case, now: float) -> bool:
        """Whether another rank is about to end, with an exit code that is not known yet."""
        others = (member for member in self.members if member is not case.member and member.is_open)
        return any(member.ending is not None and now < member.ending + _LEAVING for member in others)

    def _decide(self, case: _Case, now: float) -> None:
        # Whatever came first, but for what is an answer: of a peer that has lost a rank, or of the launcher.
        case = min(self._cases, key=lambda one: one.is_answer)
        member = case.member
        if case.asked is not None:
            self.verdict = stopped(member.seat, case.asked)
        elif case.end is not None:
            self.verdict = failed(member.seat, member.end or case.end, self._delay(member))
        else:
            alike = [one.member for one in self._cases if one.end is None and one.asked is None]
            gone = [one for one in self.members if one in alike and one.seat.node_rank == member.seat.node_rank]
            for one in gone:
                one.lost = True
            self.verdict = lost([one.seat for one in gone], case.why)
        self._decided_at = now
        others = {one.member.seat.rank for one in self._cases if one.asked is None} - set(self.verdict.ranks)
        self.later += len(others)
        self._cases.clear()
        message = self.verdict.as_message()
        for one in self.members:
            if one.line is not None:
                one.line.send("first", message)
        if self.own.end is None or self.own.seat.rank not in self.verdict.ranks:
            self.say(self.verdict.text)
        if self.own.end is None:
            self.order = Order.after(self.verdict, 0, self.own.trouble is not None and not self.own.trouble.cause, now)

    def _delay(self, member: Member) -> float:
        """Seconds for which the others wait before they stop, so that their launcher sees first who failed."""
        if self.held:
            return 0.0
        return (
            _STILL_ENDING
            if member.end is None and member.trouble is not None and not member.trouble.cause
            else _LAUNCHER_LOOKS
        )

    def _check(self, member: Member, line: Line, now: float) -> None:
        complaint = line.complaint(now, self.settings.bound)
        if complaint is None:
            return
        if not complaint.is_lost:
            self._leave(member, complaint.why)
            return
        self._drop(member)
        self._add(_Case(member, now + _GATHERING, why=complaint.why), now)

    def _leave(self, member: Member, why: str) -> None:
        """Go on without the lifeline to a rank."""
        self.say(f"warning: rank {member.seat.rank} {member.seat.said()} {why}; it is not watched any more")
        assert member.line is not None
        member.line.send("bye", None)
        self._left.append(member.line)  # open: its end would be an alarm over there
        member.line = None

    def _drop(self, member: Member) -> None:
        line, member.line = member.line, None
        if line is not None:
            line.close()
