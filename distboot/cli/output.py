"""Writing to standard output, which may be closed, full, gone, or unable to show a character."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from ..errors import DistbootError

TYPE_CHECKING = False  # type checkers take the name for typing's, whose import would slow every start
if TYPE_CHECKING:
    from typing import TextIO


def say(text: str) -> None:
    """Print a text on standard output, all of it or an error.

    Raises:
        DistbootError: `output-failed`.
        BrokenPipeError: the reader has gone.
    """
    if sys.stdout is None:  # closed before we started: nobody asked for the text
        return
    try:
        _write(sys.stdout, f"{text}\n")
    except OSError as error:
        # Python flushes once more when it ends, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise DistbootError("output-failed", f"cannot write to standard output: {error.strerror}") from None


def complain(error: DistbootError) -> None:
    """Print an error on standard error, if that is there."""
    with suppress(OSError, AttributeError):  # full or closed: the exit code has to do
        lines = (line if line.startswith("hint: ") else f"distboot: {line}" for line in str(error).split("\n"))
        _write(sys.stderr, "\n".join(lines) + "\n")


def _write(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
