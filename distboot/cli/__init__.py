"""The command line: one file a command; and for all of them argparse with our errors, and standard output.

Which may be closed, full, gone, or unable to show a character.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from functools import partial
from typing import NoReturn, TextIO

from ..errors import DistbootError
from ..text import did_you_mean, escape_control


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `DistbootError` and accepts no abbreviated options."""

    def __init__(self, command: str, description: str, usage: str | None = None) -> None:
        super().__init__(
            prog=f"python -m distboot {command}",
            description=description,
            usage=usage,
            allow_abbrev=False,
            # Every option makes one, which asks for the terminal's width, with shutil: 3 ms that only --help needs.
            formatter_class=partial(argparse.HelpFormatter, width=80),
        )
        self.add_argument(
            "--launcher",
            metavar="NAME",
            help="believe this launcher, like DISTBOOT_LAUNCHER=NAME (default: the innermost one found)",
        )

    def format_help(self) -> str:
        self.formatter_class = argparse.HelpFormatter  # as wide as the terminal
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        unknown, _, words = message.partition(": ")
        option = words.split("=")[0].split(" ")[0] if unknown == "unrecognized arguments" else ""
        meant = did_you_mean(option, self._option_string_actions) if option.startswith("--") else ""
        raise DistbootError("usage", escape_control(message), f"{meant}{self.prog} --help")


def emit(text: str) -> None:
    """Print a text on standard output, all of it, or raise `output-failed`; BrokenPipeError: the reader has exited."""
    if sys.stdout is None:  # closed before we started
        return
    try:
        _write(sys.stdout, f"{text}\n")
    except OSError as error:
        # Python flushes once more when it ends, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise DistbootError("output-failed", f"cannot write to standard output: {error.strerror}") from None


def emit_error(error: DistbootError) -> None:
    """Print an error on standard error, if that is there."""
    with suppress(OSError, AttributeError):  # full or closed: the exit code has to do
        lines = (line if line.startswith("hint: ") else f"distboot: {line}" for line in str(error).split("\n"))
        _write(sys.stderr, "\n".join(lines) + "\n")


def _write(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
