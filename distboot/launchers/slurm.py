"""Slurm: a task of a job step, as `srun` starts it.

A bare allocation (salloc), the body of a batch script (sbatch) and an interactive shell are no steps: they hold
one process and stale numbers. Only SLURM_STEP_* and the task's own variables are the step's truth. A step of several
components (`srun A : B`) is one world, and so is a plain `srun` in a heterogeneous job.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..hostlist import expand_counts, expand_hosts
from ..placement import Placement
from ..reading import Reading, variable
from ._launcher import Launcher, claims

# Slurm 22.05.8, srun -N2 -n4, rank 3:
#   SLURM_STEP_ID=0   SLURM_STEP_NUM_TASKS=4   SLURM_STEP_NUM_NODES=2   SLURM_STEP_NODELIST=nodea,nodeb
#   SLURM_STEP_TASKS_PER_NODE=3,1   SLURM_PROCID=3   SLURM_LOCALID=0   SLURM_NODEID=1   SLURM_GTIDS=3
_MARKERS = ("SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE")

# srun sets the former for its tasks to what the latter say (env_array_for_step in Slurm's env.c).
_SAME_IN_A_STEP = (
    ("SLURM_NNODES", "SLURM_STEP_NUM_NODES"),
    ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"),
)

# The step id of `salloc`'s own shell where the site has LaunchParameters=use_interactive_step (slurm.h:
# SLURM_INTERACTIVE_STEP).
_INTERACTIVE_STEP = "4294967290"


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS) or _is_interactive_shell(environ):
        return None
    reading = Reading(environ, "slurm")
    rank = reading.integer("SLURM_PROCID", "rank")
    reading.integer("SLURM_STEP_NUM_TASKS", "world_size")
    reading.integer("SLURM_LOCALID", "local_rank")
    node_index = reading.integer("SLURM_NODEID")
    num_nodes = reading.integer("SLURM_STEP_NUM_NODES", "num_nodes")
    hosts = _hosts(reading)
    own = _own_place(reading, hosts, node_index)
    _read_layout(reading, own)
    reading.agree("PMI_RANK", rank, "SLURM_PROCID")
    _check_for_left_overs(reading)
    job, step = reading.text("SLURM_JOB_ID"), reading.text("SLURM_STEP_ID")
    reading.put("job_id", f"{job}.{step}", "SLURM_JOB_ID and SLURM_STEP_ID")
    ordered = _fills_nodes_in_order(environ) and (rank is None or node_index is None or node_index <= rank)
    if ordered:
        reading.put("node_rank", node_index, "SLURM_NODEID")
    # The list is sorted by name. In a step of several components (srun A : B) the ranks need not be.
    first_is_rank0 = ordered and own == node_index and "SLURMD_NODENAME" in environ and "SLURM_HET_SIZE" not in environ
    if not hosts or not (first_is_rank0 or num_nodes == 1):
        return reading.placement(nodes_are_hosts=True)
    return reading.placement(own_address=(hosts[0], "first host of SLURM_STEP_NODELIST"), nodes_are_hosts=True)


def _is_interactive_shell(environ: Mapping[str, str]) -> bool:
    if environ.get("SLURM_STEP_ID") == _INTERACTIVE_STEP:
        return True
    # srun --pty bash: one task, which is the shell; what runs in it is no task of the step.
    return "SLURM_PTY_PORT" in environ and environ.get("SLURM_STEP_NUM_TASKS") == "1"


def _fills_nodes_in_order(environ: Mapping[str, str]) -> bool:
    # With -m arbitrary (a SLURM_HOSTFILE) rank 0 may be on any node: node indices do not follow the ranks then, and
    # the first host of the list need not be rank 0's.
    distribution = environ.get("SLURM_DISTRIBUTION", "block")
    return distribution.startswith(("block", "cyclic", "plane")) and "SLURM_HOSTFILE" not in environ


def _hosts(reading: Reading) -> list[str]:
    hosts = reading.parsed("SLURM_STEP_NODELIST", expand_hosts)
    num_nodes = reading.number("num_nodes")
    if hosts is not None and num_nodes is not None and len(hosts) != num_nodes:
        reading.problems.append(
            f"{variable(reading.environ, 'SLURM_STEP_NODELIST')} does not name SLURM_STEP_NUM_NODES={num_nodes} hosts"
        )
    return hosts or []


def _own_place(reading: Reading, hosts: list[str], node_index: int | None) -> int | None:
    """Where this node is in the lists of hosts and of counts."""
    num_nodes = reading.number("num_nodes")
    if node_index is not None and num_nodes is not None and node_index >= num_nodes:
        reading.problems.append(f"SLURM_NODEID={node_index} is not below SLURM_STEP_NUM_NODES={num_nodes}")
    name = reading.text("SLURMD_NODENAME", required=False)
    if name is None:
        return node_index
    if hosts and name not in hosts:
        listed = variable(reading.environ, "SLURM_STEP_NODELIST")
        reading.problems.append(f"{variable(reading.environ, 'SLURMD_NODENAME')} is not in {listed}")
    return hosts.index(name) if name in hosts else None


def _read_layout(reading: Reading, own: int | None) -> None:
    """The local size, and whether all that is said of the layout fits together."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    counts = reading.parsed(name, expand_counts) or []
    world_size, num_nodes = reading.number("world_size"), reading.number("num_nodes")
    if counts and world_size is not None and sum(counts) != world_size:
        reading.problems.append(
            f"{variable(reading.environ, name)} does not add up to SLURM_STEP_NUM_TASKS={world_size}"
        )
    if counts and num_nodes is not None and len(counts) != num_nodes:
        reading.problems.append(
            f"{variable(reading.environ, name)} is not about SLURM_STEP_NUM_NODES={num_nodes} nodes"
        )
    elif own is not None and own < len(counts):
        reading.put("local_world_size", counts[own], f"{name} of this node")
    # SLURM_GTIDS=1,3: the global ids of this node's tasks, in the order of their local ids.
    ids = reading.text("SLURM_GTIDS")
    rank, local_rank, here = map(reading.number, ("rank", "local_rank", "local_world_size"))
    if ids is None or rank is None or local_rank is None or here is None:
        return
    listed = ids.split(",")
    if len(listed) != here or local_rank >= here or listed[local_rank] != str(rank):
        reading.problems.append(
            f"{variable(reading.environ, 'SLURM_GTIDS')} does not have {here} tasks with "
            f"SLURM_PROCID={rank} at SLURM_LOCALID={local_rank}"
        )


def _check_for_left_overs(reading: Reading) -> None:
    """A job that was submitted from inside a step inherits the variables of that step, but has its own of the job."""
    for job, step in _SAME_IN_A_STEP:
        said, of_step = reading.environ.get(job), reading.environ.get(step)
        if said is not None and of_step is not None and said != of_step:
            reading.problems.append(
                f"{variable(reading.environ, step)} contradicts {variable(reading.environ, job)}: SLURM_STEP_* are "
                "left over from the step in which this job was submitted, or `srun --preserve-env` kept the latter"
            )
            return


SLURM = Launcher(
    name="slurm",
    title="Slurm job steps (srun)",
    markers=_MARKERS,
    read=_read,
    source="captures of 22.05.8; srun(1), OUTPUT ENVIRONMENT VARIABLES",
    passing="srun --export=ALL,NAME=VALUE …",
)
