"""What a variable that is no setting may mean."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from operator import methodcaller

_SIMILARITY = 0.85  # difflib's ratio, at most 1
_OWN = "DISTBOOT"
# Those of `run` without a variable
_ONLY_OPTIONS = ("--log-dir", "--log-prefix", "--framework", "--pass-local-rank", "--exec")


def meant_by(name: str, known: Collection[str]) -> str:
    """The known variable, or the option, that an unknown variable means.

    Empty: it is the user's own, or a newer distboot's.
    """
    prefix = f"{_OWN}_"
    is_own = name.startswith(prefix)
    rest = name.removeprefix(prefix)
    dashed = rest.lower().replace("_", "-")
    option = f"--{dashed}"
    if is_own and option in _ONLY_OPTIONS:
        return option
    similar = get_close_matches(name, known, 1, _SIMILARITY)
    if is_own:  # the beginning of a longer name
        singular = name.removesuffix("S")
        begins_so = methodcaller("startswith", (f"{name}_", f"{singular}_"))
        similar += filter(begins_so, sorted(known))
    return next(iter(similar), "")
