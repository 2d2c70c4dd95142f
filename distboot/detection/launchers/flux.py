"""Flux: a task of `flux run` or `flux submit`. A batch script is not a task.

No variable has the node index or the number of tasks on this node: --taskmap may place them in any
order.
"""

from __future__ import annotations

from ..left_over import LeftOver
from . import Launcher, Numbers

FLUX = Launcher(
    name="flux",
    title="Flux jobs (flux run, flux submit)",
    source="documentation: flux-core, flux-environment(7)",
    sample=(
        "FLUX_TASK_RANK={rank} FLUX_TASK_LOCAL_ID={local} FLUX_JOB_SIZE={size} "
        "FLUX_JOB_NNODES={nodes} FLUX_JOB_ID=ƒD2e73NP PMI_RANK={rank} PMI_SIZE={size}"
    ),
    markers=("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    numbers=Numbers(
        rank="FLUX_TASK_RANK",
        world_size="FLUX_JOB_SIZE",
        local_rank="FLUX_TASK_LOCAL_ID",
        num_nodes="FLUX_JOB_NNODES",
    ),
    must_equal={"PMI_RANK": "FLUX_TASK_RANK", "PMI_SIZE": "FLUX_JOB_SIZE"},
    # The first has the ids of all jobs around this one, too: a job's own id is unique in its
    # instance of Flux only.
    job_id_variables=("FLUX_JOB_ID_PATH", "FLUX_JOB_ID"),
    nodes_are_hosts=True,
    uses_daemons=True,
    starts_daemons=True,
    left_over=(LeftOver("FLUX_JOB_SIZE", "flux run", ("FLUX_TASK_RANK", "FLUX_JOB_SIZE")),),
    programs=("flux-shell",),
    mpi="maybe",
    unbind="flux run -o cpu-affinity=off",
    env_forwarding_hint="flux run --env=NAME=VALUE …",
)
