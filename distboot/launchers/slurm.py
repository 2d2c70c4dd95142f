"""Slurm: a task of a job step, as `srun` starts it.

A bare allocation (salloc), the body of a batch script (sbatch) and an interactive shell are no steps: they hold
one process and stale numbers. Only SLURM_STEP_* and the task's own variables are the step's truth; SLURM_NTASKS,
SLURM_JOB_NODELIST and SLURM_NTASKS_PER_NODE may be those of the job.
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

# The step id of `salloc`'s own shell where the site has LaunchParameters=use_interactive_step (slurm.h:
# SLURM_INTERACTIVE_STEP).
_INTERACTIVE_STEP = "4294967290"


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS) or _is_interactive_shell(environ):
        return None
    reading = Reading(environ, "slurm")
    reading.integer("SLURM_PROCID", "rank")
    reading.integer("SLURM_STEP_NUM_TASKS", "world_size")
    reading.integer("SLURM_LOCALID", "local_rank")
    node_index = reading.integer("SLURM_NODEID")
    num_nodes = reading.integer("SLURM_STEP_NUM_NODES", "num_nodes")
    _read_layout(reading, node_index, num_nodes)
    reading.agree("PMI_RANK", reading.number("rank"), "SLURM_PROCID")
    if environ.get("SLURM_HET_SIZE", "1") != "1":
        reading.problems.append(
            f"{variable(environ, 'SLURM_HET_SIZE')}: steps of heterogeneous jobs cannot be read yet"
        )
    job, step = reading.text("SLURM_JOB_ID"), reading.text("SLURM_STEP_ID")
    reading.put("job_id", f"{job}.{step}", "SLURM_JOB_ID and SLURM_STEP_ID")
    ordered = _fills_nodes_in_order(environ)
    if node_index is not None and ordered:
        reading.put("node_rank", node_index, "SLURM_NODEID")
    first_host = _first_host(reading, num_nodes)
    if first_host is None or (not ordered and num_nodes != 1):
        return reading.placement(nodes_are_hosts=True)
    return reading.placement(own_address=(first_host, "first host of SLURM_STEP_NODELIST"), nodes_are_hosts=True)


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


def _read_layout(reading: Reading, node_index: int | None, num_nodes: int | None) -> None:
    """The local size from SLURM_STEP_TASKS_PER_NODE, and whether all that is said of the layout fits together."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    counts = reading.parsed(name, expand_counts)
    if counts is None:
        return
    world_size = reading.number("world_size")
    if world_size is not None and sum(counts) != world_size:
        reading.problems.append(
            f"{variable(reading.environ, name)} does not add up to SLURM_STEP_NUM_TASKS={world_size}"
        )
    if num_nodes is not None and len(counts) != num_nodes:
        reading.problems.append(
            f"{variable(reading.environ, name)} is not about SLURM_STEP_NUM_NODES={num_nodes} nodes"
        )
    elif node_index is not None and node_index >= len(counts):
        reading.problems.append(f"SLURM_NODEID={node_index} is not below SLURM_STEP_NUM_NODES={num_nodes}")
    elif node_index is not None:
        reading.put("local_world_size", counts[node_index], f"{name} at SLURM_NODEID")
        _check_task_ids(reading)


def _check_task_ids(reading: Reading) -> None:
    # SLURM_GTIDS=1,3: the global ids of this node's tasks, in the order of their local ids.
    ids = reading.environ.get("SLURM_GTIDS")
    rank, local_rank, local_world_size = map(reading.number, ("rank", "local_rank", "local_world_size"))
    if ids is None or rank is None or local_rank is None:
        return
    listed = ids.split(",")
    if len(listed) != local_world_size or local_rank >= len(listed) or listed[local_rank] != str(rank):
        reading.problems.append(
            f"{variable(reading.environ, 'SLURM_GTIDS')} does not have {local_world_size} tasks with "
            f"SLURM_PROCID={rank} at SLURM_LOCALID={local_rank}"
        )


def _first_host(reading: Reading, num_nodes: int | None) -> str | None:
    hosts = reading.parsed("SLURM_STEP_NODELIST", expand_hosts)
    if hosts is None:
        return None
    if num_nodes is not None and len(hosts) != num_nodes:
        reading.problems.append(
            f"{variable(reading.environ, 'SLURM_STEP_NODELIST')} does not name SLURM_STEP_NUM_NODES={num_nodes} hosts"
        )
    return hosts[0]


SLURM = Launcher(
    name="slurm",
    title="Slurm job steps (srun)",
    markers=_MARKERS,
    read=_read,
    source="captures of 22.05.8; srun(1), OUTPUT ENVIRONMENT VARIABLES",
    passing="srun --export=ALL,NAME=VALUE …",
)
