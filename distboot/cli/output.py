"""Writing to standard output, which may be closed, full, gone, or unable to show a character."""

from __future__ import annotations

import os
import sys

from ..errors import DistbootError


def say(text: str) -> None:
    """Print a text on standard output, all of it or an error.

    Raises:
        DistbootError: `output-failed`.
        BrokenPipeError: the reader has gone.
    """
    if sys.stdout is None:  # closed before we started: nobody asked for the text
        return
    try:
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stdout.flush()
    except OSError as error:
        # Python flushes once more when it ends, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise DistbootError("output-failed", f"cannot write to standard output: {error.strerror}") from None


def complain(error: DistbootError) -> None:
    """Print an error on standard error, if that is there."""
    try:
        encoding = sys.stderr.encoding or "utf-8"
        sys.stderr.write(f"distboot: {error}\n".encode(encoding, "backslashreplace").decode(encoding))
        sys.stderr.flush()
    except (OSError, AttributeError):  # closed or full: the exit code has to do
        pass
