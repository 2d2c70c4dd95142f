"""Standard error as a terminal: color, and one line that is replaced in place.

Color is left out where NO_COLOR is set (https://no-color.org) or the terminal has none.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress

from .text import writes_json

_NARROWEST = 20  # columns
_USUAL = 80  # of a terminal that says 0, as it does not know
_CLEAR = "\r\x1b[K"  # to the beginning of the line, and erase it
_PLAIN = "\x1b[0m"
_RED = "\x1b[1;31m"
_YELLOW = "\x1b[33m"
_GREEN = "\x1b[32m"
_OF_EVENT = {
    "crash": _RED,
    "error": _RED,
    "killed": _RED,
    "launcher_gone": _RED,
    "root_cause": _RED,
    "check": _YELLOW,
    "late": _YELLOW,
    "warning": _YELLOW,
    "bad": _RED,
    "good": _GREEN,
}
# Whether a line stands there that is to be replaced
_has_line = False


def can_replace(file: int) -> bool:
    """Whether a file, a descriptor, is a terminal on which a line can be replaced."""
    knows_codes = os.environ.get("TERM", "dumb") != "dumb"
    return all((knows_codes, os.isatty(file), not writes_json()))


def painted(text: str, event: str) -> str:
    """A text in the color of an event, for a terminal."""
    color = _OF_EVENT.get(event, "")
    is_wanted = not os.environ.get("NO_COLOR")
    has_codes = os.environ.get("TERM", "dumb") != "dumb"
    if not all((color, is_wanted, has_codes, not writes_json())):
        return text
    return f"{color}{text}{_PLAIN}"


def shown(line: str, text: str, event: str) -> str:
    """A line in which a text gets the color of its event; it replaces what `show` has left."""
    begin, _, _ = text.partition(": ")  # "warning"
    return cleared() + line.replace(text, painted(text, event or begin))


def show(file: int, text: str) -> None:
    """Show a line in place of the one before; what anybody prints next is written over it."""
    global _has_line  # noqa: PLW0603 - a process has one terminal
    with suppress(OSError):
        width = os.get_terminal_size(file).columns or _USUAL
        width = max(width, _NARROWEST)
        line = text
        if len(line) >= width:
            line = f"{line[: width - 2]}…"
        _has_line = _write(file, f"{_CLEAR}{line}\r")


def cleared() -> str:
    """What erases the line that `show` has left; empty if there is none."""
    global _has_line  # noqa: PLW0603 - a process has one terminal
    if not _has_line:
        return ""
    _has_line = False
    return _CLEAR


def clear(file: int) -> None:
    """Erase that line."""
    with suppress(OSError):
        _write(file, cleared())


def _write(file: int, text: str) -> bool:
    """Write at once, or not at all: Ctrl-S stops the output of a terminal for as long as it likes."""
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    is_ready = bool(poll.poll(0))
    if is_ready:
        os.write(file, text.encode(errors="backslashreplace"))
    return is_ready
