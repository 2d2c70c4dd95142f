"""Who has joined and who is missing, on rank 0. Pure.

Each rank sends a `WorkerInfo`: what it has detected about itself, which may be incomplete. Rank 0's
agent enters them into a `JoinTable`, which refuses at once what waiting cannot fix: two processes
with the same rank, different world sizes, two ranks on one accelerator, a rank that cannot take
part. While ranks are missing the table describes them for the lines that users see.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..base.dataclass import replace
from ..base.errors import DistbootError
from ..base.text import escape_control, ranges, short_repr, with_nodes
from .membership import EarlierAgent, Membership, node_size
from .messages import WorkerInfo, as_error

# What an agent is, by whether it starts ranks
_JOINS_AS = {False: "a rank", True: "all ranks of its node"}
# By whether nodes join in place of ranks: what joins, and what the number of these is called
UNITS = {False: ("rank", "world size"), True: ("node", "number of nodes")}
_MOST_NAMED = 8  # ranks in one line
_TWO_JOBS = "; of two jobs on one host give each its own MASTER_PORT, or its own DISTBOOT_SECRET"
# By whether nodes join in place of ranks
_HINT_AT_DUPLICATE = {
    False: (
        f"look for a second copy of the job, or for RANK set once for several processes{_TWO_JOBS}"
    ),
    True: (
        "give each node its own --node-rank (NODE_RANK), or look for a second copy of the job"
        f"{_TWO_JOBS}"
    ),
}
_HINT_AT_SIZES = {
    False: f"start all ranks with one launcher and the same number of processes{_TWO_JOBS}",
    True: f"give the same --nnodes (NUM_NODES) on every node{_TWO_JOBS}",
}
_HINT_AT_SHARED = (
    "show each process its own (CUDA_VISIBLE_DEVICES), or let each see them all; to train on the"
    " CPU set CUDA_VISIBLE_DEVICES to nothing"
)


class JoinTable:
    """The records of a job's ranks as they arrive; with `by_node`, of the agents of its nodes."""

    def __init__(
        self, world_size: int, *, by_node: bool = False, earlier: Sequence[EarlierAgent] = ()
    ) -> None:
        self.world_size = world_size
        self.by_node = by_node
        self.unit, self._size = UNITS[by_node]
        self.records: dict[int, WorkerInfo] = {}
        # The same until `spread`, which leaves these by the number with which each agent joined
        self.agents = self.records
        self.agent_unit = self.unit
        self._earlier = earlier
        self._departed: dict[int, WorkerInfo] = {}  # ranks that had joined and disconnected
        self._devices: dict[str, WorkerInfo] = {}

    def add(self, record: WorkerInfo) -> None:
        """Enter one rank; `DistbootError`: waiting cannot fix what is wrong with it."""
        rank = record.rank
        self._refuse_mix_of_agents(record)
        self._refuse_different_size(record)
        first = self.records.get(rank, record)
        if first.process != record.process:
            text = f"two processes are {self.unit} {rank}: {_describe_two(first, record)}"
            raise DistbootError("duplicate-rank", text, _HINT_AT_DUPLICATE[self.by_node])
        if record.problem is not None:
            whose = f"{self.unit} {rank} on {short_repr(record.host)}"
            raise as_error(record.problem, whose)
        self.claim_device(record, record.device)
        self.records[rank] = record

    def _refuse_mix_of_agents(self, record: WorkerInfo) -> None:
        is_of_node = record.ranks > 0
        if is_of_node == self.by_node:
            return
        who = f"process {record.pid} on {short_repr(record.host)}"
        text = f"{who} joins as {_JOINS_AS[is_of_node]}, and rank 0's as {_JOINS_AS[self.by_node]}"
        hint = "give --nproc-per-node to the process of every node, or to none"
        raise DistbootError("membership-mismatch", text, hint)

    def _refuse_different_size(self, record: WorkerInfo) -> None:
        is_in_range = 0 <= record.rank < self.world_size
        if is_in_range and record.world_size == self.world_size:
            return
        where = f"{escape_control(record.host)}, process {record.pid}"
        there = f"{record.world_size} on {self.unit} {record.rank} ({where})"
        text = f"the {self._size} is {self.world_size} on {self.unit} 0 but {there}"
        raise DistbootError("membership-mismatch", text, _HINT_AT_SIZES[self.by_node])

    def claim_device(self, record: WorkerInfo, device: str | None) -> None:
        """Enter the accelerator of a rank; `shared-accelerator`: a different rank has it."""
        if device is None:
            return
        holder = self._devices.setdefault(_unique(device, record), record)
        if holder.rank != record.rank:
            host = short_repr(record.host)
            both = f"ranks {holder.rank} and {record.rank} on {host}"
            text = f"{both} would both use the accelerator {short_repr(device)}"
            raise DistbootError("shared-accelerator", text, _HINT_AT_SHARED)

    def spread(self, membership: Membership) -> None:
        """Replace the records of nodes by records of their ranks, once all nodes have joined."""
        records = {}
        for node, ranks in enumerate(membership.nodes):
            for rank in ranks:
                records[rank] = replace(self.records[node], rank=rank)
        self.records = records
        self.world_size = len(self.records)
        self.unit = "rank"

    def forget_accelerators(self) -> None:
        """From now on the frameworks report the accelerators, which they know better."""
        self._devices.clear()

    def remove(self, rank: int) -> None:
        """Remove a rank whose connection has ended before all had joined; it may join again."""
        record = self.records.pop(rank, None)
        if record is None:
            return
        self._departed[rank] = record
        if record.device is not None:
            self._devices.pop(_unique(record.device, record), None)

    @property
    def is_complete(self) -> bool:
        return len(self.records) == self.world_size

    def in_order(self) -> list[WorkerInfo]:
        ranks = sorted(self.records)
        return [self.records[rank] for rank in ranks]

    def progress(self) -> str:
        """`6/8 ranks joined; missing: ranks 3 (node 0), 7 (node 1)`."""
        joined = f"{len(self.records)}/{self.world_size} {self.unit}s joined"
        return f"{joined}; missing: {self.describe_missing()}"

    def describe_missing(self) -> str:
        """`"rank 1"`, `"nodes 1-3"`: the missing ranks, with their node where that is proven."""
        missing = sorted(set(range(self.world_size)).difference(self.records))
        numbers = {}
        for rank, record in self.records.items():
            numbers[rank] = (record.local_rank, record.local_world_size, record.node_rank)
        size = node_size(numbers)
        unit = self.unit
        if len(missing) != 1:
            unit += "s"
        if size is None or self.by_node:
            return f"{unit} {ranges(missing)}"
        node_of = {rank: rank // size for rank in missing}
        named = with_nodes(missing, node_of)
        return f"{unit} {named}"

    def describe_departed(self) -> str:
        """Which ranks had joined and disconnected, as the end of a sentence; empty if none."""
        text = ""
        ranks = sorted(self._departed.keys() - self.records.keys())
        if ranks:
            names = map(self._describe_process, ranks[:_MOST_NAMED])
            text = f"; joined and disconnected: {', '.join(names)}"
        here = {*self.records, *self._departed}
        missing = [agent for agent in self._earlier if agent.number not in here]
        if missing:
            from .earlier import describe_earlier  # here, as few jobs have restarts

            text += describe_earlier(missing, self.unit)
        return text

    def _describe_process(self, rank: int) -> str:
        record = self._departed[rank]
        process = f"process {record.pid} on {short_repr(record.host)}"
        return f"{self.unit} {rank} ({process})"


def _describe_two(first: WorkerInfo, second: WorkerInfo) -> str:
    """`"8582 and 8583, both on vm"`: two processes with the same number."""
    here = escape_control(first.host)
    if first.host == second.host:
        return f"{first.pid} and {second.pid}, both on {here}"
    there = escape_control(second.host)
    return f"{first.pid} on {here} and {second.pid} on {there}"


def _unique(device: str, record: WorkerInfo) -> str:
    """The id of an accelerator, unique in the job: NVIDIA's and AMD's are, others on their node."""
    if device.startswith(("GPU-", "MIG-")):
        return device
    return f"{record.node}/{device}"
