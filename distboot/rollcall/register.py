"""Who has reported so far, who is missing, and whether they fit together. Pure: how they report is not its matter."""

from __future__ import annotations

from dataclasses import replace

from ..errors import DistbootError, quoted
from ..record import Record, as_error
from ..roster import ranges, with_nodes

_MOST_LEFT = 8  # ranks that one line names


class Register:
    """The records of a job's ranks as they come in.

    Args:
        world_size: number of ranks of the job, as rank 0 knows it.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.records: dict[int, Record] = {}
        self._left: dict[int, Record] = {}  # those that were there, and are not any more
        self._devices: dict[str, Record] = {}
        self._facts: dict[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]] = {}

    def enter(self, record: Record) -> None:
        """Enter one rank.

        Raises:
            DistbootError: `duplicate-rank`, `roster-mismatch`, `shared-accelerator` or the rank's own problem, which
                no waiting can mend.
        """
        rank = record.rank
        if record.world_size != self.world_size or not 0 <= rank < self.world_size:
            raise DistbootError(
                "roster-mismatch",
                f"rank 0 has a world of {self.world_size}, but rank {rank} on {quoted(record.host)} (process "
                f"{record.pid}) says {record.world_size}",
                "start all ranks with one launcher and the same number of processes; of two jobs on one host give "
                "each its own MASTER_PORT, or its own DISTBOOT_SECRET",
            )
        first = self.records.get(rank)
        if first is not None and first.process != record.process:
            raise DistbootError(
                "duplicate-rank",
                f"rank {rank} is there twice: process {first.pid} on {quoted(first.host)} and process {record.pid} on "
                f"{quoted(record.host)}",
                "look for a second copy of the job, or for RANK set once for several processes; of two jobs on one "
                "host give each its own MASTER_PORT, or its own DISTBOOT_SECRET",
            )
        if record.problem is not None:
            raise as_error(record.problem, f"rank {rank} on {quoted(record.host)}")
        self.claim(rank, record.device, record)
        # One copy of what all of them say alike.
        facts = self._facts.setdefault(record.facts, record.facts)
        self.records[rank] = replace(record, facts=facts)

    def claim(self, rank: int, device: str | None, record: Record) -> None:
        """Enter which accelerator a rank uses.

        Raises:
            DistbootError: `shared-accelerator`, another one has it.
        """
        if device is None:
            return
        holder = self._devices.setdefault(_unique(device, record), record)
        if holder.rank != rank:
            raise DistbootError(
                "shared-accelerator",
                f"ranks {holder.rank} and {rank} on {quoted(record.host)} would both use the accelerator "
                f"{quoted(device)}",
                "show each process its own (CUDA_VISIBLE_DEVICES), or let each see them all; to train on the CPU "
                "set CUDA_VISIBLE_DEVICES to nothing",
            )

    def forget_accelerators(self) -> None:
        """What follows is what the frameworks say, who know them better than we do."""
        self._devices.clear()

    def leave(self, rank: int) -> None:
        """The connection of a rank is gone before the roll call was over; it may come again."""
        record = self.records.pop(rank, None)
        if record is not None:
            self._left[rank] = record
            if record.device is not None:
                self._devices.pop(_unique(record.device, record), None)

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
        here = self.ranks_a_node()
        if here is None:
            return ranges(self.missing)
        return with_nodes(self.missing, {rank: rank // here for rank in self.missing})

    def left_said(self) -> str:
        """Who was there and is not any more, as the end of a sentence; empty if nobody."""
        gone = [record for rank, record in sorted(self._left.items()) if rank not in self.records][:_MOST_LEFT]
        said = [f"rank {each.rank} (process {each.pid} on {quoted(each.host)})" for each in gone]
        return f"; there was, and has gone: {', '.join(said)}" if said else ""

    def ranks_a_node(self) -> int | None:
        """How many ranks each node has, if all that reported agree that the nodes are filled one after the other."""
        sizes = {record.local_world_size for record in self.records.values()}
        here = sizes.pop() if len(sizes) == 1 else None
        if here is None or any(
            record.local_rank is None or record.node_rank is None or record.node_rank * here + record.local_rank != rank
            for rank, record in self.records.items()
        ):
            return None
        return here


def _unique(device: str, record: Record) -> str:
    """NVIDIA's and AMD's ids are unique in the world, all others on their node."""
    return device if device.startswith(("GPU-", "MIG-")) else f"{record.node}/{device}"
