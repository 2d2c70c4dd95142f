"""`single`: one process that nobody launched. Only when no launcher, and no half of one, is left in the environment."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import DistbootError
from ..placement import Placement
from ..reading import Reading, variable
from ._launcher import Launcher
from ._unsupported import HINT

# Variables that exist only in a process that some launcher started as one of several.
_LEFT_OVER = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "Open MPI",
    "GROUP_RANK": "torchrun",
    "HOROVOD_LOCAL_RANK": "horovodrun",
    "PMI_RANK": "an MPI launcher or srun --mpi=pmi2",
    "PMI_SIZE": "an MPI launcher or srun --mpi=pmi2",
    "PMIX_RANK": "Open MPI, prterun or srun --mpi=pmix",
    "JSM_NAMESPACE_RANK": "LSF's jsrun",
    "PALS_RANKID": "PALS (aprun, mpiexec on Cray)",
    "FLUX_TASK_RANK": "flux run",
    "AWS_BATCH_JOB_NODE_INDEX": "an AWS Batch multi-node job",
    "PET_NNODES": "an operator that expects torchrun to be started",
    "PET_NPROC_PER_NODE": "an operator that expects torchrun to be started",
    "PET_NODE_RANK": "an operator that expects torchrun to be started",
}


def _read(environ: Mapping[str, str]) -> Placement:
    for name, started_by in _LEFT_OVER.items():
        if name in environ:
            raise DistbootError(
                "unsupported-launcher",
                f"{variable(environ, name)} was set by {started_by}, so this process may not be alone, "
                "but no launcher that distboot can read claims it",
                HINT,
            )
    return alone(environ)


def alone(environ: Mapping[str, str]) -> Placement:
    """A job of this one process, whatever else the environment says."""
    reading = Reading(environ, "single")
    reading.put("rank", 0, "no launcher")
    reading.put("world_size", 1, "no launcher")
    if "SLURM_JOB_ID" in environ:
        reading.notes.append(
            "SLURM_* ignored: this is an allocation, a batch script or an interactive shell, not a step; "
            "start the script with srun to run one process a task"
        )
    return reading.placement()


SINGLE = Launcher(
    name="single",
    title="no launcher: one process",
    markers=(),
    read=_read,
    source="the contract: nothing claims the environment",
)
