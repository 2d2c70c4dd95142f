"""`report`: how a job ended, from its journal, or its report as a page or as JSON.

Rank 0's agent writes the journal while the job runs, where `--report` or DISTBOOT_REPORT names a
file. So this also works for a job that was killed, or still runs.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from typing import Any

from ..base.errors import DistbootError, reason_of
from ..base.setting_readers import absolute_path, given_by_option
from ..base.text import counted, escape_control, log_line, short_repr
from ..cli.output import emit
from ..cli.parser import Parser
from ..job.journal import Journal, is_journal, path_beside, read
from ..rendezvous.protocol import ProtocolError
from ..report import files
from ..report.from_journal import goodput_of, report_of, summary_of
from .input_files import opened
from .journals import journals_beside

_HINT = "name the journal: job.jsonl, which --report job.jsonl or --report job.html writes"
# What the details of a damaged event lead to
_DAMAGED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    ProtocolError,
    TypeError,
    ValueError,
)


def report(arguments: list[str]) -> int:
    """The command `report`."""
    parser = Parser(
        "report",
        "Print how a job ended, from its journal: the .jsonl file beside its report.",
        detects=False,
    )
    parser.add_argument(
        "journal", metavar="JOURNAL", help="such as out/job.jsonl, for --report out/job.html"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the whole report as JSON")
    form.add_argument("--html", metavar="FILE", help="write the report as a page")
    options = parser.parse_args(arguments)
    if options.html is not None:
        _refuse_other_content(options.html)
    journal = _journal_at(options.journal)
    try:
        content = report_of(journal)
        if options.json:
            text = json.dumps(content, indent=2)
        elif options.html is not None:
            text = files.page(content)
        else:
            text = _summary(journal, content)
    except _DAMAGED as error:
        raise _not_a_journal(options.journal, f"an event of it is damaged: {error!r}") from None
    if journal.unreadable:
        lines = counted(journal.unreadable, "line")
        log_line(None, f"warning: {lines} of {short_repr(options.journal)} could not be read")
    if options.html is not None:
        _write_page(options.html, text)
    else:
        emit(text)
    return 0


def _refuse_other_content(path: str) -> None:
    """Refuse to replace a journal by a page, or what is neither."""
    absolute_path(given_by_option("--html", path))  # there is one, and it names a file
    beginning = files.beginning_of(path)
    if beginning and is_journal(beginning):
        raise _would_replace(f"the journal {short_repr(path)}")
    # A log to which our output goes, too, is not replaced
    is_written_on = any((_is_standard_output(path), files.is_of_each_process(path)))
    if not is_written_on and files.why_not_replaced(path) is not None:
        raise _would_replace(f"what is in {short_repr(path)}")


def _would_replace(what: str) -> DistbootError:
    text = f"the page would replace {what}"
    return DistbootError("usage", text, "let --html name another file")


def _summary(journal: Journal, content: dict[str, Any]) -> str:
    lines = [summary_of(journal)]
    goodput = goodput_of(journal)
    if goodput:
        lines.append(goodput)
    lines += _lines(content)
    return "\n".join(map(escape_control, lines))


def _refuse_device(path: str) -> None:
    """/dev/zero has no end."""
    if stat.S_ISCHR(os.stat(path).st_mode):
        raise ValueError("it is a device")


def _journal_at(path: str) -> Journal:
    try:
        _refuse_device(path)
        with opened(path) as file:
            journal = read(file)
    except (OSError, ValueError) as error:
        why = reason_of(error)
        text = f"the journal {short_repr(path)} cannot be read: {why}"
        raise DistbootError("usage", text, _hint(path)) from None
    if not journal.rounds:
        raise _not_a_journal(path, "no event of a job is in it")
    return journal


def _not_a_journal(path: str, why: str) -> DistbootError:
    text = f"{short_repr(path)} is not a valid journal: {why}"
    hint = _hint(path)
    beside = path_beside(path)
    if beside != path and os.path.exists(beside):
        hint = f"did you mean {short_repr(beside)}?"
    return DistbootError("usage", text, hint)


def _hint(path: str) -> str:
    """Which journals are in the folder of a path; how one is made, if there are none."""
    journals = journals_beside(path)
    if not journals:
        return _HINT
    return f"name a journal, the newest there: {', '.join(journals)}"


def _write_page(path: str, page: str) -> None:
    if _is_standard_output(path):  # not to be replaced: others write to it, too
        emit(page)
        return
    try:
        files.write_text(path, page)
    except OSError as error:
        text = f"the page {short_repr(path)} cannot be written: {error.strerror}"
        raise DistbootError("output-failed", text, "let --html name another file") from None


def _is_standard_output(path: str) -> bool:
    with suppress(OSError, ValueError):  # there is no such file, or it has no such name
        return os.path.samestat(os.stat(path), os.fstat(1))
    return False


def _lines(content: dict[str, Any]) -> list[str]:
    """Of a failure its traceback and what to do, and what differs."""
    found = []
    cause = content["first_failure"] or content["stopped"]
    if cause:
        for line in cause["traceback"].splitlines():
            found.append(f"  | {line}")
        if cause["hint"]:
            found.append(f"hint: {cause['hint']}")
    for finding in content["findings"]:
        found.append(f"differs: {finding}")
    return found
