"""The command line: which command is meant, and one file a command; every error is one message and an exit code.

And what all of them share: argparse with our errors, and standard output, which may be closed, full, gone, or unable to
show a character.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any, NoReturn, TextIO

from ..base.errors import DistbootError, printed
from ..base.text import did_you_mean, escape_control
from ..base.version import __version__
from ..detection.export import without_local_rank

_HELP = """\
usage: python -m distboot [run] [options] script.py [arguments …]
       python -m distboot run [options] -m module [arguments …]
       python -m distboot run [options] -- command [arguments …]
       python -m distboot show [--job] [--json]
       python -m distboot env [--format shell|dotenv|docker] [--json]
       python -m distboot doctor [--job] [--json]
       python -m distboot stacks [--pid PID] [--job JOB]
       python -m distboot launchers [--json]
       python -m distboot try [--as LAUNCH] script.py [arguments …]

Finds out which process of a distributed training job this is, whatever launched it.

commands:
  run        export RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, run the
             script or command, forward signals to it, and exit with its code (the default: `run` may be left out)
  show       print what was detected, every value with its source; with --job on all ranks, let them meet once, and
             print where each is or who is missing
  env        print the variables that `run` exports, for a shell, an env file or docker run
  doctor     look for what will make a job fail, hang or be slow in this container, each with its remedy; with --job
             on all ranks; exit code 78 if there is a problem
  stacks     print where all ranks of a job on this host are: their Python stacks, equal ones once
  launchers  print the table of all launchers and platforms that can be recognised
  try        run a script on this machine as other launchers would start it, on one node and on several, and say
             what goes wrong there

`python -m distboot COMMAND --help` tells the options of each.
"""

_LAUNCHER = "--launcher NAME  believe this launcher, like DISTBOOT_LAUNCHER=NAME (default: the innermost one found)"

# Each is a function in a module, which is imported only when it is asked for.
_COMMANDS = {
    "run": (".run", "run"),
    "show": ("..tools.show", "show"),
    "env": ("..tools.env", "env"),
    "doctor": ("..tools.doctor.command", "doctor"),
    "launchers": ("..tools.launchers", "launchers"),
    "stacks": ("..tools.stacks", "stacks"),
    "try": ("..tools.try_script", "try_script"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if os.getpid() == 1:
        _end_by_signals()
    try:
        return _dispatch(arguments)
    except DistbootError as error:
        # Standard error is full or closed: the exit code has to do
        with suppress(OSError, AttributeError):
            _write(sys.stderr, printed(error))
        from ..job.exit_status import leave  # here, as it is rarely needed

        leave(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of `show | head` has exited
        return 128 + signal.SIGPIPE


def _end_by_signals() -> None:
    """Let signals end us as process 1 of a container, too: the kernel drops those to it that have no handler."""
    from ..base.process import FROM_OUTSIDE  # here, as no other process needs it

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in FROM_OUTSIDE:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def _dispatch(arguments: list[str]) -> int:
    # torch.distributed.launch and DeepSpeed's launcher put --local-rank=N before what they take for our arguments.
    arguments = [*without_local_rank(arguments[:1]), *arguments[1:]]
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help"):
        emit(_HELP.rstrip())
        return 0 if arguments else 2
    if first == "--version":
        emit(f"distboot {__version__}")
        return 0
    command, rest = (first, arguments[1:]) if first in _COMMANDS else ("run", arguments)
    if command in ("show", "env", "doctor", "try") and not {"-h", "--help"} & set(rest[:1]):
        from ..base.settings import refuse_invalid, warn_of_unknown  # here, as --version needs none

        try:
            refuse_invalid(os.environ)
        except DistbootError:
            warn_of_unknown(os.environ, 0, None)  # which may be why
            raise
    module, function = _COMMANDS[command]
    code: int = getattr(import_module(module, __package__), function)(rest)
    return code


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `DistbootError` and accepts no abbreviated options.

    `options` are declared as in the help: "--name VALUE  what it is", without VALUE for a switch; what is indented
    continues a line, and any other line is the title of a group. `more`: by name, for `add_argument`.
    """

    def __init__(
        self,
        command: str,
        description: str,
        options: str = "",
        more: Mapping[str, Any] = {},
        usage: str | None = None,
    ) -> None:
        super().__init__(
            prog=f"python -m distboot {command}",
            description=description,
            usage=usage,
            allow_abbrev=False,
            # Every option makes one, which asks for the terminal's width, with shutil: 3 ms that only --help needs.
            formatter_class=partial(argparse.HelpFormatter, width=80),
        )
        add = self.add_argument
        for entry in re.split(r"\n(?! )", f"{_LAUNCHER}\n{options}".strip()):
            option, _, text = entry.partition("  ")
            name, _, metavar = option.partition(" ")
            if text:
                form = {"metavar": metavar} if metavar else {"action": "store_true"}
                add(name, help=text, **form, **more.get(name, {}))
            else:
                add = self.add_argument_group(entry).add_argument

    def split(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Our own options, and what is behind them: a script, module or command with its arguments."""
        index = 0
        while (
            index < len(words) and words[index].startswith("-") and words[index] not in ("-m", "--")
        ):
            action = self._option_string_actions.get(words[index])
            index += 2 if action is not None and action.nargs is None else 1  # with its value
        return words[:index], words[index:]

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
        raise DistbootError(
            "output-failed", f"cannot write to standard output: {error.strerror}"
        ) from None


def _write(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()
