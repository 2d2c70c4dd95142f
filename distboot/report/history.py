"""What rank 0 has seen of the beginning of a job, until the ranks are ready or it is clear that they never will be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of a rank, against that of rank 0.

    Attributes:
        ahead: seconds by which it is ahead.
        within: seconds by which that may be wrong.
    """

    ahead: float = 0.0
    within: float = 0.0

    @classmethod
    def read(cls, said: float, before: float, after: float) -> Clock:
        """The clock that said so between two moments of rank 0's: it may have been any moment of these.

        Example:
            `Clock.read(107.0, before=100.0, after=101.0) == Clock(ahead=6.5, within=0.5)`
        """
        return cls(said - (before + after) / 2, abs(after - before) / 2)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank that has joined.

    Attributes:
        host: its name.
        node, local_rank: its place, as far as it is known; nodes are else counted in the order of the ranks.
        pid: its process.
        started: when that began, by its own clock; 0.0: not known.
        detected: when it knew which rank it is, by its own clock; 0.0: not known.
        joined: when rank 0 had its record, by rank 0's clock.
        clock: the two clocks compared.
    """

    host: str
    node: int
    local_rank: int
    pid: int
    started: float
    detected: float
    joined: float
    clock: Clock


@dataclass(frozen=True, slots=True)
class History:
    """The beginning of a job.

    Attributes:
        world_size: how many ranks it is to have.
        launcher: what has started rank 0.
        began: when rank 0 began to wait, by its clock, as are all times that are the job's.
        met: when all were there; None: they never were.
        arrivals: those that are there, by rank.
        unready: those that are there, and did not get ready to start the framework.
        ranks_a_node: how many each node has, if those that are there prove that nodes are filled one after the other.
        findings: what they should have alike and have not.
        versions: of rank 0, of what is installed.
    """

    world_size: int
    launcher: str
    began: float
    met: float | None
    arrivals: Mapping[int, Arrival]
    unready: tuple[int, ...] = ()
    ranks_a_node: int | None = None
    findings: tuple[str, ...] = ()
    versions: Mapping[str, str] | None = None

    def clock(self, rank: int) -> Clock:
        """The clock of a rank; as rank 0's where nothing is known."""
        return self.arrivals[rank].clock if rank in self.arrivals else Clock()

    def as_plan(self) -> dict[str, Any]:
        """As plain JSON types, for a process of this very rank."""
        return asdict(self)

    @classmethod
    def from_plan(cls, plan: dict[str, Any]) -> History:
        """What `as_plan` has made, and JSON has carried."""
        arrivals = {
            int(rank): Arrival(**{**one, "clock": Clock(**one["clock"])}) for rank, one in plan["arrivals"].items()
        }
        tuples = {name: tuple(plan[name]) for name in ("unready", "findings")}
        return cls(**{**plan, "arrivals": arrivals, **tuples})
