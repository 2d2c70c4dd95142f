"""Jobs of one node that may be several: each process of an outer launcher starts one of them.

`mpirun -n 2 torchrun --nproc-per-node 8 train.py` trains two models, as does torchrun on each node
of a platform where it is told of one node. Each of them is whole, so nothing fails. It is not an
error: jobs may be meant to be separate. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ..base.errors import DistbootError
from .allocation import Unused
from .env_reader import variable
from .launchers import Launcher
from .order import LAUNCHERS, present
from .placement import VARIABLES, Placement
from .readings import Environment, claimed

# srun --pty: only one task has the terminal, in which anything may be typed
_TERMINAL = "SLURM_PTY_PORT"


def outer_processes(placement: Placement, environ: Mapping[str, str]) -> Unused | None:
    """The processes of an outer launcher, which may have started a job of one node each."""
    if placement.num_nodes != 1 or _TERMINAL in environ:
        return None
    own = LAUNCHERS[placement.launcher]
    without_ours = Environment.of(environ).without_ours
    launchers = present(environ)
    further_out = launchers[launchers.index(own) + 1 :]
    for other in further_out:
        theirs = _processes_of(other, without_ours)
        if theirs is not None and theirs.world_size > 1:
            return _unused(own, other, theirs, environ)
    return None


def _processes_of(other: Launcher, environ: Mapping[str, str]) -> Placement | None:
    """The process of an outer launcher, without the numbers that the inner one has set."""
    own_names = set(VARIABLES.values())
    outer = {name: text for name, text in environ.items() if name not in own_names}
    with suppress(DistbootError):  # what is broken there is not about this process
        return claimed(other, outer)
    return None


def _unused(
    own: Launcher,
    other: Launcher,
    theirs: Placement,
    environ: Mapping[str, str],
) -> Unused:
    count = theirs.world_size
    what = "processes"
    if other.nodes is not None:
        what = "nodes"
    source = theirs.sources["world_size"]
    if source in environ:
        source = variable(environ, source)
    return Unused(
        f"{other.command or other.name} has {count} {what} ({source})",
        f"if each of them starts {own.name}, these are {count} jobs that train separately: "
        f"tell {own.name} of the other nodes, or leave it out "
        "(python -m distboot --nproc-per-node N train.py … in its place); "
        f"or set DISTBOOT_LAUNCHER={own.name} if they are meant to be separate",
    )
