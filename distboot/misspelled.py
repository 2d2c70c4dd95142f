"""Settings in the environment that are none: a misspelled one would do nothing, and say nothing."""

from __future__ import annotations

from collections.abc import Mapping

from . import handoff
from .errors import printable, tell
from .placement import Placement

# What users set, and what one part of distboot leaves for another.
SETTINGS = (
    "DISTBOOT_GRACE", "DISTBOOT_JOIN_TIMEOUT", "DISTBOOT_LAST_WORDS", "DISTBOOT_LAUNCHER", "DISTBOOT_LIFELINE",
    "DISTBOOT_LIFELINE_TIMEOUT", handoff.VARIABLE, "DISTBOOT_REPORT", "DISTBOOT_ROLL_CALL", "DISTBOOT_SECRET",
)  # fmt: skip
_ALIKE = 0.85  # of 1, the beginning that they have in common included


def warn_of_misspelled(environ: Mapping[str, str], placement: Placement) -> None:
    """Say of each variable that is like a setting, and is none, what may be meant by it; rank 0 does, for all."""
    strange = [name for name in environ if name.startswith("DISTBOOT") and name not in SETTINGS]
    if not strange or placement.rank or handoff.VARIABLE in environ:  # the wrapper around this has said it
        return
    from difflib import get_close_matches  # here, so that nobody else pays for it

    for name in strange:  # what is like no setting is the user's own, or of a newer distboot
        for meant in get_close_matches(name, SETTINGS, 1, _ALIKE):
            said = f"{printable(name)} is no setting, and does nothing: did you mean {meant}?"
            tell(placement.who, f"warning: {said}")
