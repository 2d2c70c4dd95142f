"""`single`: one process that nobody launched. Only when no launcher, and no half of one, is left in the environment."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import DistbootError
from ..placement import Placement
from ..reading import Reading, variable
from ._launcher import Launcher

# Variables that exist only in a process that some launcher started as one of several.
_LEFT_OVER = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "Open MPI",
    "MV2_COMM_WORLD_LOCAL_RANK": "MVAPICH2",
    "GROUP_RANK": "torchrun, or by somebody for PyTorch Lightning",
    "HOROVOD_LOCAL_RANK": "horovodrun",
    "PMI_RANK": "an MPI launcher or srun --mpi=pmi2",
    "PMI_SIZE": "an MPI launcher or srun --mpi=pmi2",
    "PMI_ID": "an MPI launcher that serves PMI at a port",
    "PMIX_RANK": "Open MPI, prterun or srun --mpi=pmix",
    "JSM_NAMESPACE_LOCAL_RANK": "LSF's jsrun",
    "LSF_PM_TASKID": "LSF's blaunch, which numbers tasks but does not count them",
    "PALS_LOCAL_RANKID": "PALS (aprun, mpiexec on Cray)",
    "ALPS_APP_PE": "ALPS (aprun on older Crays), which does not count its processes",
    "FLUX_JOB_SIZE": "flux run",
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": "an AWS Batch multi-node job",
}

# What only says that there is an allocation, an index or a host around this process, and what to do about it.
_NO_LAUNCHER = {
    "SLURM_JOB_ID": (
        "SLURM_* ignored: this is an allocation, a batch script or an interactive shell, not a step; "
        "start the script with srun to run one process a task"
    ),
    "FLUX_URI": "FLUX_* ignored: this is a batch script or a shell, not a task; start the script with flux run",
    "PBS_JOBID": "PBS_* ignored: this is a job script, not a process of mpiexec; PBS numbers no ranks itself",
    "LSB_JOBID": "LSB_* ignored: this is a job script, not a step; start the script with jsrun or mpirun",
    "JOB_COMPLETION_INDEX": "JOB_COMPLETION_INDEX ignored: it counts pods of the Job, and nothing says how many",
}


def _read(environ: Mapping[str, str]) -> Placement:
    # The one task of an interactive shell has these, too, where the site's MpiDefault is not none.
    in_shell = environ.get("SLURM_STEP_NUM_TASKS") == "1"
    for name, started_by in _LEFT_OVER.items():
        if name in environ and not (in_shell and name.startswith(("PMI_", "PMIX_", "PALS_"))):
            _refuse(environ, name, started_by)
    for name in ("SLURM_PROCID", "SLURM_GTIDS"):
        if environ.get(name, "0") != "0":  # which the batch script has too
            _refuse(environ, name, "srun, but the variables of its step are gone")
    # The job script of PBS is its task 1; pbsdsh counts on from there, and nothing says how many it starts.
    if environ.get("PBS_TASKNUM", "1") != "1":
        _refuse(environ, "PBS_TASKNUM", "pbsdsh, which numbers tasks but does not count them")
    return alone(environ)


def _refuse(environ: Mapping[str, str], name: str, started_by: str) -> None:
    raise DistbootError(
        "unsupported-launcher",
        f"{variable(environ, name)} was set by {started_by}, so this process may not be alone, "
        "but no launcher that distboot can read claims it",
        "set RANK, WORLD_SIZE and LOCAL_RANK for every process and DISTBOOT_LAUNCHER=torch, "
        "or DISTBOOT_LAUNCHER=none if this process is alone",
    ).of("rank ?")


def alone(environ: Mapping[str, str]) -> Placement:
    """A job of this one process, whatever else the environment says."""
    reading = Reading(environ, "single")
    reading.put("rank", 0, "no launcher")
    reading.put("world_size", 1, "no launcher")
    reading.notes.extend(note for name, note in _NO_LAUNCHER.items() if name in environ)
    return reading.placement()


SINGLE = Launcher(
    name="single",
    title="no launcher: one process",
    markers=(),
    read=_read,
    source="the contract: nothing claims the environment",
)
