"""`detect`: from the environment of one process to its `Placement`. Pure: it reads a mapping.

1. The launcher that the user names has started the process (`named`).
2. Else it is the innermost one that claims the process (`order`); below an outer distboot, one that
   can be inside it (`outer_distboot`). What contradicts it is refused (`conflicts`, `generic_vars`).
3. Else the process is alone, unless something is left over of a launcher (`left_over`), or variables
   show other processes (`not_alone`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ..base.errors import UNKNOWN_RANK, DistbootError
from ..base.text import short_repr
from . import inherited, left_over, outer_distboot
from .claim import Claim
from .env_reader import container_env_hint
from .inherited import InheritedEnv
from .launchers import Launcher
from .order import LAUNCHERS, with_any_variable, with_marker
from .placement import NO_LAUNCHER, Placement
from .readings import Environment, claimed, read_placement, specific_markers

NODE_LEVEL_HINT = (
    "let the wrapper start the ranks: python -m distboot --nproc-per-node N script.py …, "
    "with N processes per node, or auto for as many as the platform says "
    "(else one per accelerator, or per CPU if there are none), or 1 for a single process"
)


def detect(environ: Mapping[str, str] | None = None, *, launcher: str | None = None) -> Placement:
    """Find out from the environment which process of the job this is.

    Args:
        environ: the environment to read; default: that of this process.
        launcher: name of the launcher to believe, for example "openmpi", or "none" for a process
            that is alone whatever its environment says; default: DISTBOOT_LAUNCHER, or else the
            innermost launcher that claims the environment.

    Returns:
        This process's place in the job. What its environment cannot prove is None in it, never a
        guess.

    Raises:
        DistbootError: the environment is broken or contradictory, or does not fit the launcher
            named.
    """
    if environ is None or environ is os.environ:
        environ = dict(os.environ)  # os.environ encodes the name at each lookup; a dict does not
    environment = Environment.of(environ)
    option = "launcher"
    name = launcher
    if launcher is None:
        option = "DISTBOOT_LAUNCHER"
        name = environ.get(option) or None
    if name is None:
        placement = _found(environment)
    else:
        # Here and below: most processes need only some of these
        from .named import named, refuse_unless_text

        refuse_unless_text(name, "help(distboot.detect) says what each argument is")
        option = f"{option}={short_repr(name)}"
        placement = named(environment, name, option)
    outer = environment.outer
    if outer.is_about(placement):
        placement = outer.merge(placement, environ)
    return placement


def refuse_unless_rank(placement: Placement) -> None:
    """Refuse a process that stands for a whole node."""
    if placement.node_level is not None:
        raise DistbootError(
            "node-level-launch",
            f"{placement.node_level}; this process stands for node {placement.rank} of "
            f"{placement.world_size}, and is not a rank",
            NODE_LEVEL_HINT,
        )


def _found(environment: Environment) -> Placement:
    """The placement by the innermost launcher, or of a process that is alone."""
    placement = _innermost(environment)
    was_exported = _has_rank(environment.outer)
    if was_exported and not placement.has_launcher:
        placement = _as_exported(environment)
    _refuse_signs(placement, environment.without_ours)
    return placement


def _innermost(environment: Environment) -> Placement:
    launchers = with_marker(environment.whole)
    candidates: Sequence[Launcher] = launchers
    known: Mapping[str, Placement] = {}
    if environment.outer.fields:
        known = outer_distboot.placements(environment, launchers)
        candidates = outer_distboot.candidates(launchers, environment.outer, known)
    notes: list[str] = []
    for launcher in candidates:
        placement = known.get(launcher.name)
        if placement is None:
            placement = claimed(launcher, environment.for_launcher(launcher))
        if placement is not None:
            claim = Claim(
                launcher,
                placement,
                environment,
                launchers,
                candidates,
            )
            from .conflicts import checked  # here, as a process that is alone needs none

            notes += checked(claim)
            return _with_notes(placement, notes)
        notes += _notes_on_unclaimed(launcher, environment.without_ours)
    return _with_notes(_alone(launchers, environment.without_ours), notes)


def _with_notes(placement: Placement, notes: Sequence[str]) -> Placement:
    if not notes:
        return placement
    all_notes = (*placement.notes, *notes)
    return placement._replace(notes=all_notes)


def _notes_on_unclaimed(launcher: Launcher, environ: Mapping[str, str]) -> list[str]:
    """The note on a launcher that has variables there, and has not started this process."""
    names = specific_markers(launcher, environ)
    if not names:
        return []
    counts = {environ.get(name, "1") for name in launcher.markers}
    has_one = counts <= {"0", "1"}
    is_one_node = has_one and launcher.nodes is not None
    if is_one_node:  # so that it has nothing to say
        return []
    note = f"{names} ignored: they do not describe this process"
    return [note]


def _alone(launchers: Sequence[Launcher], environ: Mapping[str, str]) -> Placement:
    """The placement of a process that none of these launchers claims."""
    for launcher in launchers:
        launcher.refuse_unclaimed(environ)
    for launcher in with_any_variable(environ):
        left_over.refuse(launcher.left_over, environ)
    return read_placement(LAUNCHERS[NO_LAUNCHER], environ)


def _has_rank(outer: InheritedEnv) -> bool:
    """Whether an outer distboot has exported the rank of a process that is not alone."""
    world_size = outer.fields.get("world_size", 1)
    has_others = world_size != 1
    return has_others and not outer.launches


def _as_exported(environment: Environment) -> Placement:
    """The rank that an outer distboot exported, in a container that has no other variables."""
    name = inherited.VARIABLE
    exported = {one: value for one, value in environment.whole.items() if one != name}
    placement = _innermost(Environment.of(exported))
    if placement.has_launcher:
        return placement
    rank = environment.outer.fields["rank"]
    world_size = environment.outer.fields["world_size"]
    raise DistbootError(
        "broken-environment",
        f"{name} is for rank {rank} of {world_size}, but RANK and WORLD_SIZE are missing",
        f"to pass them to a container: {container_env_hint('RANK', 'WORLD_SIZE')}; "
        f"else unset {name}",
    ).of(UNKNOWN_RANK)


def _refuse_signs(placement: Placement, environ: Mapping[str, str]) -> None:
    """Refuse a process that is alone, or a node, if other variables contradict that."""
    launcher = LAUNCHERS[placement.launcher]
    is_alone = (placement.world_size, placement.node_level) == (1, None)
    if is_alone and launcher.compared_with_signs:
        from . import signs  # here and below, as most processes need none

        found = signs.signs(environ)
        if found:
            from .not_alone import not_alone

            raise not_alone([*found, *signs.addresses(environ)], placement)
    elif launcher.nodes is not None and not is_alone:
        from .not_alone import refuse_other_node

        refuse_other_node(placement, environ, launcher.markers)
