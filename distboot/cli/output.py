"""Standard output and error, which may be closed, full, gone, or unable to show a character."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from ..base.errors import DistbootError, printed


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


def as_typed(error: DistbootError) -> DistbootError:
    """An error of `detect` with the option in place of the argument that it has become."""
    argument = "launcher="
    if not error.message.startswith(argument):
        return error
    return DistbootError(error.code, f"--{error.message}", error.hint).of(error.who)


def show_error(error: DistbootError) -> None:
    """Print an error on standard error, and write it where the platform shows it."""
    # If standard error is full or closed, the exit code is all that there is
    with suppress(OSError, AttributeError):
        write(sys.stderr, _colored(printed(error)))
    with suppress(OSError):  # no file left, also for the module
        from ..agent import platform_log  # here, as it is rarely needed

        platform_log.write(str(error))


def _colored(text: str) -> str:
    """The lines of an error, with its first one in color on a terminal."""
    if not sys.stderr.isatty():
        return text
    from ..base.terminal import painted  # here, as most processes have none

    first, line_end, rest = text.partition("\n")
    return f"{painted(first, 'error')}{line_end}{rest}"
