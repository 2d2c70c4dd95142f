"""The last summary of a job, on rank 0: one line for people, and the report where --report or DISTBOOT_REPORT says."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

from ..report.content import beginning, of_rank, utc
from ..report.files import try_to_write
from ..report.history import History
from ..roster import ranks_said
from .cases import Member
from .hub import Hub
from .verdict import Verdict


def summarize(hub: Hub) -> None:
    """Say how the job ended, and write the report."""
    hub.say(said(hub))
    path, history = hub.settings.report, hub.history
    if path is not None and history is not None:
        problem = try_to_write(path, lambda: content(hub, history))
        if problem is not None:
            hub.say(problem)


def said(hub: Hub) -> str:
    """The summary for people."""
    members = hub.members
    if hub.verdict is None:
        how = "all ended well" if all(_exit(member) == "0" for member in members) else "no failure was seen"
    else:
        how = hub.verdict.text.splitlines()[0]
    more = f"; {hub.later} failed after that" if hub.later else ""
    codes = defaultdict(list)
    for member in members:
        codes[_exit(member)].append(member.seat.rank)
    listed = ", ".join(f"{code} ({ranks_said(ranks)})" for code, ranks in codes.items())
    return f"summary: {_job(hub)}, {time.time() - hub.began:.1f} s: {how}{more}; exit codes: {listed}"


def content(hub: Hub, history: History) -> dict[str, object]:
    """The report, as plain JSON types."""
    verdict, own = hub.verdict, {member.seat.rank: member.steps for member in hub.members}
    first = sorted((member.seat.node_rank, member.seat.host) for member in hub.members if not member.seat.local_rank)
    return {
        "outcome": "ended" if verdict is None else "failed" if verdict.is_failure else "stopped",
        "headline": _headline(hub),
        "world_size": len(hub.members),
        "hosts": [host for _, host in first],
        "start": utc(history.began),
        "end": utc(time.time()),
        "first_failure": _cause(hub, history) if verdict is not None and verdict.is_failure else None,
        "stopped": _cause(hub, history) if verdict is not None and not verdict.is_failure else None,
        "later_failures": hub.later,
        "unlisted": [],
        **beginning(history, own),
        "ranks": [_rank(member, verdict, history) for member in hub.members],
    }


def _headline(hub: Hub) -> str:
    """What happened, in one sentence."""
    verdict, states = hub.verdict, Counter(_state(member, hub.verdict) for member in hub.members)
    if verdict is None:
        if states["ended"] == len(hub.members):
            return f"{_job(hub)}: {'all ' * (len(hub.members) > 1)}ended well"
        return f"{_job(hub)}: no failure was seen; how {states['not known']} of them ended is not known"
    seat = hub.members[verdict.ranks[0]].seat
    text = verdict.text.splitlines()[0].split(f", {seat.said()}")[0]  # where exactly is said with the failure
    if verdict.is_failure and f" on {seat.host}" not in text:
        text += f", on {seat.host}"
    counts = [f"{states[state]} {said}" for state, said in _AFTER.items() if states[state]]
    return f"{text[0].upper()}{text[1:]}" + (f"; {', '.join(counts)}" if counts and verdict.is_failure else "")


_AFTER = {"failed later": "failed later", "stopped": "stopped", "ended": "ended well", "not known": "not known"}


def _job(hub: Hub) -> str:
    ranks, nodes = len(hub.members), len({member.seat.node_rank for member in hub.members})
    return f"{ranks} rank{'s' * (ranks > 1)} on {nodes} node{'s' * (nodes > 1)}"


def _cause(hub: Hub, history: History) -> dict[str, object]:
    """What ended the job, and on which rank it was seen first."""
    assert hub.verdict is not None
    member = hub.members[hub.verdict.ranks[0]]
    end = member.end or member.trouble
    return {
        "text": hub.verdict.text.splitlines()[0],
        "code": None,
        "hint": "",
        "ranks": list(hub.verdict.ranks),
        **_rank(member, hub.verdict, history),
        "traceback": end.words if end is not None else "",
    }


def _rank(member: Member, verdict: Verdict | None, history: History) -> dict[str, object]:
    seat, end = member.seat, member.end
    return {
        "rank": seat.rank,
        "host": seat.host,
        "node_rank": seat.node_rank,
        "local_rank": seat.local_rank,
        "pid": seat.pid or None,
        "start": member.start and utc(member.start),
        "end": end and utc(end.when - history.clock(seat.rank).ahead),
        "exit_code": end and end.status,
        "signal": end and end.signal,
        "lost": member.is_lost,
        "state": _state(member, verdict),
        **of_rank(history, seat.rank, member.steps),
    }


def _state(member: Member, verdict: Verdict | None) -> str:
    """What became of a rank."""
    end = member.end
    if member.is_lost:
        return "lost"
    if verdict is not None and verdict.is_failure and member.seat.rank in verdict.ranks:
        return "failed first"
    if end is None:
        return "not known"
    if end.told or end.stopped_by is not None:
        return "stopped"
    return "ended" if end.is_well else "failed later"


def _exit(member: Member) -> str:
    if member.is_lost:
        return "lost"
    if member.end is None:
        return "not known"
    return "not known" if member.end.status is None else str(member.end.status)
