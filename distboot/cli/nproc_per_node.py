"""How many ranks `--nproc-per-node` starts on this node."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ..base.errors import DistbootError
from ..base.text import log_line
from ..detection.detect import LAUNCHERS, NODE_PLATFORMS
from ..detection.node_platform import ranks_per_node
from ..detection.placement import Placement
from ..host import cpus

# The variables are for a platform that calls mpirun itself: for Open MPI 4, and for 5.
_UNBOUND = (
    "mpirun --bind-to none, srun --cpu-bind=none; where a platform starts mpirun, set in the "
    "environment of the job OMPI_MCA_hwloc_base_binding_policy=none and "
    "PRTE_MCA_hwloc_default_binding_policy=none"
)


def count_of(wanted: str, placement: Placement, environ: Mapping[str, str]) -> int:
    """How many ranks this process starts.

    Raises `usage` if other processes of the job are on this node, or there is nothing to count.
    """
    _refuse_unless_alone_on_node(placement, environ)
    if wanted.isdigit():
        return int(wanted)
    if wanted == "auto":
        per_node = ranks_per_node(NODE_PLATFORMS, environ)
        if per_node is not None:
            return per_node[1]
    return _count_here(wanted, environ)


def _refuse_unless_alone_on_node(placement: Placement, environ: Mapping[str, str]) -> None:
    launcher = LAUNCHERS[placement.launcher]
    local_count = environ.get(launcher.local_count)
    if not local_count:
        local_count = str(placement.local_world_size or 1)
    if local_count == "1" and not placement.local_rank:
        return
    many = "several"
    if local_count.isdigit() and local_count != "1":
        many = local_count
    raise DistbootError(
        "usage",
        f"--nproc-per-node, but {placement.launcher} started {many} processes on this node",
        "start one process per node, or leave --nproc-per-node (or DISTBOOT_NPROC_PER_NODE) out",
    )


def _count_here(wanted: str, environ: Mapping[str, str]) -> int:
    """How many accelerators or CPUs this process sees."""
    from ..host import accelerators  # here, as most processes start no others

    count = 0
    if wanted != "cpu":
        count = len(accelerators.visible(environ))
    if wanted == "gpu" and not count:
        raise _nothing_to_count(wanted, ": no accelerator is visible here")
    if not count:
        count = cpus.affinity() or os.cpu_count() or 0
    if not count:
        raise _nothing_to_count(wanted, ", and the number of CPUs is not known here")
    return count


def _nothing_to_count(wanted: str, why: str) -> DistbootError:
    hint = "give the number of processes"
    return DistbootError(
        "usage",
        f"--nproc-per-node {wanted}{why}",
        hint,
    )


def warn_if_bound(placement: Placement) -> None:
    """Warn that a launcher has bound this process to a few CPUs, which its ranks inherit."""
    if placement.launcher == "single":
        return
    own = cpus.affinity()
    all_cpus = cpus.of_all()
    if own is None or all_cpus is None or own >= all_cpus:
        return
    bound = f"{placement.launcher} has bound this process to {own} of {all_cpus} CPUs"
    log_line(placement.who, f"warning: {bound}, and so all ranks of this node: {_UNBOUND}")
