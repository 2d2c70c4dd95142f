"""`detect`: from the environment of one process to its `Placement`. Pure: it reads the mapping and nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from . import handoff
from .errors import DistbootError, did_you_mean, quoted
from .launchers import INNERMOST_FIRST, Launcher
from .launchers.single import SINGLE, alone
from .placement import Placement
from .rivals import inner_rival, present, reconciled, refuse_step

# DISTBOOT_LAUNCHER=none: look for no launcher at all.
OFF = "none"


def detect(environ: Mapping[str, str] | None = None, *, launcher: str | None = None) -> Placement:
    """Find out from the environment which process of the job this is.

    Args:
        environ: the environment to read; default: that of this process.
        launcher: name of the launcher to believe, for example "openmpi", or "none" for a process that is alone
            whatever its environment says; default: DISTBOOT_LAUNCHER, or else the innermost launcher that claims
            the environment.

    Returns:
        This process's place in the job. What its environment cannot prove is None in it, never a guess.

    Raises:
        DistbootError: the environment is broken or contradictory, or does not fit the launcher named.
    """
    environ = os.environ if environ is None else environ
    bare, handed_over = handoff.take(environ)
    name, named_by = launcher, "launcher="
    if name is None and environ.get("DISTBOOT_LAUNCHER"):
        name, named_by = environ["DISTBOOT_LAUNCHER"], "DISTBOOT_LAUNCHER="
    full = environ if handed_over is None else handed_over.without_others(environ)
    if name is None:
        placement = _innermost(full, bare, handed_over)
    else:
        placement = _named(full, bare, name, f"{named_by}{quoted(name)}")
    return handed_over.completed(placement) if handed_over and handed_over.is_about(placement) else placement


def by_name(name: str) -> Launcher | None:
    """The launcher of that name, or None."""
    return next((candidate for candidate in INNERMOST_FIRST if candidate.name == name), None)


def launcher_of(placement: Placement) -> Launcher:
    """The record of the launcher that a placement names."""
    launcher = by_name(placement.launcher)
    assert launcher is not None, "a placement names the launcher that was found"
    return launcher


def _innermost(full: Mapping[str, str], bare: Mapping[str, str], handed_over: handoff.Handoff | None) -> Placement:
    """`bare` is the environment without what an outer distboot exported; `full` has RANK and its like all the same."""
    notes: list[str] = []
    for index, candidate in enumerate(INNERMOST_FIRST):
        placement = candidate.read(full if candidate.rewrites else bare)
        if placement is None:
            names = present(bare, candidate)
            notes += [f"{names} ignored: they are not about this very process"] if names else []
            continue
        outer = INNERMOST_FIRST[index + 1 :]
        if candidate.has_daemons:
            rivals = [other for other in outer if other.has_daemons]
            inner = inner_rival(bare, placement, rivals, handed_over)
            if inner is not None:
                return inner
            refuse_step(bare, placement)
        for other in () if candidate is SINGLE else outer:
            # Of two with daemons that are there and agree, one has inherited the variables of the other: no news.
            names = "" if candidate.has_daemons and other.has_daemons else present(bare, other)
            notes += [f"{names} ignored: {candidate.name} owns the rank, {other.name} is further out"] if names else []
        if not candidate.reads_plain:
            notes += reconciled(bare, placement, [other for other in outer if other.plain])
            notes += _one_a_node(placement)
        return placement._replace(notes=(*placement.notes, *notes)) if notes else placement
    raise AssertionError("the last launcher, single, claims every environment")


def _one_a_node(placement: Placement) -> list[str]:
    if placement.node_level is not None or placement.world_size == 1 or placement.num_nodes != placement.world_size:
        return []
    return ["one process was started on each node; if it is to start several ranks there, see --nproc-per-node"]


def _named(full: Mapping[str, str], bare: Mapping[str, str], name: str, said: str) -> Placement:
    if name in (SINGLE.name, OFF):
        return alone(bare)
    candidate = by_name(name)
    if candidate is None:
        names = ", ".join(launcher.name for launcher in INNERMOST_FIRST)
        hint = (
            f"{_meant(str(name))}the launchers are {names}, and {OFF} for a process that is alone "
            "(python -m distboot launchers)"
        )
        raise DistbootError("unknown-launcher", f"{said} is no launcher", hint).of("rank ?")
    placement = candidate.read(full if candidate.rewrites else bare)
    if placement is None:
        raise DistbootError(
            "launcher-mismatch",
            f"{said}, but its variables ({', '.join(candidate.markers)}) are not set, or not as it sets them",
            "remove the setting to let distboot find the launcher, or start the job with that launcher",
        ).of("rank ?")
    return placement


def _meant(word: str) -> str:
    """`"did you mean 'openmpi'? "`: its name is like this one, or it has the word in its title, as "mpirun"."""
    titled = [one.name for one in INNERMOST_FIRST if word.lower() in re.findall(r"[\w.]+", one.title.lower())]
    return did_you_mean(word, [one.name for one in INNERMOST_FIRST], titled)
