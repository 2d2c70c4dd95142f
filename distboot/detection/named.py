"""The launcher that the user names, with DISTBOOT_LAUNCHER, `--launcher` or `launcher=`."""

from __future__ import annotations

import re

from ..base.errors import UNKNOWN_RANK, DistbootError
from ..base.text import did_you_mean, short_repr
from .order import LAUNCHERS
from .placement import NO_LAUNCHER, OFF, Placement
from .readings import Environment, read_placement


def named(environment: Environment, name: str, option: str) -> Placement:
    """The placement by the launcher that the user names; `option` names it for messages."""
    if name in (NO_LAUNCHER, OFF):
        return read_placement(LAUNCHERS[NO_LAUNCHER], environment.without_ours)
    launcher = LAUNCHERS.get(name)
    if launcher is None:
        raise _unknown(name, option)
    environ = environment.for_launcher(launcher)
    is_claimed = launcher.claims(environ)
    problem = "its variables are not as it sets them"
    if is_claimed or not launcher.needs_claim:
        try:
            return read_placement(launcher, environ)
        except DistbootError as error:
            if is_claimed:
                raise
            problem = error.message.removeprefix(f"launcher {name!r}: ")
    raise DistbootError(
        "launcher-mismatch",
        f"{option}: {problem}",
        "correct the name, or remove it to let distboot find the launcher, or start the job with "
        "that launcher; in a container, pass its variables of rank and size",
    ).of(UNKNOWN_RANK)


def refuse_unless_text(launcher: object, hint: str) -> None:
    """Refuse an argument that is not a text."""
    if isinstance(launcher, str):
        return
    problem = f"launcher={short_repr(launcher)} is not a valid name"
    raise DistbootError("usage", problem, hint)


def _unknown(name: str, option: str) -> DistbootError:
    titled = []
    for launcher in LAUNCHERS.values():
        words = re.findall(r"[\w.]+", launcher.title.lower())
        if name.lower() in words:
            titled.append(launcher.name)
    listed = "python -m distboot launchers prints all"
    hint = did_you_mean(name, [*LAUNCHERS, OFF], titled)
    if hint:
        hint += listed
    else:
        names = ", ".join(LAUNCHERS)
        hint = f"the launchers are {names}, and {OFF} for a process that is alone ({listed})"
    return DistbootError(
        "unknown-launcher",
        f"{option} is not a valid launcher",
        hint,
    ).of(UNKNOWN_RANK)
