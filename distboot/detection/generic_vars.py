"""RANK, WORLD_SIZE and other generic names beside the launcher that has claimed a process.

A shell, an image or an outer launcher may have left them over. If they describe the same world they are
ignored, with a note; if they describe another one, nothing shows which of the two is stale.
"""

from __future__ import annotations

from contextlib import suppress

from ..base.errors import UNKNOWN_RANK, DistbootError
from ..base.text import digits
from .conflicts import Claim, conflict
from .env_reader import EnvReader
from .inherited import InheritedEnv
from .launchers import Launcher
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
    if launcher.uses_daemons or launcher.starts_daemons:
        _refuse_larger_world(claim)
    notes = []
    for other in claim.further_out:
        if other.generic_names:
            notes += _compared(claim, other)
    if placement.node_level is None and placement.num_nodes == placement.world_size > 1:
        notes.append(_ONE_A_NODE)
    return notes


def _refuse_larger_world(claim: Claim) -> None:
    """Refuse a WORLD_SIZE above 1 where a launcher has started one process, which would train alone."""
    # With RANK it is the whole claim of `torch`, which is compared with this one.
    if claim.placement.world_size > 1 or "RANK" in claim.environ:
        return
    size = digits(claim.environ.get("WORLD_SIZE", ""))
    if size is None or size < 2:
        return
    name = claim.launcher.name
    started = claim.launcher.command or name
    source = claim.placement.sources["world_size"]
    raise DistbootError(
        "conflicting-launchers",
        f"{started} started 1 process ({source}=1), but WORLD_SIZE={size}",
        f"{claim.launcher.start_several.format(size)}; or unset WORLD_SIZE if it is left over; "
        f"or set DISTBOOT_LAUNCHER={name} if this process is meant to be alone",
    ).of(UNKNOWN_RANK)


def _compared(claim: Claim, other: Launcher) -> list[str]:
    """The note on the variables of a launcher with generic names; an error for another world."""
    used = claim.placement.sources.values()
    ignored = []
    for name in other.markers:
        if name in claim.environ and name not in used:
            ignored.append(name)
    if not ignored or not other.claims(claim.environ):
        return []
    return _notes_on(claim, other.name, ", ".join(ignored), read(other, claim.environ))


def _notes_on(claim: Claim, name: str, ignored: str, theirs: EnvReader) -> list[str]:
    placement = claim.placement
    owner = placement.launcher
    rank = theirs.number("rank")
    world_size = theirs.number("world_size")
    if rank is None or world_size is None or theirs.problems or rank >= world_size:
        # Half of a launcher, or broken: clearly a left-over
        return [f"{ignored} ignored: {owner} owns the rank"]
    if _is_of_outer(theirs, claim.environment.outer):
        return []
    if world_size != placement.world_size:
        raise conflict(placement, name, rank, world_size, ignored)
    # An inner launcher with exactly one process for each outer one makes no sense: RANK was exported
    # once, in a batch script for example, or it is the user's own order of the same processes.
    if rank == placement.rank:
        return []
    difference = f"says {placement.rank} where {theirs.source('rank')} says {rank}"
    return [f"{ignored} ignored: {owner} owns the rank, and {difference}"]


def _is_of_outer(reader: EnvReader, outer: InheritedEnv) -> bool:
    """Whether this is the process that the outer distboot was about, or for which it was a launcher."""
    if not outer.fields:
        return False
    with suppress(DistbootError):
        return outer._replace(launches=False).is_about(reader.placement())
    return False
