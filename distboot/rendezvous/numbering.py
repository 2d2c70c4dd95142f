"""Exact numbers for all ranks, from what each of them has detected. Pure.

In this order:

1. Agents that start the ranks of a whole node: their ranks follow one another, node by node.
2. Else ranks are grouped by host and network, and by the node rank, if every rank has one.
3. The node rank and the local rank that a launcher has set stay. Missing ones are counted in the
   order of ranks.
4. The result is checked against every number that a rank was told. A contradiction is the error
   `membership-mismatch`: training with wrong numbers is worse than no training.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from operator import attrgetter

from ..base.errors import DistbootError
from ..base.text import ranges, short_repr
from .membership import Membership
from .messages import WorkerInfo

_HINT = "look for a rank that was started twice, by hand, or with variables left over"
_HINT_AT_CONTAINERS = "; containers of one host need its network and its name: --network=host"


def build_membership(records: Sequence[WorkerInfo]) -> Membership:
    """The membership from one record for each rank, in order; or for each node.

    Raises:
        DistbootError: `membership-mismatch`, the ranks contradict each other.
    """
    if records[0].ranks:
        return _of_node_agents(records)
    placed = []
    for node_rank, there in _grouped_by_node(records):
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


def _grouped_by_node(records: Sequence[WorkerInfo]) -> list[tuple[int, list[int]]]:
    """The node rank and the ranks of each node."""
    known = list(map(attrgetter("node_rank"), records))
    counted: dict[str, int] = {}
    # Two agents on one host are two nodes if the launcher says so.
    found: dict[tuple[int, str], list[int]] = defaultdict(list)
    for rank, record in enumerate(records):
        node_rank = record.node_rank
        if node_rank is None or None in known:
            node_rank = counted.setdefault(record.node, len(counted))
        found[node_rank, record.node].append(rank)
    node_ranks = [node_rank for node_rank, _ in found]
    return list(zip(node_ranks, found.values(), strict=True))


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
