"""What contradicts the launcher that has claimed a process, and which variables are ignored for it.

Nothing shows which of two launchers is the inner one where both have daemons, or where a platform
has more nodes than there are ranks. If they disagree, the user has to say which one is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ..base.errors import DistbootError
from .claim import Claim, conflict
from .generic_vars import notes_on_generic
from .launchers import Launcher, Step
from .placement import NUMBERS, VARIABLES, Placement
from .readings import claimed_whole, found_markers, read_placement, specific_markers


def checked(claim: Claim) -> list[str]:
    """Refuse what contradicts a claim; the notes on what is ignored for it."""
    launcher = claim.launcher
    if launcher.uses_daemons:
        _refuse_other_daemons(claim)
    if launcher.compared_with_nodes:
        _refuse_other_nodes(claim)
    notes = _notes_on_others(claim)
    generic = notes_on_generic(claim)
    return [*notes, *generic]


def _refuse_other_daemons(claim: Claim) -> None:
    """Refuse other numbers of another launcher that has daemons, or of a step of Slurm's."""
    own_variables = claim.launcher.numbers[:2]
    for other in claim.further_out:
        variables = other.numbers[:2]
        is_candidate = other in claim.candidates
        # Of those that read the same variables for rank and size, none can disagree
        if not is_candidate or variables == own_variables:
            continue
        if other.uses_daemons:
            _refuse_other_numbers(claim, other)
    for other in claim.candidates:
        step = other.step(claim.environ)
        if step is not None:
            _refuse_other_step(claim, other, step)


def _refuse_other_numbers(claim: Claim, other: Launcher) -> None:
    placement = claim.placement
    theirs = claimed_whole(other, claim.environ)
    if theirs is None or _agree(placement, theirs):
        return
    may_be_daemons = _may_be_daemons(placement, theirs.world_size, theirs.num_nodes)
    if other.starts_daemons and may_be_daemons:
        return
    raise conflict(
        placement,
        other.name,
        theirs.rank,
        theirs.world_size,
        specific_markers(other, claim.environ),
    )


def _agree(one: Placement, other: Placement) -> bool:
    """Whether their numbers are the same, as far as both are known."""
    for field in NUMBERS:
        mine = getattr(one, field)
        its = getattr(other, field)
        known = {mine, its}
        known.discard(None)
        differ = len(known) > 1
        if differ:
            return False
    return True


def _refuse_other_step(claim: Claim, scheduler: Launcher, step: Step) -> None:
    """Refuse a process that is also a task of a step other than that of the daemons."""
    placement = claim.placement
    same = _may_be_daemons(placement, step.tasks, step.nodes)
    own = (placement.rank, placement.world_size)
    if (step.rank, step.tasks) == own:
        known = {step.local_rank, str(placement.local_rank)} - {"", "None"}
        same = len(known) < 2
    if same:
        return
    raise conflict(
        placement,
        scheduler.name,
        step.rank,
        step.tasks,
        specific_markers(scheduler, claim.environ),
    )


def _may_be_daemons(placement: Placement, tasks: int, nodes: int | None) -> bool:
    """Whether so many tasks can be a launcher's daemons: one a node, on nodes without ranks too."""
    is_only_rank = placement.world_size == 1
    are_several = tasks > 1
    if is_only_rank and are_several:
        return False  # srun was more likely told to start more tasks
    return nodes == tasks


def _refuse_other_nodes(claim: Claim) -> None:
    """Refuse fewer ranks than a platform has nodes, and platforms that number nodes differently."""
    placement = claim.placement
    for other in claim.present:
        if other.nodes is None or other is claim.launcher:
            continue
        if claim.launcher.nodes is None:
            theirs = _nodes_around(other, claim.environ)
        else:
            theirs = claimed_whole(other, claim.environ)
        if theirs is None or _fit(claim, theirs):
            continue
        own = found_markers(claim.launcher, claim.environ)
        its = found_markers(other, claim.environ)
        raise conflict(
            placement,
            other.name,
            theirs.rank,
            theirs.world_size,
            f"{own}, or {its},",
            can_be_named=claimed_whole(other, claim.environ) is not None,
        )


def _fit(claim: Claim, theirs: Placement) -> bool:
    own = claim.placement
    numbers_nodes = claim.launcher.nodes is not None
    if not numbers_nodes:
        return theirs.world_size <= own.world_size
    mine = (own.rank, own.world_size)
    its = (theirs.rank, theirs.world_size)
    return mine == its


def _nodes_around(platform: Launcher, environ: Mapping[str, str]) -> Placement | None:
    """The node of a process that something else has numbered, or None."""
    of_nodes = dict(environ)
    if not platform.owns_torch_vars:
        # These are the numbers of the processes, which the platform does not set
        for name in VARIABLES.values():
            of_nodes.pop(name, None)
    with suppress(DistbootError):
        return read_placement(platform, of_nodes)
    return None


def _notes_on_others(claim: Claim) -> list[str]:
    """Which variables of launchers further out are ignored."""
    notes = []
    own = claim.launcher
    for other in claim.further_out:
        names = specific_markers(other, claim.environ)
        # Of two with daemons that are there and agree, one has inherited the variables of the
        # other.
        is_inherited = own.uses_daemons and other.uses_daemons
        if is_inherited or not names:
            continue
        is_platform = other.nodes is not None
        is_one_node = is_platform and not other.claims(claim.environ)
        if is_one_node:  # so that it has nothing to say
            continue
        owner = f"{own.name} owns the rank"
        further_out = f"{other.name} is further out"
        note = f"{names} ignored: {owner}, {further_out}"
        notes.append(note)
    return notes
