"""Jobs of one node that may be several: each process of an outer launcher starts one of them.

`mpirun -n 2 torchrun --nproc-per-node 8 train.py` trains two models, as does torchrun or mpirun on
each node of a platform where it is told of one node. Each of them is whole, so nothing fails. It is
not an error: jobs may be meant to be separate. Where no launcher is known that is further out, the
variables of an unknown one may still show other nodes (`signs`). Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import filterfalse
from operator import attrgetter

from ..base.patterns import pattern
from .allocation import PossiblePeers
from .env_reader import variable
from .launchers import Launcher
from .order import LAUNCHERS, with_marker
from .placement import VARIABLES, WRAPPER, Placement
from .readings import Environment, claimed_whole
from .signs import Sign, signs

# srun --pty: only one task has the terminal, in which anything may be typed
_TERMINAL = "SLURM_PTY_PORT"
# Not PET_*, which are torchrun's own settings: 1:4 nodes may be one now. Nor those of an MPI, whose
# NODE_RANK is a local one; jsrun sets some of Open MPI's.
_NODE = pattern(
    r"(?!PET_|OMPI_|PMIX?_|MPI_|MV2_|PALS_)(\w+_)?"
    r"(NODE|HOST|MACHINE|POD|VM|INSTANCE)_(RANK|INDEX|IDX|ID|NUMBER|ORDINAL)|"
    r"AZUREML_NODE_COUNT"
)
# Platforms set it, and few launchers do
_OF_NODES = {VARIABLES["node_rank"]}
_is_compared = attrgetter("compared_with_nodes")


def outer_processes(placement: Placement, environ: Mapping[str, str]) -> PossiblePeers | None:
    """The processes of an outer launcher, which may have started a job of one node each."""
    has_other_nodes = placement.num_nodes != 1
    is_typed = _TERMINAL in environ
    if has_other_nodes or is_typed:
        return None
    own = LAUNCHERS[placement.launcher]
    outer = _without(own, Environment.of(environ).without_ours)
    for other in _further_out(own, environ):
        theirs = claimed_whole(other, outer)  # what is broken there is not about this process
        if theirs is not None and theirs.world_size > 1:
            text = _described(other, theirs, environ)
            return _possible_peers(own, text, f"{theirs.world_size} jobs")
    found = list(filter(_is_of_nodes, signs(outer)))
    if found:
        shown = map(partial(variable, environ), found[0].variables)
        listed = ", ".join(shown)
        return _possible_peers(own, f"the environment shows other nodes ({listed})", "jobs")
    return None


def _further_out(own: Launcher, environ: Mapping[str, str]) -> list[Launcher]:
    """The launchers each of whose processes may have started a job."""
    launchers = with_marker(environ)
    inner = 0
    if own in launchers:  # the wrapper's own variables are those of its ranks
        inner = launchers.index(own) + 1
    found = launchers[inner:]
    if own.told_ranks_per_node:
        return found
    # Its processes may be the daemons of the others, or the ranks of a shell that numbers them.
    return list(filter(_is_compared, found))


def _is_of_nodes(sign: Sign) -> bool:
    """Whether it is the index of a node beside a count, and not of processes as this job may have."""
    return _NODE.fullmatch(sign.variables[0].upper()) is not None


def _without(own: Launcher, environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what the inner launcher has set for this process."""
    of_platforms = _OF_NODES.difference(own.numbers)
    names = {*VARIABLES.values(), *own.numbers} - of_platforms
    names |= own.set_for_one_process(environ)
    others = filterfalse(names.__contains__, environ)
    return {name: environ[name] for name in others}


def _described(other: Launcher, theirs: Placement, environ: Mapping[str, str]) -> str:
    """`"openmpi has 2 processes (OMPI_COMM_WORLD_SIZE='2')"`."""
    what = "processes"
    if other.nodes is not None:
        what = "nodes"
    source = theirs.sources["world_size"]
    if source in environ:
        source = variable(environ, source)
    return f"{other.command or other.name} has {theirs.world_size} {what} ({source})"


def _possible_peers(own: Launcher, text: str, jobs: str) -> PossiblePeers:
    command = own.command or own.name
    several = f"if each of them starts {command}, these are {jobs} that train separately"
    if own.name == WRAPPER:
        return PossiblePeers(
            text,
            f"{several}: add --nnodes, --node-rank and --master-addr; "
            "or set DISTBOOT_LAUNCHER=none if they are meant to be separate",
        )
    return PossiblePeers(
        text,
        f"{several}: tell {command} of the other nodes, or leave it out "
        "(python -m distboot --nproc-per-node N train.py … in its place); "
        f"or set DISTBOOT_LAUNCHER={own.name} if they are meant to be separate",
    )
