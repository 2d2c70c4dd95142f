"""The text of the shell script that a command runs, and the commands that it runs in any case.

Only these count, as a warning about a command that is not run would be wrong. The commands of a
function, and of a script that this one starts, do not count.
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
_OPTIONS = r"\A[^\0]*\0(?:-[a-z]*o\0[^\0]*\0|-[a-z-]*[a-np-z-]\0)*?"
_AFTER_C = pattern(rf"{_OPTIONS}-[a-z]*c\0([^\0]*)")
_FILE = pattern(rf"{_OPTIONS}([^-\0][^\0]*)")
# A text for a command, whose lines are no commands: <<EOF … EOF
_HERE_DOCUMENT = pattern(
    r"<<-?[ \t]*(['\"]?)(\w+)\1([^\n]*\n)(?:.{0,3999}?\n)??[ \t]*\2(?=\n|\Z)", re.DOTALL
)
_WORD = r"(?:'[^']*'|\"(?:\\.|[^\"\\])*\"|\\[^\n]|[^\s;&|()<>'\"\\])+"
# A line that goes on, a comment, a redirection with its target (the `(` of a process substitution
# ends the command), what ends a command, or a word with what is quoted in it
_PARTS = pattern(
    r"\\\n|#[^\n]*"
    rf"|(?:[0-9]+|&)?[<>]{{1,3}}[&|]?[ \t]*(?:{_WORD})?"
    r"|(?P<end>[;&|()\n]+)"
    rf"|(?P<word>{_WORD})",
    re.DOTALL,
)
_QUOTES = pattern(r"'([^']*)'|\"((?:\\.|[^\"\\])*)\"|\\(.)", re.DOTALL)
# Words before a command that are not its program: some of the shell's, and assignments
_BEFORE = pattern(r"exec|command|time|nohup|eval|!|[A-Za-z_]\w*\+?=.*", re.DOTALL)
# First words that open what is run only if something holds, or is called, and those that close it
_DEPTHS = {
    **dict.fromkeys(("if", "case", "for", "while", "until", "select", "{"), 1),
    **dict.fromkeys(("fi", "esac", "done", "}"), -1),
}
_TESTS = ("[", "[[", "test")
# A command after which the shell runs no other one; `exec >log` is none
_END = pattern(r"(?:exit|return|exec\0[^\0])", re.DOTALL)
_LONGEST = 1 << 20  # characters of a script that are read
_LOOKED_AT = 1 << 15  # of a shell script
_FIRST_LINES = 1 << 10  # for its #! line


def shell_text(command: list[str]) -> str:
    """The text of the shell script that a command runs.

    Empty for any other command, and if it cannot be read.
    """
    program = command[0]
    if os.path.basename(program) not in SHELLS:
        # Most are binary files, of which no more is read at each start
        if SHEBANG.match(beginning(program, _FIRST_LINES)) is None:
            return ""
        return beginning(program, _LOOKED_AT)
    joined = "\0".join([*command, ""])
    given = _AFTER_C.search(joined)
    if given is not None:
        return given[1]
    file = _FILE.search(joined)
    if file is None:
        return ""
    return beginning(file[1], _LOOKED_AT)


def beginning(path: str, most: int = _LONGEST) -> str:
    """The beginning of a file; empty if it cannot be read, or is no regular file."""
    if not os.path.isfile(path):  # a pipe can be read only once
        return ""
    # Python, too, leaves out the mark of UTF-8 that editors put before the first line
    with suppress(OSError), open(path, encoding="utf-8-sig", errors="replace") as file:
        return file.read(most)
    return ""


def commands_in(text: str) -> list[list[str]]:
    """The words, without quotes, of each command that a shell script runs in any case."""
    found = []
    depth = 0
    brackets = 0
    previous = ""
    for operator, words in _split(text):
        first = words[0]
        brackets = max(brackets + operator.count("(") - operator.count(")"), 0)
        opened = words[1:].count("{")  # function train {
        depth = max(depth + _DEPTHS.get(first, 0) + opened, 0)
        is_after_test = "&&" in operator and previous in _TESTS
        is_alternative = "||" in operator
        previous = first
        if any((depth, brackets, is_after_test, is_alternative)):
            continue
        found.append(_from_its_program(words))
        if _END.match("\0".join(words)) is not None:
            break
    return list(filter(None, found))


def all_commands_in(text: str) -> list[list[str]]:
    """The words of each command of a shell script, also of those that may not be run."""
    found = []
    for _, words in _split(text):
        found.append(_from_its_program(words))
    return list(filter(None, found))


def _split(text: str) -> list[tuple[str, list[str]]]:
    """The words of each command without its redirections, and the operators before it."""
    found: list[tuple[str, list[str]]] = []
    operator = ""
    words: list[str] = []
    without_texts = _HERE_DOCUMENT.sub(r"\3", text[:_LOOKED_AT])
    for part in _PARTS.finditer(f"{without_texts}\n"):
        if part["word"]:
            word = _QUOTES.sub(_unquoted, part["word"])
            words.append(word)
        elif part["end"]:
            is_name = len(words) == 1 and part["end"].startswith("(")  # of a function, an array
            if words and not is_name:
                found.append((operator, words))
                operator = ""
            operator += part["end"]
            words = []
    return found


def _from_its_program(words: list[str]) -> list[str]:
    rest = itertools.dropwhile(_BEFORE.fullmatch, words)
    return list(rest)


def _unquoted(quoted: re.Match[str]) -> str:
    texts = filter(None, quoted.groups())
    return "".join(texts)
