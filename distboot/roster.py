"""The roster: from what each rank knows of itself to exact numbers for all. How the ranks meet is not its matter."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from .errors import DistbootError, quoted
from .placement import Placement

_LONGEST_TEXT = 1000  # characters
_LARGEST = 1 << 32  # of any number in a record


@dataclass(frozen=True, slots=True)
class Seat:
    """The exact place of one rank."""

    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int


@dataclass(frozen=True, slots=True)
class Record:
    """What one rank says of itself when the ranks meet. None: it does not know."""

    rank: int
    launcher: str
    host: str
    node: str  # equal on two ranks only when they are in the same container or on the same bare host
    pid: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    num_nodes: int | None

    def seat(self) -> Seat | None:
        """The place that the launcher gave this rank, if it left nothing open."""
        place = (self.local_rank, self.local_world_size, self.node_rank, self.num_nodes)
        known = [value for value in place if value is not None]
        return Seat(*known) if len(known) == len(place) else None

    def as_message(self) -> dict[str, object]:
        """The record as plain JSON types."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: object) -> Record:
        """The record in a message of somebody who may be anybody.

        Raises:
            TypeError, ValueError: it is none.
        """
        if not isinstance(message, dict):
            raise TypeError("it is no object")
        for name in ("launcher", "host", "node"):
            if not isinstance(message.get(name), str) or len(message[name]) > _LONGEST_TEXT:
                raise TypeError(f"its {name} is no text")
        for name in ("rank", "pid", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes"):
            value = message.get(name)
            may_be_none = name not in ("rank", "pid", "world_size")
            if not (value is None and may_be_none) and not (type(value) is int and 0 <= value < _LARGEST):
                raise TypeError(f"its {name} is no number")
        return cls(**message)


@dataclass(frozen=True, slots=True)
class Roster:
    """The whole job, the same on every rank.

    Attributes:
        hosts: name of each node's host, in the order of node ranks.
        nodes: the ranks on each node, in the order of local ranks.
    """

    hosts: tuple[str, ...]
    nodes: tuple[tuple[int, ...], ...]

    def seat(self, rank: int) -> Seat:
        """The exact place of a rank."""
        node_rank, here = next((node, ranks) for node, ranks in enumerate(self.nodes) if rank in ranks)
        return Seat(here.index(rank), len(here), node_rank, len(self.nodes))

    def as_message(self) -> dict[str, object]:
        """The roster as plain JSON types."""
        return {"hosts": list(self.hosts), "nodes": [list(ranks) for ranks in self.nodes]}

    @classmethod
    def from_message(cls, message: object) -> Roster:
        """The roster in a message.

        Raises:
            TypeError, ValueError: it is none.
        """
        hosts, nodes = (message.get("hosts"), message.get("nodes")) if isinstance(message, dict) else (None, None)
        if not isinstance(hosts, list) or not isinstance(nodes, list) or len(hosts) != len(nodes):
            raise TypeError("it has no hosts and nodes")
        ranks = sorted(rank for node in nodes for rank in node)
        if not all(isinstance(host, str) for host in hosts) or ranks != list(range(len(ranks))):
            raise ValueError("its ranks are not all there, once")
        return cls(tuple(hosts), tuple(tuple(node) for node in nodes))


def own_record(placement: Placement) -> Record:
    """The record of this very process."""
    host = socket.gethostname()
    return Record(
        rank=placement.rank,
        launcher=placement.launcher,
        host=host,
        node=f"{host}/{_boot_id()}",
        pid=os.getpid(),
        world_size=placement.world_size,
        local_rank=placement.local_rank,
        local_world_size=placement.local_world_size,
        node_rank=placement.node_rank,
        num_nodes=placement.num_nodes,
    )


def roster_of(records: Sequence[Record]) -> Roster:
    """The roster; `records` are in rank order.

    Raises:
        DistbootError: `roster-mismatch`, the ranks contradict each other.
    """
    placed = seats(records)
    nodes: dict[int, list[int]] = {}
    for rank in sorted(range(len(records)), key=lambda rank: (placed[rank].node_rank, placed[rank].local_rank)):
        nodes.setdefault(placed[rank].node_rank, []).append(rank)
    hosts = tuple(records[ranks[0]].host for ranks in nodes.values())
    return Roster(hosts, tuple(tuple(ranks) for ranks in nodes.values()))


def seats(records: Sequence[Record]) -> list[Seat]:
    """The exact place of every rank; `records` are in rank order, and so is the result.

    Where the launcher placed all ranks completely, that stays. What it left open follows from who shares a
    node with whom, nodes counted in the order in which the ranks first reach them.

    Raises:
        DistbootError: `roster-mismatch`, the ranks contradict each other.
    """
    wrong = [f"{rank} says {r.world_size}" for rank, r in enumerate(records) if r.world_size != len(records)]
    if wrong:
        raise _mismatch(f"rank 0 has a world of {len(records)}, but rank {', rank '.join(wrong[:8])}")
    given = [record.seat() for record in records if record.launcher == "torchrun"]
    if len(given) == len(records) and None not in given:
        # Its agents number each node themselves; two of them may be on one host.
        return [seat for seat in given if seat is not None]
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
        result.append(Seat(local_rank, len(here), node_rank, len(members)))
    _check(records, members.values(), result)
    return result


def _check(records: Sequence[Record], nodes: Iterable[list[int]], placed: list[Seat]) -> None:
    """Every number that a rank was told must be so, and the numbers of each kind must be all there, once."""
    node_ranks = []
    for ranks in nodes:
        host = quoted(records[ranks[0]].host)
        node_ranks.append(placed[ranks[0]].node_rank)
        local_ranks = sorted(placed[rank].local_rank for rank in ranks)
        if local_ranks != list(range(len(ranks))):
            raise _mismatch(f"ranks {_some(ranks)} on host {host} have the local ranks {_some(local_ranks)}")
        for rank in ranks:
            said = records[rank].local_world_size
            if said is not None and said != len(ranks):
                raise _mismatch(
                    f"rank {rank} was told of {said} processes on its node, but {len(ranks)} are on host {host}: "
                    f"ranks {_some(ranks)}"
                )
    if sorted(node_ranks) != list(range(len(node_ranks))):
        raise _mismatch(f"{len(node_ranks)} nodes have the node ranks {_some(sorted(node_ranks))}")
    for rank, record in enumerate(records):
        if record.num_nodes is not None and record.num_nodes != len(node_ranks):
            raise _mismatch(f"rank {rank} was told of {record.num_nodes} nodes, but the ranks are on {len(node_ranks)}")


def _mismatch(message: str) -> DistbootError:
    return DistbootError(
        "roster-mismatch",
        message,
        "look for a rank that was started twice, by hand, or with variables left over",
    )


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:16])) + (" …" if len(numbers) > 16 else "")


def _boot_id() -> str:
    # Tells two hosts of the same name apart. Linux only; elsewhere the name has to do.
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return os.uname().nodename
