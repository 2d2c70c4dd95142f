"""The text of the shell script that a command runs, and the command itself behind its prefixes."""

from __future__ import annotations

import os
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
# Programs that run the command in their arguments: options that have a value in the next word, and
# what else is before the command
_A_WORD = r"[^\0]*\0"
_OF_NUMACTL = (
    "-i|--interleave|-w|--weighted-interleave|-p|--preferred|-P|--preferred-many"
    "|-m|--membind|-N|--cpunodebind|-C|--physcpubind"
)
_PREFIXES = {
    "env": ("-u|--unset|-C|--chdir", r"(?:[^\0]*=[^\0]*\0)*"),
    "ionice": ("-c|--class|-n|--classdata", ""),
    "nice": ("-n|--adjustment", ""),
    "nohup": ("", ""),
    "numactl": (_OF_NUMACTL, ""),
    "setsid": ("", ""),
    "stdbuf": ("-i|--input|-o|--output|-e|--error", ""),
    "taskset": ("", _A_WORD),  # the CPUs
    "time": ("-f|--format|-o|--output", ""),
    "timeout": ("-k|--kill-after|-s|--signal", _A_WORD),  # the duration
}
_ANY_PREFIX = "|".join(
    rf"{name}\0(?:(?:{options})\0{_A_WORD}|(?!(?:{options})\0)-{_A_WORD})*{more}"
    for name, (options, more) in _PREFIXES.items()
)
_BEFORE = pattern(rf"\A(?:(?:[^\0]*/)?(?:{_ANY_PREFIX}))*(?!\Z)")
_LONGEST = 1 << 20  # characters of a script that are read
LOOKED_AT = 1 << 15  # of a shell script
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
        return beginning(program, LOOKED_AT)
    joined = "\0".join([*command, ""])
    given = _AFTER_C.search(joined)
    if given is not None:
        return given[1]
    file = _FILE.search(joined)
    if file is None:
        return ""
    return beginning(file[1], LOOKED_AT)


def beginning(path: str, most: int = _LONGEST) -> str:
    """The beginning of a file; empty if it cannot be read, or is no regular file."""
    if not os.path.isfile(path):  # a pipe can be read only once
        return ""
    # Python, too, leaves out the mark of UTF-8 that editors put before the first line
    with suppress(OSError), open(path, encoding="utf-8-sig", errors="replace") as file:
        return file.read(most)
    return ""


def without_prefixes(words: list[str]) -> list[str]:
    """A command without `env NAME=VALUE`, `timeout 30`, `nice` and their like before it."""
    program = os.path.basename(words[0])
    if program not in _PREFIXES:  # as most commands: nothing is compiled
        return words
    joined = "\0".join([*words, ""])
    behind = _BEFORE.sub("", joined)
    *rest, _ = behind.split("\0")
    return rest
