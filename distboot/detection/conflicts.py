"""What contradicts the launcher that has claimed a process, and which variables are ignored for it.

Nothing shows which of two launchers is the inner one where both have daemons, or where a platform has
more nodes than there are ranks. If they disagree, the user has to say which one is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from ..base.errors import UNKNOWN_RANK, DistbootError
from .launchers import Launcher
from .placement import NUMBERS, VARIABLES, Placement
from .readings import Environment, claimed_whole, markers_present, read_placement


class Claim(NamedTuple):
    """A launcher that has claimed a process, and what else is in the environment."""

    launcher: Launcher
    placement: Placement
    environment: Environment
    present: Sequence[Launcher]  # all launchers that have a variable there
    candidates: Sequence[Launcher]  # those of them that may have started the process

    @property
    def environ(self) -> Mapping[str, str]:
        return self.environment.without_ours

    @property
    def further_out(self) -> Sequence[Launcher]:
        return self.present[self.present.index(self.launcher) + 1 :]


def conflict(
    placement: Placement, other: str, rank: int, world_size: int, variables: str
) -> DistbootError:
    """The error for another launcher with other numbers, which these variables have."""
    own = placement.launcher
    numbers = f"rank {placement.rank} of {placement.world_size} ({placement.sources['rank']})"
    return DistbootError(
        "conflicting-launchers",
        f"{own} says {numbers}, but {other} says rank {rank} of {world_size}",
        "name the one that started this very process, the last one typed: "
        f"DISTBOOT_LAUNCHER={own} or DISTBOOT_LAUNCHER={other}; "
        f"or clear {variables} if left over from a shell or an image",
    ).of(UNKNOWN_RANK)


def refuse_other_daemons(claim: Claim) -> None:
    """Refuse other numbers of another launcher that has daemons, or of a step of Slurm's."""
    for other in claim.further_out:
        # Of those that read the same variables for rank and size, none can disagree
        is_same = other.numbers[:2] == claim.launcher.numbers[:2]
        if other.uses_daemons and other in claim.candidates and not is_same:
            _refuse_other_numbers(claim, other)
    for other in claim.candidates:
        if other.step is not None:
            _refuse_other_step(claim, other)


def _refuse_other_numbers(claim: Claim, other: Launcher) -> None:
    theirs = claimed_whole(other, claim.environ)
    if theirs is None or _agree(claim.placement, theirs):
        return
    may_be_daemons = _may_be_daemons(claim.placement, theirs.world_size, theirs.num_nodes)
    if other.starts_daemons and may_be_daemons:
        return
    variables = markers_present(other, claim.environ)
    raise conflict(claim.placement, other.name, theirs.rank, theirs.world_size, variables)


def _agree(one: Placement, other: Placement) -> bool:
    """Whether their numbers are the same, as far as both are known."""
    for field in NUMBERS:
        pair = {getattr(one, field), getattr(other, field)}
        if len(pair - {None}) > 1:
            return False
    return True


def _refuse_other_step(claim: Claim, scheduler: Launcher) -> None:
    """Refuse a process that is also a task of a step which is not that of the launcher's daemons."""
    assert scheduler.step is not None
    step = scheduler.step(claim.environ)
    if step is None:
        return
    placement = claim.placement
    if (step.rank, step.tasks) == (placement.rank, placement.world_size):
        same = step.local_rank in ("", str(placement.local_rank)) or placement.local_rank is None
    else:
        same = _may_be_daemons(placement, step.tasks, step.nodes)
    if not same:
        variables = markers_present(scheduler, claim.environ)
        raise conflict(placement, scheduler.name, step.rank, step.tasks, variables)


def _may_be_daemons(placement: Placement, tasks: int, nodes: int | None) -> bool:
    """Whether so many tasks can be a launcher's daemons: one a node, on nodes without ranks too."""
    if placement.world_size == 1 and tasks > 1:
        return False  # srun was more likely told to start these tasks
    return tasks == nodes


def refuse_other_nodes(claim: Claim) -> None:
    """Refuse fewer ranks than a platform has nodes, and platforms that number nodes differently."""
    numbers_nodes = claim.launcher.nodes is not None
    for other in claim.present:
        if other.nodes is None or other is claim.launcher:
            continue
        if numbers_nodes:
            theirs = claimed_whole(other, claim.environ)
        else:
            theirs = _nodes_around(other, claim.environ)
        if theirs is None or _fit(claim.placement, theirs, numbers_nodes=numbers_nodes):
            continue
        variables = ", ".join([name for name in other.markers if name in claim.environ])
        raise conflict(claim.placement, other.name, theirs.rank, theirs.world_size, variables)


def _fit(own: Placement, theirs: Placement, *, numbers_nodes: bool) -> bool:
    if numbers_nodes:
        return (own.rank, own.world_size) == (theirs.rank, theirs.world_size)
    return theirs.world_size <= own.world_size


def _nodes_around(platform: Launcher, environ: Mapping[str, str]) -> Placement | None:
    """The node of a process that something else has numbered; None: the platform does not say it."""
    if not platform.owns_torch_vars:
        # These are the numbers of the processes, which the platform does not set
        generic = VARIABLES.values()
        environ = {name: value for name, value in environ.items() if name not in generic}
    with suppress(DistbootError):
        return read_placement(platform, environ)
    return None


def notes_on_others(claim: Claim) -> list[str]:
    """Which variables of launchers further out are ignored."""
    notes = []
    for other in claim.further_out:
        names = markers_present(other, claim.environ)
        if names and not _is_expected(claim, other):
            owner = f"{claim.launcher.name} owns the rank, {other.name} is further out"
            notes.append(f"{names} ignored: {owner}")
    return notes


def _is_expected(claim: Claim, other: Launcher) -> bool:
    """Whether variables of a launcher further out need no note."""
    # Of two with daemons that are there and agree, one has inherited the variables of the other.
    if claim.launcher.uses_daemons and other.uses_daemons:
        return True
    # A platform with one node has nothing to say.
    return other.nodes is not None and not other.claims(claim.environ)
