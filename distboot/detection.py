"""`detect`: from the environment of one process to its `Placement`. Pure: it reads the mapping and nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from . import handoff
from .errors import DistbootError, quoted
from .launchers import INNERMOST_FIRST, Launcher
from .launchers.single import SINGLE, alone
from .launchers.slurm import SLURM
from .placement import Placement

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
        The placement. What one process's environment cannot prove is None in it.

    Raises:
        DistbootError: the environment is broken or contradictory, or does not fit the launcher named.
    """
    environ = os.environ if environ is None else environ
    bare, handed_over = handoff.take(environ)
    name, named_by = launcher, "launcher="
    if name is None and environ.get("DISTBOOT_LAUNCHER"):
        name, named_by = environ["DISTBOOT_LAUNCHER"], "DISTBOOT_LAUNCHER="
    placement = (
        _named(environ, bare, name, f"{named_by}{quoted(name)}") if name is not None else _innermost(environ, bare)
    )
    return handed_over.completed(placement) if handed_over and handed_over.is_about(placement) else placement


def by_name(name: str) -> Launcher | None:
    """The launcher of that name, or None."""
    return next((candidate for candidate in INNERMOST_FIRST if candidate.name == name), None)


def _innermost(environ: Mapping[str, str], bare: Mapping[str, str]) -> Placement:
    """`bare` is `environ` without what an outer distboot exported."""
    notes: list[str] = []
    for index, candidate in enumerate(INNERMOST_FIRST):
        placement = candidate.read(environ if candidate.rewrites else bare)
        if placement is None:
            names = _present(bare, candidate)
            notes += [f"{names} ignored: they are not about this very process"] if names else []
            continue
        outer = INNERMOST_FIRST[index + 1 :]
        if candidate.has_daemons:
            _refuse_rivals(bare, placement, [other for other in outer if other.has_daemons or other is SLURM])
        for other in () if candidate is SINGLE else outer:
            # Of two with daemons that are there and agree, one has inherited the variables of the other: no news.
            names = "" if candidate.has_daemons and other.has_daemons else _present(bare, other)
            notes += [f"{names} ignored: {candidate.name} owns the rank, {other.name} is further out"] if names else []
        if not candidate.reads_plain:
            notes += _reconciled(bare, placement, [other for other in outer if other.plain])
            notes += _one_a_node(placement)
        return replace(placement, notes=(*placement.notes, *notes)) if notes else placement
    raise AssertionError("the last launcher, single, claims every environment")


def _present(environ: Mapping[str, str], launcher: Launcher) -> str:
    """The launcher's markers that are there, for a note; of those with plain names `_reconciled` speaks."""
    return "" if launcher.plain else ", ".join(name for name in launcher.markers if name in environ)


def _refuse_rivals(environ: Mapping[str, str], placement: Placement, others: list[Launcher]) -> None:
    """Refuse when another launcher with daemons, or a step that none of its daemons is in, has other numbers."""
    # srun sets PMI_* for some of its plugins only, so what is there need not be about the step.
    for_slurm = {name: value for name, value in environ.items() if not name.startswith("PMI_")}
    for other in others:
        try:
            rival = other.read(for_slurm if other is SLURM else environ) if _present(environ, other) else None
        except DistbootError:
            continue  # half a launcher
        if rival is None or (rival.rank, rival.world_size) == (placement.rank, placement.world_size):
            continue
        # A step of one task a node is that of the daemons, and one with a terminal is the shell that it all began in.
        if other is not SLURM or (rival.world_size != rival.num_nodes and "SLURM_PTY_PORT" not in environ):
            raise _conflict(placement, rival, _present(environ, other))


def _conflict(placement: Placement, rival: Placement, variables: str) -> DistbootError:
    return DistbootError(
        "conflicting-launchers",
        f"{placement.sources['rank']} says rank {placement.rank} of {placement.world_size}, but "
        f"{rival.sources['rank']} says rank {rival.rank} of {rival.world_size}",
        f"clear {variables} if left over from a shell or an image, "
        f"or set DISTBOOT_LAUNCHER={placement.launcher} or DISTBOOT_LAUNCHER={rival.launcher}",
    ).of("rank ?")


def _one_a_node(placement: Placement) -> list[str]:
    if placement.node_level is not None or placement.world_size == 1 or placement.num_nodes != placement.world_size:
        return []
    return ["one process was started on each node; if it is to start several ranks there, see --nproc-per-node"]


def _reconciled(environ: Mapping[str, str], placement: Placement, others: list[Launcher]) -> list[str]:
    """Refuse when variables with plain names describe another world: one is stale, and nothing says which."""
    notes: list[str] = []
    for other in others:
        ignored = [name for name in other.markers if name in environ]
        try:
            rival = other.read(environ) if ignored else None
        except DistbootError:  # half of a launcher, or broken: a left-over that nobody can mistake for the truth
            notes.append(f"{', '.join(ignored)} ignored: {placement.launcher} owns the rank")
            continue
        if rival is None:
            continue
        if rival.world_size == placement.world_size:
            # Nobody starts an inner launcher with exactly one process for each outer one: RANK was exported once, in
            # a batch script say, or it is the user's own order of the same processes.
            if rival.rank != placement.rank:
                notes.append(
                    f"{', '.join(ignored)} ignored: {placement.launcher} owns the rank, and says {placement.rank} "
                    f"where {rival.sources['rank']} says {rival.rank}"
                )
        else:
            raise _conflict(placement, rival, ", ".join(ignored))
    return notes


def _named(environ: Mapping[str, str], bare: Mapping[str, str], name: str, said: str) -> Placement:
    if name in (SINGLE.name, OFF):
        return alone(bare)
    candidate = by_name(name)
    if candidate is None:
        known = ", ".join(launcher.name for launcher in INNERMOST_FIRST)
        raise DistbootError(
            "unknown-launcher",
            f"{said} is no launcher",
            f"the launchers are {known}, and {OFF} for a process that is alone (see `python -m distboot launchers`)",
        ).of("rank ?")
    placement = candidate.read(environ if candidate.rewrites else bare)
    if placement is None:
        raise DistbootError(
            "launcher-mismatch",
            f"{said}, but its variables ({', '.join(candidate.markers)}) are not set, or not as it sets them",
            "remove the setting to let distboot find the launcher, or start the job with that launcher",
        ).of("rank ?")
    return placement
