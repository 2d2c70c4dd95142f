"""Where rank 0 is, from MPI itself: for a bare mpirun over several nodes, whose environment does not say it.

Only `init` comes here, and only if mpi4py is installed: it starts MPI in this process.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec

from .errors import DistbootError
from .interfaces import addresses
from .placement import Placement
from .rendezvous import free_port

_LAUNCHERS = ("openmpi", "intelmpi", "mpich", "mvapich")


def can_tell(placement: Placement) -> bool:
    """Whether MPI has to be asked where rank 0 is, and can be."""
    return placement.master_addr is None and placement.launcher in _LAUNCHERS and find_spec("mpi4py") is not None


def located(placement: Placement, join_timeout: float) -> tuple[Placement, list[str]]:
    """The placement with the address and port of rank 0, and all addresses that rank 0's host has.

    If MPI has not told within `join_timeout` seconds, the process ends: there is no other way out of its C code.

    Raises:
        DistbootError: `mpi-mismatch`, mpi4py uses another MPI than the one that started this process.
    """
    watch = threading.Timer(join_timeout, _give_up, (placement.who, join_timeout))
    watch.daemon = True
    watch.start()
    try:
        return _told_by_mpi(placement)
    finally:
        watch.cancel()


def _told_by_mpi(placement: Placement) -> tuple[Placement, list[str]]:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no MPI library, or one that mpi4py cannot use
        raise _mismatch(f"mpi4py cannot be used: {str(error).splitlines()[0]}") from None
    world = MPI.COMM_WORLD
    found = (world.Get_rank(), world.Get_size())
    if found != (placement.rank, placement.world_size):
        raise _mismatch(
            f"{placement.launcher} says that this is rank {placement.rank} of {placement.world_size}, and mpi4py that "
            f"it is rank {found[0]} of {found[1]}: it was built for another MPI"
        )
    own = None
    if placement.rank == 0:
        hosts = [address for name, address in addresses() if name != "lo" and not address.startswith("fe80:")]
        own = [placement.master_port or free_port(), *(hosts or [os.uname().nodename])]
    port, *hosts = world.bcast(own)
    source = "mpi4py: sent by rank 0"
    return placement.with_fields(source, {"master_addr": hosts[0], "master_port": port}), hosts


def _give_up(who: str | None, join_timeout: float) -> None:
    error = DistbootError(
        "join-timeout",
        f"MPI did not say where rank 0 is within {join_timeout:g} s",
        "look for a rank that did not start, or set MASTER_ADDR and MASTER_PORT for all processes",
    ).of(who)
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"distboot: {error}\n")
        sys.stderr.flush()
    os._exit(error.exit_code)


def _mismatch(message: str) -> DistbootError:
    return DistbootError(
        "mpi-mismatch",
        message,
        "make mpi4py use the MPI of the launcher (MPI4PY_LIBMPI names its libmpi.so), or set MASTER_ADDR and "
        "MASTER_PORT for all processes",
    )
