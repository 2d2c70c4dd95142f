"""RANK, WORLD_SIZE and other generic names beside the launcher that has claimed a process.

A shell, an image or an outer launcher may have left them over. If they describe the same world they
are ignored, with a note; if they describe another one, nothing shows which of the two is stale.
"""

from __future__ import annotations

from contextlib import suppress

from ..base.errors import UNKNOWN_RANK, DistbootError
from ..base.text import digits
from .claim import Claim, conflict
from .env_reader import EnvReader
from .inherited import InheritedEnv
from .launchers import Launcher
from .placement import Placement
from .readings import read

_ONE_A_NODE = (
    "one process was started on each node; if it is to start several ranks there, "
    "see --nproc-per-node"
)


def notes_on_generic(claim: Claim) -> list[str]:
    """Which variables with generic names are ignored, and whether there is one process a node."""
    launcher = claim.launcher
    placement = claim.placement
    if launcher.owns_torch_vars:
        return []
    counts_ranks = launcher.uses_daemons or launcher.starts_daemons
    if counts_ranks:
        _refuse_larger_world(claim)
    notes = []
    for other in claim.further_out:
        if other.generic_names:
            notes += _compared(claim, other)
    if _is_one_a_node(placement):
        notes.append(_ONE_A_NODE)
    return notes


def _is_one_a_node(placement: Placement) -> bool:
    one_each = placement.num_nodes == placement.world_size > 1
    return one_each and placement.node_level is None


def _refuse_larger_world(claim: Claim) -> None:
    """Refuse a WORLD_SIZE above 1 where a launcher has started one process."""
    placement = claim.placement
    launcher = claim.launcher
    size = digits(claim.environ.get("WORLD_SIZE", "")) or 1
    # With RANK it is the whole claim of `torch`, which is compared with this one.
    has_rank = "RANK" in claim.environ
    is_larger = size > 1 and placement.world_size == 1
    if has_rank or not is_larger:
        return
    name = launcher.name
    started = launcher.command or name
    source = placement.sources["world_size"]
    start = launcher.start_several.format(size)
    raise DistbootError(
        "conflicting-launchers",
        f"{started} started 1 process ({source}=1), but WORLD_SIZE={size}",
        f"{start}; or unset WORLD_SIZE if it is left over; "
        f"or set DISTBOOT_LAUNCHER={name} if this process is meant to be alone",
    ).of(UNKNOWN_RANK)


def _compared(claim: Claim, other: Launcher) -> list[str]:
    """The note on the variables of a launcher with generic names; an error for another world."""
    environ = claim.environ
    used = set(claim.placement.sources.values())
    unused = set(other.markers) - used
    names = unused & environ.keys()
    ignored = [name for name in other.markers if name in names]
    is_claimed = other.claims(environ)
    if not ignored or not is_claimed:
        return []
    theirs = read(other, environ)
    listed = ", ".join(ignored)
    return _notes_on(claim, other.name, listed, theirs)


def _notes_on(claim: Claim, name: str, ignored: str, theirs: EnvReader) -> list[str]:
    placement = claim.placement
    note = f"{ignored} ignored: {placement.launcher} owns the rank"
    rank = theirs.number("rank")
    world_size = theirs.number("world_size")
    outer = claim.environment.outer
    if rank is None or world_size is None:
        return [note]  # half of a launcher: clearly a left-over
    if theirs.problems or rank >= world_size:
        return [note]
    if _is_of_outer(theirs, outer):
        return []
    # An inner launcher with exactly one process for each outer one makes no sense: RANK was
    # exported once, in a batch script for example, or it is the user's own order of the same
    # processes.
    if (rank, world_size) == (placement.rank, placement.world_size):
        return []
    # Unless it was set below a rank of distboot, which had its own RANK
    if outer.was_replaced("RANK", claim.environment.whole):
        raise _replaced(placement, rank, world_size)
    if world_size != placement.world_size:
        raise conflict(
            placement,
            name,
            rank,
            world_size,
            ignored,
        )
    source = theirs.source("rank")
    difference = f"has {placement.rank} where {source} has {rank}"
    return [f"{note}, and {difference}"]


def _replaced(placement: Placement, rank: int, world_size: int) -> DistbootError:
    """The error for a process below a rank that the script has numbered anew."""
    outer = f"rank {placement.rank} of {placement.world_size}"
    return DistbootError(
        "conflicting-launchers",
        f"this process is below {outer}, and RANK and WORLD_SIZE were set below that to "
        f"rank {rank} of {world_size}",
        "the ranks run already: remove what starts more of them in the script, such as mp.spawn; "
        "or let the script start them all, without --nproc-per-node or another launcher; for a "
        "process that is to be alone set DISTBOOT_LAUNCHER=none, for one of an inner launcher "
        "DISTBOOT_LAUNCHER=torch",
    ).of(UNKNOWN_RANK)


def _is_of_outer(reader: EnvReader, outer: InheritedEnv) -> bool:
    """Whether these are the numbers of the process that the outer distboot was about."""
    if not outer.fields:
        return False
    of_rank = outer._replace(launches=False)
    with suppress(DistbootError):
        placement = reader.placement()
        return of_rank.is_about(placement)
    return False
