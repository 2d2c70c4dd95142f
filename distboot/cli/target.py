"""The target of the wrapper: a script or module in its own Python, or any other command."""

from __future__ import annotations

import errno
import itertools
import os
import re
import sys
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from ..base.commands import SHELLS, command_error, command_not_found
from ..base.errors import DistbootError
from ..base.patterns import pattern
from ..base.text import did_you_mean, escape_control, short_repr
from ..detection.local_rank_option import with_local_rank
from .commands import COMMANDS
from .shell_text import SHEBANG, beginning

# An option of Python that takes a value, which may be in the next word: -m, -um, -mname, -W, -Xname
_PYTHON_OPTION = pattern(r"-[A-Za-z]*?([mcWX])(.*)", re.DOTALL)
_NO_OPTION = pattern(r"-|[^-].*|", re.DOTALL)  # a script, or stdin
# A flag that keeps Python from running `sitecustomize`, before any flag that takes a value
_HIDING_FLAG = pattern("-(?:(?![mcWX])[A-Za-z])*?([ISE])")
# -m, -mdistboot, or -Im with its flag `-I`; other options take a value, which may have an m
_MODULE_OPTION = pattern(r"(-[^-mcWX]+)?-?m")
_OPTION_BEFORE_VALUE = pattern(r"-[^-mc]*[WX]|--check-hash-based-pycs")
_OF_PYTHON_ITSELF = {"-V", "-VV", "--version", "-h", "--help"}
_VERSION = "0123456789."  # characters after `python` in the name of its program
_BEGINNINGS = ("-m", "--module", "--")  # of what is not the path of a script


class Target(NamedTuple):
    """What the wrapper runs."""

    # The command, for example `["/usr/bin/python3", "-m", "module", "--epochs", "3"]`
    words: list[str]
    # Where the arguments of a script or module begin in it; its end for any other command
    start: int
    is_command: bool = False  # whether it is any other command, behind `--`
    # Why its script or module cannot run on this host; other ranks may have it
    problem: DistbootError | None = None

    def with_local_rank(self, local_rank: str, name: str) -> list[str]:
        """The command with the local rank as the script's first argument, or the command's last."""
        before = self.words[: self.start]
        arguments = with_local_rank(self.words[self.start :], local_rank, name)
        return [*before, *arguments]

    @property
    def of_python(self) -> list[str]:
        """What a Python runs: a script with its arguments, or `-m` with a module and its own.

        Empty if the command is not a Python, or if that reads its program from -c or stdin.
        """
        words = self._after_options
        if words[:1] in (["-c"], ["-"]):
            return []
        return words

    @property
    def is_on_stdin(self) -> bool:
        """Whether a Python reads its program from stdin: `python -`, or without a script."""
        if _OF_PYTHON_ITSELF.intersection(self.words):
            return False
        return self._is_python and self._after_options[:1] in ([], ["-"])

    @property
    def _after_options(self) -> list[str]:
        """What follows the options of a Python: a script, `-m` with a module, `-c` or `-`."""
        if not self._is_python:
            return []
        words = self.words[1:]
        while words:
            first = words[0]
            if _NO_OPTION.fullmatch(first):
                return words
            option, value = _python_option(first)
            words = words[1:]
            if option in ("c", "m"):
                return [f"-{option}", *filter(None, [value]), *words]
            if option and not value:
                words = words[1:]
        return []

    @property
    def script(self) -> str:
        """The script that a Python runs, or `-m`; empty if there is none."""
        first = self.of_python[:1]
        return "".join(first)

    @property
    def is_shell(self) -> bool:
        """Whether the command is a shell, in whose script anything may be started."""
        program = os.path.basename(self.words[0])
        return program in SHELLS

    @property
    def hides_hooks(self) -> str:
        """The option that keeps Python from running distboot's `sitecustomize`: `"-I"`, or empty."""
        if not self._is_python:
            return ""
        options = itertools.takewhile(lambda word: word.startswith("-"), self.words[1:])
        for word in options:
            flag = _HIDING_FLAG.match(word)
            if flag is not None:
                return f"-{flag[1]}"
        return ""

    @property
    def _is_python(self) -> bool:
        program = self.words[0]
        if program == sys.executable:
            return True
        return os.path.basename(program).rstrip(_VERSION) == "python"

    @property
    def text(self) -> str:
        """The beginning of what a Python runs; empty if it cannot be read."""
        path = self.script
        if path == "-m":
            name = self.of_python[1:2]  # none, where Python ends with a usage error
            path = _file_of_module("".join(name))
        return beginning(path)

    @property
    def as_given(self) -> str:
        """`"train.py"`, or `"-m package.train"`."""
        words = self.of_python
        if words[:1] == ["-m"]:
            return " ".join(words[:2])
        return self.script

    def missing(self) -> DistbootError | None:
        """The error if this host does not have what is to run; other ranks may have it."""
        if self.problem is not None:
            return self.problem
        from shutil import which  # here, so that a process that is alone does not pay for it

        program = self.words[0]
        if which(program) is not None:
            return None
        if os.sep in program and os.path.exists(program):
            not_permitted = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return command_error(program, not_permitted)
        return command_not_found(program)


def _python_option(word: str) -> tuple[str, str]:
    """The option that takes a value, and the value; each is empty if the word does not have it."""
    found = _PYTHON_OPTION.match(word)
    if found is None:
        return "", ""
    return found[1], found[2]


def begins_target(word: str) -> bool:
    """Whether a word is not an option, but begins what the wrapper runs."""
    return word in _BEGINNINGS or not word.startswith("-")


def target_of(given: list[str]) -> Target:
    """The target in the last words of the wrapper's command line."""
    first = given[0]
    if first == "--":
        _refuse_nothing_after(given, "command")
        if not given[1].strip():
            raise DistbootError(
                "command-not-found",
                f"the command after {first!r} is empty",
                "look for a variable that is not set",
            )
        return Target(given[1:], len(given) - 1, is_command=True)
    python = [sys.executable, *_interpreter_options()]
    if first == "-m":
        _refuse_nothing_after(given, "module")
        problem = _module_error(given[1])
        return Target([*python, *given], len(python) + 2, problem=problem)
    problem = _script_error(first)
    target = Target([*python, *given], len(python) + 1, problem=problem)
    _refuse_shell_script(target)
    return target


def _refuse_nothing_after(given: list[str], what: str) -> None:
    if len(given) == 1:
        option = given[0]
        hint = f"python -m distboot run {option} {what} [arguments …]"
        raise DistbootError(
            "usage",
            f"no {what} after {option!r}",
            hint,
        )


def _script_error(script: str) -> DistbootError | None:
    if not os.path.exists(script):
        return _no_script_error(script)
    if os.path.isdir(script) and not _has_main(script):
        message = f"{short_repr(script)} is a folder without a __main__.py"
        return DistbootError("command-not-found", message, "name the script in it")
    if os.access(script, os.R_OK):
        return None
    message = f"the script {short_repr(script)} is not readable"
    return DistbootError(
        "command-not-executable",
        message,
        "chmod +r it",
    )


def _has_main(folder: str) -> bool:
    """Whether Python can run the folder."""
    source = os.path.join(folder, "__main__.py")
    return any(map(os.path.isfile, (source, f"{source}c")))


def _refuse_shell_script(target: Target) -> None:
    """Refuse a script of a shell, in which Python would find a syntax error."""
    found = SHEBANG.match(target.text)
    if found is not None:
        script = target.script
        raise DistbootError(
            "usage",
            f"the script {short_repr(script)} is not in Python: it begins with {found[0]}",
            _after_dashes(script),
        )


def _no_script_error(script: str) -> DistbootError:
    where = ""
    if not os.path.isabs(script):
        where = f" in {_working_directory()}"
    problem = f"there is no script {short_repr(script)}{where}"
    if script in COMMANDS:
        hint = f"a command comes before its options: python -m distboot {script} …"
        return DistbootError("command-not-found", problem, hint)
    hint = "check the path"
    if not script.endswith(".py"):
        from .meant_target import meant_by_script  # here and below, as most are there

        meant = did_you_mean(script, COMMANDS)
        command = f"{meant}{hint}; {_after_dashes(script)}"
        hint = meant_by_script(script) or command
    return DistbootError("command-not-found", problem, hint)


def _after_dashes(command: str) -> str:
    is_here = os.sep not in command and os.path.isfile(command)
    if is_here:
        command = f"./{command}"
    shown = escape_control(command)
    if "@" in shown:  # it may be a URL with a password
        shown = "COMMAND"
    return f"any other command goes after '--': -- {shown} …"


@lru_cache(maxsize=1)
def _file_of_module(name: str) -> str:
    """The file that `python -m` runs, as far as can be known without importing a package."""
    from .module_lookup import file_of_module  # here, as most run a script

    found = ""
    with suppress(KeyError, ValueError):  # see `_module_error`; an invalid name
        found = file_of_module(name)
    path = name.replace(".", os.sep)
    # Else below the working directory, where `python -m` looks first
    ways = (found, os.path.join(path, "__main__.py"), f"{path}.py")
    return next(filter(os.path.isfile, ways), "")


def _module_error(name: str) -> DistbootError | None:
    """The error for a module that this Python does not find, for which it would exit with 1."""
    from .module_lookup import missing_part  # here, as most run a script

    missing = None
    # KeyError: a namespace package in another one, which only Python itself looks into
    with suppress(KeyError):
        missing = missing_part(name)
    if missing is None:
        return None
    what = f"there is no module {short_repr(name)}"
    if missing != name:
        what = f"{what}: {short_repr(missing)} is missing"
    from .meant_target import meant_by_module

    path = "PYTHONPATH"
    if "." not in missing:
        path = f"PYTHONPATH (it is not in {_working_directory()} either)"
    check = f"check the spelling and {path}, or install it for {sys.executable}"
    return DistbootError(
        "command-not-found",
        what,
        meant_by_module(name) or check,
    )


def _working_directory() -> str:
    try:
        return short_repr(os.getcwd())
    except FileNotFoundError:
        return "the working directory, which is no longer there"


def _interpreter_options() -> list[str]:
    """The options of this Python: `python -u -m distboot train.py` runs `python -u train.py`."""
    spec = sys.modules["__main__"].__spec__
    # The console script: its Python has no options of its own.
    if getattr(spec, "name", None) != "distboot.__main__":
        return []
    options: list[str] = []
    words = iter(sys.orig_argv[1:])
    for word in words:
        if not word.startswith("-"):  # a program that runs distboot in itself, by `runpy`
            return []
        module = _MODULE_OPTION.match(word)
        if module is not None:  # distboot, or a debugger that runs it in itself
            return [*options, *filter(None, module.groups())]
        options.append(word)
        if _OPTION_BEFORE_VALUE.fullmatch(word):
            value = next(words, "")
            options.append(value)
    return []
