"""What an unknown option may mean: a misspelled one, or one of the script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import filterfalse
from operator import methodcaller

from ..base.patterns import pattern
from ..base.text import did_you_mean

_SIMILARITY = 0.8  # difflib's ratio: --epochs is not --report
# Before it may be the value of an unknown option, and a URL there may have a password
_SCRIPT = pattern(r"(?<!\S)(-m [^ ]+|[^ @]+\.py)(?!\S)")


def meant_by(option: str, names: Iterable[str]) -> str:
    """The beginning of a hint with the option that is spelled nearly so; empty: there is none."""
    if not option.startswith("--"):
        return ""
    in_order = sorted(names)
    longer = filter(methodcaller("startswith", f"{option}-"), in_order)
    # The script's --report-to is not --report
    others = filterfalse(lambda name: option.startswith(f"{name}-"), in_order)
    return did_you_mean(option, others, longer, similarity=_SIMILARITY)


def after_script(option: str, target: Sequence[str], program: str) -> str:
    """The hint for an option of the script; empty: no script follows."""
    if not target:
        return ""
    script = "script.py"
    found = _SCRIPT.search(" ".join(target))
    if found is not None:
        script = found[0]
    return f"options of the script come after it: {program} … {script} {option} …"
