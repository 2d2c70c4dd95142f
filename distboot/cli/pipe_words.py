"""Words of a command that name a pipe, as a shell's `<(…)` does: a second reader finds it empty.

Python takes an empty script for one that ends well.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress

from ..base.errors import DistbootError
from ..base.patterns import pattern
from ..base.text import short_repr

# Also in --config=/dev/fd/63
_FILE = pattern(r"(?:[^/]*=)?(/dev/stdin|/dev/fd/\d+|/proc/self/fd/\d+)")


def pipe_read_twice(words: Iterable[str], ranks: int) -> DistbootError | None:
    """The error if a command names a pipe that starts several times: in each rank, or again."""
    pipe = next(filter(_names_pipe, words), None)
    if pipe is None:
        return None
    readers = {True: f"each of {ranks} ranks", False: "each start"}
    problem = f"{short_repr(pipe)} is a pipe, which can be read once"
    return DistbootError(
        "usage",
        f"{problem}, and {readers[ranks > 1]} would read it",
        "write it to a file, and name that",
    )


def _names_pipe(word: str) -> bool:
    found = _FILE.fullmatch(word)
    if found is not None:
        with suppress(OSError):
            return stat.S_ISFIFO(os.stat(found[1]).st_mode)
    return False
