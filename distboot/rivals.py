"""Several launchers speak in one environment: which of them is the inner one, or that nothing says so."""

from __future__ import annotations

from collections.abc import Mapping

from . import handoff
from .errors import DistbootError
from .launchers import Launcher
from .launchers.flux import FLUX
from .launchers.lsf import LSF
from .launchers.pals import PALS
from .launchers.slurm import SLURM
from .placement import Placement

_NUMBERS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")
_SCHEDULERS = (FLUX, LSF, PALS)  # with which people start the daemons of an MPI, as with Slurm


def inner_rival(
    environ: Mapping[str, str], placement: Placement, others: list[Launcher], handed_over: handoff.Handoff | None
) -> Placement | None:
    """The placement of another launcher with daemons that has other numbers and is the inner one for certain.

    Raises:
        DistbootError: `conflicting-launchers`, there is such a launcher, and nothing says which is the inner one.
    """
    for other in others:
        try:
            rival = other.read(environ) if present(environ, other) else None
        except DistbootError:
            continue  # half a launcher
        if rival is None or _same_place(placement, rival):
            continue
        if other in _SCHEDULERS and _may_be_daemons(placement, rival.world_size, rival.num_nodes):
            continue
        if handed_over is not None and handed_over.is_about(placement):
            return rival  # it was not there when an outer distboot saw `placement`, or that would have been refused
        raise _conflict(placement, rival.launcher, rival.rank, rival.world_size, present(environ, other))
    return None


def refuse_step(environ: Mapping[str, str], placement: Placement) -> None:
    """Refuse when this is also a task of a Slurm step that is not that of the daemons of `placement`."""
    said = [environ.get(name, "") for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")]
    # In an interactive shell, which has a terminal, anything may have been typed.
    numbers = all(number.isascii() and number.isdigit() and len(number) <= 8 for number in said)
    if not numbers or "SLURM_PTY_PORT" in environ:
        return
    rank, tasks, nodes = map(int, said)
    if (rank, tasks) == (placement.rank, placement.world_size):
        local = environ.get("SLURM_LOCALID", "")
        differs = placement.local_rank is not None and local not in ("", str(placement.local_rank))
    else:
        differs = not _may_be_daemons(placement, tasks, nodes)
    if differs:
        raise _conflict(placement, SLURM.name, rank, tasks, present(environ, SLURM))


def reconciled(environ: Mapping[str, str], placement: Placement, others: list[Launcher]) -> list[str]:
    """Refuse when variables with plain names describe another world: one is stale, and nothing says which."""
    notes: list[str] = []
    noted: set[str] = set()
    for other in others:
        ignored = [name for name in other.markers if name in environ]
        try:
            rival = other.read(environ) if ignored else None
        except DistbootError:  # half of a launcher, or broken: a left-over that nobody can mistake for the truth
            if not noted.issuperset(ignored):
                notes.append(f"{', '.join(ignored)} ignored: {placement.launcher} owns the rank")
            noted.update(ignored)
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
            raise _conflict(placement, rival.launcher, rival.rank, rival.world_size, ", ".join(ignored))
    return notes


def present(environ: Mapping[str, str], launcher: Launcher) -> str:
    """The launcher's markers that are there, for a note; of those with plain names `reconciled` speaks."""
    return "" if launcher.plain else ", ".join(name for name in launcher.markers if name in environ)


def _may_be_daemons(placement: Placement, tasks: int, nodes: int | None) -> bool:
    """Whether so many tasks can be the daemons of a launcher: one a node, on nodes without ranks too."""
    # Next to a world of one, several tasks are more likely to be what srun was told to start.
    return tasks == nodes and (placement.world_size > 1 or tasks == 1)


def _same_place(one: Placement, other: Placement) -> bool:
    """Whether two placements have the same numbers, as far as both know them."""
    pairs = ((getattr(one, field), getattr(other, field)) for field in _NUMBERS)
    return all(mine == its or None in (mine, its) for mine, its in pairs)


def _conflict(placement: Placement, name: str, rank: int, world_size: int, variables: str) -> DistbootError:
    return DistbootError(
        "conflicting-launchers",
        f"{placement.launcher} says rank {placement.rank} of {placement.world_size} ({placement.sources['rank']}), but "
        f"{name} says rank {rank} of {world_size}",
        f"name the one that started this very process, the last one typed: DISTBOOT_LAUNCHER={placement.launcher} or "
        f"DISTBOOT_LAUNCHER={name}; or clear {variables} if left over from a shell or an image",
    ).of("rank ?")
