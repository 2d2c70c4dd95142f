"""Variables of a launcher in the environment of a process that no launcher claims.

A launcher has set them in a process that it started as one of several. Where its rank or size is
missing, this process may be such a process in a container, or one that inherits the variable.
Each would be rank 0 of 1 and train on its own, so it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ..base.errors import UNKNOWN_RANK, DistbootError


class LeftOver(NamedTuple):
    """A variable that proves that a launcher started this process, or one around it."""

    name: str
    started_by: str  # what sets it; reads well after "was set by"
    needed: tuple[str, ...] = ()  # rank and size of that launcher; none: no variable has them
    harmless: str | None = None  # the value in a process that is alone
    in_shell: bool = False  # whether an interactive shell of Slurm may have it, too


def refuse(left_overs: Iterable[LeftOver], environ: Mapping[str, str]) -> None:
    """Refuse the first of these variables that is there."""
    # The shell is the one task of its step, and gets what the site's MpiDefault sets for a task.
    is_shell = environ.get("SLURM_STEP_NUM_TASKS") == "1"
    for left_over in left_overs:
        if environ.get(left_over.name, left_over.harmless) == left_over.harmless:
            continue
        if left_over.in_shell and is_shell:
            continue
        raise _unsupported(left_over, environ)


def _unsupported(left_over: LeftOver, environ: Mapping[str, str]) -> DistbootError:
    from .env_reader import container_env_hint, variable

    to_container = ""
    if left_over.needed:
        to_container = f"to pass it to a container: {container_env_hint(*left_over.needed)}; else "
    return DistbootError(
        "unsupported-launcher",
        f"{variable(environ, left_over.name)} was set by {left_over.started_by}, so this process "
        "may not be alone, but its rank or the number of ranks is missing",
        f"{to_container}set RANK, WORLD_SIZE and LOCAL_RANK for every process and "
        "DISTBOOT_LAUNCHER=torch, or DISTBOOT_LAUNCHER=none if this process is alone",
    ).of(UNKNOWN_RANK)
