"""LSF's `jsrun` (the job step manager JSM of Summit, Sierra and their kind).

It also sets Open MPI's variables, for Spectrum MPI; its own come first. A plain `bsub` job is no launcher.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..placement import Placement
from ..reading import Reading
from ._launcher import Launcher, claims

# jsrun, rank 3 of 4 with two a node:
#   JSM_NAMESPACE_RANK=3   JSM_NAMESPACE_SIZE=4   JSM_NAMESPACE_LOCAL_RANK=1   JSM_NAMESPACE_LOCAL_SIZE=2
#   LSB_JOBID=1234
_MARKERS = ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS):
        return None
    reading = Reading(environ, "lsf")
    rank = reading.integer("JSM_NAMESPACE_RANK", "rank")
    size = reading.integer("JSM_NAMESPACE_SIZE", "world_size")
    reading.integer("JSM_NAMESPACE_LOCAL_RANK", "local_rank")
    reading.integer("JSM_NAMESPACE_LOCAL_SIZE", "local_world_size", required=False)
    reading.agree("OMPI_COMM_WORLD_RANK", rank, "JSM_NAMESPACE_RANK")
    reading.agree("OMPI_COMM_WORLD_SIZE", size, "JSM_NAMESPACE_SIZE")
    reading.job_id("LSB_JOBID")
    return reading.placement(nodes_are_hosts=True)


LSF = Launcher(
    name="lsf",
    title="LSF job steps (jsrun)",
    markers=_MARKERS,
    read=_read,
    source="documentation: PyTorch Lightning's LSFEnvironment ('JSM_NAMESPACE_LOCAL_RANK: the node local rank')",
    has_daemons=True,
    passing="jsrun -E NAME=VALUE …",
)
