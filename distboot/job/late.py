"""Which ranks are late: others wait for them at a collective operation to which they do not come. Rank 0 names them.

An agent says that a rank of its own has stalled. Rank 0 asks all agents how far their ranks are, and where. As long as
no rank stalls nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple, TypeAlias

from ..base.text import escape_control, ranks_said
from .exit_status import ExitStatus, shown
from .messages import Locate, Position, Stalled
from .root_cause import RankState, from_late, from_late_failure
from .stacks import (
    Stacks,
    fold,
    from_traceback,
    lines,
    may_compute,
    waits,
    where,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol

    from ..base.settings import SupervisionSettings
    from ..rendezvous.events import EventLog
    from .root_cause import RootCause

    class Job(Protocol):
        """Rank 0's agent, as this module uses it."""

        members: dict[int, RankState]
        log: EventLog
        root_cause: RootCause | None

        @property
        def settings(self) -> SupervisionSettings: ...
        @property
        def say(self) -> Callable[..., None]: ...

        def ask_ranks(self, question: Locate, ranks: Collection[int]) -> None: ...
        def delay(self, rank: int) -> float: ...
        def end_job(self, cause: RootCause, text: str, now: float) -> None: ...


# Seconds: agents look once a second, and scripts say every other one how far they are
_TOLERANCE = 3.5
# Seconds: of a rank that has waited twice as long the others have said since how far they are
_UP_TO_DATE = 3.0
_ANSWERING = 8.0  # seconds for all agents to answer; a stack takes up to 6
_ASKED_A_SECOND = 2000  # ranks
_POLLING = 1.0  # seconds between two looks whether it is over
# Seconds; where no numbers tell that a rank does not move, its stack is the same then
_SECOND_LOOK = 3.0
_SAME_WAIT = 5.0  # seconds by which two answers may differ since when the same ranks wait
_EARLY = 1.0  # seconds before it is due; ranks are looked at once a second
_MOST_PLACES = 4  # in one line
_SILENT = "at an unknown place (its agent did not answer)"
Positions: TypeAlias = Mapping[int, Position]  # by rank


class Late(NamedTuple):
    """What holds up a job."""

    # Those that are late; empty: all wait, and none of them can be said to be late
    ranks: list[int]
    waiting: list[int]  # those that wait, for these or for each other; empty: no rank does anything
    # The process group whose collective operations say so; empty: only the stacks do
    group: str = ""

    @property
    def witness(self) -> int:
        """A rank that moves when it is over."""
        return (self.waiting or self.ranks)[0]


def find_late(positions: Positions, before: Positions, least: float) -> Late | None:
    """Who is late, once others have waited so many seconds; None: no rank is, as far as is known.

    `positions` are those of all ranks that have answered, and those `before` were the same some seconds ago.
    """
    # Where no numbers tell that a rank moves, its stack does.
    uncounted = {
        rank: one.stacks for rank, one in positions.items() if one.stacks and not one.is_counted
    }
    still = {
        rank
        for rank, stacks in uncounted.items()
        if rank in before
        and before[rank].stacks == stacks
        and before[rank].keys == positions[rank].keys
    }
    return (
        _by_numbers(positions, least)
        or _by_stacks(positions, still, least)
        or _all_idle(positions, still, least)
    )


def may_be_late(positions: Positions, least: float) -> bool:
    """Whether it is worth to look at the stacks, which disturbs the scripts a little."""
    has_stalled = all(not one.is_counted or one.since >= least for one in positions.values())
    return _by_numbers(positions, least) is not None or (len(positions) > 1 and has_stalled)


def _by_numbers(positions: Positions, least: float) -> Late | None:
    found = []
    for group in sorted({group for position in positions.values() for group in position.counts}):
        counts = {
            rank: position.counts[group]
            for rank, position in positions.items()
            if group in position.counts
        }
        free = {rank: count for rank, count in counts.items() if not positions[rank].is_held}
        most = max(free.values(), default=0)
        there = {rank for rank, count in free.items() if count == most}
        waiting = sorted(rank for rank in there if positions[rank].since >= least)
        if waiting and there < counts.keys():
            found.append(Late(sorted(counts.keys() - there), waiting, group))
    # A rank that waits in another group, or in another operation, is held up itself.
    too = {rank for late in found for rank in late.ranks if _waits(positions[rank], least)}
    held_up = too.union(*(late.waiting for late in found))
    for late in found:
        ranks = [rank for rank in late.ranks if rank not in held_up]
        if ranks:
            return late._replace(
                ranks=ranks, waiting=sorted(too.intersection(late.ranks).union(late.waiting))
            )
    return Late([], sorted(held_up)) if held_up else None


def _by_stacks(positions: Positions, still: Collection[int], least: float) -> Late | None:
    waiting = sorted(
        rank
        for rank, one in positions.items()
        if (one.since >= least or rank in still) and _waits(one)
    )
    others = sorted(positions.keys() - set(waiting))
    is_known = all(
        positions[rank].stacks is not None and not _waits(positions[rank]) for rank in others
    )
    if not others:  # or they compute there
        is_known = all(
            one.idle >= least or not may_compute(one.stacks) for one in positions.values()
        )
    return Late(others, waiting) if waiting and is_known and len(positions) > 1 else None


def _all_idle(positions: Positions, still: Collection[int], least: float) -> Late | None:
    """All ranks, if none of them moves or uses a processor."""
    is_idle = all(
        one.stacks
        and one.stacks.main
        and min(one.since, one.idle) >= least
        and (one.is_counted or rank in still)
        for rank, one in positions.items()
    )
    return Late(sorted(positions), []) if len(positions) > 1 and is_idle else None


def text_of(
    late: Late, positions: Positions, members: Mapping[int, RankState], begin: str, seconds: float
) -> str:
    """`"waiting for rank 3 (node-1) for 60 s: it is in load (data.py:41); …"`, where `begin` is `"waiting for {}"`."""
    places, waiting = (_places(ranks, positions) for ranks in (late.ranks, late.waiting))
    is_certain = bool(late.group) or all(
        positions[rank].is_counted for rank in late.waiting or late.ranks
    )
    length = f"{seconds:.0f} s" + ("" if is_certain else ", to judge by the stacks")
    if not late.waiting:
        return f"no rank has moved for {length}: {_listed(places, 'are')}"
    if not late.ranks:
        ended = [member.rank for member in members.values() if member.end is not None]
        why = "; the network between them, or a device, may not answer" if len(waiting) == 1 else ""
        why = f"; {ranks_said(ended)} ended before" if ended else why
        return f"{begin.format('each other')} for {length}: {_listed(waiting, 'wait')}{why}"
    who, is_one = ranks_said(late.ranks), len(late.ranks) == 1
    hosts = sorted({escape_control(members[rank].host) for rank in late.ranks})
    place = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
    there = f"it is{places[0][1] or ' there'}" if is_one else _listed(places, "are")
    most = max(positions[rank].counts.get(late.group, 0) for rank in late.waiting)
    least = min(positions[rank].counts.get(late.group, most) for rank in late.ranks)
    begun = f", collective operation {most:,}, {who} {'has' if is_one else 'have'} begun {least:,}"
    said = f"{begin.format(f'{who} ({place})')} for {length}: {there}; {_listed(waiting, 'wait')}"
    return said + (begun if least < most else "")


def _is_elsewhere(position: Position, before: Position) -> bool:
    """Whether a rank without numbers has moved since it was located before."""
    if position.keys != before.keys:
        return True
    return position.stacks is not None and position.stacks != before.stacks


def _waits(position: Position, least: float = 0.0) -> bool:
    return position.stacks is not None and waits(position.stacks) and position.since >= least


def _places(ranks: Iterable[int], positions: Positions) -> list[tuple[list[int], str]]:
    """Where ranks are, as far as is known, those of fewest ranks first: `" in load (data.py:41)"`."""
    stacks = {rank: positions[rank].stacks for rank in ranks}
    return fold({rank: "" if one is None else f" {where(one)}" for rank, one in stacks.items()})


def _listed(places: Sequence[tuple[Sequence[int], str]], verb: str) -> str:
    """`"rank 1 waits in a (x.py:3), ranks 0, 2 wait in b (x.py:4)"`."""
    one = {"wait": "waits", "are": "is"}[verb]
    shown = [
        f"{ranks_said(ranks)} {one if len(ranks) == 1 else verb}{place}" for ranks, place in places
    ]
    more = [f"{len(shown) - _MOST_PLACES} other places"] if len(shown) > _MOST_PLACES else []
    return ", ".join([*shown[:_MOST_PLACES], *more])


class Notices:
    """When it is said again that a rank is late: after twice as long each time, while the same wait goes on."""

    def __init__(self) -> None:
        self._ranks: list[int] = []
        self._since = -inf  # since when others wait
        self._next = 0.0  # seconds of waiting at which it is said again

    def is_due(self, late: Late, since: float, seconds: float) -> bool:
        """Whether it is to be said, as others have waited `since` then; then it counts as said."""
        is_the_same = self.has_said(late) and abs(since - self._since) < _SAME_WAIT
        if is_the_same and seconds < self._next:
            return False
        self._ranks = late.ranks
        self._since = since
        self._next = 2 * seconds - _EARLY
        return True

    def has_said(self, late: Late) -> bool:
        """Whether these ranks were the last that were said to be late."""
        return self._since > -inf and self._ranks == late.ranks


class LateWatch:
    """Rank 0's: when to ask agents where their ranks are, and what follows. All times are those of `time.monotonic`."""

    def __init__(self, job: Job) -> None:
        self.late: Late | None = None  # as far as is known
        self._waited = 0.0  # seconds for which others have waited, or none has moved
        self._said: Late | None = None  # the last one that was said to be late
        self._notices = Notices()
        self._answers: dict[int, Position] = {}  # to the question under way
        self._positions: dict[int, Position] = {}  # of all ranks, from the question before
        self._before: dict[int, Position] = {}  # the same, with the stacks before
        self._job = job
        after, self._hang_after = job.settings.stalls_after, job.settings.hang_after or inf
        # What an agent says, at the least, of a rank that has stalled
        self._least = after - min(_TOLERANCE, after / 2)
        # Seconds between two questions to all
        self._again = max(1.0, len(job.members) / _ASKED_A_SECOND)
        self._question, self._asked_at = Locate(0, stacks=False), -inf  # the last one to all
        self._as_of = -inf  # when that was asked from which the positions are
        self._awaited: set[int] = set()
        self._end = self._next = self._poll = inf
        self._has_failed = False  # whether a rank has waited for too long
        self._shows: list[Callable[[Sequence[str]], object]] = []

    @property
    def due(self) -> float:
        return min(self._end, self._next, self._poll)

    def take(self, rank: int, message: Stalled | Position, now: float) -> None:
        """A rank has not moved for long, or says where it is."""
        if isinstance(message, Stalled):
            self._next = (
                min(self._next, max(now, self._asked_at + self._again))
                if self.late is None
                else self._next
            )
        elif message.number and message.number == self._question.number and rank in self._awaited:
            self._answers[rank] = message
            self._awaited -= {rank}
        elif not message.number and self.late is not None and rank == self.late.witness:
            before, has_moved = self._positions[rank], message.since < now - self._as_of
            if self._is_busy(before):
                has_moved = _is_elsewhere(message, before)
            if has_moved:
                self._over()
            elif self._said is not self.late:
                self._notify(self.late, now)

    def show(self, reply: Callable[[Sequence[str]], object], now: float) -> None:
        """Call `reply` with lines that say where all ranks are."""
        self._shows.append(reply)
        if self._end == inf:
            self._ask_all(now, stacks=True)
        else:
            self._next = now  # once the answers to another question are there

    def leave(self, rank: int) -> None:
        """A rank ends, or its agent is not connected any more."""
        self._awaited -= {rank}
        if self.late is not None and rank in (self.late.waiting or self.late.ranks):
            self._over()

    def fails(self, end: ExitStatus, now: float) -> None:
        """A rank fails: if it has waited for too long, it is to be known for whom."""
        if self.late is None and end.has_waited and not self._has_failed:
            self._has_failed, self._least = True, _UP_TO_DATE
            self._ask_all(now, stacks=False)

    def explains(self, rank: int, end: ExitStatus, now: float) -> bool | None:
        """Whether a rank has failed as it waited for others that live, for which the job then ends; None: not yet."""
        late, has_waited = self.late, end.has_waited or (self.late is not None and end.is_abort)
        if not has_waited or (late is not None and rank not in late.waiting):
            return False
        if self._end < inf:
            return None
        if late is None or not late.ranks:
            return False
        self._end_job(late, end, now, rank)
        return True

    def turn(self, now: float) -> None:
        if self._job.root_cause is not None:
            self._awaited, self._next, self._poll = set(), inf, inf
        if self._end < inf and (not self._awaited or now >= self._end):
            self._take_answers(now)
        if now >= self._next and self._end == inf:
            self._ask_all(now, stacks=self.late is not None or bool(self._shows))
        if now >= self._poll and self.late is not None:
            witness = self.late.witness
            is_busy = self._is_busy(self._positions[witness])
            self._poll = now + (_SECOND_LOOK if is_busy else _POLLING)
            self._job.ask_ranks(Locate(0, stacks=is_busy), [witness])

    def _ask_all(self, now: float, *, stacks: bool, known: Mapping[int, Position] = {}) -> None:
        self._question, self._asked_at = Locate(self._question.number + 1, stacks), now
        self._next, self._end = inf, now + _ANSWERING
        self._answers = dict(known)
        running = (one for one in self._job.members.values() if one.is_open and one.pid)
        self._awaited |= {
            one.rank for one in running if one.exiting is None or one.failing is not None
        }
        self._job.ask_ranks(self._question, frozenset(self._awaited))  # some answer at once

    def _take_answers(self, now: float) -> None:
        self._end = inf
        silent = Position(self._question.number, 0.0, {}, 0, 0, Stacks(state=_SILENT))
        self._positions, self._as_of = (
            self._answers | dict.fromkeys(self._awaited, silent),
            self._asked_at,
        )
        for rank, position in self._positions.items():
            self._positions[rank] = self._raised(rank, position)
        if not self._question.stacks:
            # A rank that ends meanwhile has said how far it is
            if may_be_late(self._positions, self._least):
                self._ask_all(now, stacks=True, known=self._positions)
            return
        while self._shows:
            self._shows.pop(0)(self._places())
        if self._job.root_cause is None:
            self._judge(now)

    def _judge(self, now: float) -> None:
        before, self._before = self._before, self._positions
        late = find_late(self._positions, before, self._least)
        if late is not None:
            # What a script says of itself is up to a second old: they may have gone on just now.
            self.late, self._poll = late, now + _POLLING
            # One that waits may use a processor: then there is only since when the others are at rest.
            ranks = late.waiting if late.group else [*late.waiting, *late.ranks]
            self._waited = max(self._positions[rank].since for rank in ranks)
            seconds = max(self._waited, 1.0)
            self._next = now + min(
                at - seconds for at in (2 * seconds, self._hang_after) if at > seconds
            )
        elif self.late is not None:
            self._over()
        elif not before and not all(one.is_counted for one in self._positions.values()):
            self._next = now + _SECOND_LOOK
        else:
            self._before = {}

    def _raised(self, rank: int, position: Position) -> Position:
        """The position of a rank; where an exception ends it, the stack with which that was raised."""
        failing = self._job.members[rank].failing
        if failing is None or not self._question.stacks:
            return position
        stacks = from_traceback(failing.traceback)
        if stacks is None:
            return position
        return replace(position, stacks=stacks)

    def _is_busy(self, position: Position) -> bool:
        """Whether a rank uses a processor while it waits, so that only its stack tells that it has gone on."""
        return not position.is_counted and position.since < self._least

    def _over(self) -> None:
        said, self.late, self._said = self._said, None, None
        self._next, self._poll, self._before = inf, inf, {}
        # Once the job ends for it, nothing continues
        if said is not None and self._job.root_cause is None:
            self._job.log.add("late_over", (said.ranks or [0])[0])
            who = ranks_said(said.ranks) if said.ranks else "the ranks"
            text = f"{who} {'continues' if len(said.ranks) == 1 else 'continue'}"
            self._job.say(text, event="late_over", ranks=said.ranks)

    def _notify(self, late: Late, now: float) -> None:
        """Say who is late, or end the job for it."""
        self._said = late
        at_rest = min(one.since for one in self._positions.values())
        if at_rest + now - self._as_of >= self._hang_after:
            self._log(late, self._text(late, now, "waiting for {}"))
            self._end_job(late, None, now)
        elif self._notices.is_due(late, self._as_of - self._waited, self._waited):
            text = self._text(late, now, "waiting for {}")
            self._log(late, text)
            self._job.say(text + shown("\n".join(self._places())), event="late", ranks=late.ranks)

    def _log(self, late: Late, text: str) -> None:
        first = (late.ranks or late.waiting)[0]
        stacks = self._places()
        self._job.log.add(
            "late", first, ranks=late.ranks, waiting=late.waiting, text=text, stacks=stacks
        )

    def _places(self) -> list[str]:
        places = {
            rank: one.stacks for rank, one in self._positions.items() if one.stacks is not None
        }
        return lines(places, () if self.late is None else frozenset(self.late.ranks))

    def held_up(self, now: float) -> str:
        """`"rank 1 (vm) had held up the job for 600 s"`; empty: no rank was said to be late."""
        late = self.late
        if late is None or self._said is None or not late.ranks:
            return ""
        text = self._text(late, now, "{} had held up the job")
        return text.partition("; ")[0].replace(": it is in ", ", in ")

    def _end_job(
        self, late: Late, end: ExitStatus | None, now: float, failed: int | None = None
    ) -> None:
        """End it for those that are late; `failed`: a rank that has waited for them, and how it ended."""
        begin = "{} held up the job" if late.ranks else "the ranks have waited for {}"
        text = self._text(late, now, begin)
        ranks = late.ranks or late.waiting
        if end is None or failed is None:
            stacks = [] if self._notices.has_said(late) else self._places()
            self._job.end_job(from_late(ranks, text, stacks), text, now)
            return
        cause = from_late_failure(ranks, text, failed, end, self._job.delay(failed))
        self._job.end_job(cause, cause.headline, now)

    def _text(self, late: Late, now: float, begin: str) -> str:
        return text_of(
            late, self._positions, self._job.members, begin, self._waited + now - self._as_of
        )
