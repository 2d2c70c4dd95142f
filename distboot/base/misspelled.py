"""What a variable that is no setting may mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches

_SIMILARITY = 0.85  # difflib's ratio, at most 1
_OWN = "DISTBOOT"
# Those of `run` without a variable
_ONLY_OPTIONS = ("--log-dir", "--log-prefix", "--framework", "--pass-local-rank", "--exec")


def meanings(unknown: Sequence[str], known: Collection[str]) -> dict[str, str]:
    """The known variable, or the option, that each unknown variable means, if it means one."""
    found = {}
    for name in unknown:
        meant = _meant_by(name, known)
        if meant:
            found[name] = meant
    return found


def _meant_by(name: str, known: Collection[str]) -> str:
    """What an unknown variable means; empty: it is the user's own, or a newer distboot's."""
    prefix = f"{_OWN}_"
    is_own = name.startswith(prefix)
    rest = name.removeprefix(prefix)
    dashed = rest.lower().replace("_", "-")
    option = f"--{dashed}"
    if is_own and option in _ONLY_OPTIONS:
        return option
    similar = get_close_matches(name, known, 1, _SIMILARITY)
    if is_own:  # the beginning of a longer name
        longer = [each for each in sorted(known) if each.startswith(f"{name}_")]
        similar += longer
    return next(iter(similar), "")
