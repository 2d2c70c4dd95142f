"""The membership: who has joined, who is missing, and exact numbers for all. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

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
# In a membership and in Members
_ALIKE = (
    "master_addr",
    "by_node",
    "round",
    "max_restarts",
    "heartbeat_timeout",
    "resume_port",
)
# What an agent is, by whether it starts ranks
_JOINS_AS = {False: "a rank", True: "all ranks of its node"}
_MOST_LEFT = 8  # ranks that one line names
_DUPLICATE = (
    "look for a second copy of the job, or for RANK set once for several processes; of two jobs on one host give each "
    "its own MASTER_PORT, or its own DISTBOOT_SECRET"
)
_SIZES = (
    "start all ranks with one launcher and the same number of processes; of two jobs on one host give each its own "
    "MASTER_PORT, or its own DISTBOOT_SECRET"
)
_SHARED = (
    "show each process its own (CUDA_VISIBLE_DEVICES), or let each see them all; to train on the CPU set "
    "CUDA_VISIBLE_DEVICES to nothing"
)

# Of a job that goes on, whose agents have met before
COME_BACK = (
    "start the wrapper of what is missing again, with the same rank or node rank, on that host or another one; "
    "DISTBOOT_JOIN_TIMEOUT is how long the others wait for it"
)


@dataclass(frozen=True, slots=True)
class Membership:
    """The whole job, the same on every rank.

    Attributes:
        hosts: name of each node's host, in the order of node ranks.
        nodes: the ranks on each node, in the order of local ranks.
        master_addr: address under which the ranks of other nodes reached rank 0; None if there are none.
        by_node: whether each node has one agent for all of its ranks; else each rank has its own.
        round: of the job, from 0; each restart begins a new one.
        max_restarts: what rank 0's agent was started with, which counts for all.
        heartbeat_timeout: that of rank 0's agent, in seconds, likewise.
        resume_port: where rank 0's agent takes back an agent that has lost its connection; 0: nowhere.
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
        return self.nodes if self.by_node else tuple((rank,) for rank in range(self.world_size))

    def place(self, rank: int) -> dict[str, int]:
        """The exact numbers of one rank, as a `Placement` calls them."""
        node_rank, here = next(
            (node, ranks) for node, ranks in enumerate(self.nodes) if rank in ranks
        )
        numbers = {"local_rank": here.index(rank), "local_world_size": len(here)}
        return {**numbers, "node_rank": node_rank, "num_nodes": len(self.nodes)}

    def node_of(self) -> dict[int, int]:
        return {rank: node for node, ranks in enumerate(self.nodes) for rank in ranks}

    def as_message(self) -> Members:
        nodes = tuple(tuple((run.start, len(run)) for run in runs(ranks)) for ranks in self.nodes)
        alike = {name: getattr(self, name) for name in _ALIKE}
        return Members(hosts=self.hosts, nodes=nodes, **alike)

    @classmethod
    def from_message(cls, message: Members, agents: int) -> Membership:
        """The membership of a job with so many agents; `ProtocolError`: it is not one."""

        def refuse_if(broken: bool, why: str) -> None:
            if broken:
                raise ProtocolError(f"sends a broken Members: {why}")

        sizes = [sum(count for _, count in runs) for runs in message.nodes]
        by_node, world_size = message.by_node, sum(sizes) if message.by_node else agents
        refuse_if(len(message.hosts) != len(sizes), "it has not a host for each node")
        refuse_if(
            sum(sizes) > (agents * MOST_RANKS_A_NODE if by_node else agents),
            "it has too many ranks",
        )
        refuse_if(
            by_node and (len(sizes) != agents or 0 in sizes), "it has not the nodes of this job"
        )
        nodes = tuple(
            tuple(rank for run in runs for rank in range(run[0], sum(run)))
            for runs in message.nodes
        )
        all_ranks = sorted(rank for node in nodes for rank in node)
        refuse_if(all_ranks != list(range(world_size)), "its ranks are not all there, once")
        return cls(message.hosts, nodes, **{name: getattr(message, name) for name in _ALIKE})


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
    """The membership; `records` are in the order of ranks, or in that of nodes, whose ranks follow one another.

    What the launcher said stays. What it left open follows from who shares a node with whom, nodes counted in the
    order in which the ranks first reach them, and local ranks in the order of ranks. `membership-mismatch`: the ranks
    contradict each other.
    """
    if records[0].ranks:
        firsts = [0, *accumulate(record.ranks for record in records)]
        ranks = tuple(tuple(range(first, end)) for first, end in pairwise(firsts))
        return Membership(tuple(record.host for record in records), ranks, by_node=True)
    node_known = all(record.node_rank is not None for record in records)
    # Two agents on one host are two nodes when the launcher says so.
    members: dict[tuple[str, int | None], list[int]] = {}
    for rank, record in enumerate(records):
        members.setdefault((record.node, record.node_rank if node_known else None), []).append(rank)
    nodes = sorted(
        (index if node_rank is None else node_rank, _by_local_rank(here, records))
        for index, ((_, node_rank), here) in enumerate(members.items())
    )
    node_ranks = [node_rank for node_rank, _ in nodes]
    if node_ranks != list(range(len(nodes))):
        raise _mismatch(f"{len(nodes)} nodes have the node ranks {ranges(node_ranks)}")
    for rank, record in enumerate(records):
        if record.num_nodes is not None and record.num_nodes != len(nodes):
            raise _mismatch(
                f"rank {rank} was told of {record.num_nodes} nodes, but the ranks are on {len(nodes)}"
            )
    return Membership(
        tuple(records[here[0]].host for _, here in nodes), tuple(here for _, here in nodes)
    )


def _by_local_rank(here: Sequence[int], records: Sequence[WorkerInfo]) -> tuple[int, ...]:
    """The ranks of one node in the order of their local ranks, which must be all there, once."""
    host, known = short_repr(records[here[0]].host), [records[rank].local_rank for rank in here]
    # For those that their launcher has not told
    left = iter(sorted(set(range(len(here))).difference(known)))
    placed = sorted(
        (next(left) if own is None else own, rank) for own, rank in zip(known, here, strict=True)
    )
    local_ranks = [local_rank for local_rank, _ in placed]
    if local_ranks != list(range(len(here))):
        raise _mismatch(
            f"ranks {ranges(here)} on host {host} have the local ranks {ranges(local_ranks)}"
        )
    for rank in here:
        size = records[rank].local_world_size
        if size is not None and size != len(here):
            raise _mismatch(
                f"rank {rank} was told of {size} processes on its node, but {len(here)} are on host {host}: "
                f"ranks {ranges(here)}",
                "; containers of one host need its network and its name: --network=host",
            )
    return tuple(rank for _, rank in placed)


def node_size(told: Mapping[int, tuple[int | None, ...]]) -> int | None:
    """How many ranks each node has, if what ranks were told agrees that the nodes are filled one after the other.

    `told`: local rank, local world size and node rank, by rank.
    """
    sizes = {size for _, size, _ in told.values()}
    here = sizes.pop() if len(sizes) == 1 else None
    if not here or any(
        (node, local) != divmod(rank, here) for rank, (local, _, node) in told.items()
    ):
        return None
    return here


def _mismatch(message: str, more: str = "") -> DistbootError:
    hint = f"look for a rank that was started twice, by hand, or with variables left over{more}"
    return DistbootError("membership-mismatch", message, hint)


class JoinTable:
    """The records of a job's ranks as they come in; or, `by_node`, those of the agents of its nodes."""

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
        self._left: dict[int, WorkerInfo] = {}  # those that were there, and are not any more
        self._devices: dict[str, WorkerInfo] = {}
        self._facts: dict[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]] = {}

    def add(self, record: WorkerInfo) -> None:
        """Enter one rank; `DistbootError`: it does not fit, or has a problem, which waiting cannot fix."""
        rank, unit, host = record.rank, self.unit, short_repr(record.host)
        if bool(record.ranks) != self.by_node:
            there = _JOINS_AS[bool(record.ranks)]
            here = _JOINS_AS[self.by_node]
            text = f"process {record.pid} on {host} joins as {there}, and rank 0's as {here}"
            hint = "give --nproc-per-node to the process of every node, or to none"
            raise DistbootError("membership-mismatch", text, hint)
        if record.world_size != self.world_size or not 0 <= rank < self.world_size:
            there = f"{record.world_size} on {unit} {rank} ({_where(record)}, process {record.pid})"
            text = f"the {self.size} is {self.world_size} on {unit} 0 but {there}"
            raise DistbootError("membership-mismatch", text, _SIZES)
        first = self.records.get(rank)
        if first is not None and first.process != record.process:
            text = f"two processes are {unit} {rank}: {_both(first, record)}"
            raise DistbootError("duplicate-rank", text, _DUPLICATE)
        if record.problem is not None:
            raise as_error(record.problem, f"{unit} {rank} on {host}")
        self.claim_device(record, record.device)
        # One copy of what all of them say alike.
        self.records[rank] = replace(
            record, facts=self._facts.setdefault(record.facts, record.facts)
        )

    def claim_device(self, record: WorkerInfo, device: str | None) -> None:
        """Enter which accelerator a rank uses; `DistbootError`: `shared-accelerator`, another one has it."""
        if device is None:
            return
        holder = self._devices.setdefault(_unique(device, record), record)
        if holder.rank != record.rank:
            both = f"ranks {holder.rank} and {record.rank} on {short_repr(record.host)}"
            text = f"{both} would both use the accelerator {short_repr(device)}"
            raise DistbootError("shared-accelerator", text, _SHARED)

    def spread(self, membership: Membership) -> None:
        """All agents of nodes have reported: from now on each of their ranks has a record of its own."""
        nodes = enumerate(membership.nodes)
        self.records = {
            rank: replace(self.records[node], rank=rank) for node, ranks in nodes for rank in ranks
        }
        self.world_size = len(self.records)
        self.unit = "rank"

    def forget_accelerators(self) -> None:
        """What follows is what the frameworks say, who know them better than we do."""
        self._devices.clear()

    def remove(self, rank: int) -> None:
        """The connection of a rank has ended before all had joined; it may join again."""
        record = self.records.pop(rank, None)
        if record is not None:
            self._left[rank] = record
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
        """`"rank 1"`, `"nodes 1-3"`: the missing ranks as ranges, with their node where those that joined prove it."""
        missing = [rank for rank in range(self.world_size) if rank not in self.records]
        here = node_size(
            {
                rank: (r.local_rank, r.local_world_size, r.node_rank)
                for rank, r in self.records.items()
            }
        )
        unit = self.unit
        if len(missing) != 1:
            unit += "s"
        if here is None or self.by_node:
            return f"{unit} {ranges(missing)}"
        return f"{unit} {with_nodes(missing, {rank: rank // here for rank in missing})}"

    def describe_departed(self) -> str:
        """Which ranks were there and are not any more, as the end of a sentence; empty if none."""
        gone = [record for rank, record in sorted(self._left.items()) if rank not in self.records][
            :_MOST_LEFT
        ]
        departed = [
            f"{self.unit} {each.rank} (process {each.pid} on {short_repr(each.host)})"
            for each in gone
        ]
        left = f"; joined and disconnected: {', '.join(departed)}" if departed else ""
        return left + self._describe_earlier()

    def _describe_earlier(self) -> str:
        """Where those that are missing were in the round before, as the end of a sentence; empty: it is not known."""
        here = {*self.records, *self._left}
        return describe_earlier(
            [agent for agent in self._earlier if agent.number not in here], self.unit
        )


def describe_earlier(agents: Sequence[EarlierAgent], unit: str) -> str:
    """`"; ranks 2-3 on nodeb were lost at 15:13:02 and have not come back"`, a part for each host."""
    found = ""
    hosts = list(dict.fromkeys(agent.host for agent in agents))
    for host in hosts[:_MOST_LEFT]:
        there = [agent for agent in agents if agent.host == host]
        lost_at = max(agent.lost_at for agent in there)
        numbers = ranges([agent.number for agent in there])
        units, were, have = (f"{unit}s", "were", "have") if len(there) > 1 else (unit, "was", "has")
        found += f"; {units} {numbers} on {escape_control(host)} {were} "
        if lost_at:
            when = time.strftime("%H:%M:%S", time.localtime(lost_at))
            found += f"lost at {when} and {have} not come back"
        else:
            found += "there in the round before"
    more = len(hosts) - _MOST_LEFT
    return f"{found}; and those of {more} other hosts" if more > 0 else found


def _where(record: WorkerInfo) -> str:
    return escape_control(record.host)


def _both(first: WorkerInfo, second: WorkerInfo) -> str:
    """`"8582 and 8583, both on vm"`: two processes with the same number."""
    if first.host == second.host:
        return f"{first.pid} and {second.pid}, both on {_where(first)}"
    return f"{first.pid} on {_where(first)} and {second.pid} on {_where(second)}"


def _unique(device: str, record: WorkerInfo) -> str:
    """NVIDIA's and AMD's ids are unique in the world, all others on their node."""
    return device if device.startswith(("GPU-", "MIG-")) else f"{record.node}/{device}"
