"""`init("mpi")`: mpi4py's communicators, of all ranks and of those on each node, in the order of the roster."""

from __future__ import annotations

from collections.abc import Mapping

from ..context import Context
from ..exports import Exported
from ..mpi import started
from ..rollcall.meeting import Meeting
from ..rollcall.ready import Ready
from ._joined import Gated, context, export, imported
from ._options import Options


def on_cpu(_: Options) -> bool:
    """MPI itself uses no accelerator."""
    return True


def exports(_meeting: Meeting, _environ: Mapping[str, str]) -> dict[str, str]:
    """Nothing: MPI has its own ways."""
    return {}


def start(meeting: Meeting, exported: Exported, options: Options) -> Context:
    """Start MPI, unless it has been started, and split its world."""
    meeting.ready(lambda: (imported("mpi4py", "mpi4py", "pip install mpi4py"), Ready()))
    placement = meeting.placement
    world = started(placement, meeting.join_timeout)
    export(meeting, exported)
    comm = world.Dup()
    local_comm = world.Split(placement.node_rank, placement.local_rank)
    meets = Gated(meeting, options)
    meets.barrier = comm.Barrier  # type: ignore[method-assign]
    return context(meeting, exported, options, meets, comm=comm, local_comm=local_comm)
