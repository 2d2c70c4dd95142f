"""PMI_RANK and PMI_SIZE of some MPI launcher: `mpiexec -n 4 docker run -e PMI_RANK -e PMI_SIZE …`.

MPICH, Intel MPI, PALS or `srun --mpi=pmi2` set them. They are enough; the local numbers are not
known.
"""

from __future__ import annotations

from ..left_over import LeftOver
from . import Launcher, Numbers

# Launchers with these set PMI_*, too, and know more. Where none of them claims the process, it is
# the shell of a step.
_OF_OTHERS = (
    "FLUX_TASK_RANK",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "PALS_RANKID",
    "PALS_NODEID",
)


PMI = Launcher(
    name="pmi",
    title="an MPI launcher or srun --mpi=pmi2, of which only PMI_RANK and PMI_SIZE are left",
    source="captures of MPICH, Intel MPI, and Slurm with --mpi=pmi2",
    sample="PMI_RANK={rank} PMI_SIZE={size}",
    markers=("PMI_RANK", "PMI_SIZE"),
    unless=_OF_OTHERS,
    numbers=Numbers(rank="PMI_RANK", world_size="PMI_SIZE"),
    nodes_are_hosts=True,
    uses_daemons=True,
    left_over=(LeftOver("PMI_ID", "an MPI launcher that serves PMI at a port", in_shell=True),),
    of_one_process="PMI_(RANK|SIZE|FD|PORT|ID|JOBID|SPAWNED|LOCAL_)",
    programs=("hydra_pmi_proxy", "hydra_bstrap_proxy", "slurmstepd"),
    job_option="--control-port",  # hydra_pmi_proxy --control-port node-0:35143 --rmk user …
    mpi="yes",
    read_by=("horovod", "jax"),
)
