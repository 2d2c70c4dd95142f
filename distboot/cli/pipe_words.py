"""Words of a command that name a pipe, as a shell's `<(…)` does: a second reader finds it empty.

Python takes an empty script for one that ends well.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from ..base.errors import DistbootError
from ..base.patterns import pattern
from ..base.text import short_repr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .target import Target

# Also in --config=/dev/fd/63
_FILE = pattern(r"(?:[^/]*=)?(/dev/stdin|/dev/fd/\d+|/proc/self/fd/\d+)")


def pipe_error(target: Target, ranks: int) -> DistbootError | None:
    """The error if a command reads a pipe that starts several times: in each rank, or again."""
    pipe = _read_once(target)
    if not pipe:
        return None
    readers = "each start"
    if ranks > 1:
        readers = f"each of {ranks} ranks"
    return DistbootError(
        "usage",
        f"{pipe}, which can be read once, and {readers} would read it",
        "write it to a file, and name that",
    )


def _read_once(target: Target) -> str:
    """What a command reads that is gone then: `"'/dev/fd/63' is a pipe"`; empty: nothing."""
    if target.is_on_stdin:
        return "the program of this Python is on stdin"
    pipe = next(filter(_names_pipe, target.words), None)
    if pipe is None:
        return ""
    return f"{short_repr(pipe)} is a pipe"


def _names_pipe(word: str) -> bool:
    found = _FILE.fullmatch(word)
    if found is not None:
        with suppress(OSError):
            return stat.S_ISFIFO(os.stat(found[1]).st_mode)
    return False
