"""`Context`: what a training script holds after `init`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from .lifeline.preemption import preempted

_FIRST_LIMIT = 3600.0  # seconds that main_first() gives the first rank: downloads are slow


class _WaitsFor(Protocol):
    def __call__(self, what: str, limit: float, *, opens: bool) -> None: ...


@dataclass(eq=False, slots=True)
class Context:
    """This process's exact place in the job, and the means to work with the other ranks.

    Attributes:
        framework: what was started, for example "torch".
        launcher, platform, rank, world_size, local_rank, local_world_size, node_rank, num_nodes, master_addr,
            master_port, job_id: as in `Placement`, but exact.
        hosts: host name of each node, by node rank.
        device: the `torch.device` of this rank ("torch", "deepspeed").
        hvd: Horovod's module for the framework, for example `horovod.torch` ("horovod.torch" and its like).
        strategy: the `tf.distribute.Strategy` ("tensorflow").
        task_type, task_id: of this rank in TensorFlow's cluster, for example "worker" and 1 ("tensorflow").
        comm, local_comm: MPI communicators of all ranks and of those on this node, in the order of ranks and local
            ranks ("mpi").

    What the framework does not have is None.
    """

    framework: str
    launcher: str
    platform: str | None
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    master_addr: str
    master_port: int
    job_id: str | None
    hosts: tuple[str, ...]
    _barrier: Callable[[], None] = field(repr=False)
    _wait_for: _WaitsFor = field(repr=False)
    _stop: Callable[[], None] = field(repr=False)
    _is_up: Callable[[], bool] = field(repr=False)
    device: Any = None
    hvd: Any = None
    strategy: Any = None
    task_type: str | None = None
    task_id: int | None = None
    comm: Any = None
    local_comm: Any = None
    _ended: bool = field(default=False, repr=False)

    @property
    def closed(self) -> bool:
        """Whether the process group has ended, by `close()` or by the script itself."""
        return self._ended or not self._is_up()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_rank == 0

    @property
    def preempted(self) -> bool:
        """Whether this rank was asked to stop: by SIGTERM, from outside or because another rank failed.

        From the first time that it is read, in the main thread, SIGTERM does not end this process by itself: save what
        there is to save, and end, before the grace (DISTBOOT_GRACE) is over.
        """
        return preempted()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self._barrier()

    @contextmanager
    def main_first(self, timeout: float = _FIRST_LIMIT) -> Iterator[None]:
        """Run a block on rank 0 first (a download, say), then on all the others. All ranks must enter it.

        Args:
            timeout: seconds that rank 0 may take. The time limit of collective operations plays no part.
        """
        yield from self._first("main_first()", timeout, goes_first=self.is_main)

    @contextmanager
    def local_main_first(self, timeout: float = _FIRST_LIMIT) -> Iterator[None]:
        """Run a block on the first process of each node first, then on the others. All ranks must enter it.

        Args:
            timeout: seconds that the first ones may take. The time limit of collective operations plays no part.
        """
        yield from self._first(f"local_main_first() on node {self.node_rank}", timeout, goes_first=self.is_local_main)

    def close(self) -> None:
        """Leave the process group. A second call does nothing."""
        if not self._ended:
            self._ended = True
            self._stop()

    def __enter__(self) -> Context:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _first(self, what: str, timeout: float, *, goes_first: bool) -> Iterator[None]:
        if self.world_size == 1:
            yield
            return
        if not goes_first:
            self._wait_for(what, timeout, opens=False)
        try:
            yield
        finally:  # also when the block failed: the others are waiting
            if goes_first:
                self._wait_for(what, timeout, opens=True)
