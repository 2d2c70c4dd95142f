"""The last summary of a job, on rank 0: for people, and as JSON where DISTBOOT_REPORT says."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone

from ..errors import quoted
from ..roster import ranks_said
from .cases import Member
from .hub import Hub
from .settings import Settings


def writable(settings: Settings, say: Callable[[str], None]) -> Settings:
    """The settings, without a report if it is clear already that it cannot be written; which is said."""
    problem = settings.report and _problem(settings.report)
    if not problem:
        return settings
    say(f"warning: there will be no report: {problem}")
    return replace(settings, report=None)


def _problem(path: str) -> str | None:
    folder = os.path.dirname(path)
    if os.path.isdir(path):
        return f"DISTBOOT_REPORT={quoted(path)} is a directory"
    if not os.path.isdir(folder):
        return f"DISTBOOT_REPORT={quoted(path)}: there is no directory {quoted(folder)}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"DISTBOOT_REPORT={quoted(path)}: this process may not write there"
    return None


def summarize(hub: Hub) -> None:
    """Say how the job ended, and write the report."""
    hub.say(said(hub))
    path = hub.settings.report
    if path is None:
        return
    try:
        _write(path, json.dumps(content(hub), indent=2) + "\n")
    except OSError as error:
        hub.say(f"warning: the report could not be written: {quoted(path)}: {error.strerror}")


def said(hub: Hub) -> str:
    """The summary for people."""
    members = hub.members
    nodes = len({member.seat.node_rank for member in members})
    job = f"{len(members)} ranks on {nodes} node{'s' if nodes > 1 else ''}, {time.time() - hub.began:.1f} s"
    if hub.verdict is None:
        how = "all ended well" if all(_exit(member) == "0" for member in members) else "no failure was seen"
    else:
        how = hub.verdict.text.splitlines()[0]
    more = f"; {hub.later} failed after that" if hub.later else ""
    codes = defaultdict(list)
    for member in members:
        codes[_exit(member)].append(member.seat.rank)
    listed = ", ".join(f"{code} ({ranks_said(ranks)})" for code, ranks in codes.items())
    return f"summary: {job}: {how}{more}; exit codes: {listed}"


def content(hub: Hub) -> dict[str, object]:
    """The report, as plain JSON types."""
    verdict = hub.verdict
    first = sorted((member.seat.node_rank, member.seat.host) for member in hub.members if not member.seat.local_rank)
    return {
        "outcome": "ended" if verdict is None else "failed" if verdict.is_failure else "stopped",
        "world_size": len(hub.members),
        "hosts": [host for _, host in first],
        "start": _time(hub.began),
        "end": _time(time.time()),
        "first_failure": _cause(hub) if verdict is not None and verdict.is_failure else None,
        "stopped": _cause(hub) if verdict is not None and not verdict.is_failure else None,
        "later_failures": hub.later,
        "ranks": [_rank(member) for member in hub.members],
    }


def _cause(hub: Hub) -> dict[str, object]:
    """What ended the job, and on which rank it was seen first."""
    assert hub.verdict is not None
    member = hub.members[hub.verdict.ranks[0]]
    end = member.end or member.trouble
    return {
        "text": hub.verdict.text.splitlines()[0],
        "ranks": list(hub.verdict.ranks),
        **_rank(member),
        "traceback": end.words if end is not None else "",
    }


def _rank(member: Member) -> dict[str, object]:
    seat, end = member.seat, member.end
    return {
        "rank": seat.rank,
        "host": seat.host,
        "node_rank": seat.node_rank,
        "local_rank": seat.local_rank,
        "pid": seat.pid or None,
        "start": member.start and _time(member.start),
        "end": end and _time(end.when),
        "exit_code": end and end.status,
        "signal": end and end.signal,
        "lost": member.is_lost,
    }


def _exit(member: Member) -> str:
    if member.is_lost:
        return "lost"
    if member.end is None:
        return "not known"
    return "not known" if member.end.status is None else str(member.end.status)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def _write(path: str, text: str) -> None:
    """All of it or nothing; but for what is no file: a device, a pipe."""
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isfile(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # a pipe that nobody reads is no reason to wait
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        return
    part = f"{path}.part"
    try:
        with open(part, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            os.unlink(part)
        raise
