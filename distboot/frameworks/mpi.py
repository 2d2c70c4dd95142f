"""`init("mpi")`: mpi4py's communicators, of all ranks and of those on each node, in the order of the roster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import mpi
from ..context import Context
from ..errors import DistbootError
from ..exports import Exported
from ..placement import Placement
from ..rollcall.meeting import Meeting
from ..rollcall.ready import Ready
from ._joined import Gated, context, export, imported
from ._options import Options

# They start processes of their own, and never through MPI.
_WITHOUT_MPI = ("torchrun", "deepspeed", "horovodrun", "lightning")


def on_cpu(_: Options) -> bool:
    """MPI itself uses no accelerator."""
    return True


def exports(_meeting: Meeting, _environ: Mapping[str, str]) -> dict[str, str]:
    """Nothing: MPI has its own ways."""
    return {}


def start(meeting: Meeting, exported: Exported, options: Options) -> Context:
    """Start MPI, unless it has been started, and split its world."""
    placement = meeting.placement

    def step() -> tuple[Any, Ready]:
        _refuse_launcher(placement)
        imported("mpi4py", "mpi4py", "pip install mpi4py")
        return mpi.loaded(), Ready()

    library = meeting.ready(step)
    with mpi.starting(library, placement, meeting.join_timeout) as world:
        comm = world.Dup()
        local_comm = world.Split(placement.node_rank, placement.local_rank)
    export(meeting, exported)

    def is_up() -> bool:
        return not library.Is_finalized()

    def leave() -> None:
        if is_up():
            local_comm.Free()
            comm.Free()

    meets = Gated(meeting, options, barrier=comm.Barrier)
    return context(meeting, exported, options, meets, leave=leave, is_up=is_up, comm=comm, local_comm=local_comm)


def _refuse_launcher(placement: Placement) -> None:
    if placement.launcher in _WITHOUT_MPI and placement.world_size > 1:
        raise DistbootError(
            "mpi-mismatch",
            f"launcher {placement.launcher!r} does not start MPI: each of the {placement.world_size} ranks would "
            "be a world of its own",
            "start the job with mpirun (or srun --mpi=…), or use a framework that needs no MPI",
        )
