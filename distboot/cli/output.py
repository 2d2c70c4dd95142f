"""Standard output and error, which may be closed, full, gone, or unable to show a character."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from ..base.errors import DistbootError


def emit(text: str) -> None:
    """Print a whole text and a line end on standard output.

    Raises `output-failed`, or BrokenPipeError when the reader has exited.
    """
    if sys.stdout is None:  # it was closed before this process started
        return
    try:
        write(sys.stdout, f"{text}\n")
    except OSError as error:
        # Python flushes once more when it exits, and would print another error then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        problem = f"cannot write to standard output: {error.strerror}"
        raise DistbootError("output-failed", problem) from None


def write(stream: TextIO, text: str) -> None:
    """Write a text at once, with escapes for what the stream's encoding lacks."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
