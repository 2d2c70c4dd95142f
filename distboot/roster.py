"""The roster: from what each rank knows of itself to exact numbers for all. How the ranks meet is not its matter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .errors import DistbootError, quoted
from .record import Record

_MOST_SPANS = 20  # ranges in one line


@dataclass(frozen=True, slots=True)
class Place:
    """The exact place of one rank."""

    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int


@dataclass(frozen=True, slots=True)
class Roster:
    """The whole job, the same on every rank.

    Attributes:
        hosts: name of each node's host, in the order of node ranks.
        nodes: the ranks on each node, in the order of local ranks.
        master_addr: address under which the ranks of other nodes reached rank 0; None if there are none.
    """

    hosts: tuple[str, ...]
    nodes: tuple[tuple[int, ...], ...]
    master_addr: str | None = None

    def place(self, rank: int) -> Place:
        """The exact place of a rank."""
        node_rank, here = next((node, ranks) for node, ranks in enumerate(self.nodes) if rank in ranks)
        return Place(here.index(rank), len(here), node_rank, len(self.nodes))

    def node_of(self) -> dict[int, int]:
        """Rank -> node rank."""
        return {rank: node for node, ranks in enumerate(self.nodes) for rank in ranks}

    def as_message(self) -> dict[str, object]:
        """The roster as plain JSON types."""
        nodes = [_runs(ranks) for ranks in self.nodes]
        return {"hosts": list(self.hosts), "nodes": nodes, "master_addr": self.master_addr}

    @classmethod
    def from_message(cls, message: object, world_size: int) -> Roster:
        """The roster of so many ranks in a message.

        Raises:
            TypeError, ValueError: it is none.
        """
        if not isinstance(message, dict):
            raise TypeError("it is no object")
        hosts, nodes, master_addr = (message.get(name) for name in ("hosts", "nodes", "master_addr"))
        if not isinstance(hosts, list) or not isinstance(nodes, list) or len(hosts) != len(nodes):
            raise TypeError("it has no hosts and nodes")
        if not (master_addr is None or isinstance(master_addr, str)):
            raise TypeError("its address is no text")
        if not all(isinstance(host, str) for host in hosts):
            raise TypeError("a host is no text")
        if sum(count for runs in nodes for _, count in runs if type(count) is int and count > 0) > world_size:
            raise ValueError("it has too many ranks")
        places = tuple(tuple(rank for first, count in runs for rank in range(first, first + count)) for runs in nodes)
        ranks = sorted(rank for node in places for rank in node)
        if ranks != list(range(world_size)):
            raise ValueError("its ranks are not all there, once")
        return cls(tuple(hosts), places, master_addr)


def _runs(ranks: Iterable[int]) -> list[list[int]]:
    """First rank and number of each run of ranks: eight on a node are the usual thing, and take one."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([rank, 1])
    return runs


def roster_of(records: Sequence[Record]) -> Roster:
    """The roster; `records` are in rank order.

    Raises:
        DistbootError: `roster-mismatch`, the ranks contradict each other.
    """
    placed = places(records)
    nodes: dict[int, list[int]] = {}
    for rank in sorted(range(len(records)), key=lambda rank: (placed[rank].node_rank, placed[rank].local_rank)):
        nodes.setdefault(placed[rank].node_rank, []).append(rank)
    hosts = tuple(records[ranks[0]].host for ranks in nodes.values())
    return Roster(hosts, tuple(tuple(ranks) for ranks in nodes.values()))


def places(records: Sequence[Record]) -> list[Place]:
    """The exact place of every rank; `records` are in rank order, and so is the result.

    Where the launcher placed all ranks completely, that stays. What it left open follows from who shares a
    node with whom, nodes counted in the order in which the ranks first reach them.

    Raises:
        DistbootError: `roster-mismatch`, the ranks contradict each other.
    """
    node_known = all(record.node_rank is not None for record in records)
    # Two agents on one host are two nodes when the launcher says so.
    keys = [(record.node, record.node_rank if node_known else None) for record in records]
    members: dict[tuple[str, int | None], list[int]] = {}
    for rank, key in enumerate(keys):
        members.setdefault(key, []).append(rank)
    order = {key: index for index, key in enumerate(members)}
    local_known = all(record.local_rank is not None for record in records)
    result = []
    for rank, (record, key) in enumerate(zip(records, keys, strict=True)):
        here = members[key]
        local_rank = record.local_rank if local_known else here.index(rank)
        node_rank = record.node_rank if node_known else order[key]
        assert local_rank is not None
        assert node_rank is not None
        result.append(Place(local_rank, len(here), node_rank, len(members)))
    _check(records, members.values(), result)
    return result


def _check(records: Sequence[Record], nodes: Iterable[list[int]], placed: list[Place]) -> None:
    """Every number that a rank was told must be so, and the numbers of each kind must be all there, once."""
    node_ranks = []
    for ranks in nodes:
        host = quoted(records[ranks[0]].host)
        node_ranks.append(placed[ranks[0]].node_rank)
        local_ranks = sorted(placed[rank].local_rank for rank in ranks)
        if local_ranks != list(range(len(ranks))):
            raise _mismatch(f"ranks {ranges(ranks)} on host {host} have the local ranks {ranges(local_ranks)}")
        for rank in ranks:
            said = records[rank].local_world_size
            if said is not None and said != len(ranks):
                raise _mismatch(
                    f"rank {rank} was told of {said} processes on its node, but {len(ranks)} are on host {host}: "
                    f"ranks {ranges(ranks)}"
                )
    if sorted(node_ranks) != list(range(len(node_ranks))):
        raise _mismatch(f"{len(node_ranks)} nodes have the node ranks {ranges(sorted(node_ranks))}")
    for rank, record in enumerate(records):
        if record.num_nodes is not None and record.num_nodes != len(node_ranks):
            raise _mismatch(f"rank {rank} was told of {record.num_nodes} nodes, but the ranks are on {len(node_ranks)}")


def _mismatch(message: str) -> DistbootError:
    return DistbootError(
        "roster-mismatch",
        message,
        "look for a rank that was started twice, by hand, or with variables left over",
    )


def ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` -> `"0-2, 5"`; the numbers are in ascending order."""
    return _said(_runs(numbers))


def _said(runs: Iterable[Sequence[int]]) -> str:
    return _first([str(first) if count == 1 else f"{first}-{first + count - 1}" for first, count in runs])


def ranks_said(ranks: Sequence[int]) -> str:
    """`"rank 3"`, `"ranks 0-2, 5"`, for ranks in ascending order."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def with_nodes(ranks: Iterable[int], node_of: Mapping[int, int]) -> str:
    """`"3 (node 0), 8-31 (nodes 1-3)"`, for ranks in ascending order."""
    by_node: dict[int, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(node_of[rank], []).append(rank)
    groups: list[tuple[list[int], list[list[int]]]] = []  # nodes, and the runs of their ranks
    for node, here in by_node.items():
        runs = _runs(here)
        nodes, before = groups[-1] if groups else ([], [])
        if len(runs) == len(before) == 1 and node == nodes[-1] + 1 and runs[0][0] == sum(before[0]):
            nodes.append(node)
            before[0][1] += runs[0][1]
        else:
            groups.append(([node], runs))
    return _first([f"{_said(runs)} (node{'s' if len(nodes) > 1 else ''} {ranges(nodes)})" for nodes, runs in groups])


def _first(said: list[str]) -> str:
    return ", ".join(said[:_MOST_SPANS]) + (f" and {len(said) - _MOST_SPANS} more" if len(said) > _MOST_SPANS else "")
