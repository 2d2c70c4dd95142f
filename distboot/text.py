"""Text for people: values quoted, control characters escaped, ranges of ranks, addresses, and one line on stderr."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby

_DIGITS_AND_DOTS = re.compile(r"[0-9.]+", re.ASCII)
_STDERR_LIMIT = 500  # milliseconds
_PIPE_BUF = 4096  # bytes
_LONGEST = 200  # characters of a value that a message shows
_MOST_SPANS = 20  # ranges in one line
_BEGINNINGS = ("summary", "warning", "hint")  # of a text that are events


def short_repr(value: object) -> str:
    """A value for an error message: quoted, control characters escaped, not too long, and without a password."""
    if isinstance(value, str) and "@" in value:  # user:password@host, or a token for it
        value = "***" + value[value.rindex("@") :]
    text = repr(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def escape_control(text: str) -> str:
    """A text for the terminal with its control characters escaped; line ends are control characters too."""
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    )


def host_name() -> str:
    """This host's own name, for the terminal: a container may have any."""
    return escape_control(os.uname().nodename)


def as_json(who: str | None, text: str, event: str = "", **more: object) -> str:
    """A line as one object of JSON, where DISTBOOT_LOG asks for it; else nothing."""
    if os.environ.get("DISTBOOT_LOG") != "json":
        return ""
    import json  # here and below, as few want it
    import time

    begin, _, rest = text.partition(": ")
    event, text = (begin, rest) if begin in _BEGINNINGS else (event or "note", text)
    unit, _, number = (who or "rank").partition(" ")
    whose = {
        "rank": None,
        unit: int(number) if number.isdigit() else None,
        "host": os.uname().nodename,
    }
    return (
        json.dumps(
            {"event": event, "time": round(time.time(), 3), **whose, "message": text, **more}
        )
        + "\n"
    )


def log_line(who: str | None, text: str, event: str = "", **more: object) -> None:
    """Print a line about this process on stderr; in one piece, because other ranks may write there too.

    It says `who` this is and the host, to be found in a log of many ranks; None: this process is alone.
    The event that it is about, and `more` fields, are for JSON.
    """
    whose = "" if who is None else f"{who} on {host_name()}: "
    line = as_json(who, text, event, **more) or f"distboot: {whose}{text}\n"
    with suppress(OSError, ValueError, AttributeError):  # closed: a line is not worth the job
        sys.stderr.flush()
        try:
            file = sys.stderr.fileno()
        except OSError:  # something in memory
            sys.stderr.write(line)
            return
        _write_in_time(file, line.encode(errors="backslashreplace"))


def _write_in_time(file: int, data: bytes) -> None:
    """Write, but do not wait for long: the reader may have stopped."""
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    while data and poll.poll(_STDERR_LIMIT):
        # Which a pipe that is ready takes at once, pipe(7)
        data = data[os.write(file, data[:_PIPE_BUF]) :]


def did_you_mean(word: str, names: Iterable[str], known: Iterable[str] = ()) -> str:
    """`"did you mean 'torch'? "`, to begin a hint with; empty if no name is like the word, nor `known` to be meant."""
    from difflib import get_close_matches  # here, as it is slow to import

    near = [*known, *get_close_matches(word.lower(), list(names), 1)]
    return f"did you mean {near[0]!r}? " if near else ""


def digits(text: str, most: int = 8) -> int | None:
    """The number that a text with at most so many digits is; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= most else None


def counted(count: int, what: str) -> str:
    """`"1 rank"`, `"3 ranks"`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def runs(numbers: Iterable[int]) -> list[range]:
    """`[0, 1, 2, 5]` -> `[range(0, 3), range(5, 6)]`."""
    found: list[range] = []
    for number in numbers:
        if found and number == found[-1].stop:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def ranges(numbers: Iterable[int]) -> str:
    """`[0, 1, 2, 5]` -> `"0-2, 5"`; the numbers are in ascending order."""
    return _joined(runs(numbers))


def ranks_said(ranks: Sequence[int]) -> str:
    """`"rank 3"`, `"ranks 0-2, 5"`, for ranks in ascending order."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def with_nodes(ranks: Iterable[int], node_of: Mapping[int, int]) -> str:
    """`"3 (node 0), 8-31 (nodes 1-3)"`, for ranks in ascending order."""

    def nodes_of(run: range) -> list[int]:
        return sorted({node_of[rank] for rank in run})

    groups = groupby(runs(ranks), nodes_of)
    return _first([f"{_joined([*found])} {nodes_said(nodes)}" for nodes, found in groups])


def nodes_said(nodes: Sequence[int]) -> str:
    """`"(node 0)"`, `"(nodes 1-3)"`, for nodes in ascending order."""
    return f"(node{'s' if len(nodes) > 1 else ''} {ranges(nodes)})"


def _joined(found: Sequence[range]) -> str:
    return _first(
        [str(run.start) if len(run) == 1 else f"{run.start}-{run.stop - 1}" for run in found]
    )


def _first(spans: Sequence[str]) -> str:
    more = f" and {len(spans) - _MOST_SPANS} more" if len(spans) > _MOST_SPANS else ""
    return ", ".join(spans[:_MOST_SPANS]) + more


def first_line(error: BaseException) -> str:
    """The message of an exception that is not ours, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def is_address(host: str) -> bool:
    """Whether a host that was read by `parse_address` is an address, and no name that has to be looked up."""
    return ":" in host or _DIGITS_AND_DOTS.fullmatch(host) is not None


def format_address(host: str, port: int) -> str:
    """Address and port for a message: `"nodea:29500"`, `"[fd00::1]:29500"`."""
    host = without_mapping(host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_mapping(host: str) -> str:
    """An IPv4 address as itself, where a socket that serves both families says `::ffff:10.0.0.1`."""
    return host.removeprefix("::ffff:") if "." in host else host


def without_secret(text: str, secret: str | None = None) -> str:
    """A text without a secret, by default the DISTBOOT_SECRET of this process.

    As it is, as repr, ascii and JSON write it, and as they write that once more.
    """
    secret = os.environ.get("DISTBOOT_SECRET", "") if secret is None else secret
    if not secret:
        return text
    import json

    writers: list[Callable[[str], str]] = [
        repr,
        ascii,
        json.dumps,
        partial(json.dumps, ensure_ascii=False),
    ]
    forms = {secret, repr(secret.encode(errors="surrogateescape"))[2:-1]}
    for _ in range(2):
        plain = [write(form)[1:-1] for form in forms for write in writers]
        # So that its own are escaped
        quotes = [write(form + "'\"")[1:-4] for form in forms for write in (repr, ascii)]
        forms.update(plain, quotes)
    for form in sorted(forms, key=len, reverse=True):
        text = text.replace(form, "***")
    return text
