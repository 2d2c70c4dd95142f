"""The membership: from what each rank knows of itself to exact numbers for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ..errors import DistbootError
from ..text import ranges, runs, short_repr
from .messages import LONGEST_TEXT, MOST_RANKS_A_NODE, Members, WorkerInfo
from .protocol import ProtocolError, flag, message, nested, number, of, optional, several, text, time_or_duration

LOOPBACK = "127.0.0.1"
_line = text(LONGEST_TEXT)


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
    """

    hosts: tuple[str, ...] = of(several(text(LONGEST_TEXT)))
    nodes: tuple[tuple[int, ...], ...] = of(several(several(number)))
    master_addr: str | None = of(optional(text(LONGEST_TEXT)), default=None)
    by_node: bool = of(flag, default=False)
    round: int = of(number, default=0)
    max_restarts: int = of(number, default=0)

    @property
    def world_size(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def agents(self) -> tuple[tuple[int, ...], ...]:
        return self.nodes if self.by_node else tuple((rank,) for rank in range(self.world_size))

    def place(self, rank: int) -> dict[str, int]:
        """The exact numbers of one rank, as a `Placement` calls them."""
        node_rank, here = next((node, ranks) for node, ranks in enumerate(self.nodes) if rank in ranks)
        numbers = {"local_rank": here.index(rank), "local_world_size": len(here)}
        return {**numbers, "node_rank": node_rank, "num_nodes": len(self.nodes)}

    def node_of(self) -> dict[int, int]:
        return {rank: node for node, ranks in enumerate(self.nodes) for rank in ranks}

    def as_message(self) -> Members:
        nodes = tuple(tuple((run.start, len(run)) for run in runs(ranks)) for ranks in self.nodes)
        return Members(self.hosts, nodes, self.master_addr, self.by_node, self.round, self.max_restarts)

    @classmethod
    def from_message(cls, message: Members, agents: int) -> Membership:
        """The membership of a job with so many agents; `ProtocolError`: it is not one."""

        def refuse_if(broken: bool, why: str) -> None:
            if broken:
                raise ProtocolError(f"sends a broken Members: {why}")

        sizes = [sum(count for _, count in runs) for runs in message.nodes]
        by_node, world_size = message.by_node, sum(sizes) if message.by_node else agents
        refuse_if(len(message.hosts) != len(sizes), "it has not a host for each node")
        refuse_if(sum(sizes) > (agents * MOST_RANKS_A_NODE if by_node else agents), "it has too many ranks")
        refuse_if(by_node and (len(sizes) != agents or 0 in sizes), "it has not the nodes of this job")
        nodes = tuple(tuple(rank for run in runs for rank in range(run[0], sum(run))) for runs in message.nodes)
        all_ranks = sorted(rank for node in nodes for rank in node)
        refuse_if(all_ranks != list(range(world_size)), "its ranks are not all there, once")
        return cls(message.hosts, nodes, message.master_addr, by_node, message.round, message.max_restarts)


@message
class JoinPlan:
    """What an agent needs to know to join."""

    own: WorkerInfo = of(nested(WorkerInfo))
    job: str = of(text(100))  # as the secret, of `JobCredentials`
    secret: str = of(text(1 << 16), repr=False)
    hosts: tuple[str, ...] = of(several(_line))  # where rank 0 may be, the likeliest first
    ports: tuple[int, ...] = of(several(number))  # those that the ranks try, in this order
    is_certain: bool = of(flag)  # whether rank 0 is at the first host, or may be at any of them
    source: str = of(_line)  # what says where rank 0 is, for example "MASTER_ADDR"
    quiet: bool = of(flag)  # whether another rank of this node says what is being waited for
    again: bool = of(flag)  # whether an agent around this one has met the others, and keeps other jobs from the port
    join_timeout: float = of(time_or_duration)
    name: str = of(text(1 << 16), default="")  # the job's, for users: what the launcher or the platform calls it


@message
class JoinResult:
    """What an agent knows when all ranks have met."""

    membership: Membership = of(nested(Membership))
    warnings: tuple[str, ...] = of(several(text(1 << 16)), default=())  # what differs and should not, on rank 0
    host: str = of(_line, default="")  # where rank 0 was really reached
    port: int = of(number, default=0)
    store_host: str = of(_line, default=LOOPBACK)  # for the store of a framework, which rank 0 serves at this port
    own_address: str = of(_line, default=LOOPBACK)  # of this host for the ranks of the other nodes, if there are any
    interface: str | None = of(optional(_line), default=None)  # that leads to these, if it is known


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
            raise _mismatch(f"rank {rank} was told of {record.num_nodes} nodes, but the ranks are on {len(nodes)}")
    return Membership(tuple(records[here[0]].host for _, here in nodes), tuple(here for _, here in nodes))


def _by_local_rank(here: Sequence[int], records: Sequence[WorkerInfo]) -> tuple[int, ...]:
    """The ranks of one node in the order of their local ranks, which must be all there, once."""
    host, known = short_repr(records[here[0]].host), [records[rank].local_rank for rank in here]
    left = iter(sorted(set(range(len(here))).difference(known)))  # for those that their launcher has not told
    placed = sorted((next(left) if own is None else own, rank) for own, rank in zip(known, here, strict=True))
    local_ranks = [local_rank for local_rank, _ in placed]
    if local_ranks != list(range(len(here))):
        raise _mismatch(f"ranks {ranges(here)} on host {host} have the local ranks {ranges(local_ranks)}")
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
    if not here or any((node, local) != divmod(rank, here) for rank, (local, _, node) in told.items()):
        return None
    return here


def _mismatch(message: str, more: str = "") -> DistbootError:
    hint = f"look for a rank that was started twice, by hand, or with variables left over{more}"
    return DistbootError("membership-mismatch", message, hint)
