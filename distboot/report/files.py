"""The file of the report: checked before the job starts, written whole at its end, or not at all.

The page is `page.html` with the report in it, as data for its script, and as text for browsers
without one.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ..base.errors import DistbootError, reason_of
from ..base.patterns import pattern
from ..base.text import (
    escape_control,
    first_line,
    short_repr,
)

_NO_CAUSE = {"text": "", "traceback": "", "hint": ""}
_TEMPLATE = os.path.join(os.path.dirname(__file__), "page.html")
_OUTCOMES = {
    "ended": "ended",
    "failed": "failed",
    "stopped": "stopped on request",
    "started": "started",
    "running": "running, or killed",
}
# Of a failure, by whether it is an error of distboot, which are those of the start
_TITLES = {False: "First failure", True: "Why it did not start"}
_READER_TIMEOUT = 3.0  # seconds for which the reader of a pipe may take nothing
_FIRST_LINE = 4096  # bytes of a journal that show what it is
# The sidecar's output is not the script's, and a log must not be replaced, nor what is in /dev
_OF_EACH_PROCESS = ("/dev/std", "/dev/fd", "/proc/")
_WHY_NO_FILE = "it is a different file for each process"
# How a report begins, as JSON or as a page
_REPORT = pattern(
    rb"""\{\s*"outcome":\s*"(ended|failed|stopped|started|running)",\s*"headline":\s*\""""
    rb"""|<!doctype html>(?s:.{,200})default-src 'none'; s(cript|tyle)-src"""
)
_MOST_LINKS = 40  # as the kernel follows


def unwritable(path: str) -> DistbootError | None:
    """The error if no report can be written at a path, as the job may take hours; else None."""
    why = _why_unwritable(path)
    if why is None:
        return None
    return DistbootError(
        "output-failed",
        f"the report {short_repr(path)} cannot be written: {why}",
        "let --report or DISTBOOT_REPORT name another file, "
        f"in an existing, writable folder of rank 0's host{_if_relative(path)}",
    )


def _if_relative(path: str) -> str:
    """What to do where the path comes of a relative one in the environment; else empty."""
    given = os.environ.get("DISTBOOT_REPORT", "")
    if not given:
        return ""
    if os.path.isabs(given):
        return ""
    absolute = None
    with suppress(FileNotFoundError):  # the working directory does not exist any more
        absolute = os.path.abspath(given)
    if path != absolute:  # it is of --report
        return ""
    return (
        f"; {short_repr(given)} is relative to the working directory, which a script may change "
        "before init(): give an absolute path"
    )


def _why_unwritable(path: str) -> str | None:
    try:
        if os.path.isdir(path):
            return "it is a directory"
        if path.startswith(_OF_EACH_PROCESS):
            return _WHY_NO_FILE
        if not is_special(path):  # the reader of a pipe may come later
            if is_of_each_process(path):
                return _WHY_NO_FILE
            descriptor, part, _ = _start_file(path)
            os.close(descriptor)
            os.unlink(part)
            return _why_not_begun(path)
    except OSError as error:
        return error.strerror or ""
    except ValueError as error:  # a path with a null character
        return str(error)
    return None


def why_not_replaced(path: str) -> str | None:
    """Why the report may not replace the file: it is not the report of an earlier job."""
    beginning = beginning_of(path)
    if not beginning:
        return None
    if _REPORT.match(beginning):
        return None
    return "it is not a report, and would be overwritten"


def _why_not_begun(path: str) -> str | None:
    """Why neither a report nor the journal beside it can be begun: a file has other content."""
    from ..job.journal import is_journal, path_beside  # here, as most jobs have no report

    journal = path_beside(path)
    if path != journal:  # else the journal is all that is written
        why = why_not_replaced(path)
        if why is not None:
            return why
    beginning = beginning_of(journal)
    if is_journal(beginning):  # or there is none yet, or none can be, which its writer says
        return None
    name = short_repr(os.path.basename(journal))
    return f"the events of the job would replace what is in {name} beside it"


def beginning_of(path: str) -> bytes:
    """The first bytes of a file, which show what it is; empty: it is none, or cannot be read."""
    if os.path.isfile(path):  # not a pipe, which may have no writer
        with suppress(OSError), open(path, "rb") as file:
            return file.read(_FIRST_LINE)
    return b""


def try_to_write(path: str, content: Callable[[], Mapping[str, object]]) -> str | None:
    """Write the report; return a warning if it cannot be written, as the job ends all the same."""
    from ..job.journal import path_beside  # here, as most jobs have no report

    if path_beside(path) == path:  # the journal is all that there is to be
        return None
    try:
        write(path, content())
    except OSError as error:
        why = reason_of(error)
    except Exception as error:  # noqa: BLE001 - a defect of this package
        why = f"{type(error).__name__}: {first_line(error)}"
    else:
        return None
    return f"warning: the report could not be written: {short_repr(path)}: {why}"


def write(path: str, content: Mapping[str, object]) -> None:
    """Write the report as a page if its name ends in .html, else as JSON; raises OSError."""
    if path.lower().endswith(".html"):
        write_text(path, page(content))
    else:
        write_text(path, json.dumps(content, indent=2) + "\n")


def write_text(path: str, text: str) -> None:
    """Replace a file by this text, or leave it as it is; raises OSError."""
    data = text.encode(errors="backslashreplace")
    if is_special(path) or is_of_each_process(path):
        _write_special(path, data)
        return
    descriptor, part, place = _start_file(path)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(part, place)
    except BaseException:  # also a signal
        with suppress(OSError):
            os.unlink(part)
        raise


def _write_special(path: str, data: bytes) -> None:
    """Write to a pipe or a device, without a wait for a reader that is not there.

    Or to a file that this process has open for its output.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_APPEND)
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        while data:
            if not poll.poll(_READER_TIMEOUT * 1000):
                raise OSError(errno.ETIMEDOUT, "its reader has stopped reading")
            written = os.write(descriptor, data)
            data = data[written:]
    finally:
        os.close(descriptor)


def page(content: Mapping[str, Any]) -> str:
    """The page of a report: one file that needs no network."""
    with open(_TEMPLATE, encoding="utf-8") as file:
        template = file.read()
    cause = content["first_failure"] or content["stopped"] or _NO_CAUSE
    texts = {
        "title": _text(content["headline"], 120),
        "outcome": _text(content["outcome"]),
        "outcome_said": _OUTCOMES[content["outcome"]],
        "headline": _text(content["headline"], 600),
        "failure_title": _failure_title(content),
        "failure_text": _text(cause["text"], 2000),
        "traceback": "\n".join(map(_text, cause["traceback"].split("\n"))),
        "hint_label": "What to do:" if cause["hint"] else "",
        "hint": _text(cause["hint"], 2000),
        # < begins each tag and comment: without it, no name of a host can end the element.
        "report": json.dumps(content).replace("<", "\\u003c"),
        # A browser runs the script of the template and no other, whatever a traceback contains.
        "nonce": os.urandom(16).hex(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: texts[found[1]], template)


def _failure_title(content: Mapping[str, Any]) -> str:
    failure = content["first_failure"]
    if failure:
        is_of_start = failure["code"] is not None
        return _TITLES[is_of_start]
    if content["stopped"] is not None:
        return "Why it stopped"
    return ""


def _text(value: str, most: int = 300) -> str:
    """Text for HTML, cut if too long; escape sequences for a terminal are shown as text."""
    from html import escape  # here, as most jobs have no page

    if len(value) > most:
        value = f"{value[:most]}…"
    return escape(escape_control(value))


def is_special(path: str) -> bool:
    """Whether a pipe or a device is at this path."""
    return os.path.exists(path) and not os.path.isfile(path)


def is_of_each_process(path: str) -> bool:
    """Whether it is `/dev/stdout` or its like, or leads there: not to be replaced by a file."""
    for _ in range(_MOST_LINKS):
        folder, name = os.path.split(os.path.abspath(path))
        place = os.path.join(os.path.realpath(folder), name)
        place = f"/{place.lstrip('/')}"  # of two slashes at its beginning, POSIX keeps both
        if place.startswith(_OF_EACH_PROCESS):
            return True
        if not os.path.islink(place):
            return False
        path = os.path.join(os.path.dirname(place), os.readlink(place))
    return False


def _start_file(path: str) -> tuple[int, str, str]:
    """Open a new file beside the path: its descriptor, its name, and the name that it will get."""
    # stat follows a link: the kernel refuses one of another user (fs.protected_symlinks), a rename
    # would not.
    mode = None
    with suppress(FileNotFoundError):
        mode = os.stat(path).st_mode & 0o777
    place = path
    if os.path.islink(path):
        place = os.path.realpath(path)
    part = f"{place}.{os.urandom(4).hex()}.part"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    if mode is None:
        return os.open(part, flags, 0o666), part, place
    # Readable by no more users than the file that it replaces
    descriptor = os.open(part, flags, mode)
    with suppress(OSError):  # for what the umask has removed
        os.fchmod(descriptor, mode)
    return descriptor, part, place
