"""Warnings of the wrapper before it starts anything: what a person typed has no effect.

Only rank 0 prints them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from ..base.text import escape_control, log_line, short_repr
from ..detection.placement import Placement
from .target import Target

# Options of the wrapper that no script has for itself; many scripts have --report or --log-dir.
_WRAPPERS_ALONE = (
    "--nproc-per-node",
    "--max-restarts",
    "--restart-delay",
    "--restart-window",
    "--join-timeout",
    "--pass-local-rank",
    "--log-prefix",
    "--log-format",
)
# Those that a script may have, too: they are the wrapper's beside one of the others
_OFTEN_OF_SCRIPTS = ("--report", "--log-dir", "--grace", "--bind", "--launcher", "--framework")
_SHORTEST_NAME = 4  # characters


def misplaced_options(
    target: Target,
    alone: Collection[str] = _WRAPPERS_ALONE,
    often: Collection[str] = _OFTEN_OF_SCRIPTS,
) -> list[str]:
    """Options of distboot among the script's arguments, which the script does not mention.

    `alone`: those that no script has for itself; `often`: those that count beside one of them.
    """
    if target.is_command:
        return []
    found = {}
    text = target.text.replace("_", "-")  # of a name, `args.max_restarts`
    arguments = target.words[target.start :]
    for word in itertools.takewhile("--".__ne__, arguments):
        given = word.partition("=")[0]
        option = given.replace("_", "-")
        is_known = option in (*alone, *often)
        if is_known and not _mentions(text, option):
            found[option] = given
    if found.keys().isdisjoint(alone):
        return []
    return list(found.values())


def _mentions(text: str, option: str) -> bool:
    """Whether a text has an option, with its dashes if the name is so short that any text has it."""
    name = option.removeprefix("--")
    if len(name) < _SHORTEST_NAME:
        return option in text
    return name in text


def warn_of_misplaced(target: Target, placement: Placement) -> None:
    """Warn of the options of the wrapper that the script gets."""
    found = misplaced_options(target)
    if found and not placement.rank:
        warn_of_options(found, placement.who)


def warn_of_options(misplaced: Sequence[str], who: str | None) -> None:
    """Warn of options of distboot that the script gets."""
    *others, last = misplaced
    listed = last
    if others:
        listed = f"{', '.join(others)} and {last}"
    options = escape_control(listed)
    text = f"warning: {options} after the script: passed to the script, not used by distboot"
    log_line(who, f"{text}; options of distboot come before the script")


def warn_of_world_size(placement: Placement, environ: Mapping[str, str]) -> None:
    """Warn of a WORLD_SIZE of a person's that the launcher's number of processes overrules."""
    given = environ.get("WORLD_SIZE")
    source = placement.sources.get("world_size", "")
    reasons_against = (
        given is None,
        placement.rank,  # rank 0 warns
        "RANK" in environ,  # both are another launcher's
        placement.platform,  # which may count nodes with it
        placement.node_level,
        source in ("", "WORLD_SIZE"),  # it is used
        given == str(placement.world_size),
    )
    if any(reasons_against):
        return
    launcher = f"{source}={placement.world_size} of {placement.launcher}"
    text = f"warning: WORLD_SIZE={short_repr(given)} is overruled by {launcher}"
    log_line(placement.who, text)
