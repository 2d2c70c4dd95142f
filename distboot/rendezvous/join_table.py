"""Who has reported so far, who is missing, whether they fit together, and what differs between them. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..errors import DistbootError
from ..host import FRAMEWORK
from ..text import escape_control, nodes_said, ranges, ranks_said, short_repr, with_nodes
from .membership import Membership, node_size
from .messages import WorkerInfo, as_error

_MOST_LEFT = 8  # ranks that one line names
_MOST_SKEW = 30.0  # seconds; more than that, and logs cannot be compared and credentials expire early
_MOST_GROUPS = 4  # odd groups named for one fact
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


class JoinTable:
    """The records of a job's ranks as they come in; or, `by_node`, those of the agents of its nodes."""

    def __init__(self, world_size: int, *, by_node: bool = False) -> None:
        self.world_size, self.by_node = world_size, by_node
        self.unit = "node" if by_node else "rank"
        self.records: dict[int, WorkerInfo] = {}
        self._left: dict[int, WorkerInfo] = {}  # those that were there, and are not any more
        self._devices: dict[str, WorkerInfo] = {}
        self._facts: dict[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]] = {}

    def add(self, record: WorkerInfo) -> None:
        """Enter one rank; `DistbootError`: it does not fit, or has a problem, which waiting cannot fix."""
        rank, unit, host = record.rank, self.unit, short_repr(record.host)
        if bool(record.ranks) != self.by_node:
            there, here = ("a rank", "all ranks of its node") if self.by_node else ("all ranks of its node", "a rank")
            text = f"process {record.pid} on {host} joins as {there}, and rank 0's as {here}"
            hint = "give --nproc-per-node to the process of every node, or to none"
            raise DistbootError("membership-mismatch", text, hint)
        if record.world_size != self.world_size or not 0 <= rank < self.world_size:
            there = f"{unit} {rank} on {host} (process {record.pid}) says {record.world_size}"
            text = f"{unit} 0 has a world of {self.world_size}, but {there}"
            raise DistbootError("membership-mismatch", text, _SIZES)
        first = self.records.get(rank)
        if first is not None and first.process != record.process:
            both = f"process {first.pid} on {short_repr(first.host)} and process {record.pid} on {host}"
            raise DistbootError("duplicate-rank", f"{unit} {rank} is there twice: {both}", _DUPLICATE)
        if record.problem is not None:
            raise as_error(record.problem, f"{unit} {rank} on {host}")
        self.claim_device(rank, record.device, record)
        # One copy of what all of them say alike.
        self.records[rank] = replace(record, facts=self._facts.setdefault(record.facts, record.facts))

    def claim_device(self, rank: int, device: str | None, record: WorkerInfo) -> None:
        """Enter which accelerator a rank uses; `DistbootError`: `shared-accelerator`, another one has it."""
        if device is None:
            return
        holder = self._devices.setdefault(_unique(device, record), record)
        if holder.rank != rank:
            both = f"ranks {holder.rank} and {rank} on {short_repr(record.host)}"
            text = f"{both} would both use the accelerator {short_repr(device)}"
            raise DistbootError("shared-accelerator", text, _SHARED)

    def spread(self, membership: Membership) -> None:
        """All agents of nodes have reported: from now on each of their ranks has a record of its own."""
        nodes = enumerate(membership.nodes)
        self.records = {rank: replace(self.records[node], rank=rank) for node, ranks in nodes for rank in ranks}
        self.world_size, self.unit = len(self.records), "rank"

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
        """`6/8 ranks joined, missing 3 (node 0), 7 (node 1)`."""
        return f"{len(self.records)}/{self.world_size} {self.unit}s joined, missing {self.describe_missing()}"

    def describe_missing(self) -> str:
        """The missing ranks as ranges, with their node where the ranks that are there prove how nodes are filled."""
        missing = [rank for rank in range(self.world_size) if rank not in self.records]
        here = node_size({rank: (r.local_rank, r.local_world_size, r.node_rank) for rank, r in self.records.items()})
        return ranges(missing) if here is None else with_nodes(missing, {rank: rank // here for rank in missing})

    def describe_departed(self) -> str:
        """Which ranks were there and are not any more, as the end of a sentence; empty if none."""
        gone = [record for rank, record in sorted(self._left.items()) if rank not in self.records][:_MOST_LEFT]
        departed = [f"{self.unit} {each.rank} (process {each.pid} on {short_repr(each.host)})" for each in gone]
        return f"; joined and disconnected: {', '.join(departed)}" if departed else ""


def _unique(device: str, record: WorkerInfo) -> str:
    """NVIDIA's and AMD's ids are unique in the world, all others on their node."""
    return device if device.startswith(("GPU-", "MIG-")) else f"{record.node}/{device}"


def consistency_warnings(
    records: Sequence[WorkerInfo], membership: Membership, skews: Mapping[int, float]
) -> list[str]:
    """Lines like "ranks 8-15 (node 1): torch 2.12.0, others 2.13.0".

    `records` are in rank order; `skews` has the seconds that a rank's clock is ahead of rank 0's.
    """
    node_of = membership.node_of()
    found: list[str] = []
    if len({record.facts for record in records}) > 1:
        tables = [dict(record.facts) for record in records]
        for name in sorted({name for table in tables for name in table}):
            found += _about(name, [table.get(name) for table in tables], node_of)
    return found + _clocks(skews, node_of)


def refuse_several_frameworks(records: Sequence[WorkerInfo], membership: Membership) -> None:
    """Refuse ranks that are about to start different frameworks, or one in different ways: they could not meet."""
    chosen = [dict(record.facts).get(FRAMEWORK) for record in records]
    if len(set(chosen)) > 1 and None not in chosen:
        raise DistbootError(
            "membership-mismatch",
            "; ".join(_about(FRAMEWORK, chosen, membership.node_of())),
            "let all ranks call init() with the same arguments, and give the wrapper the same --framework",
        )


def _about(name: str, values: Sequence[str | None], node_of: Mapping[int, int]) -> list[str]:
    groups: dict[str | None, list[int]] = defaultdict(list)
    for rank, value in enumerate(values):
        groups[value].append(rank)
    usual, *odd = sorted(groups, key=lambda value: (-len(groups[value]), groups[value][0]))
    rest = "others" if len(odd) == 1 else "most"
    lines = [
        f"{_ranks(groups[value], node_of)}: {_described(name, value)}, {rest} {_value(name, usual)}"
        for value in odd[:_MOST_GROUPS]
    ]
    if len(odd) > _MOST_GROUPS:
        lines.append(f"{escape_control(name.rstrip('='))}: {len(odd) - _MOST_GROUPS} more values on other ranks")
    return lines


def _described(name: str, value: str | None) -> str:
    if name == "accelerators":
        return f"{_value(name, value)} accelerators visible"
    if name.endswith("=") and value is not None:
        return f"{escape_control(name)}{_value(name, value)}"
    return f"{escape_control(name.rstrip('='))} {_value(name, value)}"


def _value(name: str, value: str | None) -> str:
    if value is None:
        return "not set" if name.endswith("=") else "not there"
    return short_repr(value) if name.endswith("=") else escape_control(value)


def _clocks(skews: Mapping[int, float], node_of: Mapping[int, int]) -> list[str]:
    """Against the middle one: rank 0's own clock may be the one that is wrong."""
    clocks = {0: 0.0, **skews}
    middle = sorted(clocks.values())[len(clocks) // 2]
    lines = []
    for sign, how in ((1, "ahead of"), (-1, "behind")):
        off = {rank: sign * (clock - middle) for rank, clock in sorted(clocks.items())}
        off = {rank: seconds for rank, seconds in off.items() if seconds > _MOST_SKEW}
        if off:
            most = max(off.values())
            lines.append(f"{_ranks(list(off), node_of)}: clock up to {most:.0f} s {how} that of the others")
    return lines


def _ranks(ranks: list[int], node_of: Mapping[int, int]) -> str:
    return f"{ranks_said(ranks)} {nodes_said(sorted({node_of[rank] for rank in ranks}))}"
