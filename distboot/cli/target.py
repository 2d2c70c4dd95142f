"""What the wrapper is to run: a script or module in the wrapper's own Python, or any other command."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

from .. import arguments, child
from ..errors import DistbootError, did_you_mean, printable, quoted


class Target(NamedTuple):
    """What the wrapper is to run.

    Attributes:
        given: as it stands on our command line, for example `["-m", "module", "--epochs", "3"]`.
        python: how our own Python starts again, with its options, for example `["/usr/bin/python3", "-u"]`.
        words: the command, for example `["/usr/bin/python3", "-m", "module", "--epochs", "3"]`.
        start: where the arguments of a script or module begin in it; its end for any other command.
    """

    given: list[str]
    python: list[str]
    words: list[str]
    start: int

    def with_local_rank(self, local_rank: str, name: str) -> list[str]:
        """The command with the local rank as the first argument of the script, or the last of another command."""
        return [*self.words[: self.start], *arguments.with_local_rank(self.words[self.start :], local_rank, name)]

    def missing(self) -> DistbootError | None:
        """What the other ranks should hear, too, if they have the program and this one has not."""
        from shutil import which  # here, so that a process that is alone does not pay for it

        program = self.words[0]
        if which(program) is not None:
            return None
        if os.sep in program and os.path.exists(program):
            hint = "name a program in it" if os.path.isdir(program) else "chmod +x it"
            return DistbootError("command-not-executable", f"{quoted(program)} may not be executed", hint)
        return child.not_found(program)


def target_of(given: list[str]) -> Target:
    """The target that our command line ends with.

    Raises:
        DistbootError: `usage`, `command-not-found` or `command-not-executable`.
    """
    python = [sys.executable, *_interpreter_options()]
    if given[0] == "--":
        if len(given) == 1:
            raise DistbootError("usage", "no command after '--'", "python -m distboot run -- command [arguments …]")
        return Target(given, python, given[1:], len(given) - 1)
    if given[0] == "-m":
        if len(given) == 1:
            raise DistbootError("usage", "no module after '-m'", "python -m distboot run -m module [arguments …]")
        return Target(given, python, [*python, *given], len(python) + 2)
    script = given[0]
    if not os.path.exists(script):
        where = "" if os.path.isabs(script) else f" in {_working_directory()}"
        meant = did_you_mean(script, ("run", "show", "env", "launchers", "doctor"))
        hint = f"{meant}check the path; any other command goes after '--': run -- {printable(script)} …"
        raise DistbootError("command-not-found", f"there is no script {quoted(script)}{where}", hint)
    if not os.access(script, os.R_OK):
        raise DistbootError("command-not-executable", f"the script {quoted(script)} may not be read", "chmod +r it")
    return Target(given, python, [*python, *given], len(python) + 1)


def _working_directory() -> str:
    try:
        return quoted(os.getcwd())
    except FileNotFoundError:
        return "the working directory, which is not there any more"


def _interpreter_options() -> list[str]:
    """The options of this Python, so that `python -u -m distboot train.py` runs `python -u train.py`."""
    spec = sys.modules["__main__"].__spec__
    if spec is None or spec.name != "distboot.__main__":  # the console script: its Python has no options of its own
        return []
    options: list[str] = []
    for word in sys.orig_argv[1:]:
        if word.startswith("-") and not word.startswith("--") and "m" in word and word[1] not in "WXc":
            flags = word[: word.index("m")]  # -m, or -Im, or -mdistboot
            return [*options, flags] if flags != "-" else options
        options.append(word)
    return options
