"""Slurm: a task of a job step, as `srun` starts it.

A bare allocation (salloc), the body of a batch script (sbatch) and an interactive shell are not
steps: they hold one process and stale numbers. Only SLURM_STEP_* and the task's own variables are
the step's truth. A step of several components (`srun A : B`) is one world, and so is a plain `srun`
in a heterogeneous job.

A batch script has SLURM_PROCID=0 and SLURM_NTASKS, as the first task has: a rank above 0 is a task,
and rank 0 is one where the id or the size of a step is there, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...base.errors import UNKNOWN_RANK, DistbootError
from ...base.patterns import pattern
from ...base.text import digits
from ..env_reader import EnvReader, container_env_hint, variable
from ..left_over import LeftOver
from ..parse import expand_counts, expand_hosts
from . import Launcher, Numbers, Step, has_any

# The size of the step; and what srun sets to it, too, unless it was told to keep that of the job
# (--preserve-env).
_SIZE = "SLURM_STEP_NUM_TASKS"
_SIZE_OF_JOB = "SLURM_NTASKS"
_MARKERS = ("SLURM_STEP_ID", _SIZE)
_NODE = "SLURM_NODEID"
_NODES = "SLURM_STEP_NUM_NODES"
_NEEDED = ("SLURM_PROCID", _SIZE)
_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
_HOSTS = "SLURM_STEP_NODELIST"

# srun sets the former for its tasks to what the latter say (env_array_for_step in Slurm's env.c).
_SAME_IN_A_STEP = (
    ("SLURM_NNODES", _NODES),
    (_SIZE_OF_JOB, _SIZE),
    ("SLURM_TASKS_PER_NODE", _PER_NODE),
)

# Values of `srun -m` that fill the nodes in the order of ranks; empty: the default
_IN_ORDER = pattern("block|cyclic|plane|$")

# The step id of `salloc`'s own shell where the site has LaunchParameters=use_interactive_step
# (slurm.h: SLURM_INTERACTIVE_STEP).
INTERACTIVE_STEP = "4294967290"

# All of these are in the environment of a batch script, with SLURM_PROCID=0 and ENVIRONMENT=BATCH
# (Slurm's env.c, env_array_for_batch_job; ParaStation's psslurm, setJobEnv). A container has some
# of them, of a task or of the script.
_BATCH_SCRIPT = (
    "SLURM_JOB_ID",
    "SLURM_JOB_NODELIST",
    "SLURM_CLUSTER_NAME",
    _NODE,
    "SLURM_LOCALID",
    "SLURM_TASK_PID",
)
# So are these, and SLURM_GTIDS=0. They are needed, too, where ENVIRONMENT has another value: many
# applications set ENVIRONMENT=production or the like.
_ALSO_NEEDED = ("SLURM_SUBMIT_DIR", "SLURM_JOB_NAME")
# Ten variables that begin so are in each task that srun starts, and in no batch script (all
# captures; Slurm's env.c, env_array_for_step and setup_env).
_OF_SRUN = (
    "SLURM_STEP_",
    "SLURM_STEPID",
    "SLURM_SRUN_COMM_HOST",
    "SLURM_SRUN_COMM_PORT",
    "SLURM_LAUNCH_NODE_IPADDR",
)


def _claim(environ: Mapping[str, str]) -> bool:
    step = environ.get("SLURM_STEP_ID")
    rank = environ.get("SLURM_PROCID", "0")
    size = environ.get(_SIZE)
    if step == INTERACTIVE_STEP:
        return False
    # srun --pty bash: one task, which is the shell; what runs in it is not a task of the step.
    has_terminal = "SLURM_PTY_PORT" in environ
    is_only_task = size == "1"
    if has_terminal and is_only_task:
        return False
    is_step = has_any(environ, _MARKERS)
    has_rank = rank != "0"
    return is_step or has_rank


def _read(reader: EnvReader) -> None:
    node_index = reader.integer(_NODE)
    hosts = _hosts(reader)
    own = _own_place(reader, hosts, node_index)
    _read_layout(reader, own)
    _check_ids(reader)
    _check_pmi_rank(reader)
    _refuse_older_step(reader)
    job = reader.text("SLURM_JOB_ID")
    step = reader.text("SLURM_STEP_ID")
    if None not in (job, step):
        reader.record("SLURM_JOB_ID and SLURM_STEP_ID", job_id=f"{job}.{step}")
    ordered = _fills_nodes_in_order(reader, node_index)
    if ordered:
        reader.record(_NODE, node_rank=node_index)
    # The list is sorted by name. In a step of several components (srun A : B) the ranks need not
    # be.
    is_sorted = "SLURM_HET_SIZE" not in reader.environ
    first_is_rank0 = ordered and is_sorted and own == node_index
    is_single = reader.number("num_nodes") == 1
    is_on_first = first_is_rank0 or is_single
    if hosts and is_on_first:
        reader.own_address = (hosts[0], f"first host of {_HOSTS}")


def _hosts(reader: EnvReader) -> list[str]:
    """The hosts of the step."""
    hosts = reader.parsed(_HOSTS, expand_hosts)
    nodes = reader.number("num_nodes")
    if hosts is None:
        return []
    count = len(hosts)
    if nodes not in (None, count):
        expected = f"{_NODES}={nodes}"
        reader.reject(_HOSTS, f"does not name {expected} hosts")
    return hosts


def _refuse_older_step(reader: EnvReader) -> None:
    """Refuse the variables of a step in which this job was submitted."""
    environ = reader.environ
    for of_job, of_step in _SAME_IN_A_STEP:
        different = {environ.get(of_job), environ.get(of_step)} - {None}
        if len(different) > 1:
            shown = variable(environ, of_job)
            reader.reject(
                of_step,
                f"contradicts {shown}: SLURM_STEP_* are left over from the step in which this job "
                "was submitted, or `srun --preserve-env` kept the latter",
            )
            reader.remedy = (
                f"if srun started this process, leave --preserve-env out, or unset {of_job} "
                "before srun; else unset all SLURM_STEP_*"
            )
            return


def _fills_nodes_in_order(reader: EnvReader, node_index: int | None) -> bool:
    """Whether the node index follows the ranks, and the first host of the list is that of rank 0.

    With -m arbitrary (a SLURM_HOSTFILE) rank 0 may be on any node. Without -m no variable has the
    order, or a container has not got it.
    """
    environ = reader.environ
    default = "block"
    if reader.absent:
        default = "unknown"
    order = environ.get("SLURM_DISTRIBUTION", default)
    has_own_order = "SLURM_HOSTFILE" in environ
    follows = _IN_ORDER.match(order) is not None
    if has_own_order or not follows:
        return False
    lowest = _lowest_rank(reader)
    if node_index is None or lowest is None:
        return node_index is not None
    return node_index <= lowest


def _lowest_rank(reader: EnvReader) -> int | None:
    """The lowest rank on this node; its own where nothing lists them."""
    listed = reader.environ.get("SLURM_GTIDS", "")
    text, _, _ = listed.partition(",")
    first = digits(text)
    if first is None:
        first = reader.number("rank")
    return first


def _own_place(reader: EnvReader, hosts: list[str], node_index: int | None) -> int | None:
    """Where this node is in the lists of hosts and of counts."""
    source = "SLURMD_NODENAME"
    nodes = reader.number("num_nodes")
    _check_index(reader, node_index, nodes)
    name = reader.text(source)
    if name is None and nodes == 1:
        # In a step of several components the indexes need not be those of the lists
        return 0
    if name is None or not hosts:
        return None
    if name in hosts:
        return hosts.index(name)
    shown = variable(reader.environ, _HOSTS)
    why = f"is not in {shown}"
    reader.reject(source, why)
    return None


def _check_index(reader: EnvReader, index: int | None, nodes: int | None) -> None:
    if index is None or nodes is None:
        return
    size = f"{_NODES}={nodes}"
    problem = f"{_NODE}={index} is not below {size}"
    if index >= nodes:
        reader.problems.append(problem)


def _read_layout(reader: EnvReader, own: int | None) -> None:
    """The local size, and whether the counts fit the step."""
    counts = reader.parsed(_PER_NODE, expand_counts)
    if counts is None:
        return
    count = len(counts)
    total = sum(counts)
    ranks = reader.number("world_size")
    nodes = reader.number("num_nodes")
    if ranks not in (None, total):
        size = reader.first(_SIZE, _SIZE_OF_JOB)
        reader.reject(_PER_NODE, f"does not add up to {size}={ranks}")
    if nodes not in (None, count):
        expected = f"{_NODES}={nodes}"
        reader.reject(_PER_NODE, f"is not about {expected} nodes")
        return
    if own is None or own >= count:
        return
    here = counts[own]
    reader.record(f"{_PER_NODE} of this node", local_world_size=here)


def _check_ids(reader: EnvReader) -> None:
    """SLURM_GTIDS=1,3: the global ids of this node's tasks, in the order of their local ids."""
    name = "SLURM_GTIDS"
    ids = reader.text(name)
    rank = reader.number("rank")
    local_rank = reader.number("local_rank")
    here = reader.number("local_world_size")
    if ids is None or local_rank is None:
        return
    unknown = None in (rank, here)
    if unknown:
        return
    listed = ids.split(",")
    own = listed[local_rank : local_rank + 1]
    if (len(listed), own) == (here, [str(rank)]):
        return
    task = f"SLURM_PROCID={rank} at SLURM_LOCALID={local_rank}"
    reader.reject(
        name,
        f"does not have {here} tasks with {task}",
    )


def _check_pmi_rank(reader: EnvReader) -> None:
    """PMI_RANK is that of `srun --mpi=pmi2`, and so the rank of the task.

    With pyxis and enroot's hook 50-slurm-pmi.sh all tasks of a node have the one of the task that
    started their container: the hook runs once, and pyxis copies its variables to all
    (slurm-pyxis-22.05.8+0.24.0). SLURM_PROCID is not copied.
    """
    name = "PMI_RANK"
    environ = reader.environ
    text = environ.get(name)
    rank = reader.number("rank")
    if rank is None or text == str(rank):
        return
    step = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    is_of_step = environ.get("PMI_JOBID") == step
    on_this_node = environ.get("SLURM_GTIDS", "").split(",")
    if is_of_step and text in on_this_node:
        shown = variable(environ, name)
        reader.notes.append(
            f"{shown} ignored: it is another task's of this node, as pyxis copies it; an MPI needs "
            "srun --mpi=pmix"
        )
        return
    reader.agree(name, rank, "SLURM_PROCID")


def _step(environ: Mapping[str, str]) -> Step | None:
    rank = digits(environ.get("SLURM_PROCID", ""))
    tasks = digits(environ.get(_SIZE, ""))
    nodes = digits(environ.get(_NODES, "0"))
    local_rank = environ.get("SLURM_LOCALID", "")
    if rank is None or tasks is None or nodes is None:
        return None
    # In an interactive shell anything may have been typed.
    in_shell = "SLURM_PTY_PORT" in environ
    if in_shell:
        return None
    return Step(
        rank,
        tasks,
        nodes,
        local_rank,
    )


def _refuse_first_task(environ: Mapping[str, str]) -> None:
    """Refuse what may be the first task of a step: a batch script has its rank and size, too."""
    # A step that `_claim` has not taken for that of a task is the shell's.
    is_shell = has_any(environ, _MARKERS)
    if is_shell or "SLURM_PROCID" not in environ:
        return
    is_only_task = environ.get(_SIZE_OF_JOB) == "1"
    if is_only_task or _is_batch_script(environ):
        return
    shown = variable(environ, "SLURM_PROCID")
    to_container = container_env_hint("SLURM_STEP_ID")
    raise DistbootError(
        "unsupported-launcher",
        f"{shown} is set in the first task of a step and in a batch script, and the environment "
        "does not tell which of them this process is",
        f"pass SLURM_STEP_ID, too, to the container of a task: {to_container}; or set "
        "DISTBOOT_LAUNCHER=slurm if it is a task, DISTBOOT_LAUNCHER=none if it is alone",
    ).of(UNKNOWN_RANK)


def _is_batch_script(environ: Mapping[str, str]) -> bool:
    """Whether this environment has all variables of a batch script.

    The container of a task has ENVIRONMENT=BATCH only with all other variables. Another value
    proves less, as an image may set it: more variables are needed then, and none of srun's.
    """
    kind = environ.get("ENVIRONMENT")
    names = environ.keys()
    is_whole = names >= {*_BATCH_SCRIPT}
    if kind is None or not is_whole:
        return False
    if kind == "BATCH":
        return True
    has_more = names >= {*_ALSO_NEEDED}
    has_one_task = environ.get("SLURM_GTIDS") == "0"
    has_step = any(name.startswith(_OF_SRUN) for name in names)
    return has_more and has_one_task and not has_step


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
    numbers=Numbers(
        rank="SLURM_PROCID",
        world_size=_SIZE,
        local_rank="SLURM_LOCALID",
        num_nodes=_NODES,
    ),
    fallbacks={_SIZE: _SIZE_OF_JOB},
    must_equal={"PMI_SIZE": _SIZE},
    read=_read,
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
        LeftOver(_NODE, "srun", _NEEDED, harmless="0", in_shell=True),
    ),
    programs=("slurmstepd",),
    mpi="maybe",
    read_by=("jax",),
    jax_needs_nothing=True,
    # With these its own plugin for Slurm works, and can requeue the job.
    lightning_reads=("SLURM_NTASKS_PER_NODE", _SIZE_OF_JOB),
    command="srun",
    start_several="start {0} tasks: srun --ntasks={0} …, on one node with --ntasks-per-node={0}",
    unbind="srun --cpu-bind=none (or SLURM_CPU_BIND=none)",
    env_forwarding_hint="srun --export=ALL,NAME=VALUE …",
)
