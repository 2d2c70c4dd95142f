"""`Context`: what a training script holds after `init`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .base.errors import DistbootError
from .base.setting_readers import Given, seconds_of_argument
from .base.text import (
    escape_control,
    first_line,
    short_repr,
    without_secret,
)
from .rendezvous.messages import LONGEST_FAILURE

if TYPE_CHECKING:
    import torch
    from mpi4py.MPI import Intracomm

    from .script.preemption import Preemption

_AFTER_A_FAILURE = 1.0  # seconds for the other ranks to arrive when the block of this one failed
_BARRIER = "barrier()"
_TURN_HINT = "let one thread of the script wait for other ranks, or let its threads take turns"


class _Turns:
    """Lets one thread at a time wait for the other ranks.

    With several, each rank might be first at a different place.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread = 0  # the one whose turn it is
        self._place = ""  # where it is

    @contextmanager
    def at(self, place: str, *, queues: bool, inside: str | None) -> Iterator[None]:
        """Take the turn at a place.

        `queues`: after another thread that is at the same place; `inside`: this thread's block.
        """
        if inside is not None and self._thread == threading.get_ident():
            yield
            return
        if not self._lock.acquire(blocking=False):
            self._refuse_unless_same(place, queues=queues)
            self._lock.acquire()
        self._thread = threading.get_ident()
        self._place = place
        try:
            yield
        finally:
            self._thread = 0
            self._place = ""
            self._lock.release()

    def _refuse_unless_same(self, place: str, *, queues: bool) -> None:
        other = self._place
        if self._thread == threading.get_ident():
            raise DistbootError(
                "usage",
                f"{place} in a signal handler, while this thread is in {other}",
                "call it outside of the handler",
            )
        if other and not (queues and other == place):
            raise DistbootError(
                "usage",
                f"{place} while another thread of this rank is in {other}",
                _TURN_HINT,
            )


@dataclass(eq=False, slots=True)
class Context:
    """This process's exact place in the job, and how it works with the other ranks.

        with ctx.main_first():  # rank 0 downloads, the others find it there
            data = download(folder)
        ...
        if ctx.is_main:  # one log, one checkpoint
            log(loss)

    Attributes:
        framework: what was started, for example "torch".
        launcher: what started this process and owns its rank, for example "openmpi" or "single".
        platform: what owns the machines, for example "azureml", or None.
        rank: 0 to world_size - 1.
        world_size: number of processes of the job.
        local_rank: 0 to local_world_size - 1; the launcher's own where it has one.
        local_world_size: number of the job's processes on this node.
        node_rank: 0 to num_nodes - 1; nodes are counted in the order of their first ranks.
        num_nodes: number of nodes that have a rank.
        master_addr: host name or address at which rank 0 was reached.
        master_port: the port there; under torchrun that of its agent's store.
        job_id: what the launcher or the platform calls this job, or None.
        hosts: host name of each node, by node rank; empty where the roll call is off.
        device: the `torch.device` of this rank ("torch", "deepspeed", "horovod.torch").
        hvd: Horovod's module for the framework, for example `horovod.torch`.
        strategy: the `tf.distribute.Strategy` ("tensorflow").
        task_type: type of this rank's task, for example "worker" ("tensorflow").
        task_id: its index among those of its type ("tensorflow").
        comm: mpi4py's communicator of all ranks, in their order ("mpi").
        local_comm: that of the ranks on this node, in the order of local ranks ("mpi").

    Of the last seven, those that the framework does not have are None.
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
    _wait_for: Callable[..., None] = field(repr=False)  # as `Session.wait_for`
    _refuse_fork: Callable[[str], None] = field(repr=False)  # as `Session.refuse_fork`
    _leave_group: Callable[[], None] = field(repr=False)
    _is_up: Callable[[], bool] = field(repr=False)
    _preemption: Preemption = field(repr=False)
    # None for other frameworks. `X | Any` lets an editor show and complete X, and asks no user of the
    # framework to exclude None; where the framework is not installed, it is Any.
    device: torch.device | Any = None
    hvd: Any = None
    strategy: Any = None
    task_type: str | None = None
    task_id: int | None = None
    comm: Intracomm | Any = None
    local_comm: Intracomm | Any = None
    _ended: bool = field(default=False, repr=False)
    # Id of a thread -> the block that it is in.
    _inside: dict[int, str | None] = field(default_factory=dict, repr=False)
    _turns: _Turns = field(default_factory=_Turns, repr=False)

    @property
    def closed(self) -> bool:
        """Whether the process group has ended, by `close()` or by the script itself."""
        return self._ended or not self._is_up()

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0: for work to be done once.

        Such a branch must not contain a collective operation.
        """
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its node: for work to be done once per node."""
        return self.local_rank == 0

    @property
    def preempted(self) -> bool:
        """Whether the job is to stop: true at the same read on all ranks, whichever was asked.

        Read it once a step, at the same place on all ranks, and in one thread, whichever that is.
        From the first read on, or from `init` on in a script whose code reads it, SIGTERM does not
        end this process by itself: save the state, and end, before the grace (DISTBOOT_GRACE) is
        over.
        """
        return self._preemption.read()

    def request_stop(self) -> None:
        """Ask all ranks to stop: `preempted` turns true at the same read on all of them.

        For a reason that one rank alone finds: a loss that has stopped falling, a spent budget.
        """
        self._preemption.request("ctx.request_stop()", lasts=False)

    def step(self) -> None:
        """Report that a step begins, so that this rank does not count as late.

        Collective operations of torch are counted without it, and so are reads of `preempted`. See
        `DISTBOOT_LATE_AFTER`.
        """
        self._preemption.step()

    def barrier(self) -> None:
        """Wait until all ranks are here, as long as `timeout` of `init` says.

        Threads of a rank take turns: each call is one barrier of the job.

        Raises:
            DistbootError: `missing-rank`, which names the ranks that did not arrive, where the
                barrier is distboot's own ("none", Horovod, TensorFlow, JAX); torch, DeepSpeed and
                MPI fail in their own way. `usage`: the call is inside a block of `main_first` or
                `local_main_first`, while another thread is in one, in a signal handler that
                interrupts it, or after `close()`; or the context is closed meanwhile.
        """
        self._refuse_fork(_BARRIER)
        self._refuse_closed(_BARRIER)
        self._refuse_ended()
        self._refuse_inside(_BARRIER)
        with self._turns.at(_BARRIER, queues=True, inside=None):
            self._barrier()

    @contextmanager
    def main_first(self, timeout: float = 3600.0) -> Iterator[None]:
        """Run a block on rank 0 first, for example a download, then on all other ranks.

        All ranks must enter it. The block must not contain a collective operation: the other ranks
        would not take part. If it fails on rank 0, the others do not run it: they raise
        `rank-failed`. Inside another `main_first` it adds nothing: that one has the order.

        Args:
            timeout: seconds for which the others wait; downloads are slow. The timeout of
                collective operations does not matter here.

        Raises:
            DistbootError: `missing-rank`: on a rank that has waited `timeout` for rank 0; then also
                on rank 0, when its block ends. A rank that never enters is not noticed.
                `rank-failed`: the block failed on rank 0, with the reason. `usage`: invalid
                `timeout`; another thread of this rank waits for other ranks; or the context is
                closed, before or by this block.
        """
        yield from self._first("main_first()", timeout, None, goes_first=self.is_main)

    @contextmanager
    def local_main_first(self, timeout: float = 3600.0) -> Iterator[None]:
        """Run a block on the first process of each node first, then on the others there.

        As `main_first`, for each node by itself. All ranks must enter it. Rank 0 continues only
        when the first processes of all nodes are done.

        Args:
            timeout: as for `main_first`.

        Raises:
            DistbootError: as for `main_first`.
        """
        yield from self._first(
            "local_main_first()", timeout, self.node_rank, goes_first=self.is_local_main
        )

    def close(self) -> None:
        """Leave the process group. A second call does nothing.

        If another thread waits in a `barrier()` or `main_first()` of distboot's own, that raises
        `usage`.
        """
        if not self._ended:
            self._ended = True
            self._preemption.close()
            self._leave_group()

    def __enter__(self) -> Context:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _refuse_closed(self, what: str) -> None:
        if self._ended:
            raise DistbootError(
                "usage",
                f"{what} after close()",
                "call it before, or init() again",
            )

    def _refuse_closed_inside(self, what: str) -> None:
        """Refuse the end of a block that has closed the context: the ranks that wait have lost it."""
        if self._ended:
            raise DistbootError(
                "usage",
                f"close() inside {what}: other ranks wait for its end",
                "call it after the block",
            )

    def _refuse_ended(self) -> None:
        """Refuse a barrier, which needs the process group, after the script has ended that."""
        if not self._is_up():
            raise DistbootError(
                "usage",
                f"{_BARRIER} after the end of the process group (destroy_process_group())",
                "call it before, or init() again",
            )

    def _refuse_inside(self, what: str, *blocks: str) -> None:
        """Refuse to wait, inside one of these blocks, for ranks that wait for its end.

        Without `blocks`: inside any.
        """
        block = self._inside.get(threading.get_ident())
        if block is None:
            return
        if not blocks or block in blocks:
            problem = (
                f"{what} inside {block}: the other ranks reach it only after this one has left"
            )
            raise DistbootError(
                "usage",
                problem,
                "call it before or after the block",
            )

    def _first(
        self, what: str, timeout: float, node: int | None, *, goes_first: bool
    ) -> Iterator[None]:
        text = f"{what.removesuffix('()')}(timeout={short_repr(timeout)})"
        timeout = seconds_of_argument(Given(text, timeout, "usage"))
        self._refuse_closed(what)
        if node is not None:  # rank 0 waits there for the first processes of all nodes
            self._refuse_inside(what, "main_first()")
        outer = self._inside.get(threading.get_ident())
        if outer == what:  # which has the order already
            yield
            return
        # The turn lasts until the block has ended, because other ranks wait for that
        with self._turns.at(what, queues=False, inside=outer):
            yield from self._run_in_order(what, timeout, node, goes_first=goes_first)

    def _run_in_order(
        self, what: str, timeout: float, node: int | None, *, goes_first: bool
    ) -> Iterator[None]:
        is_alone = self.world_size == 1
        if not goes_first and not is_alone:
            self._wait_for(what, timeout, opens=False, node=node)
        others_wait = goes_first and not is_alone
        thread = threading.get_ident()
        outer = self._inside.get(thread)
        self._inside[thread] = what
        try:
            yield
        except BaseException as error:
            if others_wait and isinstance(error, GeneratorExit):  # a generator that is left early
                with suppress(Exception):
                    self._wait_for(what, timeout, opens=True, node=node)
            elif others_wait:
                self._report_failure(error, what, node)
            raise
        finally:
            self._inside[thread] = outer
        if others_wait:
            self._refuse_closed_inside(what)
            self._wait_for(what, timeout, opens=True, node=node)

    def _report_failure(self, error: BaseException, what: str, node: int | None) -> None:
        """Tell the ranks that wait for the block that it failed; their own errors do not matter."""
        text = without_secret(f"{type(error).__name__}: {first_line(error)}")
        failure = escape_control(text)[:LONGEST_FAILURE]
        with suppress(Exception):
            self._wait_for(what, _AFTER_A_FAILURE, opens=True, node=node, failure=failure)


def who_of(context: Context) -> str | None:
    """This process in messages; None if it is the only one."""
    if context.world_size == 1:
        return None
    return f"rank {context.rank}"
