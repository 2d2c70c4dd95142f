"""The membership: the whole job with exact numbers, the same on every rank. Pure.

`JoinPlan` is what an agent needs to know to join, and `JoinResult` what it knows afterwards. Rank 0
builds the membership (`numbering`). An agent checks a received one once more
(`Membership.from_message`), as it indexes its tables with these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from ..base.text import (
    runs,
)
from .messages import (
    MOST_RANKS_A_NODE,
    Members,
    WorkerInfo,
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
        ranks = range(self.world_size)
        return tuple((rank,) for rank in ranks)

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
        return Members(
            hosts=self.hosts,
            nodes=tuple(nodes),
            master_addr=self.master_addr,
            by_node=self.by_node,
            round=self.round,
            max_restarts=self.max_restarts,
            heartbeat_timeout=self.heartbeat_timeout,
            resume_port=self.resume_port,
        )

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
        return cls(
            hosts=message.hosts,
            nodes=tuple(nodes),
            master_addr=message.master_addr,
            by_node=message.by_node,
            round=message.round,
            max_restarts=message.max_restarts,
            heartbeat_timeout=message.heartbeat_timeout,
            resume_port=message.resume_port,
        )


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
    # The launcher's programs, one of which is above this process; see `Launcher.programs`
    programs: tuple[str, ...] = of(several(line), default=())
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
