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
#   OMPI_COMM_WORLD_LOCAL_RANK=0   OMPI_COMM_WORLD_LOCAL_SIZE=1   OMPI_UNIVERSE_SIZE=4
#   PMIX_NAMESPACE=prterun-nodea-22774@1
# Open MPI 4.1.4 has the same four, and
#   PMIX_NAMESPACE=283049985       OMPI_MCA_ess_base_jobid=283049985
# Never read: OMPI_COMM_WORLD_NODE_RANK (the local rank again); OMPI_MCA_orte_hnp_uri and the host in PMIX_NAMESPACE
# (mpirun's host, which need not be rank 0's); OMPI_MCA_orte_num_nodes (counts a host several times with --map-by seq).
_RANKING = ("OMPI_MCA_rmaps_base_ranking_policy", "PRTE_MCA_rmaps_default_ranking_policy")
_MARKERS = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS):
        return None
    reading = Reading(environ, "openmpi")
    rank = reading.integer("OMPI_COMM_WORLD_RANK", "rank")
    size = reading.integer("OMPI_COMM_WORLD_SIZE", "world_size")
    local_rank = reading.integer("OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = reading.integer("OMPI_COMM_WORLD_LOCAL_SIZE", "local_world_size")
    reading.agree("PMIX_RANK", rank, "OMPI_COMM_WORLD_RANK")
    reading.agree("OMPI_WORLD_SIZE", size, "OMPI_COMM_WORLD_SIZE")  # 5 only
    reading.agree("OMPI_WORLD_LOCAL_SIZE", local_size, "OMPI_COMM_WORLD_LOCAL_SIZE")  # 5 only
    if local_size == size and local_rank is not None and size is not None and local_rank < size:
        reading.put("local_rank", rank, "derived: all processes are on this node")
    elif _in_rank_order(environ, rank, size, local_size):
        reading.put("local_rank", local_rank, "OMPI_COMM_WORLD_LOCAL_RANK")
    else:
        reading.notes.append(
            "OMPI_COMM_WORLD_LOCAL_RANK need not follow the order of ranks here, so it is not believed"
        )
    reading.job_id("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
    return reading.placement(nodes_are_hosts=True)


def _in_rank_order(environ: Mapping[str, str], rank: int | None, size: int | None, local_size: int | None) -> bool:
    """Whether the local ranks of Open MPI increase with the rank, as PyTorch's do."""
    # It hands them out in the order in which it maps processes to slots. That is another order where there are more
    # processes than slots (5.0.11, --map-by :OVERSUBSCRIBE, 4 on 2 slots: 0, 2, 1, 3), or with --rank-by; and in 5
    # without any trace where it maps by package (0, 2, 1, 3 on two packages). 4 is known by a variable of its own.
    is_4 = "OMPI_VERSION" not in environ and environ.get("OMPI_MCA_ess_base_vpid") == str(rank)
    if not is_4 and local_size not in (1, 2):
        return False
    slots = environ.get("OMPI_UNIVERSE_SIZE", "")
    enough = slots.isascii() and slots.isdigit() and size is not None and int(slots[:9]) >= size
    return enough and not any(name in environ for name in _RANKING)


OPENMPI = Launcher(
    name="openmpi",
    title="Open MPI 4 and 5 (mpirun, mpiexec)",
    markers=_MARKERS,
    read=_read,
    source="captures of 4.1.4 and 5.0.11; Open MPI FAQ, 'environment variables that Open MPI defines'",
    has_daemons=True,
    passing="mpirun -x NAME=VALUE …",
    local_index="OMPI_COMM_WORLD_LOCAL_RANK",
)
