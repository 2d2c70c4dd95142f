"""Slurm: a task of a job step, as `srun` starts it; and `single`, a process that no launcher started.

A bare allocation (salloc), the body of a batch script (sbatch) and an interactive shell are not steps: they hold
one process and stale numbers. Only SLURM_STEP_* and the task's own variables are the step's truth. A step of several
components (`srun A : B`) is one world, and so is a plain `srun` in a heterogeneous job.
A batch script has SLURM_PROCID=0 and SLURM_NTASKS, as the first task has: a rank above 0 is a task, and rank 0 is one
where the id or the size of a step is there, too. `single` refuses the rest, and a process in whose environment
half of a launcher is left over.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...base.errors import UNKNOWN_RANK, DistbootError
from ...base.text import digits
from ..env_reader import EnvReader, container_env_hint, variable
from ..parse import expand_counts, expand_hosts
from . import Launcher, has_any

# Slurm 22.05.8, srun -N2 -n4, rank 3:
#   SLURM_STEP_ID=0   SLURM_STEP_NUM_TASKS=4   SLURM_STEP_NUM_NODES=2   SLURM_STEP_NODELIST=nodea,nodeb
#   SLURM_STEP_TASKS_PER_NODE=3,1   SLURM_PROCID=3   SLURM_LOCALID=0   SLURM_NODEID=1   SLURM_GTIDS=3
_MARKERS = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")

# The size of the step; and what srun sets to it, too, unless it was told to keep that of the job (--preserve-env).
_SIZE = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")

# srun sets the former for its tasks to what the latter say (env_array_for_step in Slurm's env.c).
_SAME_IN_A_STEP = (
    ("SLURM_NNODES", "SLURM_STEP_NUM_NODES"),
    ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
)

# The step id of `salloc`'s own shell where the site has LaunchParameters=use_interactive_step (slurm.h:
# SLURM_INTERACTIVE_STEP).
INTERACTIVE_STEP = "4294967290"


def _claim(environ: Mapping[str, str]) -> bool:
    is_task = has_any(environ, _MARKERS) or environ.get("SLURM_PROCID", "0") != "0"
    # srun --pty bash: one task, which is the shell; what runs in it is not a task of the step.
    in_shell = "SLURM_PTY_PORT" in environ and environ.get("SLURM_STEP_NUM_TASKS") == "1"
    return is_task and not in_shell and environ.get("SLURM_STEP_ID") != INTERACTIVE_STEP


def _read(reader: EnvReader) -> None:
    node_index = reader.integer("SLURM_NODEID")
    hosts = _hosts(reader)
    own = _own_place(reader, hosts, node_index)
    _read_layout(reader, own)
    _refuse_older_step(reader)
    job = reader.text("SLURM_JOB_ID")
    step = reader.text("SLURM_STEP_ID")
    if job is not None and step is not None:
        reader.put("SLURM_JOB_ID and SLURM_STEP_ID", job_id=f"{job}.{step}")
    ordered = _fills_nodes_in_order(reader, node_index)
    if ordered:
        reader.put("SLURM_NODEID", node_rank=node_index)
    # The list is sorted by name. In a step of several components (srun A : B) the ranks need not be.
    first_is_rank0 = ordered and own == node_index and "SLURM_HET_SIZE" not in reader.environ
    if hosts and (first_is_rank0 or reader.number("num_nodes") == 1):
        reader.own_address = (hosts[0], "first host of SLURM_STEP_NODELIST")


def _hosts(reader: EnvReader) -> list[str]:
    """The hosts of the step."""
    name = "SLURM_STEP_NODELIST"
    hosts = reader.parsed(name, expand_hosts) or []
    num_nodes = reader.number("num_nodes")
    if hosts and num_nodes is not None and len(hosts) != num_nodes:
        reader.reject(name, f"does not name SLURM_STEP_NUM_NODES={num_nodes} hosts")
    return hosts


def _refuse_older_step(reader: EnvReader) -> None:
    """Refuse the variables of a step in which this job was submitted: the job has its own of the job."""
    environ = reader.environ
    for of_job, of_step in _SAME_IN_A_STEP:
        if of_job not in environ or of_step not in environ:
            continue
        if environ[of_job] != environ[of_step]:
            reader.reject(
                of_step,
                f"contradicts {variable(environ, of_job)}: SLURM_STEP_* are left over from the "
                "step in which this job was submitted, or `srun --preserve-env` kept the latter",
            )
            return


def _fills_nodes_in_order(reader: EnvReader, node_index: int | None) -> bool:
    # With -m arbitrary (a SLURM_HOSTFILE) rank 0 may be on any node: node indices do not follow the ranks then, and
    # the first host of the list need not be rank 0's. Without -m nothing says how, or a container was not told.
    order = reader.environ.get("SLURM_DISTRIBUTION")
    if "SLURM_HOSTFILE" in reader.environ or (order is None and reader.absent):
        return False
    if node_index is None or not (order or "block").startswith(("block", "cyclic", "plane")):
        return False
    rank = _lowest_rank(reader)
    if rank is None:
        return True
    if node_index == 0:
        return True
    return rank > 0 and node_index <= rank


def _lowest_rank(reader: EnvReader) -> int | None:
    """The lowest rank on this node; its own where nothing lists them."""
    first = digits(reader.environ.get("SLURM_GTIDS", "").partition(",")[0])
    if first is None:
        return reader.number("rank")
    return first


def _own_place(reader: EnvReader, hosts: list[str], node_index: int | None) -> int | None:
    """Where this node is in the lists of hosts and of counts."""
    num_nodes = reader.number("num_nodes")
    if node_index is not None and num_nodes is not None and node_index >= num_nodes:
        reader.problems.append(
            f"SLURM_NODEID={node_index} is not below SLURM_STEP_NUM_NODES={num_nodes}"
        )
    name = reader.text("SLURMD_NODENAME")
    if name is None:  # in a step of several components the indexes need not be those of the lists
        return 0 if num_nodes == 1 else None
    if name in hosts:
        return hosts.index(name)
    if hosts:
        reader.reject(
            "SLURMD_NODENAME", f"is not in {variable(reader.environ, 'SLURM_STEP_NODELIST')}"
        )
    return None


def _read_layout(reader: EnvReader, own: int | None) -> None:
    """The local size, and whether all numbers of the layout fits together."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    counts = reader.parsed(name, expand_counts)
    if counts is not None:
        _check_counts(reader, name, counts)
        num_nodes = reader.number("num_nodes")
        is_whole = num_nodes is None or num_nodes == len(counts)
        if is_whole and own is not None and own < len(counts):
            reader.put(f"{name} of this node", local_world_size=counts[own])
    _check_ids(reader)


def _check_counts(reader: EnvReader, name: str, counts: list[int]) -> None:
    """The counts of all nodes are those of the step."""
    world_size = reader.number("world_size")
    num_nodes = reader.number("num_nodes")
    if world_size is not None and sum(counts) != world_size:
        reader.reject(name, f"does not add up to {reader.first(*_SIZE)}={world_size}")
    if num_nodes is not None and len(counts) != num_nodes:
        reader.reject(name, f"is not about SLURM_STEP_NUM_NODES={num_nodes} nodes")


def _check_ids(reader: EnvReader) -> None:
    """SLURM_GTIDS=1,3: the global ids of this node's tasks, in the order of their local ids."""
    ids = reader.text("SLURM_GTIDS")
    rank = reader.number("rank")
    local_rank = reader.number("local_rank")
    here = reader.number("local_world_size")
    if ids is None or rank is None or local_rank is None or here is None:
        return
    listed = ids.split(",")
    if len(listed) != here or local_rank >= here or listed[local_rank] != str(rank):
        reader.reject(
            "SLURM_GTIDS",
            f"does not have {here} tasks with SLURM_PROCID={rank} at SLURM_LOCALID={local_rank}",
        )


SLURM = Launcher(
    name="slurm",
    title="Slurm job steps (srun)",
    markers=_MARKERS,
    triggers=("SLURM_PROCID",),
    numbers=("SLURM_PROCID", _SIZE[0], "SLURM_LOCALID", None, None, "SLURM_STEP_NUM_NODES"),
    instead=dict([_SIZE]),
    same={"PMI_RANK": "SLURM_PROCID", "PMI_SIZE": _SIZE[0]},
    more=_read,
    nodes_are_hosts=True,
    source="captures of 22.05.8; srun(1), OUTPUT ENVIRONMENT VARIABLES",
    claim=_claim,
    programs=("slurmstepd",),
    env_forwarding_hint="srun --export=ALL,NAME=VALUE …",
)


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


def _claim_single(environ: Mapping[str, str]) -> bool:
    """Refuse where something is left over of a launcher; else this process is alone."""
    # The one task of an interactive shell has these, too, some where the site's MpiDefault is not none.
    in_shell = environ.get("SLURM_STEP_NUM_TASKS") == "1"
    _refuse_task_0(environ)
    for name, (started_by, needed) in _LEFT_OVER.items():
        if name in environ and not (
            in_shell and name.startswith(("SLURM_", "PMI_", "PMIX_", "PALS_"))
        ):
            _refuse(environ, name, started_by, needed)
    for name in ("SLURM_GTIDS", "SLURM_LOCALID", "SLURM_NODEID"):  # which the batch script has, too
        if environ.get(name, "0") != "0" and not in_shell:
            _refuse(environ, name, "srun", "SLURM_PROCID SLURM_STEP_NUM_TASKS")
    # The job script of PBS is its task 1; pbsdsh counts on from there, and nothing says how many it starts.
    if environ.get("PBS_TASKNUM", "1") != "1":
        _refuse(environ, "PBS_TASKNUM", "pbsdsh, which numbers tasks but does not count them")
    return True


def _refuse(environ: Mapping[str, str], name: str, started_by: str, needed: str = "") -> None:
    to_container = (
        f"to pass it to a container: {container_env_hint(*needed.split())}; else " if needed else ""
    )
    raise DistbootError(
        "unsupported-launcher",
        f"{variable(environ, name)} was set by {started_by}, so this process may not be alone, "
        "but the environment does not have both its rank and the number of ranks",
        f"{to_container}set RANK, WORLD_SIZE and LOCAL_RANK for every process and DISTBOOT_LAUNCHER=torch, "
        "or DISTBOOT_LAUNCHER=none if this process is alone",
    ).of(UNKNOWN_RANK)


def _refuse_task_0(environ: Mapping[str, str]) -> None:
    """Refuse what may be the first task of a Slurm step: a batch script has its rank and size, too."""
    # Else `slurm` has claimed it
    is_shell = "SLURM_STEP_ID" in environ or "SLURM_STEP_NUM_TASKS" in environ
    is_batch_script = environ.get("ENVIRONMENT") == "BATCH" and all(
        name in environ for name in _BATCH_SCRIPT
    )
    if (
        "SLURM_PROCID" in environ
        and not is_shell
        and not is_batch_script
        and environ.get("SLURM_NTASKS") != "1"
    ):
        raise DistbootError(
            "unsupported-launcher",
            f"{variable(environ, 'SLURM_PROCID')} is set in the first task of a step and in a batch script, and the "
            "environment does not tell which of them this process is",
            f"pass SLURM_STEP_ID, too, to the container of a task: {container_env_hint('SLURM_STEP_ID')}; or set "
            "DISTBOOT_LAUNCHER=slurm if it is a task, DISTBOOT_LAUNCHER=none if it is alone",
        ).of(UNKNOWN_RANK)


def _read_single(reader: EnvReader) -> None:
    reader.put("no launcher", rank=0, world_size=1)
    reader.notes.extend(note for name, note in _NO_LAUNCHER.items() if name in reader.environ)


SINGLE = Launcher(
    name="single",
    title="no launcher: one process",
    markers=(),
    more=_read_single,
    source="the contract: nothing claims the environment",
    claim=_claim_single,
)
