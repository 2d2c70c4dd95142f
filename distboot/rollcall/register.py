"""Who has reported so far, who is missing, and whether they fit together. Pure: how they report is not its matter."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import DistbootError, quoted
from ..roster import Record


class Register:
    """The records of a job's ranks as they come in.

    Args:
        world_size: number of ranks of the job, as rank 0 knows it.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.records: dict[int, Record] = {}

    def enter(self, record: Record) -> None:
        """Enter one rank.

        Raises:
            DistbootError: `duplicate-rank` or `roster-mismatch`, which no waiting can mend.
        """
        rank = record.rank
        if record.world_size != self.world_size or not 0 <= rank < self.world_size:
            raise DistbootError(
                "roster-mismatch",
                f"rank 0 has a world of {self.world_size}, but rank {rank} on {quoted(record.host)} (process "
                f"{record.pid}) says {record.world_size}",
                "start all ranks with one launcher and the same number of processes",
            )
        first = self.records.get(rank)
        if first is not None and (first.host, first.pid) != (record.host, record.pid):
            raise DistbootError(
                "duplicate-rank",
                f"rank {rank} is there twice: process {first.pid} on {quoted(first.host)} and process {record.pid} on "
                f"{quoted(record.host)}",
                "look for a second copy of the job, or for RANK set once for several processes",
            )
        self.records[rank] = record

    def leave(self, rank: int) -> None:
        """The connection of a rank is gone before the roll call was over; it may come again."""
        self.records.pop(rank, None)

    @property
    def is_complete(self) -> bool:
        """Whether every rank has reported."""
        return len(self.records) == self.world_size

    @property
    def missing(self) -> list[int]:
        """The ranks that have not reported."""
        return [rank for rank in range(self.world_size) if rank not in self.records]

    def progress(self) -> str:
        """`6/8 joined, missing 3 (node 0), 7 (node 1)`."""
        return f"{len(self.records)}/{self.world_size} joined, missing {self.missing_said()}"

    def missing_said(self) -> str:
        """The missing ranks as ranges, with their node where the ranks that are there prove how nodes are filled."""
        here = self._ranks_a_node()
        if here is None:
            return ranges(self.missing)
        by_node: dict[int, list[int]] = {}
        for rank in self.missing:
            by_node.setdefault(rank // here, []).append(rank)
        return ", ".join(f"{ranges(ranks)} (node {node})" for node, ranks in by_node.items())

    def _ranks_a_node(self) -> int | None:
        """How many ranks each node has, if all that reported agree that the nodes are filled one after the other."""
        sizes = {record.local_world_size for record in self.records.values()}
        here = sizes.pop() if len(sizes) == 1 else None
        if here is None or any(
            record.local_rank is None or record.node_rank is None or record.node_rank * here + record.local_rank != rank
            for rank, record in self.records.items()
        ):
            return None
        return here


def ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` -> `"0-2, 5"`; the numbers are in ascending order."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    said = [str(low) if low == high else f"{low}-{high}" for low, high in spans[:_MOST_SPANS]]
    return ", ".join(said) + (f" and {len(spans) - _MOST_SPANS} more" if len(spans) > _MOST_SPANS else "")


_MOST_SPANS = 20
