"""`single`: one process that no launcher started. Only when no launcher, and no half of one, is in the environment."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import DistbootError
from ..env_reader import EnvReader, container_env_hint, variable
from . import Launcher

# Variables that exist only in a process that some launcher started as one of several: which one, and those of its
# variables that say which process this is, if there are any. A container may not have got them.
_LEFT_OVER = {
    "OMPI_COMM_WORLD_LOCAL_RANK": ("Open MPI", "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE"),
    "OMPI_COMM_WORLD_NODE_RANK": ("Open MPI", "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE"),
    "JSM_NAMESPACE_LOCAL_RANK": ("LSF's jsrun", "JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE"),
    "PMIX_RANK": (
        "Open MPI (or by srun --mpi=pmix, beside SLURM_PROCID and SLURM_STEP_NUM_TASKS)", "OMPI_COMM_WORLD_SIZE",
    ),
    "MV2_COMM_WORLD_LOCAL_RANK": ("MVAPICH2", "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE"),
    "HOROVOD_LOCAL_RANK": ("horovodrun", "HOROVOD_RANK HOROVOD_SIZE"),
    "HOROVOD_CROSS_RANK": ("horovodrun", "HOROVOD_RANK HOROVOD_SIZE"),
    "GROUP_RANK": ("torchrun, or for PyTorch Lightning", "RANK WORLD_SIZE"),
    "ROLE_RANK": ("torchrun", "RANK WORLD_SIZE"),
    "CROSS_RANK": ("DeepSpeed", "RANK WORLD_SIZE"),
    "PALS_LOCAL_RANKID": ("PALS (aprun, mpiexec on Cray)", "PMI_RANK PMI_SIZE"),
    "FLUX_JOB_SIZE": ("flux run", "FLUX_TASK_RANK FLUX_JOB_SIZE"),
    "SLURM_STEP_NODELIST": ("srun", "SLURM_PROCID SLURM_STEP_NUM_TASKS"),
    "SLURM_STEP_TASKS_PER_NODE": ("srun", "SLURM_PROCID SLURM_STEP_NUM_TASKS"),
    "AWS_BATCH_JOB_MAIN_NODE_INDEX": (
        "an AWS Batch multi-node job", "AWS_BATCH_JOB_NODE_INDEX AWS_BATCH_JOB_NUM_NODES",
    ),
    "PMI_ID": ("an MPI launcher that serves PMI at a port", ""),
    "LSF_PM_TASKID": ("LSF's blaunch, which numbers tasks but does not count them", ""),
    "ALPS_APP_PE": ("ALPS (aprun on older Crays), which does not count its processes", ""),
}  # fmt: skip

# All of these are in the environment of a batch script, with SLURM_PROCID=0 and ENVIRONMENT=BATCH (Slurm's env.c,
# env_array_for_batch_job; ParaStation's psslurm, setJobEnv). A container has some of them, of a task or of the script.
_BATCH_SCRIPT = (
    "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_CLUSTER_NAME", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_TASK_PID",
)  # fmt: skip

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


def _claim(environ: Mapping[str, str]) -> bool:
    """Refuse where something is left over of a launcher; else this process is alone."""
    # The one task of an interactive shell has these, too, some where the site's MpiDefault is not none.
    in_shell = environ.get("SLURM_STEP_NUM_TASKS") == "1"
    _refuse_task_0(environ)
    for name, (started_by, needed) in _LEFT_OVER.items():
        if name in environ and not (in_shell and name.startswith(("SLURM_", "PMI_", "PMIX_", "PALS_"))):
            _refuse(environ, name, started_by, needed)
    for name in ("SLURM_GTIDS", "SLURM_LOCALID", "SLURM_NODEID"):  # which the batch script has, too
        if environ.get(name, "0") != "0" and not in_shell:
            _refuse(environ, name, "srun", "SLURM_PROCID SLURM_STEP_NUM_TASKS")
    # The job script of PBS is its task 1; pbsdsh counts on from there, and nothing says how many it starts.
    if environ.get("PBS_TASKNUM", "1") != "1":
        _refuse(environ, "PBS_TASKNUM", "pbsdsh, which numbers tasks but does not count them")
    return True


def _refuse(environ: Mapping[str, str], name: str, started_by: str, needed: str = "") -> None:
    to_container = f"to pass it to a container: {container_env_hint(*needed.split())}; else " if needed else ""
    raise DistbootError(
        "unsupported-launcher",
        f"{variable(environ, name)} was set by {started_by}, so this process may not be alone, "
        "but the environment does not have both its rank and the number of ranks",
        f"{to_container}set RANK, WORLD_SIZE and LOCAL_RANK for every process and DISTBOOT_LAUNCHER=torch, "
        "or DISTBOOT_LAUNCHER=none if this process is alone",
    ).of("rank ?")


def _refuse_task_0(environ: Mapping[str, str]) -> None:
    """Refuse what may be the first task of a Slurm step: a batch script has its rank and size, too."""
    is_shell = "SLURM_STEP_ID" in environ or "SLURM_STEP_NUM_TASKS" in environ  # else `slurm` has claimed it
    is_batch_script = environ.get("ENVIRONMENT") == "BATCH" and all(name in environ for name in _BATCH_SCRIPT)
    if "SLURM_PROCID" in environ and not is_shell and not is_batch_script and environ.get("SLURM_NTASKS") != "1":
        raise DistbootError(
            "unsupported-launcher",
            f"{variable(environ, 'SLURM_PROCID')} is set in the first task of a step and in a batch script, and the "
            "environment does not tell which of them this process is",
            f"pass SLURM_STEP_ID, too, to the container of a task: {container_env_hint('SLURM_STEP_ID')}; or set "
            "DISTBOOT_LAUNCHER=slurm if it is a task, DISTBOOT_LAUNCHER=none if it is alone",
        ).of("rank ?")


def _read(reader: EnvReader) -> None:
    reader.put("no launcher", rank=0, world_size=1)
    reader.notes.extend(note for name, note in _NO_LAUNCHER.items() if name in reader.environ)


SINGLE = Launcher(
    name="single",
    title="no launcher: one process",
    markers=(),
    more=_read,
    source="the contract: nothing claims the environment",
    claim=_claim,
)
