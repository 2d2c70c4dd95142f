"""What another process of this host runs, without arguments, which may be secrets."""

from __future__ import annotations

import os
import re
from contextlib import suppress

from ..base.patterns import pattern
from ..base.text import cut, escape_control

# The words of a Python up to its code, module or script, with \0 between them. A value may be the
# rest of the word of its option, or the next word.
_PYTHON = pattern(
    r"(?<![^\0])(?:[^\0]*/)?python[^\0/]*(?![^\0])"
    r"(?:\0--check-hash-based-pycs\0[^\0]*"
    r"|\0-[^-cmWX\0]*[WX](?:[^\0]+|\0[^\0]*)"
    r"|\0-[^-cmWX\0]+(?![^\0]))*"
    r"(?:(?P<code>\0-[^-cmWX\0]*c)|\0-[^-cmWX\0]*m\0?[^\0]+|\0[^-\0][^\0]*)?"
)
# Any other word may be an option, a variable, code, or a URL with a password
_PLAIN = pattern(r"(?!-)[^\s=@]+")
_SCRIPT = pattern(r"(?!-)[^\s=@]+\.py")
# All that follows `-c` or `-lc`
_CODE = pattern(r"\0-[A-Za-z]*c(?![^\0]).*", re.DOTALL)
# The words of the wrapper before what it runs, each after \0: its command, its options, those
# without a value first, and `--`
_WRAPPER = pattern(
    r"(?:\0(?:run|try)(?![^\0]))?"
    r"(?:\0(?!(?:--|-m|--module)(?![^\0]))"
    r"(?:(?:--(?:exec|log[-_]prefix|no[-_]python|pass[-_]local[-_]rank|quiet|standalone)"
    r"|-q|-[^-\0][^\0]+|-[^\0=]*=[^\0]*)(?![^\0])"
    r"|-[^\0]*\0[^\0]*))*"
    r"(?:\0--(?![^\0]))?"
)
_LONGEST_COMMAND = 100  # characters


def command(process: int) -> list[str]:
    """The words of the command of a process; none: it has ended, or cannot be seen."""
    with suppress(OSError), open(f"/proc/{process}/cmdline", "rb") as file:
        words = os.fsdecode(file.read()).split("\0")
        return words[:-1]
    return []


def short_command(process: int) -> str:
    """`"python train.py"`, `"python -m http.server"`, `"python -c …"`; empty: it cannot be seen.

    No more of it, as code and arguments may be secrets.
    """
    shown = " ".join(without_arguments(command(process)))
    return cut(escape_control(shown), _LONGEST_COMMAND)


def without_arguments(words: list[str]) -> list[str]:
    """The program, its script or module, and the script or command that the wrapper runs."""
    shown = _first_words(words)
    name = os.path.basename("".join(shown[-1:]))
    if name == "distboot":
        of_wrapper = "\0".join(["", *words[len(shown) :]])
        shown += _target_in(of_wrapper)
    return shown


def without_code(words: str) -> str:
    r"""The words, with \0 between them, up to an option `-c`: code follows it, after any program."""
    return _CODE.sub("", words)


def _first_words(words: list[str]) -> list[str]:
    """A Python with its options and its script or module; of other programs at most two words."""
    python = _PYTHON.match("\0".join(words))
    if python is None:
        second = filter(_PLAIN.fullmatch, words[1:2])
        return [*words[:1], *second]
    shown = python[0].split("\0")
    if python["code"] is not None:
        shown.append("…")
    return shown


def _target_in(of_wrapper: str) -> list[str]:
    """The script that the wrapper runs, or `["--", "sleep"]`: the program of a command after that."""
    target = _WRAPPER.sub("", of_wrapper, count=1)
    script = _script_in(target)
    if script:
        return script
    options = of_wrapper.removesuffix(target)
    if not options.endswith("\0--"):
        return []
    for program in target.split("\0")[1:2]:
        if _PLAIN.fullmatch(program):
            return ["--", os.path.basename(program)]
    return []


def _script_in(target: str) -> list[str]:
    """The script in a command: its first or second word, or what a Python in it runs."""
    target = without_code(target)
    found = target.split("\0")[1:3]
    python = _PYTHON.search(target)
    if python is not None:
        found = python[0].split("\0")[-1:]
    return list(filter(_SCRIPT.fullmatch, found))[:1]
