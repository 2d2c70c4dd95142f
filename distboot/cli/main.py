"""Which command is meant; and that every error becomes one message and an exit code, never a traceback."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from .. import __version__
from ..errors import DistbootError
from .output import complain, say

_HELP = """\
usage: python -m distboot [run] [options] script.py [arguments …]
       python -m distboot run [options] -m module [arguments …]
       python -m distboot run [options] -- command [arguments …]
       python -m distboot show [--job] [--json]
       python -m distboot env [--format shell|dotenv] [--json]
       python -m distboot doctor [--job] [--json]
       python -m distboot launchers [--json]

Finds out which process of a distributed training job this is, whatever launched it.

commands:
  run        export RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, run the
             script or command, forward signals to it, and exit with its code (the default: `run` may be left out)
  show       print what was detected, every value with its source; with --job on all ranks, let them meet once, and
             print where each is or who is missing
  env        print the variables that `run` exports, for a shell or an env file
  doctor     look for what will make a job fail, hang or be slow in this container, each with its remedy; with --job
             on all ranks; exit code 78 if there is a problem
  launchers  print the table of all launchers and platforms that can be recognised

`python -m distboot COMMAND --help` tells the options of each.
"""

_COMMANDS = (
    "run",
    "show",
    "env",
    "doctor",
    "launchers",
)  # each is a module beside this one, imported only when it is asked for


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if os.getpid() == 1:
        _end_by_signals()
    try:
        return _dispatch(arguments)
    except DistbootError as error:
        complain(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of `show | head` has gone; nobody is left to tell
        return 128 + signal.SIGPIPE


def _end_by_signals() -> None:
    """Let signals end us as process 1 of a container, too: the kernel drops those to it that have no handler."""
    from ..ending import FROM_OUTSIDE  # here, as no other process needs it

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in FROM_OUTSIDE:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end)


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help"):
        say(_HELP.rstrip())
        return 0 if arguments else 2
    if first == "--version":
        say(f"distboot {__version__}")
        return 0
    command, rest = (first, arguments[1:]) if first in _COMMANDS else ("run", arguments)
    code: int = import_module(f".{command}", __package__).main(rest)
    return code
