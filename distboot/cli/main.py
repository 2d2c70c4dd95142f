"""The command line: finds the command and calls it; an error is one message and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from ..base.errors import DistbootError
from ..base.version import __version__
from ..detection.local_rank_option import without_local_rank
from .commands import COMMANDS, help_text
from .output import as_typed, emit, show_error

_ASKS_FOR_HELP = {"-h", "--help"}
_VERSION = {"-V", "--version", "version"}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    if arguments is None:
        arguments = sys.argv[1:]
    is_process_1 = os.getpid() == 1
    if is_process_1:
        from .signals import exit_on_signals  # here, as few processes are

        exit_on_signals()
    try:
        return _dispatch(arguments)
    except DistbootError as error:
        show_error(as_typed(error))
        return error.exit_code
    except KeyboardInterrupt:
        from .signals import end_by_interrupt

        return end_by_interrupt()
    except BrokenPipeError:  # the reader of `show | head` has exited
        return 128 + signal.SIGPIPE


def _dispatch(arguments: list[str]) -> int:
    # torch.distributed.launch and DeepSpeed's launcher put --local-rank=N before the arguments.
    before = without_local_rank(arguments[:1])
    arguments = [*before, *arguments[1:]]
    if not arguments:
        return _show_placement()
    first, *rest = arguments
    if first == "help":
        return _help(rest)
    if first in _ASKS_FOR_HELP:
        topic = "".join(rest[:1])
        if topic in COMMANDS:
            return _help(rest)
        return _help([])
    if first in _VERSION:
        emit(f"distboot {__version__}")
        return 0
    if first in COMMANDS:
        return _call(first, rest)
    return _call("run", arguments)


def _help(words: list[str]) -> int:
    """`help` and `help COMMAND`."""
    if not words or words[0] in _ASKS_FOR_HELP:
        emit(help_text())
        return 0
    name = words[0]
    if name in COMMANDS:
        return _call(name, ["--help"])
    from ..base.text import did_you_mean, short_repr  # here, as few ask

    raise DistbootError(
        "usage",
        f"{short_repr(name)} is not a command",
        f"{did_you_mean(name, COMMANDS)}the commands are {', '.join(COMMANDS)}",
    )


def _show_placement() -> int:
    """Without arguments: where this process is, and what to type next."""
    show = import_module(COMMANDS["show"].module, __package__)
    emit(f"{show.where()}\n\n{help_text()}")
    return 2


def _call(name: str, arguments: list[str]) -> int:
    if name != "run":  # which has handlers of its own
        from .signals import raise_at_interrupt

        raise_at_interrupt()
    command = COMMANDS[name]
    is_for_help = not _ASKS_FOR_HELP.isdisjoint(arguments[:1])
    if command.needs_settings and not is_for_help:
        _refuse_invalid_settings()
    module = import_module(command.module, __package__)
    function = getattr(module, command.function)
    code: int = function(arguments)
    return code


def _refuse_invalid_settings() -> None:
    from ..base.settings import refuse_invalid, warn_of_unknown  # here, as --version needs none

    try:
        refuse_invalid(os.environ)
    except DistbootError:
        warn_of_unknown(os.environ, 0, None)  # a misspelled one may be the reason
        raise
