"""PALS: `mpiexec` and `aprun` on HPE Cray systems (Polaris, Aurora, Derecho).

Slurm (`--mpi=cray_shasta`) and Flux set PALS_* too, for Cray's MPI library; they are asked first.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..placement import Placement
from ..reading import Reading
from ._launcher import Launcher, claims

# mpiexec -n 4 --ppn 2, rank 3:
#   PALS_RANKID=3   PALS_NODEID=1   PALS_LOCAL_RANKID=1   PALS_LOCAL_SIZE=2   PALS_APID=0f3b9c7e-…
#   PMI_RANK=3   PMI_SIZE=4   PMI_LOCAL_RANK=1   PMI_LOCAL_SIZE=2
# No PALS variable has the number of ranks (PALS_NRANKS is an option of mpiexec, and may be anybody's): PMI_SIZE has.
_MARKERS = ("PALS_RANKID", "PALS_NODEID")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS) or "SLURM_STEP_ID" in environ:
        return None
    reading = Reading(environ, "pals")
    rank = reading.integer("PALS_RANKID", "rank")
    reading.integer("PMI_SIZE", "world_size")
    reading.integer("PALS_LOCAL_RANKID", "local_rank", required=False)
    reading.integer("PALS_LOCAL_SIZE", "local_world_size", required=False)
    node = reading.integer("PALS_NODEID")
    if rank is not None and node is not None and node <= rank:  # else somebody mapped the ranks to nodes as they liked
        reading.put("node_rank", node, "PALS_NODEID")
    reading.agree("PMI_RANK", rank, "PALS_RANKID")
    reading.agree("PMI_LOCAL_RANK", reading.number("local_rank"), "PALS_LOCAL_RANKID")
    reading.agree("PMI_LOCAL_SIZE", reading.number("local_world_size"), "PALS_LOCAL_SIZE")
    reading.job_id("PALS_APID")
    return reading.placement(nodes_are_hosts=True)


PALS = Launcher(
    name="pals",
    title="PALS (mpiexec and aprun on HPE Cray)",
    markers=_MARKERS,
    read=_read,
    source="documentation: HPE pals.h, 'Environment variables available for applications'",
    has_daemons=True,
    passing="mpiexec --env NAME=VALUE …",
)
