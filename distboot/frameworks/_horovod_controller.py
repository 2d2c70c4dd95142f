"""Whether Horovod's processes communicate with MPI or with Gloo.

MPI where an MPI launcher has started the processes and Horovod's own MPI works under that launcher,
otherwise Gloo. `backend=` of `init` or HOROVOD_CONTROLLER asks for one of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ..base.errors import DistbootError
from ..base.text import log_line, short_repr
from ..detection.order import LAUNCHERS
from ..detection.placement import Placement
from ._horovod_build import Build, rebuild

_CONTROLLER = "HOROVOD_CONTROLLER"
_OPERATIONS = "HOROVOD_CPU_OPERATIONS"

SAME_MPI = (
    "start the job with the mpirun of that MPI, or build Horovod with the MPI of the launcher"
)


class _Wish(NamedTuple):
    """What the user asks for."""

    controller: str | None  # "mpi", "gloo", or None for the default
    source: str  # for example "HOROVOD_CONTROLLER='mpi'"; empty for the default


def may_use_mpi(placement: Placement, environ: Mapping[str, str]) -> bool:
    """Whether the choice depends on how Horovod was built."""
    wish = _wish(environ, None)
    return LAUNCHERS[placement.launcher].mpi == "yes" or wish.controller == "mpi"


def controller(
    build: Build, placement: Placement, environ: Mapping[str, str], backend: str | None = None
) -> str:
    """`"mpi"` or `"gloo"`; an error if Horovod cannot use what is asked for or needed."""
    wish = _wish(environ, backend)
    conflict = _conflict(build, placement, environ)
    if wish.controller == "mpi":
        _refuse_mpi(build, placement, conflict, wish)
        return "mpi"
    if wish.controller is None and _fits_mpi(build, placement, conflict):
        return "mpi"
    _refuse_gloo(build, placement, environ, conflict, wish)
    is_default = wish.controller is None
    if is_default and conflict is not None and placement.rank == 0:
        log_line(
            placement.who,
            f"{conflict}; so Horovod uses Gloo",
        )
    return "gloo"


def _wish(environ: Mapping[str, str], backend: str | None) -> _Wish:
    text = environ.get(_CONTROLLER, "")
    variable = f"{_CONTROLLER}={short_repr(text)}"
    if text and text.lower() not in ("mpi", "gloo"):
        raise DistbootError(
            "broken-environment",
            f"{variable} is neither mpi nor gloo",
            f"unset {_CONTROLLER}",
        )
    if backend is None:
        if not text:
            return _Wish(None, "")
        asked = text.lower()
        return _Wish(asked, variable)
    argument = f"backend={short_repr(backend)}"
    if backend.lower() not in ("mpi", "gloo"):
        raise DistbootError(
            "backend-not-available",
            f"{argument}: Horovod has 'mpi' and 'gloo'",
            "leave backend out to get the right one; NCCL is used for data on GPUs where Horovod "
            "was built with it",
        )
    if text and text.lower() != backend.lower():
        raise DistbootError(
            "broken-environment",
            f"{variable} contradicts {argument}",
            f"unset {_CONTROLLER}",
        )
    return _Wish(backend.lower(), argument)


def _fits_mpi(build: Build, placement: Placement, conflict: str | None) -> bool:
    """Whether MPI is the default."""
    if not build.mpi:
        return False
    if placement.world_size == 1 and not build.gloo:
        return True  # a process that is alone can start MPI without a launcher
    return LAUNCHERS[placement.launcher].mpi == "yes" and conflict is None


def _refuse_mpi(build: Build, placement: Placement, conflict: str | None, wish: _Wish) -> None:
    """Refuse MPI, which the user asks for, where it is not available."""
    if not build.mpi:
        raise _build_error(
            "MPI",
            "HOROVOD_WITH_MPI",
            f"{wish.source} asks for it",
        )
    # Whether what srun starts finds an MPI that fits is not known before MPI starts.
    may_start_mpi = LAUNCHERS[placement.launcher].mpi in ("yes", "maybe")
    if placement.world_size > 1 and not may_start_mpi:
        code = "broken-environment"
        if wish.source.startswith("backend="):
            code = "backend-not-available"
        raise DistbootError(
            code,
            f"{wish.source} asks for MPI, and launcher {placement.launcher!r} does not start it: "
            "each rank would be alone",
            "leave it out, and Horovod uses Gloo; or start the job with mpirun",
        )
    if conflict is not None:
        raise DistbootError(
            "mpi-mismatch",
            f"{wish.source} asks for MPI, and {conflict}",
            f"{SAME_MPI}; or leave it out, and Horovod uses Gloo",
        )


def _refuse_gloo(
    build: Build,
    placement: Placement,
    environ: Mapping[str, str],
    conflict: str | None,
    wish: _Wish,
) -> None:
    """Refuse Gloo where it is not available."""
    if not build.gloo and conflict is not None and wish.controller is None:
        raise DistbootError(
            "mpi-mismatch",
            conflict,
            f"{SAME_MPI}; or with Gloo: {rebuild('HOROVOD_WITH_GLOO')}",
        )
    source = wish.source or f"launcher {placement.launcher!r} without MPI"
    if not build.gloo:
        raise _build_error(
            "Gloo",
            "HOROVOD_WITH_GLOO",
            f"{source} needs it",
        )
    operations = environ.get(_OPERATIONS, "")
    if operations.lower() == "mpi":
        raise DistbootError(
            "broken-environment",
            f"{_OPERATIONS}={short_repr(operations)} contradicts Gloo, which Horovod uses here "
            f"({source})",
            f"unset {_OPERATIONS}, or start the job with the mpirun of Horovod's MPI",
        )


def _build_error(what: str, flag: str, why: str) -> DistbootError:
    return DistbootError(
        "backend-not-available",
        f"this Horovod was built without {what} ({flag}=1), and {why}",
        f"build it again with {what}: {rebuild(flag)}",
    )


def _conflict(build: Build, placement: Placement, environ: Mapping[str, str]) -> str | None:
    """Why Horovod's MPI cannot work under this MPI launcher, where that is certain.

    Each process would be in a world of its own, or end in MPI_Init.
    """
    if build.library is None or LAUNCHERS[placement.launcher].mpi != "yes":
        return None
    mpirun = _conflicting_mpirun(build.library, placement.launcher, environ)
    if mpirun is None:
        return None
    return f"Horovod's MPI is {build.library}, which does not work under the mpirun of {mpirun}"


def _conflicting_mpirun(library: str, launcher: str, environ: Mapping[str, str]) -> str | None:
    """The mpirun that started this process, if this MPI library does not work under it.

    Measured: Open MPI 5.0.11 works under the mpirun of 4.1.4, but not the other way round. Neither
    works under that of MPICH.
    """
    open_mpi = re.match(r"Open MPI v(\d+)", library)
    if launcher != "openmpi":
        if open_mpi is None:
            return None
        return launcher
    if open_mpi is None:
        return "Open MPI"
    # 5 is the first to set the variable
    started = re.match(r"\d+", environ.get("OMPI_VERSION", "4"))
    if started is None or int(open_mpi[1]) >= int(started[0]):
        return None
    return f"Open MPI {started[0]}"
