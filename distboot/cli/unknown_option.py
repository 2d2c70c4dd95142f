"""What an unknown option may mean: a misspelled one, or one of the script."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import filterfalse
from operator import methodcaller

from ..base.patterns import pattern
from ..host.command_line import without_code

_SIMILARITY = 0.8  # difflib's ratio: --epochs is not --report
_MOST = 3  # options that begin with the same word
# The words are between \0. Before it may be the value of an unknown option, and a URL there may have
# a password. A word with spaces may be such a value, too, or code.
_SCRIPT = pattern(r"(?<![^\0])(-m\0[^\0\s=@]+|[^\0\s=@]+\.py)(?![^\0])")


def meant_by(option: str, names: Iterable[str]) -> str:
    """The beginning of a hint with the options that begin or end so, or the one that is spelled
    nearly so; empty: there is none.
    """
    if not option.startswith("--"):
        return ""
    option = option.replace("_", "-")
    in_order = sorted(names)
    longer = [
        *filter(methodcaller("startswith", f"{option}-"), in_order),
        *filter(methodcaller("endswith", option[1:]), in_order),
    ]
    # The script's --report-to is not --report
    others = filterfalse(lambda name: option.startswith(f"{name}-"), in_order)
    near = get_close_matches(option.lower(), list(others), 1, _SIMILARITY)
    if longer or not near:
        singular = option.removesuffix("s")  # --logs begins as --log-dir does
        longer += filter(methodcaller("startswith", f"{singular}-"), in_order)
    found = list(dict.fromkeys(near + longer))[:_MOST]
    if not found:
        return ""
    *first, last = map(repr, found)
    listed = last
    if first:
        listed = f"{', '.join(first)} or {last}"
    return f"did you mean {listed}? "


def after_script(option: str, target: Sequence[str], program: str) -> str:
    """The hint for what may be an option of the script; empty: no script follows."""
    if not target:
        return ""
    script = "script.py"
    words = "\0".join(["", *target])
    found = _SCRIPT.search(without_code(words))
    if found is not None:
        script = shlex.join(found[1].split("\0"))
    return f"if it is an option of the script, it comes after it: {program} … {script} {option} …"
