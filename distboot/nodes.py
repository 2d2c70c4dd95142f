"""Launches of one process a node, pod or container: refused where ranks are due, and turned into ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from . import cpus, handoff
from .address import socket_said
from .detection import launcher_of
from .errors import DistbootError, tell
from .placement import VARIABLES, Placement
from .rendezvous import MPI_LAUNCHERS

_WAY_OUT = (
    "let the wrapper start the ranks: python -m distboot --nproc-per-node N script.py …, with N processes a node, "
    "or auto for one an accelerator (without any: one a CPU), or 1 if there is to be no other"
)
# For Open MPI 4, and for 5: more ranks than cores are what was asked for, each may use all cores (see `cpus`), and in a
# container root is who is there.
_FOR_MPIRUN = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def refuse_unless_rank(placement: Placement) -> None:
    """Refuse a process that stands for a whole node.

    Raises:
        DistbootError: `node-level-launch`.
    """
    if placement.node_level is not None:
        raise DistbootError(
            "node-level-launch",
            f"{placement.node_level}; this process stands for node {placement.rank} of {placement.world_size}, "
            "and is no rank",
            _WAY_OUT,
        )


def refuse_idle_accelerators(placement: Placement, device_type: str, count: int) -> None:
    """Refuse one process a node where the node has several accelerators, `count`, and nobody chose that.

    Raises:
        DistbootError: `node-level-launch`.
    """
    one_a_node = placement.num_nodes == placement.world_size and placement.world_size > 1
    if one_a_node and count > 1 and placement.launcher != "torchrun":
        raise DistbootError(
            "node-level-launch",
            f"one process was started on each of {placement.num_nodes} nodes, and this one sees {count} {device_type} "
            "devices: all but the first would idle",
            f"{_WAY_OUT}; or show each process the one device that it is to use (CUDA_VISIBLE_DEVICES=0)",
        )


def refuse_several_here(placement: Placement, environ: Mapping[str, str]) -> None:
    """Refuse to start the ranks of this node from one of several processes on it.

    Raises:
        DistbootError: `usage`.
    """
    launcher = launcher_of(placement)
    here = environ.get(launcher.local_count) or str(placement.local_world_size or 1)
    if here != "1" or placement.local_rank:
        many = here if here.isdigit() and here != "1" else "several"
        raise DistbootError(
            "usage",
            f"--nproc-per-node, but {placement.launcher} started {many} processes on this node",
            "start one process a node, or leave --nproc-per-node out",
        )


def warn_if_bound(placement: Placement) -> None:
    """Say that the ranks will be slow, as they inherit that the launcher has bound this process to a few CPUs."""
    own, there = cpus.affinity(), cpus.of_all()
    if placement.launcher != "single" and own is not None and there is not None and own < there:
        bound = f"{placement.launcher} has bound this process to {own} of {there} CPUs, and so all ranks of this node"
        tell(placement.who, f"warning: {bound}: mpirun --bind-to none, srun --cpu-bind=none")


def has_torchrun() -> bool:
    """Whether torch is installed in this Python."""
    from importlib.util import find_spec  # here and below, so that other starts of the wrapper do not pay for it

    return find_spec("torch") is not None


def agents_meet(options: Sequence[str]) -> bool:
    """Whether the user's options let torchrun's agents find each other, and then they count the nodes themselves."""
    return any(option.startswith("--rdzv-backend=") and option != "--rdzv-backend=static" for option in options)


def torchrun(placement: Placement, nproc_per_node: str, options: Sequence[str] = ()) -> list[str]:
    """The command line, without its script, of the agent that starts the ranks of this node.

    Args:
        placement: of the one process on this node, with an address and a port.
        nproc_per_node: a number, or auto, gpu or cpu, as torchrun takes it.
        options: the user's own for torchrun.

    Raises:
        DistbootError: `broken-environment`.
    """
    import tempfile

    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        raise DistbootError(
            "broken-environment",
            "torchrun, which is to start the ranks, needs a folder for temporary files, and none can be written to",
            "docker run --tmpfs /tmp, or set TMPDIR to a folder that can be",
        ) from None
    where = socket_said(str(placement.master_addr), placement.master_port or 0)
    own = (
        [f"--rdzv-endpoint={where}", f"--rdzv-id={placement.job_id or 'distboot'}"]
        if agents_meet(options)
        else [
            "--rdzv-backend=static",
            f"--node-rank={placement.rank}",
            f"--master-addr={placement.master_addr}",
            f"--master-port={placement.master_port}",
        ]
    )
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        # By default the last two would end the agent and leave its ranks alone.
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2",
        *(f"--nnodes={placement.world_size}", f"--nproc-per-node={nproc_per_node}"),
        *own,
        *options,  # the last one counts
    ]


def mpirun(placement: Placement, nproc_per_node: str, environ: Mapping[str, str], options: Sequence[str]) -> list[str]:
    """The command line, without its program, that starts the ranks of the only node, where there is no torchrun.

    Args:
        placement: as for `torchrun`.
        nproc_per_node: the same.
        environ: of this process.
        options: the user's own for torchrun, which there is not.

    Raises:
        DistbootError: `framework-not-installed` or `usage`.
    """
    from shutil import which

    from . import accelerators

    problem = "torch, whose torchrun starts them, is not installed in this Python"
    if placement.world_size > 1 or options or placement.launcher in MPI_LAUNCHERS or which("mpirun") is None:
        raise DistbootError(
            "framework-not-installed",
            f"--nproc-per-node starts the ranks of a node, and {problem}",
            "pip install torch, also for other frameworks; on a single node an mpirun will do; or let the launcher "
            "start one process a rank",
        )
    found, all_cpus = len(accelerators.visible(environ)), cpus.affinity() or os.cpu_count()
    count = {"gpu": found, "cpu": all_cpus, "auto": found or all_cpus}.get(nproc_per_node, nproc_per_node)
    if not count:
        problem = f"--nproc-per-node {nproc_per_node}, and how many that is cannot be seen here"
        raise DistbootError("usage", problem, "give the number of processes")
    return ["mpirun", "-n", str(count)]


def agent_target(target: Sequence[str]) -> list[str]:
    """Script, module or command, with its arguments, as torchrun wants to be told of it."""
    # It reads the words as templates, for ${local_rank} (torch.distributed.elastic, utils.api.macros).
    words = [word.replace("$", "$$") for word in target]
    return ["--no-python", *words] if target[0] == "--" else words


def agent_environ(
    environ: Mapping[str, str], placement: Placement, nproc_per_node: str, *, keeps_order: bool
) -> dict[str, str]:
    """The environment for torchrun's agent: without what says that each of its ranks is this one process.

    Args:
        environ: of this process.
        placement: as for `torchrun`.
        nproc_per_node: the same.
        keeps_order: whether the agents count the nodes as the launcher does.
    """
    bare, _ = handoff.take(environ)
    # torchrun takes PET_* for its options, and all that matter are given; TORCHELASTIC_* are those of an agent further
    # out, whose store this one must not use.
    kept = {name: value for name, value in bare.items() if not name.startswith(("PET_", "TORCHELASTIC_"))}
    for name in ("DISTBOOT_LAUNCHER", "NODE_RANK"):
        kept.pop(name, None)
    if keeps_order:
        kept["NODE_RANK"] = str(placement.rank)  # torchrun itself has no name for it that scripts know
    # torchrun sets 1 where it is not set.
    return kept | (cpus.variables(int(nproc_per_node), kept) if nproc_per_node.isdigit() else {})


def mpirun_environ(environ: Mapping[str, str], placement: Placement) -> dict[str, str]:
    """The environment for mpirun: without what says that each of its ranks is this one process."""
    bare, _ = handoff.take(environ)
    outer = {*launcher_of(placement).markers, *VARIABLES.values(), "TF_CONFIG", "DISTBOOT_LAUNCHER"}
    return {**_FOR_MPIRUN, **{name: value for name, value in bare.items() if name not in outer}}
