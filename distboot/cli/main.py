"""The command line: finds the command and calls it; an error is one message and an exit code."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from importlib import import_module

from ..base.errors import DistbootError, printed
from ..base.version import __version__
from ..detection.local_rank_option import without_local_rank
from .output import emit, write

_HELP = """\
usage: python -m distboot [run] [options] script.py [arguments …]
       python -m distboot run [options] -m module [arguments …]
       python -m distboot run [options] -- command [arguments …]
       python -m distboot show [--job] [--json]
       python -m distboot env [--format shell|dotenv|docker] [--json]
       python -m distboot doctor [--job] [--json]
       python -m distboot check [--allreduce] [--json]
       python -m distboot stacks [--pid PID] [--job JOB]
       python -m distboot launchers [--json]
       python -m distboot try [--as LAUNCH] script.py [arguments …]
       python -m distboot report [--json | --html FILE] job.jsonl
       python -m distboot badhosts [FILE]

Detects which process of a distributed training job this is, whatever launched it.

commands:
  run        export RANK, LOCAL_RANK, NODE_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
             MASTER_ADDR and MASTER_PORT, run the script or command, forward signals
             to it, and exit with its code (the default: `run` may be left out)
  show       print what was detected, every value with its source; with --job on all
             ranks, let them meet once, and print where each is or who is missing
  env        print the variables that `run` exports, for a shell, an env file or
             docker run
  doctor     look for what will make a job fail, hang or be slow in this container,
             each with its remedy; with --job on all ranks; exit code 78 if there is a
             problem
  check      on all ranks, before a job: compare all nodes and the links between them,
             and print what each has; with --allreduce measure that, too; exit code
             78 if a node or a link is odd
  stacks     print where all ranks of a job on this host are: their Python stacks,
             grouped by identical stack
  launchers  print the table of all launchers and platforms that can be recognized
  try        run a script on this machine as other launchers would start it, on one
             node and on several, and print what goes wrong there
  report     print how a job ended from its journal, or make its report from that;
             also of a job that was killed, or still runs
  badhosts   print the hosts of a file that DISTBOOT_BAD_HOSTS_FILE has made, with
             commas, for srun --exclude

`python -m distboot COMMAND --help` prints the options of each.
"""

# Each is a function in a module, which is imported only when it is asked for.
_COMMANDS = {
    "run": (".run", "run"),
    "show": ("..tools.show", "show"),
    "env": ("..tools.env", "env"),
    "doctor": ("..tools.doctor.command", "doctor"),
    "launchers": ("..tools.launchers", "launchers"),
    "check": ("..tools.check_command", "check"),
    "stacks": ("..tools.stacks", "stacks"),
    "try": ("..tools.try_script", "try_script"),
    "report": ("..tools.report_command", "report"),
    "badhosts": ("..tools.bad_hosts_command", "badhosts"),
}
_ASKS_FOR_HELP = {"-h", "--help"}
# `run` refuses invalid settings itself: an option may override them.
_WITH_SETTINGS = ("show", "env", "doctor", "check", "try")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    if arguments is None:
        arguments = sys.argv[1:]
    is_process_1 = os.getpid() == 1
    if is_process_1:
        _exit_on_signals()
    try:
        return _dispatch(arguments)
    except DistbootError as error:
        # If standard error is full or closed, the exit code is all that there is
        with suppress(OSError, AttributeError):
            write(sys.stderr, printed(error))
        from ..agent import platform_log  # here, as it is rarely needed

        platform_log.write(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader of `show | head` has exited
        return 128 + signal.SIGPIPE


def _exit_on_signals() -> None:
    """Exit on signals in process 1 of a container, too: the kernel drops those without a handler."""
    from ..base.process import FROM_OUTSIDE  # here, as no other process needs it

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in FROM_OUTSIDE:
        is_ignored = signal.getsignal(number) is signal.SIG_IGN
        if not is_ignored:
            signal.signal(number, end)


def _dispatch(arguments: list[str]) -> int:
    help_text = _HELP.rstrip()
    # torch.distributed.launch and DeepSpeed's launcher put --local-rank=N before the arguments.
    before = without_local_rank(arguments[:1])
    arguments = [*before, *arguments[1:]]
    if not arguments:
        emit(help_text)
        return 2
    first = arguments[0]
    if first in _ASKS_FOR_HELP:
        emit(help_text)
        return 0
    if first == "--version":
        emit(f"distboot {__version__}")
        return 0
    if first in _COMMANDS:
        return _call(first, arguments[1:])
    return _call("run", arguments)


def _call(command: str, arguments: list[str]) -> int:
    asks_for_help = not _ASKS_FOR_HELP.isdisjoint(arguments[:1])
    if command in _WITH_SETTINGS and not asks_for_help:
        _refuse_invalid_settings()
    module, name = _COMMANDS[command]
    function = getattr(import_module(module, __package__), name)
    code: int = function(arguments)
    return code


def _refuse_invalid_settings() -> None:
    from ..base.settings import refuse_invalid, warn_of_unknown  # here, as --version needs none

    try:
        refuse_invalid(os.environ)
    except DistbootError:
        warn_of_unknown(os.environ, 0, None)  # a misspelled one may be the reason
        raise
