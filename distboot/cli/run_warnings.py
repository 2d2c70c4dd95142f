"""Warnings of the wrapper before it starts anything: what a person typed has no effect.

Only rank 0 prints them.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..base.text import escape_control, log_line, short_repr
from ..detection.placement import Placement
from .script_text import misplaced_options
from .target import Target


def warn_of_misplaced(target: Target, placement: Placement) -> None:
    """Warn of the options of the wrapper that the script gets."""
    found = misplaced_options(target)
    if not found or placement.rank:
        return
    *others, last = found
    listed = last
    if others:
        listed = f"{', '.join(others)} and {last}"
    options = escape_control(listed)
    text = f"warning: {options} after the script: passed to the script, not used by distboot"
    log_line(placement.who, f"{text}; options of distboot come before the script")


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
