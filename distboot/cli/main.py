"""Which command is meant; and that every error becomes one message and an exit code, never a traceback."""

from __future__ import annotations

import os
import signal
import sys
from importlib import import_module

from .. import __version__
from ..detection.arguments import without_local_rank
from ..errors import DistbootError
from . import emit, emit_error

_HELP = """\
usage: python -m distboot [run] [options] script.py [arguments …]
       python -m distboot run [options] -m module [arguments …]
       python -m distboot run [options] -- command [arguments …]
       python -m distboot show [--job] [--json]
       python -m distboot env [--format shell|dotenv|docker] [--json]
       python -m distboot doctor [--job] [--json]
       python -m distboot launchers [--json]

Finds out which process of a distributed training job this is, whatever launched it.

commands:
  run        export RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, run the
             script or command, forward signals to it, and exit with its code (the default: `run` may be left out)
  show       print what was detected, every value with its source; with --job on all ranks, let them meet once, and
             print where each is or who is missing
  env        print the variables that `run` exports, for a shell, an env file or docker run
  doctor     look for what will make a job fail, hang or be slow in this container, each with its remedy; with --job
             on all ranks; exit code 78 if there is a problem
  launchers  print the table of all launchers and platforms that can be recognised

`python -m distboot COMMAND --help` tells the options of each.
"""

# Each is a function in a module beside this one, which is imported only when it is asked for.
_COMMANDS = {"run": "run", "show": "show", "env": "show", "doctor": "doctor", "launchers": "show"}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if os.getpid() == 1:
        _end_by_signals()
    try:
        return _dispatch(arguments)
    except DistbootError as error:
        emit_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of `show | head` has exited
        return 128 + signal.SIGPIPE


def _end_by_signals() -> None:
    """Let signals end us as process 1 of a container, too: the kernel drops those to it that have no handler."""
    from ..process import FROM_OUTSIDE  # here, as no other process needs it

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
    code: int = getattr(import_module(f".{_COMMANDS[command]}", __package__), command)(rest)
    return code
