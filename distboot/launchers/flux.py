"""Flux: a task of a job, as `flux run` and `flux submit` start it. A batch script or `flux alloc` shell is no task."""

from __future__ import annotations

from collections.abc import Mapping

from ..placement import Placement
from ..reading import Reading
from ._launcher import Launcher, claims

# flux run -N2 -n4, rank 3:
#   FLUX_TASK_RANK=3   FLUX_TASK_LOCAL_ID=1   FLUX_JOB_SIZE=4   FLUX_JOB_NNODES=2   FLUX_JOB_ID=ƒD2e73NP
#   PMI_RANK=3   PMI_SIZE=4
# There is no node index and no count of the tasks here: --taskmap may place them in any order.
_MARKERS = ("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS):
        return None
    reading = Reading(environ, "flux")
    rank = reading.integer("FLUX_TASK_RANK", "rank")
    size = reading.integer("FLUX_JOB_SIZE", "world_size")
    reading.integer("FLUX_TASK_LOCAL_ID", "local_rank")
    reading.integer("FLUX_JOB_NNODES", "num_nodes")
    reading.agree("PMI_RANK", rank, "FLUX_TASK_RANK")
    reading.agree("PMI_SIZE", size, "FLUX_JOB_SIZE")
    # The path has the ids of all jobs around this one: a job's own id is unique in its instance of Flux only.
    reading.job_id("FLUX_JOB_ID_PATH", "FLUX_JOB_ID")
    return reading.placement(nodes_are_hosts=True)


FLUX = Launcher(
    name="flux",
    title="Flux jobs (flux run, flux submit)",
    markers=_MARKERS,
    read=_read,
    source="documentation: flux-core, flux-environment(7)",
    has_daemons=True,
    passing="flux run --env=NAME=VALUE …",
)
