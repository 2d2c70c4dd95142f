"""MPI in this process: for a framework that uses it, and to learn where rank 0 is.

A bare mpirun over several nodes does not say the latter in the environment. Only `init` comes here.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from .errors import DistbootError, first_line
from .interfaces import addresses
from .placement import Placement
from .rendezvous import MPI_LAUNCHERS, free_port


def can_tell(placement: Placement) -> bool:
    """Whether MPI has to be asked where rank 0 is, and can be."""
    return placement.master_addr is None and placement.launcher in MPI_LAUNCHERS and find_spec("mpi4py") is not None


def located(placement: Placement, join_timeout: float) -> tuple[Placement, list[str]]:
    """The placement with the address and port of rank 0, and all addresses that rank 0's host has.

    If MPI has not told within `join_timeout` seconds, the process is killed: there is no other way out of its C code.

    Raises:
        DistbootError: `mpi-mismatch`, mpi4py uses another MPI than the one that started this process.
    """
    remedy = "look for a rank that did not start or did not come to init(), or set MASTER_ADDR and MASTER_PORT for all"
    with _watched(placement.who, join_timeout, "MPI did not say where rank 0 is", remedy):
        return _told_by_mpi(placement)


def started(placement: Placement, limit: float) -> Any:
    """MPI's world, in which this process is the rank that the placement says.

    Args:
        placement: of this process.
        limit: seconds for MPI to start, after which the process is killed.

    Raises:
        DistbootError: `mpi-mismatch`, mpi4py uses another MPI than the one that started this process, or none did.
    """
    with _watched(placement.who, limit, "MPI did not start", "look for a rank that did not come to init()"):
        return _world(placement)


def _told_by_mpi(placement: Placement) -> tuple[Placement, list[str]]:
    world = _world(placement)
    _abort_when_we_fail()
    own = None
    if placement.rank == 0:
        hosts = [address for name, address in addresses() if name != "lo" and not address.startswith("fe80:")]
        own = [placement.master_port or free_port(), *(hosts or [os.uname().nodename])]
    port, *hosts = world.bcast(own)
    source = "mpi4py: sent by rank 0"
    return placement.with_fields(source, {"master_addr": hosts[0], "master_port": port}), hosts


def _world(placement: Placement) -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no MPI library, or one that mpi4py cannot use
        raise _mismatch(f"mpi4py cannot be used: {first_line(error)}") from None
    world = MPI.COMM_WORLD
    found = (world.Get_rank(), world.Get_size())
    if found != (placement.rank, placement.world_size):
        # The first line of what it says of itself: "Open MPI v5.0.11, package: …"
        library = MPI.Get_library_version().splitlines()[0].split(",")[0]
        why = f"it uses {library}, and was not started by that" if found == (0, 1) else "it counts them in another way"
        raise _mismatch(
            f"{placement.launcher} says that this is rank {placement.rank} of {placement.world_size}, and mpi4py that "
            f"it is rank {found[0]} of {found[1]}: {why}"
        )
    return world


def _abort_when_we_fail() -> None:
    """An uncaught exception ends the whole job: MPI's own end would wait for the ranks that go on."""
    from mpi4py import run

    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        run.set_abort_status(1)

    sys.excepthook = hook


@contextmanager
def _watched(who: str | None, limit: float, late: str, remedy: str) -> Iterator[None]:
    """End this process if the block has not ended within `limit` seconds.

    By a process of its own: starting MPI holds Python's lock, so that no thread or signal handler of ours could run.
    """
    error = DistbootError("join-timeout", f"{late} within {limit:g} s", remedy).of(who)
    us, (done, running) = os.getpid(), os.pipe()
    watcher = os.fork()
    if watcher == 0:
        os.close(running)
        if not select.select([done], [], [], limit)[0] and os.getppid() == us:
            with suppress(OSError):
                os.write(2, f"distboot: {error}\n".encode())
            os.kill(us, signal.SIGKILL)
        os._exit(0)
    os.close(done)
    try:
        yield
    finally:
        os.close(running)
        os.waitpid(watcher, 0)


def _mismatch(message: str) -> DistbootError:
    return DistbootError(
        "mpi-mismatch",
        message,
        "start the job with the mpirun of that MPI (or srun --mpi=…), or make mpi4py use the MPI of the launcher "
        "(MPI4PY_LIBMPI names its libmpi.so); only to find rank 0, MASTER_ADDR and MASTER_PORT for all do, too",
    )
