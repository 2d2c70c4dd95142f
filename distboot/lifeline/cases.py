"""Which failure was first: everything for which a job may have to end, weighed by rank 0 before it says so."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from .ends import End
from .line import Line
from .verdict import Seat

SETTLING = 0.15  # seconds for a failure to become known to which a signal is the answer; mpirun gives us 0.24 to live
EXPLAINING = 0.5  # seconds for one to become known that explains what a rank says of a peer
GATHERING = 0.1  # seconds in which the ranks of a host that died are lost
_LEAVING = 10.0  # seconds for a Python that is about to end to do so, while other ranks have lost it already


@dataclass(slots=True, eq=False)
class Member:
    """What rank 0 knows of one rank.

    Attributes:
        seat: where it is.
        line: the connection; None for rank 0 itself, and when it is not watched any more.
        start: seconds since the epoch, when it was first heard of.
        steps: the same, by its own clock, of what it says of its beginning.
        trouble: how it fails, although it has not ended yet.
        ending: since when it is about to end, as `time.monotonic` has it.
        end: how it has ended.
        is_lost: whether it was lost without a word.
    """

    seat: Seat
    line: Line | None = None
    start: float | None = None
    steps: dict[str, float] = field(default_factory=dict)
    trouble: End | None = None
    ending: float | None = None
    end: End | None = None
    is_lost: bool = False

    def begin(self, pid: int) -> None:
        """It is watched from now on, in this process."""
        self.seat = replace(self.seat, pid=pid)
        self.start = time.time()

    @property
    def is_open(self) -> bool:
        """Whether it is to end yet, and we would hear of it."""
        return self.end is None and (self.line is not None or self.seat.rank == 0)


@dataclass(slots=True, eq=False)
class Case:
    """Something for which the job may have to end.

    Attributes:
        member: the rank.
        due: when it is decided, if nothing comes that explains it.
        end: how the rank failed; None if it was lost, or was asked to stop.
        asked: the signal from outside that asked it to stop.
        why: why it counts as lost.
    """

    member: Member
    due: float
    end: End | None = None
    asked: int | None = None
    why: str = ""

    @property
    def is_loss(self) -> bool:
        """Whether the rank was lost."""
        return self.end is None and self.asked is None

    @property
    def is_consequence(self) -> bool:
        """Whether it only speaks of a peer."""
        return self.end is not None and self.end.is_consequence

    @property
    def is_answer(self) -> bool:
        """Whether something else may have come before it: it speaks of a peer, or is what a launcher does then."""
        return self.asked is not None or self.is_consequence


@dataclass(slots=True)
class Inquest:
    """All cases until one of them is decided."""

    members: list[Member]
    cases: list[Case] = field(default_factory=list)

    def failed(self, member: Member, end: End, now: float) -> Case:
        """A rank has failed, or is about to."""
        return self._add(Case(member, now + (EXPLAINING if end.is_consequence else 0.0), end))

    def lost(self, member: Member, why: str, now: float, gathering: float = GATHERING) -> Case:
        """A rank was lost, perhaps with others."""
        return self._add(Case(member, now + gathering, why=why))

    def asked(self, member: Member, number: int, now: float) -> Case:
        """Somebody outside has asked a rank to stop."""
        return self._add(Case(member, now + SETTLING, asked=number))

    def decided(self, now: float) -> Case | None:
        """What came first, once that is clear; None: not yet."""
        if not self.cases:
            return None
        case = min(self.cases, key=lambda one: one.due)
        # When all have ended there is nothing to wait for.
        if case.due > now and any(member.is_open for member in self.members):
            return None
        if case.is_consequence and self._may_be_explained(case, now):
            case.due = now + EXPLAINING
            return None
        return min(self.cases, key=lambda one: one.is_answer)

    def lost_with(self, case: Case) -> list[Member]:
        """The ranks of the same node that were lost, by rank."""
        node = case.member.seat.node_rank
        found = {one.member.seat.rank: one.member for one in self.cases if one.is_loss}
        return [member for _, member in sorted(found.items()) if member.seat.node_rank == node]

    def others(self, ranks: Iterable[int]) -> int:
        """How many ranks besides these have failed."""
        return len({one.member.seat.rank for one in self.cases if one.asked is None} - set(ranks))

    def due(self) -> list[float]:
        """When something is to be decided."""
        return [case.due for case in self.cases]

    def _add(self, case: Case) -> Case:
        self.cases.append(case)
        return case

    def _may_be_explained(self, case: Case, now: float) -> bool:
        """Whether another rank is about to end, with an exit code that is not known yet."""
        others = (member for member in self.members if member is not case.member and member.is_open)
        return any(member.ending is not None and now < member.ending + _LEAVING for member in others)
