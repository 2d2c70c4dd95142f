"""The roster: from what each rank knows of itself to exact numbers for all. How the ranks meet is not its matter."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .errors import DistbootError, quoted
from .placement import Placement


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

    launcher: str
    host: str
    node: str  # equal on two ranks only when they are in the same container or on the same bare host
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


def own_record(placement: Placement) -> Record:
    """The record of this very process."""
    host = socket.gethostname()
    return Record(
        launcher=placement.launcher,
        host=host,
        node=f"{host}/{_boot_id()}",
        world_size=placement.world_size,
        local_rank=placement.local_rank,
        local_world_size=placement.local_world_size,
        node_rank=placement.node_rank,
        num_nodes=placement.num_nodes,
    )


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
