"""How many ranks `--nproc-per-node` starts on this node."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import NamedTuple

from ..base.errors import DistbootError
from ..base.patterns import pattern
from ..detection.node_platform import ranks_per_node
from ..detection.order import LAUNCHERS, node_platforms, related
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
        per_node = ranks_per_node(node_platforms(related(environ)), environ)
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
    raise _several(options, placement, f"{many} on this one")


def _refuse_unless_alone_elsewhere(options: SimpleNamespace, placement: Placement) -> None:
    """Refuse on all nodes what one of them refuses: else the others would wait for it."""
    nodes = placement.num_nodes
    if nodes is None or nodes == placement.world_size:
        return
    raise _several(options, placement, f"{placement.world_size} processes on {nodes} nodes")


def _several(options: SimpleNamespace, placement: Placement, started: str) -> DistbootError:
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
    """How many accelerators or CPUs this process sees."""
    counted = _COUNTED[wanted]
    for count in counted.counts:
        found = count(environ)
        if found:
            return found
    raise DistbootError(
        "usage",
        f"--nproc-per-node {wanted}{counted.nothing_found} here",
        "give the number of processes",
    )


def _count_accelerators(environ: Mapping[str, str]) -> int:
    from ..host import accelerators  # here, as most processes start no others

    visible = accelerators.visible(environ)
    return len(visible)


def _count_allowed_cpus(_: Mapping[str, str]) -> int | None:
    return cpus.affinity()


def _count_cpus(_: Mapping[str, str]) -> int | None:
    return os.cpu_count()


class _Counted(NamedTuple):
    """What is counted for a value of --nproc-per-node; the first count above 0 is taken."""

    counts: tuple[Callable[[Mapping[str, str]], int | None], ...]
    nothing_found: str  # why there is nothing to count


_CPUS = (_count_allowed_cpus, _count_cpus)
_NO_CPUS = ", and the number of CPUs is not known"
_COUNTED = {
    "gpu": _Counted((_count_accelerators,), ": no accelerator is visible"),
    "cpu": _Counted(_CPUS, _NO_CPUS),
    "auto": _Counted((_count_accelerators, *_CPUS), _NO_CPUS),
}
