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
from .hub import Hub, Member
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
    outcome = "ended" if verdict is None else "failed" if verdict.is_failure else "stopped"
    return {
        "outcome": outcome,
        "world_size": len(hub.members),
        "hosts": [member.seat.host for member in hub.members if member.seat.local_rank == 0],
        "start": _time(hub.began),
        "end": _time(time.time()),
        "first_failure": None if verdict is None else _first(hub),
        "later_failures": hub.later,
        "ranks": [_rank(member) for member in hub.members],
    }


def _first(hub: Hub) -> dict[str, object]:
    assert hub.verdict is not None
    member = hub.members[hub.verdict.ranks[0]]
    words = "" if member.end is None and member.trouble is None else (member.end or member.trouble or 0)
    traceback = getattr(words, "words", "")
    return {
        "ranks": list(hub.verdict.ranks),
        "text": hub.verdict.text.splitlines()[0],
        **{name: _rank(member)[name] for name in ("rank", "host", "node_rank", "local_rank", "pid")},
        **{name: _rank(member)[name] for name in ("exit_code", "signal", "end")},
        "traceback": traceback,
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
        "lost": member.lost,
    }


def _exit(member: Member) -> str:
    if member.lost:
        return "lost"
    if member.end is None:
        return "not known"
    return "not known" if member.end.status is None else str(member.end.status)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def _write(path: str, text: str) -> None:
    """All of it or nothing."""
    name = f"{path}.{os.getpid()}.part"
    try:
        with open(name, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        raise
