"""Slurm: a task of a job step, as `srun` starts it.

A bare allocation (salloc), the body of a batch script (sbatch) and an interactive shell are not steps:
they hold one process and stale numbers. Only SLURM_STEP_* and the task's own variables are the step's
truth. A step of several components (`srun A : B`) is one world, and so is a plain `srun` in a
heterogeneous job.

A batch script has SLURM_PROCID=0 and SLURM_NTASKS, as the first task has: a rank above 0 is a task,
and rank 0 is one where the id or the size of a step is there, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...base.errors import UNKNOWN_RANK, DistbootError
from ...base.text import digits
from ..env_reader import EnvReader, container_env_hint, variable
from ..left_over import LeftOver
from ..parse import expand_counts, expand_hosts
from . import Launcher, Step, has_any

_MARKERS = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS")
# The size of the step; and what srun sets to it, too, unless it was told to keep that of the job
# (--preserve-env).
_SIZE = "SLURM_STEP_NUM_TASKS"
_SIZE_OF_JOB = "SLURM_NTASKS"
_NEEDED = ("SLURM_PROCID", _SIZE)
_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_HOSTS = "SLURM_STEP_NODELIST"

# srun sets the former for its tasks to what the latter say (env_array_for_step in Slurm's env.c).
_SAME_IN_A_STEP = (
    ("SLURM_NNODES", "SLURM_STEP_NUM_NODES"),
    (_SIZE_OF_JOB, _SIZE),
    ("SLURM_TASKS_PER_NODE", _PER_NODE),
)

# The step id of `salloc`'s own shell where the site has LaunchParameters=use_interactive_step (slurm.h:
# SLURM_INTERACTIVE_STEP).
INTERACTIVE_STEP = "4294967290"

# All of these are in the environment of a batch script, with SLURM_PROCID=0 and ENVIRONMENT=BATCH
# (Slurm's env.c, env_array_for_batch_job; ParaStation's psslurm, setJobEnv). A container has some of
# them, of a task or of the script.
_BATCH_SCRIPT = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_CLUSTER_NAME",
    "SLURM_NODEID",
    "SLURM_LOCALID",
    "SLURM_TASK_PID",
)


def _claim(environ: Mapping[str, str]) -> bool:
    if environ.get("SLURM_STEP_ID") == INTERACTIVE_STEP:
        return False
    # srun --pty bash: one task, which is the shell; what runs in it is not a task of the step.
    if "SLURM_PTY_PORT" in environ and environ.get(_SIZE) == "1":
        return False
    return has_any(environ, _MARKERS) or environ.get("SLURM_PROCID", "0") != "0"


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
        reader.own_address = (hosts[0], f"first host of {_HOSTS}")


def _hosts(reader: EnvReader) -> list[str]:
    """The hosts of the step."""
    hosts = reader.parsed(_HOSTS, expand_hosts)
    if not hosts:
        return []
    num_nodes = reader.number("num_nodes")
    if num_nodes is not None and len(hosts) != num_nodes:
        reader.reject(_HOSTS, f"does not name SLURM_STEP_NUM_NODES={num_nodes} hosts")
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
    """Whether the node index follows the ranks, and the first host of the list is that of rank 0.

    With -m arbitrary (a SLURM_HOSTFILE) rank 0 may be on any node. Without -m no variable has the
    order, or a container has not got it.
    """
    order = reader.environ.get("SLURM_DISTRIBUTION")
    if "SLURM_HOSTFILE" in reader.environ:
        return False
    if order is None and reader.absent:
        return False
    if order and not order.startswith(("block", "cyclic", "plane")):
        return False
    if node_index is None:
        return False
    rank = _lowest_rank(reader)
    if rank is None or node_index == 0:
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
    if name is None:
        # In a step of several components the indexes need not be those of the lists
        if num_nodes == 1:
            return 0
        return None
    if name in hosts:
        return hosts.index(name)
    if hosts:
        reader.reject("SLURMD_NODENAME", f"is not in {variable(reader.environ, _HOSTS)}")
    return None


def _read_layout(reader: EnvReader, own: int | None) -> None:
    """The local size, and whether all numbers of the layout fit together."""
    counts = reader.parsed(_PER_NODE, expand_counts)
    if counts is not None:
        _check_counts(reader, counts)
        num_nodes = reader.number("num_nodes")
        is_whole = num_nodes is None or num_nodes == len(counts)
        if is_whole and own is not None and own < len(counts):
            reader.put(f"{_PER_NODE} of this node", local_world_size=counts[own])
    _check_ids(reader)


def _check_counts(reader: EnvReader, counts: list[int]) -> None:
    """The counts of all nodes are those of the step."""
    world_size = reader.number("world_size")
    num_nodes = reader.number("num_nodes")
    if world_size is not None and sum(counts) != world_size:
        name = reader.first(_SIZE, _SIZE_OF_JOB)
        reader.reject(_PER_NODE, f"does not add up to {name}={world_size}")
    if num_nodes is not None and len(counts) != num_nodes:
        reader.reject(_PER_NODE, f"is not about SLURM_STEP_NUM_NODES={num_nodes} nodes")


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


def _step(environ: Mapping[str, str]) -> Step | None:
    rank = digits(environ.get("SLURM_PROCID", ""))
    tasks = digits(environ.get(_SIZE, ""))
    nodes = digits(environ.get("SLURM_STEP_NUM_NODES", "0"))
    if rank is None or tasks is None or nodes is None:
        return None
    if "SLURM_PTY_PORT" in environ:
        return None  # an interactive shell, in which anything may have been typed
    return Step(rank, tasks, nodes, environ.get("SLURM_LOCALID", ""))


def _refuse_first_task(environ: Mapping[str, str]) -> None:
    """Refuse what may be the first task of a step: a batch script has its rank and size, too."""
    # A step that `_claim` has not taken for that of a task is the shell's.
    if "SLURM_PROCID" not in environ or has_any(environ, _MARKERS):
        return
    if environ.get(_SIZE_OF_JOB) == "1" or _is_batch_script(environ):
        return
    raise DistbootError(
        "unsupported-launcher",
        f"{variable(environ, 'SLURM_PROCID')} is set in the first task of a step and in a batch "
        "script, and the environment does not tell which of them this process is",
        "pass SLURM_STEP_ID, too, to the container of a task: "
        f"{container_env_hint('SLURM_STEP_ID')}; or set DISTBOOT_LAUNCHER=slurm if it is a task, "
        "DISTBOOT_LAUNCHER=none if it is alone",
    ).of(UNKNOWN_RANK)


def _is_batch_script(environ: Mapping[str, str]) -> bool:
    if environ.get("ENVIRONMENT") != "BATCH":
        return False
    return all(name in environ for name in _BATCH_SCRIPT)


SLURM = Launcher(
    name="slurm",
    title="Slurm job steps (srun)",
    source="captures of 22.05.8; srun(1), OUTPUT ENVIRONMENT VARIABLES",
    # With three tasks on the first node, SLURM_STEP_TASKS_PER_NODE=3,1.
    sample=(
        "SLURM_JOB_ID=4711 SLURM_JOBID=4711 SLURM_STEP_ID=0 SLURM_STEPID=0 "
        "SLURM_PROCID={rank} SLURM_LOCALID={local} "
        "SLURM_NTASKS={size} SLURM_NPROCS={size} SLURM_STEP_NUM_TASKS={size} "
        "SLURM_NTASKS_PER_NODE={per_node} SLURM_NODEID={node} SLURM_NNODES={nodes} "
        "SLURM_JOB_NUM_NODES={nodes} SLURM_STEP_NUM_NODES={nodes} "
        "SLURM_JOB_NODELIST={hosts} SLURM_NODELIST={hosts} SLURM_STEP_NODELIST={hosts} "
        "SLURMD_NODENAME=node-{node} SLURM_TASKS_PER_NODE={per_node}(x{nodes}) "
        "SLURM_STEP_TASKS_PER_NODE={per_node}(x{nodes}) "
        "SLURM_SRUN_COMM_HOST=node-0 SLURM_STEP_LAUNCHER_PORT=1"
    ),
    markers=_MARKERS,
    claim=_claim,
    triggers=("SLURM_PROCID",),
    numbers=("SLURM_PROCID", _SIZE, "SLURM_LOCALID", None, None, "SLURM_STEP_NUM_NODES"),
    instead={_SIZE: _SIZE_OF_JOB},
    same={"PMI_RANK": "SLURM_PROCID", "PMI_SIZE": _SIZE},
    more=_read,
    nodes_are_hosts=True,
    starts_daemons=True,
    step=_step,
    refuse_unclaimed=_refuse_first_task,
    left_over=(
        LeftOver(_HOSTS, "srun", _NEEDED, in_shell=True),
        LeftOver(_PER_NODE, "srun", _NEEDED, in_shell=True),
        # The batch script has these, too.
        LeftOver("SLURM_GTIDS", "srun", _NEEDED, harmless="0", in_shell=True),
        LeftOver("SLURM_LOCALID", "srun", _NEEDED, harmless="0", in_shell=True),
        LeftOver("SLURM_NODEID", "srun", _NEEDED, harmless="0", in_shell=True),
    ),
    programs=("slurmstepd",),
    mpi="maybe",
    read_by=("jax",),
    jax_needs_nothing=True,
    # With these its own plugin for Slurm works, and can requeue the job.
    lightning_reads=("SLURM_NTASKS_PER_NODE", _SIZE_OF_JOB),
    command="srun",
    start_several=(
        "start {0} tasks: srun --ntasks-per-node={0} … on one node, srun --ntasks={0} … on several"
    ),
    env_forwarding_hint="srun --export=ALL,NAME=VALUE …",
)
