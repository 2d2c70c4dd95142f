"""When each rank came to the roll call, for the report of the job. Whether it may is not the matter of this file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from ..record import Record
from ..report.history import Arrival, Clock, History
from ..roster import Roster
from .readiness import Readiness
from .register import Register


class Seen:
    """The times at which rank 0 has seen what.

    Args:
        own: rank 0's own record.

    Attributes:
        are_to_be_ready: whether the ranks have met, and each is to say that it is ready.
    """

    def __init__(self, own: Record) -> None:
        self.are_to_be_ready = False
        self._own, self._began = own, time.time()
        self._met: float | None = None
        self._joined = {0: self._began}
        self._clocks = {own.node: Clock()}  # one a node, as rank 0 knows it best
        self._node_of = {0: own.node}

    def joined(self, record: Record, welcomed: float) -> None:
        """A record has come; its clock was read between the welcome, of the rank or of its relay, and now."""
        now = time.time()
        self._joined[record.rank], self._node_of[record.rank] = now, record.node
        clock = Clock.read(record.clock, welcomed, now)
        if record.node not in self._clocks or clock.within < self._clocks[record.node].within:
            self._clocks[record.node] = clock

    def met(self) -> None:
        """All are there."""
        self._met = time.time()

    def skews(self) -> dict[int, float]:
        """Rank -> seconds that its clock is ahead of rank 0's."""
        return {rank: self._clocks[node].ahead for rank, node in self._node_of.items() if rank}

    def history(self, register: Register, readiness: Readiness | None, findings: Sequence[str]) -> History:
        """All of it."""
        records = dict(sorted({0: self._own, **register.records}.items()))
        here = register.ranks_a_node()
        places = _places(records, here) if readiness is None else _places_in(readiness.roster)
        arrivals = {}
        for rank, one in records.items():
            if rank in self._joined:
                times = one.started, one.detected, self._joined[rank]
                arrivals[rank] = Arrival(one.host, *places[rank], one.pid, *times, self._clocks[one.node])
        return History(
            world_size=register.world_size,
            launcher=self._own.launcher,
            began=self._began,
            met=self._met,
            arrivals=arrivals,
            unready=tuple(sorted(readiness.unready)) if readiness and self.are_to_be_ready else (),
            ranks_a_node=here,
            findings=tuple(findings),
            # Not the settings: what is in them is the user's own.
            versions={name: value for name, value in self._own.facts if not name.endswith("=")},
        )


def _places_in(roster: Roster) -> dict[int, tuple[int, int]]:
    """Rank -> node and local rank."""
    return {
        rank: (node, local_rank) for node, ranks in enumerate(roster.nodes) for local_rank, rank in enumerate(ranks)
    }


def _places(records: Mapping[int, Record], here: int | None) -> dict[int, tuple[int, int]]:
    """The same where not all are there: `here` are on each node, or nodes are counted as the ranks reach them."""
    if here is not None:
        return {rank: divmod(rank, here) for rank in records}
    nodes: dict[str, list[int]] = {}
    for rank, record in records.items():
        nodes.setdefault(record.node, []).append(rank)
    return _places_in(Roster(tuple(nodes), tuple(map(tuple, nodes.values()))))
