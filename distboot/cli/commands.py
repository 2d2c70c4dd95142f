"""The table of commands: what each does, and the function that does it."""

from __future__ import annotations

from typing import NamedTuple


class Command(NamedTuple):
    """One command of the command line."""

    summary: str  # what it does, in one line of `--help`
    # Imported only when it is asked for
    module: str
    function: str
    needs_settings: bool = False  # whether invalid settings are refused before it


COMMANDS = {
    # It refuses invalid settings itself: an option may override them
    "run": Command(
        "export RANK, WORLD_SIZE, MASTER_ADDR, …, and run a script",
        ".run",
        "run",
    ),
    "show": Command(
        "print what was detected, with sources; with --job of all ranks",
        "..tools.show",
        "show",
        needs_settings=True,
    ),
    "env": Command(
        "print the variables that `run` exports, for a shell or docker run",
        "..tools.env",
        "env",
        needs_settings=True,
    ),
    "doctor": Command(
        "look for what makes a job fail, hang or be slow in this container",
        "..tools.doctor.command",
        "doctor",
        needs_settings=True,
    ),
    "check": Command(
        "on all ranks: compare all nodes and the links between them",
        "..tools.check_command",
        "check",
        needs_settings=True,
    ),
    "try": Command(
        "run a script on this machine as other launchers would start it",
        "..tools.try_script",
        "try_script",
        needs_settings=True,
    ),
    "stacks": Command(
        "print where all ranks of a job are, on all its hosts",
        "..tools.stacks",
        "stacks",
    ),
    "report": Command(
        "print how a job ended, from its journal",
        "..tools.report_command",
        "report",
    ),
    "launchers": Command(
        "print the launchers and platforms that are recognized",
        "..tools.launchers",
        "launchers",
    ),
    "badhosts": Command(
        "print the hosts of a file of bad hosts, for srun --exclude",
        "..tools.bad_hosts_command",
        "badhosts",
    ),
    "completion": Command(
        "print what completes commands and options in bash, zsh or fish",
        "..tools.completion",
        "completion",
    ),
}

_BEGIN = """\
usage: python -m distboot [run] [options] script.py [arguments …]
       python -m distboot COMMAND [options]

Finds the place of a process in a distributed job, whatever launched it.

  python -m distboot --nproc-per-node 2 train.py   two ranks on this machine
  srun python -m distboot train.py                 each task of srun is a rank
  python -m distboot run -- ./train.sh             any command is the rank

commands (run may be left out; --help after each prints its options):
"""


def help_text() -> str:
    """What `--help` prints: it fits on a screen of 24 lines with 80 columns."""
    lines = [f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()]
    return _BEGIN + "\n".join(lines)
