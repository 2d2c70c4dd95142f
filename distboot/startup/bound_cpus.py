"""Warnings that a launcher bound a process to fewer CPUs than its share.

Open MPI binds each of two ranks to one core; more of them to a NUMA node. Whatever a rank starts
inherits it: the threads of OpenMP, and the workers that load data.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..base.text import log_line
from ..detection.order import LAUNCHERS
from ..detection.placement import Placement
from ..host import cpus

_THREADS = "OMP_NUM_THREADS"
_ONE_CORE = 2  # CPUs, where each core has two threads


def warn_of_node(placement: Placement) -> None:
    """Warn where the process that starts the ranks of a node is bound, as they inherit it."""
    bound = cpus.binding()
    if bound is None or not placement.has_launcher:
        return
    own, every = bound
    _warn(
        placement,
        f"this process to {own} of {every} CPUs, and so all ranks of this node",
    )


def warn_of_rank(placement: Placement, environ: Mapping[str, str], root: cpus.Root = "/") -> None:
    """Warn where a rank is bound to one core of a larger share, or below OMP_NUM_THREADS.

    Only the first rank of each node warns.
    """
    if placement.local_rank != 0 or not placement.has_launcher:
        return
    bound = cpus.binding(root)
    ranks = placement.local_world_size
    if bound is None or ranks is None:
        return
    own, every = bound
    what = f"each rank to {own} of {every} CPUs"
    share = every // ranks
    threads = environ.get(_THREADS, "")
    if threads.isdecimal() and int(threads) > own:
        _warn(
            placement,
            f"{what}, and {_THREADS}={threads} is more than that",
        )
    elif own <= min(_ONE_CORE, share // 2):
        _warn(
            placement,
            f"{what}, of which its share is {share}",
        )


def _warn(placement: Placement, what: str) -> None:
    launcher = LAUNCHERS[placement.launcher]
    who = launcher.name
    if launcher.told_ranks_per_node:  # it binds nothing itself
        who = f"what started {launcher.name}"
    log_line(
        placement.who,
        f"warning: {who} has bound {what}: {launcher.unbind}",
    )
