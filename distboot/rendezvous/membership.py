"""The membership: who has joined, who is missing, and exact numbers for all. Pure.

Each rank sends a `WorkerInfo`: what it has detected about itself, which may be incomplete. Rank 0's
agent enters them into a `JoinTable`, which refuses at once what waiting cannot fix: two processes
with the same rank, different world sizes, two ranks on one accelerator, a rank that cannot take
part. While ranks are missing the table describes them for the lines that users see.

When the table is complete, `build_membership` turns the records into a `Membership`, which all
ranks receive. In this order:

1. Agents that start the ranks of a whole node: their ranks follow one another, node by node.
2. Else ranks are grouped by host and network, and by the node rank, if every rank has one.
3. The node rank and the local rank that a launcher has set stay. Missing ones are counted in the
   order of ranks.
4. The result is checked against every number that a rank was told. A contradiction is the error
   `membership-mismatch`: training with wrong numbers is worse than no training.

An agent checks a received membership once more (`Membership.from_message`), as it indexes its
tables with these numbers.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ..base.errors import DistbootError
from ..base.text import (
    escape_control,
    ranges,
    runs,
    short_repr,
    with_nodes,
)
from .messages import (
    MOST_RANKS_A_NODE,
    Members,
    WorkerInfo,
    as_error,
    heartbeat_timeout,
    line,
    port,
)
from .protocol import (
    ProtocolError,
    flag,
    nested,
    number,
    of,
    optional,
    several,
    text,
    time_or_duration,
)

LOOPBACK = "127.0.0.1"
# Fields that a membership and the message Members share
_SHARED_FIELDS = (
    "master_addr",
    "by_node",
    "round",
    "max_restarts",
    "heartbeat_timeout",
    "resume_port",
)
# What an agent is, by whether it starts ranks
_JOINS_AS = {False: "a rank", True: "all ranks of its node"}
_MOST_NAMED = 8  # ranks, or hosts, in one line
_HINT_AT_DUPLICATE = (
    "look for a second copy of the job, or for RANK set once for several processes; of two jobs on"
    " one host give each its own MASTER_PORT, or its own DISTBOOT_SECRET"
)
_HINT_AT_SIZES = (
    "start all ranks with one launcher and the same number of processes; of two jobs on one host"
    " give each its own MASTER_PORT, or its own DISTBOOT_SECRET"
)
_HINT_AT_SHARED = (
    "show each process its own (CUDA_VISIBLE_DEVICES), or let each see them all; to train on the"
    " CPU set CUDA_VISIBLE_DEVICES to nothing"
)

# The hint for missing ranks after a restart, when all agents have met before
COME_BACK = (
    "start the wrapper of what is missing again, with the same rank or node rank, on that host or"
    " another one; DISTBOOT_JOIN_TIMEOUT is how long the others wait for it"
)


@dataclass(frozen=True, slots=True)
class Membership:
    """The whole job, the same on every rank.

    Attributes:
        hosts: name of each node's host, in the order of node ranks.
        nodes: the ranks on each node, in the order of local ranks.
        master_addr: address under which the ranks of other nodes reached rank 0; None without any.
        by_node: whether each node has one agent for all of its ranks; else each rank has its own.
        round: of the job, from 0; each restart begins a new one.
        max_restarts: what rank 0's agent was started with, which counts for all.
        heartbeat_timeout: that of rank 0's agent, in seconds, likewise.
        resume_port: where an agent that has lost its connection connects again; 0: nowhere.
    """

    hosts: tuple[str, ...] = of(several(line))
    nodes: tuple[tuple[int, ...], ...] = of(several(several(number)))
    master_addr: str | None = of(optional(line), default=None)
    by_node: bool = of(flag, default=False)
    round: int = of(number, default=0)
    max_restarts: int = of(number, default=0)
    heartbeat_timeout: float = of(heartbeat_timeout, default=15.0)
    resume_port: int = of(port, default=0, compare=False)

    @property
    def world_size(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def agents(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each agent."""
        if self.by_node:
            return self.nodes
        return tuple((rank,) for rank in range(self.world_size))

    def place(self, rank: int) -> dict[str, int]:
        """The exact numbers of one rank, as a `Placement` calls them."""
        for node_rank, ranks in enumerate(self.nodes):
            if rank in ranks:
                return {
                    "local_rank": ranks.index(rank),
                    "local_world_size": len(ranks),
                    "node_rank": node_rank,
                    "num_nodes": len(self.nodes),
                }
        raise ValueError(rank)

    def node_of(self) -> dict[int, int]:
        return {rank: node for node, ranks in enumerate(self.nodes) for rank in ranks}

    def as_message(self) -> Members:
        nodes = []
        for ranks in self.nodes:
            nodes.append(tuple((run.start, len(run)) for run in runs(ranks)))
        shared = {name: getattr(self, name) for name in _SHARED_FIELDS}
        return Members(hosts=self.hosts, nodes=tuple(nodes), **shared)

    @classmethod
    def from_message(cls, message: Members, agents: int) -> Membership:
        """The membership of a job with so many agents; `ProtocolError`: it is not valid."""
        sizes = _checked_sizes(message, agents)
        world_size = agents
        if message.by_node:
            world_size = sum(sizes)
        nodes: list[tuple[int, ...]] = []
        for node_runs in message.nodes:
            ranks: list[int] = []
            for first, count in node_runs:
                ranks += range(first, first + count)
            nodes.append(tuple(ranks))
        if sorted(chain.from_iterable(nodes)) != list(range(world_size)):
            raise ProtocolError("sends a broken Members: its ranks are not all there, once")
        shared = {name: getattr(message, name) for name in _SHARED_FIELDS}
        return cls(message.hosts, tuple(nodes), **shared)


def _checked_sizes(message: Members, agents: int) -> list[int]:
    """How many ranks each node has, checked before the ranks are listed: that may take memory."""
    sizes = []
    for node_runs in message.nodes:
        sizes.append(sum(count for _, count in node_runs))
    most_ranks = agents
    if message.by_node:
        most_ranks = agents * MOST_RANKS_A_NODE
    if len(message.hosts) != len(sizes):
        raise ProtocolError("sends a broken Members: it has not a host for each node")
    if sum(sizes) > most_ranks:
        raise ProtocolError("sends a broken Members: it has too many ranks")
    if message.by_node and (len(sizes) != agents or 0 in sizes):
        raise ProtocolError("sends a broken Members: it has not the nodes of this job")
    return sizes


@dataclass(frozen=True, slots=True)
class EarlierAgent:
    """An agent of the round before, as another one of that round knows it."""

    number: int = of(number)  # of its rank, or its node
    host: str = of(line)
    lost_at: float = of(time_or_duration, default=0.0)  # seconds since the epoch; 0.0: it was not


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """What an agent needs to know to join."""

    own: WorkerInfo = of(nested(WorkerInfo))
    job: str = of(text(100))  # digest of what tells it from others
    hosts: tuple[str, ...] = of(several(line))  # where rank 0 may be, the likeliest first
    ports: tuple[int, ...] = of(several(number))  # those that the ranks try, in this order
    join_timeout: float = of(time_or_duration)
    # Which all ranks of the job know; empty: not set
    secret: str = of(text(1 << 16), default="", repr=False)
    # Whether rank 0 is at the first host, or may be at any of them
    is_certain: bool = of(flag, default=True)
    source: str = of(line, default="")  # what says where rank 0 is, for example "MASTER_ADDR"
    # Why there may be fewer nodes than these, to be said with the missing ones
    doubt: str = of(line, default="")
    # "WORLD_SIZE=4", where a person may have set it to more than there are
    size: str = of(line, default="")
    # Whether another rank of this node says what is being waited for
    quiet: bool = of(flag, default=False)
    # Whether an agent around this one has met the others, and keeps the port
    again: bool = of(flag, default=False)
    # Of the round before, in a job that goes on
    earlier: tuple[EarlierAgent, ...] = of(several(nested(EarlierAgent)), default=())
    # Seconds for which rank 0's agent may still be ending its ranks of that round
    ending: float = of(time_or_duration, default=0.0)
    # Of the launcher, one of which is above this process; see `Launcher.programs`
    programs: tuple[str, ...] = of(several(line), default=())
    # The job's, for users: what the launcher or the platform calls it
    name: str = of(text(1 << 16), default="")


@dataclass(frozen=True, slots=True)
class JoinResult:
    """What an agent knows when all ranks have met."""

    membership: Membership = of(nested(Membership))
    # What differs and should not, on rank 0
    warnings: tuple[str, ...] = of(several(text(1 << 16)), default=())
    host: str = of(line, default="")  # where rank 0 was really reached
    port: int = of(number, default=0)
    # For the store of a framework, which rank 0 serves at this port
    store_host: str = of(line, default=LOOPBACK)
    # Of this host for the ranks of the other nodes, if there are any
    own_address: str = of(line, default=LOOPBACK)
    interface: str | None = of(optional(line), default=None)  # that leads to these, if it is known


def build_membership(records: Sequence[WorkerInfo]) -> Membership:
    """The membership from one record for each rank, in order; or for each node (see the top).

    Raises:
        DistbootError: `membership-mismatch`, the ranks contradict each other.
    """
    if records[0].ranks:
        return _of_node_agents(records)
    nodes = []
    for node_rank, ranks in _grouped_by_node(records):
        nodes.append((node_rank, _by_local_rank(ranks, records)))
    nodes.sort()
    node_ranks = [node_rank for node_rank, _ in nodes]
    if node_ranks != list(range(len(nodes))):
        raise _mismatch(f"{len(nodes)} nodes have the node ranks {ranges(node_ranks)}")
    for rank, record in enumerate(records):
        if record.num_nodes not in (None, len(nodes)):
            raise _mismatch(
                f"rank {rank} was told of {record.num_nodes} nodes,"
                f" but the ranks are on {len(nodes)}"
            )
    hosts = tuple(records[ranks[0]].host for _, ranks in nodes)
    return Membership(hosts, tuple(ranks for _, ranks in nodes))


def _of_node_agents(records: Sequence[WorkerInfo]) -> Membership:
    """The membership of a job in which each node has one agent for its ranks."""
    nodes: list[tuple[int, ...]] = []
    first = 0
    for record in records:
        end = first + record.ranks
        nodes.append(tuple(range(first, end)))
        first = end
    hosts = tuple(record.host for record in records)
    return Membership(hosts, tuple(nodes), by_node=True)


def _grouped_by_node(records: Sequence[WorkerInfo]) -> list[tuple[int, list[int]]]:
    """The node rank and the ranks of each node, in the order in which the ranks first reach
    them.
    """
    is_known = all(record.node_rank is not None for record in records)
    if not is_known:
        by_host: dict[str, list[int]] = {}
        for rank, record in enumerate(records):
            by_host.setdefault(record.node, []).append(rank)
        return list(enumerate(by_host.values()))
    # Two agents on one host are two nodes if the launcher says so.
    by_number: dict[tuple[str, int | None], list[int]] = {}
    for rank, record in enumerate(records):
        by_number.setdefault((record.node, record.node_rank), []).append(rank)
    return [(node_rank or 0, ranks) for (_, node_rank), ranks in by_number.items()]


def _by_local_rank(ranks: Sequence[int], records: Sequence[WorkerInfo]) -> tuple[int, ...]:
    """The ranks of one node in the order of their local ranks."""
    host = short_repr(records[ranks[0]].host)
    known = [records[rank].local_rank for rank in ranks]
    # For the ranks without one
    free = iter(sorted(set(range(len(ranks))).difference(known)))
    placed = []
    for rank, local_rank in zip(ranks, known, strict=True):
        if local_rank is None:
            placed.append((next(free), rank))
        else:
            placed.append((local_rank, rank))
    placed.sort()
    local_ranks = [local_rank for local_rank, _ in placed]
    if local_ranks != list(range(len(ranks))):
        raise _mismatch(
            f"ranks {ranges(ranks)} on host {host} have the local ranks {ranges(local_ranks)}"
        )
    for rank in ranks:
        size = records[rank].local_world_size
        if size not in (None, len(ranks)):
            raise _mismatch(
                f"rank {rank} was told of {size} processes on its node,"
                f" but {len(ranks)} are on host {host}: ranks {ranges(ranks)}",
                "; containers of one host need its network and its name: --network=host",
            )
    return tuple(rank for _, rank in placed)


def node_size(told: Mapping[int, tuple[int | None, ...]]) -> int | None:
    """How many ranks each node has, if the numbers prove that all nodes are filled in order.

    Args:
        told: local rank, local world size and node rank, by rank.
    """
    sizes = {size for _, size, _ in told.values()}
    if len(sizes) != 1:
        return None
    size = sizes.pop()
    if not size:
        return None
    for rank, (local_rank, _, node_rank) in told.items():
        if (node_rank, local_rank) != divmod(rank, size):
            return None
    return size


def _mismatch(message: str, more: str = "") -> DistbootError:
    hint = f"look for a rank that was started twice, by hand, or with variables left over{more}"
    return DistbootError("membership-mismatch", message, hint)


class JoinTable:
    """The records of a job's ranks as they arrive; with `by_node`, those of the agents of its
    nodes.
    """

    def __init__(
        self, world_size: int, *, by_node: bool = False, earlier: Sequence[EarlierAgent] = ()
    ) -> None:
        self.world_size = world_size
        self.by_node = by_node
        self.unit = "rank"
        self.size = "world size"
        if by_node:
            self.unit = "node"
            self.size = "number of nodes"
        self.records: dict[int, WorkerInfo] = {}
        self._earlier = earlier
        self._departed: dict[int, WorkerInfo] = {}  # ranks that had joined and disconnected
        self._devices: dict[str, WorkerInfo] = {}
        self._facts: dict[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]] = {}

    def add(self, record: WorkerInfo) -> None:
        """Enter one rank; `DistbootError`: waiting cannot fix what is wrong with it."""
        rank = record.rank
        self._refuse_mix_of_agents(record)
        self._refuse_different_size(record)
        first = self.records.get(rank)
        if first is not None and first.process != record.process:
            text = f"two processes are {self.unit} {rank}: {_describe_two(first, record)}"
            raise DistbootError("duplicate-rank", text, _HINT_AT_DUPLICATE)
        if record.problem is not None:
            whose = f"{self.unit} {rank} on {short_repr(record.host)}"
            raise as_error(record.problem, whose)
        self.claim_device(record, record.device)
        # One copy of equal facts: there may be 10,000 ranks.
        facts = self._facts.setdefault(record.facts, record.facts)
        self.records[rank] = replace(record, facts=facts)

    def _refuse_mix_of_agents(self, record: WorkerInfo) -> None:
        is_of_node = record.ranks > 0
        if is_of_node == self.by_node:
            return
        who = f"process {record.pid} on {short_repr(record.host)}"
        text = f"{who} joins as {_JOINS_AS[is_of_node]}, and rank 0's as {_JOINS_AS[self.by_node]}"
        hint = "give --nproc-per-node to the process of every node, or to none"
        raise DistbootError("membership-mismatch", text, hint)

    def _refuse_different_size(self, record: WorkerInfo) -> None:
        is_in_range = 0 <= record.rank < self.world_size
        if is_in_range and record.world_size == self.world_size:
            return
        where = f"{_where(record)}, process {record.pid}"
        there = f"{record.world_size} on {self.unit} {record.rank} ({where})"
        text = f"the {self.size} is {self.world_size} on {self.unit} 0 but {there}"
        raise DistbootError("membership-mismatch", text, _HINT_AT_SIZES)

    def claim_device(self, record: WorkerInfo, device: str | None) -> None:
        """Enter the accelerator of a rank; `shared-accelerator`: a different rank has it."""
        if device is None:
            return
        holder = self._devices.setdefault(_unique(device, record), record)
        if holder.rank != record.rank:
            both = f"ranks {holder.rank} and {record.rank} on {short_repr(record.host)}"
            text = f"{both} would both use the accelerator {short_repr(device)}"
            raise DistbootError("shared-accelerator", text, _HINT_AT_SHARED)

    def spread(self, membership: Membership) -> None:
        """Replace the records of nodes by records of their ranks, once all nodes have joined."""
        records = {}
        for node, ranks in enumerate(membership.nodes):
            for rank in ranks:
                records[rank] = replace(self.records[node], rank=rank)
        self.records = records
        self.world_size = len(self.records)
        self.unit = "rank"

    def forget_accelerators(self) -> None:
        """From now on the frameworks report the accelerators, which they know better."""
        self._devices.clear()

    def remove(self, rank: int) -> None:
        """Remove a rank whose connection has ended before all had joined; it may join again."""
        record = self.records.pop(rank, None)
        if record is None:
            return
        self._departed[rank] = record
        if record.device is not None:
            self._devices.pop(_unique(record.device, record), None)

    @property
    def is_complete(self) -> bool:
        return len(self.records) == self.world_size

    def in_order(self) -> list[WorkerInfo]:
        return [record for _, record in sorted(self.records.items())]

    def progress(self) -> str:
        """`6/8 ranks joined; missing: ranks 3 (node 0), 7 (node 1)`."""
        joined = f"{len(self.records)}/{self.world_size} {self.unit}s joined"
        return f"{joined}; missing: {self.describe_missing()}"

    def describe_missing(self) -> str:
        """`"rank 1"`, `"nodes 1-3"`: the missing ranks, with their node where that is proven."""
        missing = [rank for rank in range(self.world_size) if rank not in self.records]
        numbers = {}
        for rank, record in self.records.items():
            numbers[rank] = (record.local_rank, record.local_world_size, record.node_rank)
        size = node_size(numbers)
        unit = self.unit
        if len(missing) != 1:
            unit += "s"
        if size is None or self.by_node:
            return f"{unit} {ranges(missing)}"
        return f"{unit} {with_nodes(missing, {rank: rank // size for rank in missing})}"

    def describe_departed(self) -> str:
        """Which ranks had joined and disconnected, as the end of a sentence; empty if none."""
        departed = []
        for rank, record in sorted(self._departed.items()):
            if rank not in self.records:
                where = f"process {record.pid} on {short_repr(record.host)}"
                departed.append(f"{self.unit} {rank} ({where})")
        text = ""
        if departed:
            text = f"; joined and disconnected: {', '.join(departed[:_MOST_NAMED])}"
        here = {*self.records, *self._departed}
        missing = [agent for agent in self._earlier if agent.number not in here]
        return text + describe_earlier(missing, self.unit)


def describe_earlier(agents: Sequence[EarlierAgent], unit: str) -> str:
    """Where these were in the round before, a part for each host, as the end of a sentence.

    `"; ranks 2-3 on nodeb were lost at 15:13:02 and have not come back"`
    """
    by_host: dict[str, list[EarlierAgent]] = {}
    for agent in agents:
        by_host.setdefault(agent.host, []).append(agent)
    text = ""
    for host, there in list(by_host.items())[:_MOST_NAMED]:
        text += _describe_host_of_earlier(host, there, unit)
    more = len(by_host) - _MOST_NAMED
    if more > 0:
        text += f"; and those of {more} other hosts"
    return text


def _describe_host_of_earlier(host: str, agents: Sequence[EarlierAgent], unit: str) -> str:
    were = "was"
    have = "has"
    if len(agents) > 1:
        unit += "s"
        were = "were"
        have = "have"
    numbers = ranges([agent.number for agent in agents])
    text = f"; {unit} {numbers} on {escape_control(host)} {were} "
    lost_at = max(agent.lost_at for agent in agents)
    if not lost_at:
        return text + "there in the round before"
    when = time.strftime("%H:%M:%S", time.localtime(lost_at))
    return text + f"lost at {when} and {have} not come back"


def _where(record: WorkerInfo) -> str:
    return escape_control(record.host)


def _describe_two(first: WorkerInfo, second: WorkerInfo) -> str:
    """`"8582 and 8583, both on vm"`: two processes with the same number."""
    if first.host == second.host:
        return f"{first.pid} and {second.pid}, both on {_where(first)}"
    return f"{first.pid} on {_where(first)} and {second.pid} on {_where(second)}"


def _unique(device: str, record: WorkerInfo) -> str:
    """The id of an accelerator, unique in the job: NVIDIA's and AMD's are, others on their node."""
    if device.startswith(("GPU-", "MIG-")):
        return device
    return f"{record.node}/{device}"
