"""What rank 0 learns about a job, as an append-only list of events.

The rendezvous starts the list, and the agent of rank 0 continues it. `Event.time` is by the clock
of the job, `job_time`; times in `details` are by the clock of the rank that sent them, `clock_time`.
`Clocks` has the difference.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from .membership import Membership
from .messages import WorkerInfo
from .protocol import LONGEST_TIME

Kind = Literal[
    "rendezvous_started",  # launcher, world_size, ranks_per_node, round, versions
    # Host, node, pid, local_rank, local_world_size, node_rank, process_start, detected, offset,
    # uncertainty
    "joined",
    "left",  # before all had joined
    "all_joined",  # findings
    "checked",  # seconds, findings, variables, nodes: of the check of all nodes
    "allreduce",  # ranks, backend, sizes, pairs, median: of `check --allreduce`
    "not_ready",
    "registered",  # pid, cpus (to which it is bound): its failures are detected from now on
    "phases",  # the time of each step that it has taken: OWN
    "failing",  # text, and an external_signal: it is about to fail, or cannot continue
    # exit_code, signal, stopped_by_us, external_signal, at, traceback (of a root cause), hides (see
    # `job/root_cause.from_hidden`)
    "exited",
    "unreachable",  # text
    "silent",  # text: nothing arrives from it, though its host answers; the job continues
    "reachable",  # again, after that
    "stop_requested",  # text
    "stop_agreed",  # read, missing
    "late",  # ranks, waiting, text, stacks
    "late_over",
    "separate_models",  # ranks, reason: they train a model each
    "separate_models_over",
    # kind, ranks, text, location, traceback, then (the rank that failed because of it, if any)
    "root_cause",
    # In the journal alone, see `job/journal`
    "met",
    "heard",
    "start_failed",
    "started",
    "ended",
    "not_written",
]
PLACE = ("local_rank", "local_world_size", "node_rank")  # as the launcher sets them
_MOST_OF_A_KIND = 100  # events of one rank: a rank may send the same again and again
# Those of rank 0's own, from which it is added up where the time went; later ones without stacks
_ADDED_UP: tuple[Kind, ...] = ("late", "late_over")
_MOST_ADDED_UP = 10_000


# Seconds for which the times of a job can be sent, however far off the clock is
_LONGEST_JOB = 10 * 366 * 86400.0


def since_boot() -> float:
    """Seconds that no step of the clock changes, with those for which the host was suspended."""
    try:
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    except (AttributeError, OSError):  # not on Linux
        return time.monotonic()


class HostClock:
    """The clock of this host as it was at one moment, and the time since then.

    A later step of it, as when NTP corrects it, changes nothing: it would make the job longer or
    shorter than it was. Of a clock that is far off, it is the nearest time that can be sent.
    """

    def __init__(self) -> None:
        self.booted = 0.0  # when this host booted, in seconds since the epoch
        self.read()

    def read(self) -> None:
        """Be the clock as it is now."""
        now = min(time.time(), LONGEST_TIME - _LONGEST_JOB)
        self.booted = max(now - since_boot(), 0.0)

    def at(self, seconds: float) -> float:
        """The time so many seconds after the boot."""
        return min(self.booted + seconds, LONGEST_TIME)


_clock_of_job = HostClock()
# Of this rank, as it was when its agent began to join: then rank 0 has compared it with its own
own_clock = HostClock()


def clock_time() -> float:
    """Seconds since the epoch by the clock of this rank, for a message."""
    return own_clock.at(since_boot())


def job_time() -> float:
    """Seconds since the epoch by the clock of the job: rank 0's as it was when this process began."""
    return _clock_of_job.at(since_boot())


class Event(NamedTuple):
    """One fact. `rank` is None where it is about the whole job."""

    time: float
    rank: int | None
    event: Kind
    details: dict[str, Any]


class EventLog(list[Event]):
    """The events of a job, in the order in which rank 0 learned of them."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        super().__init__(events)
        self._counts: Counter[tuple[int | None, Kind]] = Counter()
        self._record: Callable[[Event], object] = lambda _: None

    @classmethod
    def from_json(cls, rows: Iterable[Iterable[Any]]) -> EventLog:
        """Read an `EventLog` from its JSON."""
        events = [Event(*row) for row in rows]
        return cls(events)

    def add(self, event: Kind, rank: int | None = None, /, **details: Any) -> None:
        if self._is_too_often(event, rank):
            return
        if self._counts[rank, event] > _MOST_OF_A_KIND and "stacks" in details:
            details["stacks"] = []
        one = Event(
            job_time(),
            rank,
            event,
            details,
        )
        self.append(one)
        self._record(one)

    def record(self, record: Callable[[Event], object]) -> None:
        """Call `record` with each event: those so far, and each one when it happens."""
        for one in self:
            record(one)
        self._record = record

    def note(self, event: Kind, rank: int | None = None, /, **details: Any) -> float:
        """Record an event that is not one of this list; returns its time."""
        now = job_time()
        if not self._is_too_often(event, rank):
            self._record(Event(now, rank, event, details))
        return now

    def _is_too_often(self, event: Kind, rank: int | None) -> bool:
        self._counts[rank, event] += 1
        most = _MOST_OF_A_KIND
        if event in _ADDED_UP:
            most = _MOST_ADDED_UP
        return self._counts[rank, event] > most


class ClockOffset(NamedTuple):
    """Seconds by which a rank's clock is ahead of the job's, and by which that may be wrong."""

    offset: float = 0.0
    uncertainty: float = 0.0


class Clocks:
    """By how much the clock of each rank is ahead of the job's, from the events of a job."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._nodes: dict[Any, int] = {}  # of the ranks that have joined
        # By node: its ranks share a clock, and the best reading counts
        self._of_node: dict[int, ClockOffset] = {}
        for one in events:
            if one.event == "joined":
                self._read(one)
            elif one.event == "left":
                self._nodes.pop(one.rank, None)

    def _read(self, joined: Event) -> None:
        details = joined.details
        node = details["node"]
        self._nodes[joined.rank] = node
        clock = ClockOffset(details["offset"], details["uncertainty"])
        known = self._of_node.setdefault(node, clock)
        if clock.uncertainty < known.uncertainty:
            self._of_node[node] = clock

    def of(self, rank: int) -> ClockOffset:
        """The clock of a rank; that of the job if it is not known."""
        if rank not in self._nodes:
            return ClockOffset()
        return self._of_node[self._nodes[rank]]

    def offsets(self) -> dict[int, float]:
        """Seconds by which each rank's clock is ahead of rank 0's, without that."""
        others = self._nodes.keys() - {0}
        of_rank_0 = self.of(0).offset
        return {rank: self.of(rank).offset - of_rank_0 for rank in others}


class JoinLog(EventLog):
    """The events of the rendezvous, which begin with rank 0's own record."""

    def __init__(self, own: WorkerInfo) -> None:
        super().__init__()
        self._nodes: dict[str, int] = {}
        # Not the settings: their values are the user's own.
        versions = {name: value for name, value in own.facts if not name.endswith("=")}
        self.add(
            "rendezvous_started",
            launcher=own.launcher,
            world_size=own.world_size,
            round=own.round,
            versions=versions,
            **_of_node("ranks_per_node", own.ranks),
        )
        self.joined(own)

    def joined(self, record: WorkerInfo, welcomed: float | None = None) -> None:
        """A rank has sent its record. It read its clock for that between `welcomed` and now.

        `welcomed` is in `job_time`; None for rank 0 itself.
        """
        now = job_time()
        if welcomed is None:
            # Its steps since this process began, without the noise of two readings; 0.0, not -0.0
            clock = ClockOffset(round(clock_time() - now, 2) + 0.0)
        else:
            # 107 on its clock at some moment between 100 and 101 is 6.5 ± 0.5.
            clock = ClockOffset(record.clock - (welcomed + now) / 2, abs(now - welcomed) / 2)
        self.add(
            "joined",
            record.rank,
            host=record.host,
            node=self._nodes.setdefault(record.node, len(self._nodes)),
            pid=record.pid,
            cpus=record.cpus,
            **_of_node("ranks", record.ranks),
            **{name: getattr(record, name) for name in PLACE},
            process_start=record.started,
            detected=record.detected,
            **clock._asdict(),
        )

    def spread(self, membership: Membership) -> None:
        """Turn the events of nodes' agents into events of their ranks."""
        self[:] = spread(self, membership.world_size, membership.nodes.__getitem__)


def _of_node(name: str, ranks: int) -> dict[str, int]:
    """How many ranks an agent joins for; nothing, if that is its own rank."""
    if not ranks:
        return {}
    return {name: ranks}


def spread(
    of_nodes: Iterable[Event], world_size: int, ranks_of: Callable[[int], Sequence[int]]
) -> list[Event]:
    """Turn the events of nodes' agents, which join for all ranks of a node, into those of ranks."""
    found = []
    for one in of_nodes:
        details = dict(one.details)
        if one.rank is None:
            if one.event == "rendezvous_started":
                details["world_size"] = world_size
                details.pop("ranks_per_node", None)
            found.append(one._replace(details=details))
            continue
        ranks = ranks_of(one.rank)
        for local_rank, rank in enumerate(ranks):
            of_rank = dict(details)
            if one.event == "joined":
                of_rank.pop("ranks", None)
                of_rank["local_rank"] = local_rank
                of_rank["local_world_size"] = len(ranks)
                of_rank["node_rank"] = one.rank
            found.append(Event(one.time, rank, one.event, of_rank))
    return found


def spread_alike(events: Sequence[Event]) -> Sequence[Event]:
    """The same before all have joined, if those that have are alike: then the others are taken to be.

    The events themselves if they are not alike, or are those of ranks.
    """
    joined = {one.details.get("ranks", 0) for one in events if one.event == "joined"}
    per_node = ranks_per_node(events[0])
    if not per_node or joined != {per_node}:
        return events
    world_size = size_of(events[0])
    return spread(
        events,
        world_size,
        lambda node: range(node * per_node, (node + 1) * per_node),
    )


def ranks_per_node(started: Event) -> int:
    """The ranks of rank 0's agent, from `rendezvous_started`; 0: each rank has its own."""
    found: int = started.details.get("ranks_per_node", 0)
    return found


def size_of(started: Event) -> int:
    """The number of ranks, from `rendezvous_started`, if each node has as many as that of rank 0."""
    agents: int = started.details["world_size"]
    return agents * max(ranks_per_node(started), 1)


# The steps that a rank reports while it starts, by its own clock, in their order
COMMAND = "command_started"  # by the wrapper
CALLED = "init_called"
ALL_CALLED = "all_called"
IMPORTED = "framework_imported"
ALL_READY = "all_ready"
GROUP = "group_ready"
OWN = (COMMAND, CALLED, ALL_CALLED, IMPORTED, ALL_READY, GROUP)


def own_steps(taken: Mapping[str, float]) -> dict[str, float]:
    """The steps that a rank reports, with their times; without those of a newer distboot."""
    found = {}
    for name in OWN:
        if name in taken:
            found[name] = float(taken[name])
    return found
