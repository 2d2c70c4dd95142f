"""What Horovod's processes talk with: MPI where an MPI launcher has started theirs, everywhere else Gloo."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..errors import DistbootError, quoted, tell
from ..placement import Placement
from ..rendezvous import MPI_LAUNCHERS
from ._horovod_build import Build, rebuild

# Where asking for MPI can make sense: what srun starts may find an MPI that fits it or not, and nothing says so before.
_MAY_START_MPI = (*MPI_LAUNCHERS, "slurm", "pals", "lsf", "flux")
SAME_MPI = "start the job with the mpirun of that MPI, or build Horovod with the MPI of the launcher"


def controller(build: Build, placement: Placement, environ: Mapping[str, str], backend: str | None = None) -> str:
    """What it is: "mpi" or "gloo".

    Args:
        build: of Horovod.
        placement: of this process.
        environ: its environment, without what distboot exported.
        backend: what the caller of `init` asks for.

    Raises:
        DistbootError: `backend-not-available` or `mpi-mismatch`; `broken-environment` for a variable of Horovod's that
            contradicts what can be.
    """
    asked, by = _asked(environ, backend)
    stranger = _stranger(build, placement, environ)
    if asked == "mpi":
        _refuse_mpi(build, placement, stranger, by)
        return "mpi"
    alone = placement.world_size == 1 and not build.gloo  # a process on its own is free to start MPI
    if asked is None and build.mpi and (alone or (placement.launcher in MPI_LAUNCHERS and stranger is None)):
        return "mpi"
    if not build.gloo and stranger is not None and asked is None:
        raise DistbootError("mpi-mismatch", stranger, f"{SAME_MPI}; or with Gloo: {rebuild('HOROVOD_WITH_GLOO')}")
    by = by or f"launcher {placement.launcher!r} without MPI"
    if not build.gloo:
        raise _lacks("Gloo", "HOROVOD_WITH_GLOO", f"{by} needs it")
    operations = environ.get("HOROVOD_CPU_OPERATIONS", "")
    if operations.lower() == "mpi":
        raise DistbootError(
            "broken-environment",
            f"HOROVOD_CPU_OPERATIONS={quoted(operations)} contradicts Gloo, which Horovod uses here ({by})",
            "unset HOROVOD_CPU_OPERATIONS, or start the job with the mpirun of Horovod's MPI",
        )
    if stranger is not None and asked is None and placement.rank == 0:
        tell(placement.who, f"{stranger}; so Horovod uses Gloo")
    return "gloo"


def _asked(environ: Mapping[str, str], backend: str | None) -> tuple[str | None, str]:
    """What the user asks for, and with which words."""
    text = environ.get("HOROVOD_CONTROLLER", "")
    if text and text.lower() not in ("mpi", "gloo"):
        problem = f"HOROVOD_CONTROLLER={quoted(text)} is neither mpi nor gloo"
        raise DistbootError("broken-environment", problem, "unset HOROVOD_CONTROLLER")
    if backend is None:
        return text.lower() or None, f"HOROVOD_CONTROLLER={quoted(text)}" if text else ""
    said = f"backend={quoted(backend)}"
    if backend.lower() not in ("mpi", "gloo"):
        raise DistbootError(
            "backend-not-available",
            f"{said}: Horovod has 'mpi' and 'gloo'",
            "leave backend out to get the right one; NCCL is used for what is on GPUs where Horovod was built with it",
        )
    if text and text.lower() != backend.lower():
        problem = f"HOROVOD_CONTROLLER={quoted(text)} contradicts {said}"
        raise DistbootError("broken-environment", problem, "unset HOROVOD_CONTROLLER")
    return backend.lower(), said


def _refuse_mpi(build: Build, placement: Placement, stranger: str | None, by: str) -> None:
    """Refuse MPI, which the user asks for, where it is not to be had."""
    if not build.mpi:
        raise _lacks("MPI", "HOROVOD_WITH_MPI", f"{by} asks for it")
    if placement.world_size > 1 and placement.launcher not in _MAY_START_MPI:
        raise DistbootError(
            "backend-not-available" if by.startswith("backend=") else "broken-environment",
            f"{by} asks for MPI, and launcher {placement.launcher!r} does not start it: each rank would be alone",
            "leave it out, and Horovod uses Gloo; or start the job with mpirun",
        )
    if stranger is not None:
        raise DistbootError(
            "mpi-mismatch",
            f"{by} asks for MPI, and {stranger}",
            f"{SAME_MPI}; or leave it out, and Horovod uses Gloo",
        )


def _lacks(what: str, flag: str, why: str) -> DistbootError:
    return DistbootError(
        "backend-not-available",
        f"this Horovod was built without {what} ({flag}=1), and {why}",
        f"build it again with {what}: {rebuild(flag)}",
    )


def _stranger(build: Build, placement: Placement, environ: Mapping[str, str]) -> str | None:
    """Why Horovod's MPI cannot work under this MPI launcher, where that is certain; None: it may.

    Each process would be in a world of its own, or end in MPI_Init. Measured: Open MPI 5.0.11 works under the mpirun
    of 4.1.4, but not the other way round; and none works under that of MPICH.
    """
    if build.library is None or placement.launcher not in MPI_LAUNCHERS:
        return None
    library = re.match(r"Open MPI v(\d+)", build.library)
    started = re.match(r"\d+", environ.get("OMPI_VERSION", "4"))  # which 5 is the first to set
    if placement.launcher != "openmpi":
        mpirun = placement.launcher if library is not None else None
    elif library is None:
        mpirun = "Open MPI"
    else:
        mpirun = f"Open MPI {started[0]}" if started is not None and int(library[1]) < int(started[0]) else None
    return mpirun and f"Horovod's MPI is {build.library}, which does not work under the mpirun of {mpirun}"
