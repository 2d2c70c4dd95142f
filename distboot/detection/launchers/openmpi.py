"""Open MPI (`mpirun`, `mpiexec`), also in Azure ML's MPI jobs and under the MPI operator.

A process does not know which nodes the other ranks are on: the node rank, and the host of rank 0,
stay unknown where there are several nodes. No two processes of a node have the same local rank, but
local ranks need not follow the order of ranks: 0, 2, 1, 3 for four processes on two slots, on two
packages, or with --rank-by (5.0.8 and 5.0.11).

Never read: OMPI_COMM_WORLD_NODE_RANK (the local rank again); OMPI_MCA_orte_hnp_uri and the host in
PMIX_NAMESPACE (the host of mpirun, which need not be that of rank 0); OMPI_MCA_orte_num_nodes
(counts a host several times with --map-by seq).
"""

from __future__ import annotations

from ..left_over import LeftOver
from . import Launcher, Numbers

_RANK = "OMPI_COMM_WORLD_RANK"
_SIZE = "OMPI_COMM_WORLD_SIZE"

OPENMPI = Launcher(
    name="openmpi",
    title="Open MPI (mpirun, mpiexec)",
    source=(
        "captures of 4.1.4 and 5.0.11; Open MPI FAQ, 'environment variables that Open MPI defines'"
    ),
    # 5.0.11, which also sets PMIX_NAMESPACE=prterun-nodea-22774@1. 4.1.4 has neither OMPI_WORLD_*
    # nor OMPI_VERSION, and PMIX_NAMESPACE=283049985 OMPI_MCA_ess_base_jobid=283049985.
    sample=(
        "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE={size} "
        "OMPI_COMM_WORLD_LOCAL_RANK={local} OMPI_COMM_WORLD_LOCAL_SIZE={per_node} "
        "OMPI_COMM_WORLD_NODE_RANK={local} OMPI_UNIVERSE_SIZE={size} "
        "OMPI_WORLD_SIZE={size} OMPI_WORLD_LOCAL_SIZE={per_node} OMPI_VERSION=5.0.11"
    ),
    markers=(_RANK, _SIZE),
    numbers=Numbers(
        rank=_RANK,
        world_size=_SIZE,
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    fallbacks={_RANK: "PMIX_RANK"},
    must_equal={
        "PMIX_RANK": _RANK,
        "OMPI_WORLD_SIZE": _SIZE,
        "OMPI_WORLD_LOCAL_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    job_id_variables=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    in_order=(),
    nodes_are_hosts=True,
    uses_daemons=True,
    left_over=(
        LeftOver("OMPI_COMM_WORLD_LOCAL_RANK", "Open MPI", (_RANK, _SIZE)),
        LeftOver("OMPI_COMM_WORLD_NODE_RANK", "Open MPI", (_RANK, _SIZE)),
        LeftOver(
            "PMIX_RANK",
            "Open MPI (or by srun --mpi=pmix, beside SLURM_PROCID and SLURM_STEP_NUM_TASKS)",
            (_SIZE,),
            in_shell=True,
        ),
    ),
    of_one_process="OMPI_COMM_WORLD_|PMIX_(?!MCA_)",
    # mpirun, which is also the daemon of its own host, and the daemons of the other hosts. 5 runs
    # prterun in its place.
    programs=(
        *("prterun", "prted", "prte", "orterun", "orted"),
        *("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi"),
    ),
    mpi="yes",
    read_by=("horovod", "jax"),
    # The variables are for a platform that calls mpirun itself: for 4, and for 5
    unbind=(
        "mpirun --bind-to none; where a platform starts mpirun, set in the environment of the job "
        "OMPI_MCA_hwloc_base_binding_policy=none and PRTE_MCA_hwloc_default_binding_policy=none"
    ),
    env_forwarding_hint="mpirun -x NAME=VALUE …",
)
