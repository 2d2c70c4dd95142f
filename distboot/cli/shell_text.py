"""The text of the shell script that a command runs, and the commands in that text.

A shell alone knows which of them it runs: what is below `if` counts, too. The text of a script that
this one starts is not read.
"""

from __future__ import annotations

import itertools
import os
import re
from contextlib import suppress

from ..base.commands import SHELLS
from ..base.patterns import pattern

# A #! line whose interpreter is a shell, or `env` with a shell after its options and assignments.
# pip writes #!/bin/sh into scripts of Python, too: to Python, the exec line below it is a text.
SHEBANG = pattern(
    r"#!(?![^\n]*\n'''exec')[ \t]*(?:\S*/)?"
    r"(?:env[ \t]+(?:-\S*[ \t]+|\w+=\S*[ \t]+)*(?:[^\s=]*/)?)?"
    rf"(?:busybox[ \t]+)?(?:{'|'.join(SHELLS)})(?!\S)[^\n]*"
)
# A shell, its options, of which -o has a value; each word ends in \0
_OPTIONS = r"\A[^\0]*\0(?:-[a-z]*o\0[^\0]*\0|-[a-z-]+\0)*?"
_AFTER_C = pattern(rf"{_OPTIONS}-[a-z]*c\0([^\0]*)")
_FILE = pattern(rf"{_OPTIONS}([^-\0][^\0]*)")
# What ends a command, a comment included, or a word with what is quoted in it
_PARTS = pattern(
    r"(?P<end>#[^\n]*|[;&|()\n]+)"
    r"|(?P<word>(?:'[^']*'|\"(?:\\.|[^\"\\])*\"|\\[^\n]|[^\s;&|()'\"\\])+)",
    re.DOTALL,
)
_QUOTES = pattern(r"'([^']*)'|\"((?:\\.|[^\"\\])*)\"|\\(.)", re.DOTALL)
_LINE_GOES_ON = "\\\n"
# Words before a command that are not its program: some of the shell's, and assignments
_BEFORE = pattern(
    r"exec|command|time|nohup|eval|!|\{|if|then|elif|else|while|until|do|[A-Za-z_]\w*\+?=.*",
    re.DOTALL,
)
# What is run only if something holds
CONDITION = pattern(r"(?<![^\s;&|()])(?:if|case|while|until|for)\s|\|\|")
_LONGEST = 1 << 20  # bytes of a script that are read


def shell_text(command: list[str]) -> str:
    """The text of the shell script that a command runs.

    Empty for any other command, and if it cannot be read.
    """
    program = command[0]
    if os.path.basename(program) not in SHELLS:
        text = beginning(program)
        if SHEBANG.match(text) is None:
            return ""
        return text
    joined = "\0".join([*command, ""])
    given = _AFTER_C.search(joined)
    if given is not None:
        return given[1]
    file = _FILE.search(joined)
    if file is None:
        return ""
    return beginning(file[1])


def beginning(path: str) -> str:
    """The beginning of a file; empty if it cannot be read, or is no regular file."""
    if not os.path.isfile(path):  # a pipe can be read only once
        return ""
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read(_LONGEST)
    return ""


def commands_in(text: str) -> list[list[str]]:
    """The words of each command in the text of a shell script, without quotes."""
    found: list[list[str]] = [[]]
    for part in _PARTS.finditer(text.replace(_LINE_GOES_ON, " ")):
        if part["end"]:
            found.append([])
            continue
        word = _QUOTES.sub(_unquoted, part["word"])
        found[-1].append(word)
    commands = map(_from_its_program, found)
    return list(filter(None, commands))


def _from_its_program(words: list[str]) -> list[str]:
    rest = itertools.dropwhile(_BEFORE.fullmatch, words)
    return list(rest)


def _unquoted(quoted: re.Match[str]) -> str:
    texts = filter(None, quoted.groups())
    return "".join(texts)
