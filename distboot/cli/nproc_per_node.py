"""How many ranks `--nproc-per-node` starts on this node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace

from ..base.errors import DistbootError
from ..base.patterns import pattern
from ..detection.node_platform import ranks_per_node
from ..detection.order import LAUNCHERS, node_platforms, with_any_variable
from ..detection.placement import Placement
from ..host import cpus
from . import torchrun_options

_ABOVE_1 = pattern("(?!1$)[0-9]+")


def count_of(options: SimpleNamespace, placement: Placement, environ: Mapping[str, str]) -> int:
    """How many ranks this process starts.

    Raises `usage` if other processes of the job are on this node, or there is nothing to count.
    """
    _refuse_unless_alone_on_node(options, placement, environ)
    _refuse_unless_alone_elsewhere(options, placement)
    wanted: str = options.nproc_per_node
    if wanted.isdigit():
        return int(wanted)
    if wanted == "auto":  # the number that the platform shows, if any
        per_node = ranks_per_node(node_platforms(with_any_variable(environ)), environ)
        if per_node is not None:
            _, count = per_node
            return count
    return _count_here(wanted, environ)


def _refuse_unless_alone_on_node(
    options: SimpleNamespace, placement: Placement, environ: Mapping[str, str]
) -> None:
    launcher = LAUNCHERS[placement.launcher]
    local_count = environ.get(launcher.local_count)
    if not local_count:
        local_size = placement.local_world_size or 1
        local_count = str(local_size)
    is_first = not placement.local_rank
    if local_count == "1" and is_first:
        return
    many = "several processes"
    is_number = _ABOVE_1.fullmatch(local_count) is not None
    if is_number:
        many = f"{local_count} processes"
    raise _several_error(options, placement, f"{many} on this one")


def _refuse_unless_alone_elsewhere(options: SimpleNamespace, placement: Placement) -> None:
    """Refuse on all nodes what one of them refuses: else the others would wait for it."""
    nodes = placement.num_nodes
    if nodes is None or nodes == placement.world_size:
        return
    raise _several_error(options, placement, f"{placement.world_size} processes on {nodes} nodes")


def _several_error(options: SimpleNamespace, placement: Placement, started: str) -> DistbootError:
    """The error for nodes on which the launcher has started several processes."""
    problem = "--nproc-per-node needs one process per node"
    if options.one_per_node_by:
        problem = f"{options.one_per_node_by} starts one rank on each node"
    leave_out = torchrun_options.without_counts(options, placement)
    return DistbootError(
        "usage",
        f"{problem}, but {placement.launcher} started {started}",
        f"{leave_out}; or start one process per node",
    )


def _count_here(wanted: str, environ: Mapping[str, str]) -> int:
    """How many accelerators this process sees, or CPUs: with `auto` if there are none."""
    found: int | None = None
    if wanted != "cpu":
        from ..host import accelerators  # here, as most processes start no others

        visible = accelerators.visible(environ)
        found = len(visible)
    nothing_found = ": no accelerator is visible"
    if wanted != "gpu":
        found = found or cpus.affinity() or os.cpu_count()
        nothing_found = ", and the number of CPUs is not known"
    if not found:
        raise DistbootError(
            "usage",
            f"--nproc-per-node {wanted}{nothing_found} here",
            "give the number of processes",
        )
    return found
