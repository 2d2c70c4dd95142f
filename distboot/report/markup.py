"""Text in HTML: escaped, without control characters, and never longer than somebody would read."""

from __future__ import annotations

import html
from datetime import datetime

from ..errors import printable

_LONGEST = 300  # characters in one line
_MOST_LINES = 60
_UNITS = ((3600, 60, "min", 1, "s"), (86400, 3600, "h", 60, "min"))


def text(value: object, most: int = _LONGEST) -> str:
    """A value as text in HTML, also in an attribute: escape sequences of a terminal are shown, and do nothing."""
    said = str(value)
    said = said if len(said) <= most else f"{said[:most]}…"
    return html.escape(printable(said))


def lines(value: object) -> str:
    """The same for several lines: the last ones, as a traceback ends with what went wrong."""
    found = str(value).split("\n")
    shown = [text(line) for line in found[-_MOST_LINES:]]
    return "\n".join(["…", *shown] if len(found) > _MOST_LINES else shown)


def seconds(when: str) -> float:
    """A time of the report, in seconds since the epoch."""
    return datetime.fromisoformat(when).timestamp()


def duration(given: float) -> str:
    """`"330 ms"`, `"2.50 s"`, `"12.4 s"`, `"3 min 20 s"`, `"2 h 5 min"`, `"3.2 d"`."""
    if given < 1:
        return f"{given * 1000:.3g} ms" if given >= 0.001 or not given else "under 1 ms"
    if given < 10:
        return f"{given:.2f} s"
    if given < 60:
        return f"{given:.1f} s"
    for limit, size, name, part_size, part in _UNITS:
        if given < limit:
            return f"{given // size:.0f} {name} {given % size // part_size:.0f} {part}"
    return f"{given / 86400:.1f} d"


def clock(when: str) -> str:
    """`"2026-11-22 09:14:02 UTC"`."""
    return f"{when[:10]} {when[11:19]} UTC"
