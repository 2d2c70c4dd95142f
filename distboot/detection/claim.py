"""A launcher that has claimed a process, and the error for another one that contradicts it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..base.errors import UNKNOWN_RANK, DistbootError
from .launchers import Launcher
from .placement import Placement
from .readings import Environment


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
        own = self.present.index(self.launcher)
        return self.present[own + 1 :]


def conflict(
    placement: Placement,
    other: str,
    rank: int,
    world_size: int,
    variables: str,
    *,
    can_be_named: bool = True,  # whether the other one can, without unsetting any variable
) -> DistbootError:
    """The error for another launcher with other numbers; one of both has left these variables."""
    own = placement.launcher
    numbers = f"rank {placement.rank} of {placement.world_size} ({placement.sources['rank']})"
    hint = (
        "name the launcher that started this process, the innermost one: "
        f"DISTBOOT_LAUNCHER={own} or DISTBOOT_LAUNCHER={other}; "
        f"or unset {variables} if left over from a shell or an image"
    )
    if not can_be_named:
        hint = (
            f"unset {variables} if left over from a shell or an image; "
            f"or DISTBOOT_LAUNCHER={own} if this is {numbers}"
        )
    return DistbootError(
        "conflicting-launchers",
        f"{own} has {numbers}, but {other} has rank {rank} of {world_size}",
        hint,
    ).of(UNKNOWN_RANK)
