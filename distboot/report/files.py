"""The file of the report: whether it can be written, before anything starts; and all of it or nothing, at the end.

The page is `page.html` with the report in it: as data for its script, and as text for who has none.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ..errors import DistbootError
from ..text import escape_control, first_line, short_repr

_TEMPLATE = os.path.join(os.path.dirname(__file__), "page.html")
_OUTCOMES = {"ended": "ended", "failed": "failed", "stopped": "stopped by an external signal", "started": "started"}
_OWN_OUTPUT = ("/dev/std", "/dev/fd/", "/proc/")  # the sidecar's is not the script's, and a log is not to be replaced


def refuse_unwritable(path: str) -> None:
    """Refuse, as `output-failed`, a path at which there could be no report: it will be hours until it is written."""
    try:
        _try(path)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise DistbootError(
            "output-failed",
            f"the report {short_repr(path)} cannot be written: {why}",
            "let --report or DISTBOOT_REPORT name a file in a folder of rank 0's host that is there and can be written "
            "to",
        ) from None


def _try(path: str) -> None:
    if os.path.isdir(path):
        raise IsADirectoryError(0, "it is a directory")
    if path.startswith(_OWN_OUTPUT):
        raise ValueError("what is there is another file for each process")
    if not _is_no_file(path):  # else a pipe whose reader is still to come, say
        descriptor, part, _ = _begun(path)
        os.close(descriptor)
        os.unlink(part)


def try_to_write(path: str, content: Callable[[], Mapping[str, object]]) -> str | None:
    """Write the report; a warning if it cannot be written, the job ends as it would without."""
    try:
        write(path, content())
    except Exception as error:  # noqa: BLE001 - a defect of ours, where it is no OSError
        why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {first_line(error)}"
        return f"warning: the report could not be written: {short_repr(path)}: {why or error}"
    return None


def write(path: str, content: Mapping[str, object]) -> None:
    """Write the report, or raise OSError: as a page, if the name of the file ends in .html, else as JSON."""
    text = page(content) if path.lower().endswith(".html") else json.dumps(content, indent=2) + "\n"
    data = text.encode(errors="backslashreplace")
    if _is_no_file(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # so as not to wait for the reader of a pipe
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        return
    descriptor, part, place = _begun(path)
    try:  # all of it or nothing
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(part, place)
    except BaseException:  # a signal, too
        with suppress(OSError):
            os.unlink(part)
        raise


def page(content: Mapping[str, Any]) -> str:
    """The page for a report: one file that asks the network for nothing."""
    with open(_TEMPLATE, encoding="utf-8") as file:
        template = file.read()
    cause = content["first_failure"] or content["stopped"]
    texts = {
        "title": _text(content["headline"], 120),
        "outcome": _text(content["outcome"]),
        "outcome_said": _OUTCOMES[content["outcome"]],
        "headline": _text(content["headline"], 600),
        "failure_title": _failure_title(content),
        "failure_text": _text(cause["text"], 2000) if cause else "",
        "traceback": "\n".join(map(_text, cause["traceback"].split("\n"))) if cause else "",
        "hint_label": "What to do:" if cause and cause["hint"] else "",
        "hint": _text(cause["hint"], 2000) if cause else "",
        # No character in it ends the element, whatever a host is called: < begins each tag and comment.
        "report": json.dumps(content).replace("<", "\\u003c"),
        # A browser runs the script of the template and no other, whatever a traceback brings along.
        "nonce": os.urandom(16).hex(),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: texts[found[1]], template)


def _failure_title(content: Mapping[str, Any]) -> str:
    if content["first_failure"]:
        return "Why it did not start" if content["first_failure"]["code"] else "First failure"
    return "" if content["stopped"] is None else "Why it stopped"


def _text(value: str, most: int = 300) -> str:
    """Text in HTML, not too long; escape sequences of a terminal are shown, and do nothing."""
    from html import escape  # here, as most jobs have no page

    return escape(escape_control(value if len(value) <= most else f"{value[:most]}…"))


def _is_no_file(path: str) -> bool:
    return os.path.exists(path) and not os.path.isfile(path)


def _begun(path: str) -> tuple[int, str, str]:
    """A new file, open and with its name, and the place for which it is: beside it, as only there it can be renamed."""
    try:
        # Through a link: the kernel refuses that of another user (fs.protected_symlinks), where we would rename.
        mode: int | None = os.stat(path).st_mode & 0o777
    except FileNotFoundError:
        mode = None
    place = os.path.realpath(path) if os.path.islink(path) else path
    part = f"{place}.{os.urandom(4).hex()}.part"
    # A new file, not through a link; readable by no more users than the file that it replaces.
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666 if mode is None else mode)
    if mode is not None:
        with suppress(OSError):  # what the umask has taken away
            os.fchmod(descriptor, mode)
    return descriptor, part, place
