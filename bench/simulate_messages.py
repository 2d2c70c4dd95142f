"""What the ranks of a job say to rank 0: real frames, whose contents are made up."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from distboot.job.messages import (
    Position,
    Register,
    Stalled,
)
from distboot.job.stacks import Stacks, frame
from distboot.rendezvous.membership import JoinPlan, Membership
from distboot.rendezvous.messages import (
    Hello,
    Ready,
    WorkerInfo,
)
from distboot.rendezvous.plan import environment_facts
from distboot.rendezvous.protocol import Channel

RANKS_A_NODE = 8
JOB = "5c2f10aa"
HELLO = Channel().sign(Hello(JOB, "0" * 32))
BEAT = Channel().sign(None)
_FACTS = environment_facts({}, RANKS_A_NODE, "torch")


def record(rank: int, world_size: int, **more: object) -> WorkerInfo:
    """A rank that Slurm has started, on a node of eight, with the facts of this very Python."""
    node = rank // RANKS_A_NODE
    host = f"node-{node:05}"
    return WorkerInfo(
        rank, "slurm", host, f"{host}/boot", 1000 + rank, str(rank), world_size, local_rank=rank % RANKS_A_NODE,
        local_world_size=min(RANKS_A_NODE, world_size - node * RANKS_A_NODE), node_rank=node, facts=_FACTS, **more,  # type: ignore[arg-type]
    )  # fmt: skip


def plan(world_size: int) -> JoinPlan:
    """That of rank 0."""
    return JoinPlan(record(0, world_size), JOB, ("127.0.0.1",), (1,), 300.0)


def membership_of_nodes(world_size: int) -> Membership:
    """The membership that follows."""
    nodes = [
        range(first, min(first + RANKS_A_NODE, world_size))
        for first in range(0, world_size, RANKS_A_NODE)
    ]
    return Membership(
        tuple(f"node-{node:05}" for node in range(len(nodes))), tuple(map(tuple, nodes)), "10.0.0.1"
    )


def place(rank: int, *, is_late: bool = False, alike: bool = True) -> Stacks:
    """Where the script of a rank is, in a training loop: in its data loader, or it waits in a collective operation."""
    torch = "/opt/venv/lib/python3.11/site-packages/torch"
    files = {
        "distributed/c10d_logger.py": "wrapper",
        "distributed/distributed_c10d.py": "all_reduce",
    }
    waits = [frame(name, f"{torch}/{file}", 3000) for file, name in files.items()]
    loads = [
        frame(name, f"{torch}/utils/data/dataloader.py", 700)
        for name in ("_try_get_data", "_next_data", "next")
    ]
    calls = ["reduce_gradients", "step", "train_epoch", "fit", "main", "<module>"]
    own = [
        frame(name, "/home/user/project/src/train.py", 40 + (0 if alike else rank))
        for name in calls
    ]
    return Stacks((*(loads if is_late else waits), *own))


@dataclass(frozen=True)
class Line:
    """A rank with its connection to rank 0.

    Attributes:
        world_size: of the job.
        rank: which one it is.
    """

    world_size: int
    rank: int

    @cached_property
    def record(self) -> bytes:
        """What it says of itself."""
        return Channel().sign(record(self.rank, self.world_size, clock=time.time()))

    def ready(self) -> bytes:
        """That it is ready."""
        return Channel().sign(Ready(device=f"0000:{self.rank % 8:02}:00.0"), self.rank)

    def watch(self) -> bytes:
        """That its supervision begins."""
        return Channel().sign(Register(1000 + self.rank), self.rank)

    def stall(self) -> bytes:
        """That it has not moved for long."""
        return Channel().sign(Stalled(), self.rank)

    def position(self, stacks: Stacks | None = None) -> bytes:
        """How far it is: the first answer, or with stacks the second one. The last rank has not come as far."""
        count = 1967 if self.is_last else 1968
        return Channel().sign(
            Position(2 if stacks else 1, 60.0, {"0": count}, 0, 0, stacks), self.rank
        )

    def place(self, *, alike: bool = True) -> bytes:
        """The same, with where it is."""
        return self.position(place(self.rank, is_late=self.is_last, alike=alike))

    @property
    def is_last(self) -> bool:
        return self.rank == self.world_size - 1


def lines_of(world_size: int) -> list[Line]:
    """All of a job but rank 0, by rank."""
    return [Line(world_size, rank) for rank in range(1, world_size)]
