"""The membership: the whole job with exact numbers, the same on every rank. Pure.

`JoinPlan` is what an agent needs to know to join, and `JoinResult` what it knows afterwards. Rank 0
builds the membership (`build_membership`) from what each rank has detected, in this order:

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

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter

from ..base.dataclass import as_dict, dataclass
from ..base.errors import DistbootError
from ..base.text import ranges, runs, short_repr
from .messages import (
    MOST_RANKS_A_NODE,
    Members,
    WorkerInfo,
    heartbeat_timeout,
    line,
    port,
    shared_variables,
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
# For ranks that contradict each other
_HINT = "look for a rank that was started twice, by hand, or with variables left over"
_HINT_AT_CONTAINERS = "; containers of one host need its network and its name: --network=host"


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
        shared: variables of rank 0, with their values, for ranks that have none (`--share-env`).
    """

    hosts: tuple[str, ...] = of(several(line))
    nodes: tuple[tuple[int, ...], ...] = of(several(several(number)))
    master_addr: str | None = of(optional(line), default=None)
    by_node: bool = of(flag, default=False)
    round: int = of(number, default=0)
    max_restarts: int = of(number, default=0)
    heartbeat_timeout: float = of(heartbeat_timeout, default=15.0)
    resume_port: int = of(port, default=0, compare=False)
    shared: tuple[tuple[str, str], ...] = of(shared_variables, default=(), repr=False)

    @property
    def world_size(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def agents(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each agent."""
        if self.by_node:
            return self.nodes
        ranks = range(self.world_size)
        return tuple((rank,) for rank in ranks)

    def place(self, rank: int) -> dict[str, int]:
        """The exact numbers of one rank, as a `Placement` calls them."""
        is_there = [rank in ranks for ranks in self.nodes]
        node_rank = is_there.index(True)
        ranks = self.nodes[node_rank]
        return {
            "local_rank": ranks.index(rank),
            "local_world_size": len(ranks),
            "node_rank": node_rank,
            "num_nodes": len(self.nodes),
        }

    def leader(self, node: int | None) -> int:
        """The first rank of a node; None: of the job."""
        if node is None:
            return 0
        return self.nodes[node][0]

    def node_of(self) -> dict[int, int]:
        """The node rank of each rank."""
        found = {}
        for node, ranks in enumerate(self.nodes):
            found.update(dict.fromkeys(ranks, node))
        return found

    def as_message(self) -> Members:
        nodes = []
        for ranks in self.nodes:
            node_runs = [(run.start, len(run)) for run in runs(ranks)]
            nodes.append(tuple(node_runs))
        content = as_dict(self)  # the same, but for the nodes
        content["nodes"] = tuple(nodes)
        return Members(**content)

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
        content = as_dict(message)
        content["nodes"] = tuple(nodes)
        return cls(**content)


def _checked_sizes(message: Members, agents: int) -> list[int]:
    """How many ranks each node has, checked before the ranks are listed: that may take memory."""
    sizes = []
    for node_runs in message.nodes:
        sizes.append(sum(count for _, count in node_runs))
    most_ranks = agents
    has_nodes = True
    if message.by_node:
        most_ranks = agents * MOST_RANKS_A_NODE
        has_nodes = len(sizes) == agents and 0 not in sizes
    checks = (
        (len(message.hosts) == len(sizes), "has not a host for each node"),
        (sum(sizes) <= most_ranks, "has too many ranks"),
        (has_nodes, "has not the nodes of this job"),
    )
    for holds, problem in checks:
        if not holds:
            raise ProtocolError(f"sends a broken Members: it {problem}")
    return sizes


@dataclass(frozen=True, slots=True)
class EarlierAgent:
    """An agent of the round before."""

    number: int = of(number)  # of its rank, or its node
    host: str = of(line)
    lost_at: float = of(time_or_duration, default=0.0)  # seconds since the epoch; 0.0: it was not


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """What an agent needs to know to join."""

    own: WorkerInfo = of(nested(WorkerInfo))
    job: str = of(text(100))  # a digest that other jobs do not have
    hosts: tuple[str, ...] = of(several(line))  # where rank 0 may be, the likeliest first
    ports: tuple[int, ...] = of(several(number))  # those that the ranks try, in this order
    join_timeout: float = of(time_or_duration)
    # The same on all ranks of the job; empty: not set
    secret: str = of(text(1 << 16), default="", repr=False)
    # Whether rank 0 is at the first host, or may be at any of them
    is_certain: bool = of(flag, default=True)
    source: str = of(line, default="")  # of the address of rank 0, for example "MASTER_ADDR"
    # Why there may be fewer nodes than these, for the error about missing ones
    doubt: str = of(line, default="")
    # "WORLD_SIZE=4", if a person may have set it to more than there are
    size: str = of(line, default="")
    # Whether another process on this node prints which ranks are missing
    quiet: bool = of(flag, default=False)
    # Whether an agent around this one has already met the others, and keeps the port
    again: bool = of(flag, default=False)
    # The agents of the round before, in a job with restarts
    earlier: tuple[EarlierAgent, ...] = of(several(nested(EarlierAgent)), default=())
    # Seconds for which rank 0's agent may still be ending its ranks of that round
    ending: float = of(time_or_duration, default=0.0)
    delay: float = of(time_or_duration, default=0.0)  # seconds before this round
    # The launcher's programs, one of which is above this process; see `Launcher.programs`
    programs: tuple[str, ...] = of(several(line), default=())
    unbind: str = of(line, default="")  # how the launcher is told not to bind; `Launcher.unbind`
    # Rank 0's variables for ranks that have none, and names that it does not share: may be secrets
    shared: tuple[tuple[str, str], ...] = of(shared_variables, default=(), repr=False)
    unshared: tuple[str, ...] = of(several(line), default=())
    # Of the job, for users: as the launcher or the platform calls it
    name: str = of(text(1 << 16), default="")


@dataclass(frozen=True, slots=True)
class JoinResult:
    """What an agent knows once all ranks have met."""

    membership: Membership = of(nested(Membership))
    # Differences between ranks, on rank 0
    warnings: tuple[str, ...] = of(several(text(1 << 16)), default=())
    host: str = of(line, default="")  # where rank 0 was really reached
    port: int = of(number, default=0)
    # For the store of a framework, which rank 0 serves at this port
    store_host: str = of(line, default=LOOPBACK)
    # Of this host for the ranks of the other nodes, if there are any
    own_address: str = of(line, default=LOOPBACK)
    interface: str | None = of(optional(line), default=None)  # that leads to these, if it is known
    # When this host booted, by the clock of the agent: see `events.own_clock`; 0.0: not known
    booted: float = of(time_or_duration, default=0.0)


def build_membership(records: Sequence[WorkerInfo]) -> Membership:
    """The membership from one record for each rank, in order; or for each node.

    Raises:
        DistbootError: `membership-mismatch`, the ranks contradict each other.
    """
    if records[0].ranks:
        return _of_node_agents(records)
    placed = []
    for (node_rank, _), there in _grouped_by_node(records).items():
        ranks = _by_local_rank(there, records)
        placed.append((node_rank, ranks))
    placed.sort()
    hosts = []
    nodes = []
    node_ranks = []
    for node_rank, ranks in placed:
        first = records[ranks[0]]
        hosts.append(first.host)
        nodes.append(ranks)
        node_ranks.append(node_rank)
    if node_ranks != list(range(len(nodes))):
        raise _mismatch(f"{len(nodes)} nodes have the node ranks {ranges(node_ranks)}")
    for rank, record in enumerate(records):
        if record.num_nodes not in (None, len(nodes)):
            raise _mismatch(
                f"rank {rank} was told of {record.num_nodes} nodes,"
                f" but the ranks are on {len(nodes)}"
            )
    return Membership(tuple(hosts), tuple(nodes))


def _of_node_agents(records: Sequence[WorkerInfo]) -> Membership:
    """The membership of a job in which each node has one agent for its ranks."""
    hosts = []
    nodes = []
    first = 0
    for record in records:
        end = first + record.ranks
        ranks = tuple(range(first, end))
        hosts.append(record.host)
        nodes.append(ranks)
        first = end
    return Membership(tuple(hosts), tuple(nodes), by_node=True)


def _grouped_by_node(records: Sequence[WorkerInfo]) -> dict[tuple[int, str], list[int]]:
    """The ranks of each node, by its node rank and what is equal there."""
    known = map(attrgetter("node_rank"), records)
    are_numbered = None not in known
    counted: dict[str, int] = {}
    # Two agents on one host are two nodes if their launcher numbers them so.
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, record in enumerate(records):
        node_rank = record.node_rank
        if node_rank is None or not are_numbered:
            node_rank = counted.setdefault(record.node, len(counted))
        found[node_rank, record.node].append(rank)
    return found


def _by_local_rank(ranks: Sequence[int], records: Sequence[WorkerInfo]) -> tuple[int, ...]:
    """The ranks of one node in the order of their local ranks."""
    size = len(ranks)
    host = short_repr(records[ranks[0]].host)
    known = [records[rank].local_rank for rank in ranks]
    # For the ranks without one
    free = sorted(set(range(size)).difference(known))
    placed = []
    for rank, local_rank in zip(ranks, known, strict=True):
        if local_rank is None:
            local_rank = free.pop(0)  # noqa: PLW2901 - it gets one here
        placed.append((local_rank, rank))
    placed.sort()
    local_ranks = [local_rank for local_rank, _ in placed]
    if local_ranks != list(range(size)):
        numbers = ranges(local_ranks)
        raise _mismatch(f"ranks {ranges(ranks)} on host {host} have the local ranks {numbers}")
    for rank in ranks:
        told = records[rank].local_world_size
        if told not in (None, size):
            raise _mismatch(
                f"rank {rank} was told of {told} processes on its node,"
                f" but {size} are on host {host}: ranks {ranges(ranks)}",
                _HINT_AT_CONTAINERS,
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


def _mismatch(
    message: str,
    more: str = "",  # of the hint
) -> DistbootError:
    return DistbootError("membership-mismatch", message, f"{_HINT}{more}")
