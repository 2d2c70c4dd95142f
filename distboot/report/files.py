"""The file of the report: whether it can be written, before anything starts; and all of it or nothing, at the end.

`StartupReport` writes that of a job that does not start.

The page is `page.html` with the report in it: as data for its script, and as text for who has none.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from ..errors import DistbootError
from ..process import FROM_OUTSIDE
from ..text import escape_control, first_line, log_line, short_repr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..detection.placement import Placement
    from ..rendezvous.membership import Membership
    from . import EventLog

_TEMPLATE = os.path.join(os.path.dirname(__file__), "page.html")
_OUTCOMES = {
    "ended": "ended",
    "failed": "failed",
    "stopped": "stopped by an external signal",
    "started": "started",
}
# The sidecar's is not the script's, and a log is not to be replaced
_OWN_OUTPUT = ("/dev/std", "/dev/fd/", "/proc/")


def unwritable(path: str) -> DistbootError | None:
    """Why there could be no report at a path, as it will be hours until it is written; None: there can be one."""
    try:
        if os.path.isdir(path):
            why = "it is a directory"
        elif path.startswith(_OWN_OUTPUT):
            why = "what is there is another file for each process"
        else:
            if not _is_no_file(path):  # else a pipe whose reader is still to come, say
                descriptor, part, _ = _begun(path)
                os.close(descriptor)
                os.unlink(part)
            return None
    except (OSError, ValueError) as error:
        why = error.strerror or "" if isinstance(error, OSError) else str(error)
    text = f"the report {short_repr(path)} cannot be written: {why}"
    hint = "let --report or DISTBOOT_REPORT name a file in an existing, writable folder of rank 0's host"
    return DistbootError("output-failed", text, hint)


def try_to_write(path: str, content: Callable[[], Mapping[str, object]]) -> str | None:
    """Write the report; a warning if it cannot be written, the job ends as it would without."""
    try:
        write(path, content())
    except Exception as error:  # noqa: BLE001 - a defect of ours, where it is no OSError
        why = (
            error.strerror
            if isinstance(error, OSError)
            else f"{type(error).__name__}: {first_line(error)}"
        )
        return f"warning: the report could not be written: {short_repr(path)}: {why or error}"
    return None


def write(path: str, content: Mapping[str, object]) -> None:
    """Write the report, or raise OSError: as a page, if the name of the file ends in .html, else as JSON."""
    text = page(content) if path.lower().endswith(".html") else json.dumps(content, indent=2) + "\n"
    data = text.encode(errors="backslashreplace")
    if _is_no_file(path):
        # So as not to wait for the reader of a pipe
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
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
    descriptor = os.open(
        part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666 if mode is None else mode
    )
    if mode is not None:
        with suppress(OSError):  # what the umask has taken away
            os.fchmod(descriptor, mode)
    return descriptor, part, place


class _Job(Protocol):
    """What is known of the job that starts: a `JobInfo`."""

    membership: Membership | None
    steps: dict[str, float]
    is_watched: bool

    @property
    def log(self) -> EventLog | None: ...


class StartupReport:
    """The report of a job that is not supervised yet: a rank is missing, say; or that never is."""

    def __init__(
        self, path: str | None, placement: Placement, rounds: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        # None: there is to be none, or another process writes it
        self._path = None if placement.rank else path
        self._who = placement.who
        self._rounds = rounds  # of the job, that have failed

    def problem(self) -> DistbootError | None:
        """Why there could be no report, which all ranks should hear before anything starts; None: nothing."""
        error = None if self._path is None else unwritable(self._path)
        if error is not None:
            self._path = None
        return error

    def impossible(self) -> None:
        """Say that there will be no report, as the ranks do not meet."""
        if self._path is not None:
            log_line(
                self._who,
                f"warning: there will be no report {short_repr(self._path)}: DISTBOOT_RENDEZVOUS=0",
            )

    @contextmanager
    def despite_signals(self) -> Iterator[None]:
        """Let a signal that ends this process in this block do so only after the block, which may report it.

        In the block it is a `SystemExit`, as in process 1 of a container.
        """
        ours = self._path is not None and threading.current_thread() is threading.main_thread()
        taken = [
            number for number in FROM_OUTSIDE if ours and signal.getsignal(number) == signal.SIG_DFL
        ]
        got: list[int] = []

        def take(number: int, _: object) -> None:
            for other in taken:  # while the report is being written
                signal.signal(other, signal.SIG_IGN)
            got.append(number)
            raise SystemExit(128 + number)

        for number in taken:
            signal.signal(number, take)
        try:
            yield
        finally:
            for number in taken:
                # Else the block has found a use for it
                if signal.getsignal(number) in (take, signal.SIG_IGN):
                    signal.signal(number, signal.SIG_DFL)
            if got:
                os.kill(os.getpid(), got[0])

    def failed(self, job: _Job, error: BaseException | None) -> None:
        """Write, once, that the ranks have not met or could not start for this reason; None: that they have started."""
        path, log = self._path, job.log
        if path is None or log is None:  # only rank 0 knows of the others
            return
        self._path = None
        if job.steps:
            log.add("phases", 0, **job.steps)
        from .content import startup_report  # here, as most jobs start

        problem = try_to_write(
            path, lambda: startup_report(log, job.membership, error, time.time(), self._rounds)
        )
        if problem is not None:
            log_line(self._who, problem)

    @contextmanager
    def until_watched(self, job: _Job) -> Iterator[None]:
        """Report a job that fails in this block before it is supervised; or that it is not, after the block."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            if not job.is_watched:
                self.failed(job, error)
