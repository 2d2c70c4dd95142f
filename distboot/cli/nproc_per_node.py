"""How many ranks `--nproc-per-node` starts on this node."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from ..base.errors import DistbootError
from ..detection.detect import LAUNCHERS, NODE_PLATFORMS
from ..detection.node_platform import ranks_per_node
from ..detection.placement import Placement
from ..host import cpus

_ABOVE_1 = re.compile("(?!1$)[0-9]+")
_NOTHING_TO_COUNT = {
    "gpu": ": no accelerator is visible",
    "cpu": ", and the number of CPUs is not known",
    "auto": ", and the number of CPUs is not known",
}


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
    local_count = environ.get(launcher.local_count) or str(placement.local_world_size or 1)
    if local_count == "1" and not placement.local_rank:
        return
    many = "several"
    if _ABOVE_1.fullmatch(local_count):
        many = local_count
    raise DistbootError(
        "usage",
        f"--nproc-per-node, but {placement.launcher} started {many} processes on this node",
        "start one process per node, or leave --nproc-per-node (or DISTBOOT_NPROC_PER_NODE) out",
    )


def _count_here(wanted: str, environ: Mapping[str, str]) -> int:
    """How many accelerators or CPUs this process sees."""
    from ..host import accelerators  # here, as most processes start no others

    found = 0
    if wanted != "cpu":
        found = len(accelerators.visible(environ))
    if wanted != "gpu":
        found = found or cpus.affinity() or os.cpu_count() or 0
    if found:
        return found
    why = _NOTHING_TO_COUNT[wanted]
    problem = f"--nproc-per-node {wanted}{why} here"
    raise DistbootError("usage", problem, "give the number of processes")
