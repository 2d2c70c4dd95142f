"""Open MPI 4 and 5: `mpirun`, `mpiexec`, `prterun --personality ompi`; also Azure ML's MPI jobs and the MPI operator.

One process knows its rank and its local numbers, but not which nodes the other ranks are on: the node rank,
and rank 0's host, stay unknown when there are several nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..placement import Placement
from ..reading import Reading
from ._launcher import Launcher, claims

# Open MPI 5.0.11, 3 + 1 processes, rank 3:
#   OMPI_COMM_WORLD_RANK=3         OMPI_COMM_WORLD_SIZE=4
#   OMPI_COMM_WORLD_LOCAL_RANK=0   OMPI_COMM_WORLD_LOCAL_SIZE=1
#   PMIX_NAMESPACE=prterun-nodea-22774@1
# Open MPI 4.1.4 has the same four, and
#   PMIX_NAMESPACE=283049985       OMPI_MCA_ess_base_jobid=283049985   OMPI_MCA_orte_num_nodes=2
# Never read: OMPI_COMM_WORLD_NODE_RANK (the local rank again), OMPI_MCA_orte_hnp_uri and the host in
# PMIX_NAMESPACE (mpirun's host, which need not be rank 0's).
_MARKERS = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS):
        return None
    reading = Reading(environ, "openmpi")
    rank = reading.integer("OMPI_COMM_WORLD_RANK", "rank")
    size = reading.integer("OMPI_COMM_WORLD_SIZE", "world_size")
    local_rank = reading.integer("OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = reading.integer("OMPI_COMM_WORLD_LOCAL_SIZE", "local_world_size")
    reading.integer("OMPI_MCA_orte_num_nodes", "num_nodes", required=False)  # nodes of the job map, 4 only
    reading.agree("OMPI_WORLD_SIZE", size, "OMPI_COMM_WORLD_SIZE")  # 5 only
    reading.agree("OMPI_WORLD_LOCAL_SIZE", local_size, "OMPI_COMM_WORLD_LOCAL_SIZE")  # 5 only
    _put_local_rank(reading, rank, size, local_rank, local_size)
    reading.job_id("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return reading.placement(nodes_are_hosts=True)


def _put_local_rank(
    reading: Reading, rank: int | None, size: int | None, local_rank: int | None, local_size: int | None
) -> None:
    # Open MPI hands out local ranks in the order in which it maps processes to slots. Where that is not the
    # order of ranks (5.0.11, --map-by :OVERSUBSCRIBE, 4 processes on 2 slots: 0, 2, 1, 3), its local rank is
    # not PyTorch's, which increases with the rank.
    name = "OMPI_COMM_WORLD_LOCAL_RANK"
    if rank is None or size is None or local_rank is None or local_size is None or local_rank >= local_size:
        reading.put("local_rank", local_rank, name)
    elif local_size == size:
        reading.put("local_rank", rank, "derived: all processes are on this node, in the order of ranks")
    elif local_rank <= rank and local_size - local_rank <= size - rank:
        reading.put("local_rank", local_rank, name)
    else:
        reading.notes.append(f"{name}={local_rank} ignored: it does not follow the order of ranks")


OPENMPI = Launcher(
    name="openmpi",
    title="Open MPI 4 and 5 (mpirun, mpiexec)",
    markers=_MARKERS,
    read=_read,
    source="captures of 4.1.4 and 5.0.11; Open MPI FAQ, 'environment variables that Open MPI defines'",
    passing="mpirun -x NAME=VALUE …",
)
