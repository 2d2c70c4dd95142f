"""The summary and the report of a job from its journal alone: pure functions of what was written.

A journal may have no end: its job still runs, or was killed outright. Then the time of the report
is that of the last event, as nothing is known of what came after it. If a file holds several jobs,
one after the other, the last one counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..job.journal import Journal, Round
from ..job.restarts import failed_round, lost_rounds
from ..rendezvous.events import Event, spread, spread_alike
from ..rendezvous.events import size_of as expected_size
from ..rendezvous.membership import Membership
from .content import (
    Doubts,
    job_report,
    size_of,
    startup_report,
    utc,
)
from .job_state import JobState, of_kinds
from .spent import RoundTime, Spent, goodput_line
from .start_failure import StartFailure
from .summary import summary_line


def report_of(journal: Journal) -> dict[str, object]:
    """The report, as `job_report` makes it while the job ends."""
    last = journal.rounds[-1]
    events = _events_of(last)
    membership = last.membership
    rounds = _failed_rounds(journal)
    before = _spent_before(journal)
    failure = _start_failure(last)
    has_started = "started" in last.besides  # and is not supervised
    if failure is not None or has_started or membership is None:
        report = startup_report(events, membership, failure, last.last, rounds, before=before)
        if failure is None and not has_started:
            report["outcome"] = "running"
            report["headline"] = _headline_of_start(last, events)
        return report
    report = job_report(
        events,
        membership,
        _doubts(last),
        last.last,
        rounds,
        before=before,
    )
    if _is_open(last, events):
        report["outcome"] = "running"
        report["headline"] = _headline_of_open(last, events, membership)
    return report


def summary_of(journal: Journal) -> str:
    """One line: how the job has ended, or how far it is."""
    last = journal.rounds[-1]
    events = _events_of(last)
    membership = last.membership
    ended = last.besides.get("ended")
    if membership is None or ended is None:
        headline = str(report_of(journal)["headline"])
        return f"summary: {headline}"
    return summary_line(
        events,
        membership,
        _doubts(last),
        ended.time,
        ended.details["exit_code"],
        rounds=_failed_rounds(journal),
    )


def goodput_of(journal: Journal) -> str:
    """What the time of the job was spent on, in one line.

    Empty for a short job, and where the end is not known: since the last event it may have trained.
    """
    last = journal.rounds[-1]
    events = _events_of(last)
    if last.membership is None or _is_open(last, events):
        return ""
    round_ = RoundTime(events, last.membership.world_size)
    return goodput_line(_spent_before(journal).with_round(round_, last.last))


def _events_of(round_: Round) -> list[Event]:
    """The events of a round, with those of nodes as events of their ranks."""
    membership = round_.membership
    if membership is None:
        return list(spread_alike(round_.events))
    if not membership.by_node:
        return round_.events
    kinds = [one.event for one in round_.events]
    after = [*kinds, "all_joined"].index("all_joined")
    of_nodes = round_.events[:after]
    of_ranks = spread(of_nodes, membership.world_size, membership.nodes.__getitem__)
    return [*of_ranks, *round_.events[after:]]


def _doubts(round_: Round) -> Doubts:
    details = round_.besides["met"].details
    separate_jobs = details["separate_jobs"]
    is_launcher = bool(separate_jobs) and " " not in separate_jobs
    if is_launcher:  # as earlier journals have it
        own = f"each rank ran {separate_jobs} for a job of its own"
        separate_jobs = f"{own}, and none joined the others"
    return Doubts(
        separate_jobs=separate_jobs,
        unused=details["unused"],
    )


def _start_failure(round_: Round) -> StartFailure | None:
    failed = round_.besides.get("start_failed")
    if failed is None:
        return None
    return StartFailure(**failed.details)


def _is_open(round_: Round, events: Sequence[Event]) -> bool:
    """Whether the journal does not tell how the round has ended."""
    return not of_kinds(events, "root_cause") and "ended" not in round_.besides


def _headline_of_start(round_: Round, events: Sequence[Event]) -> str:
    size = expected_size(events[0])
    joined = JobState(events).joined
    at = utc(round_.last)
    return (
        f"still starting, or killed; {len(joined)} of {size} ranks had joined "
        f"when the journal ended, at {at}"
    )


def _headline_of_open(round_: Round, events: Sequence[Event], membership: Membership) -> str:
    ended = JobState(events).exited
    running = membership.world_size - len(ended)
    at = utc(round_.last)
    return (
        f"{size_of(membership)}: still running, or killed; "
        f"{running} had not ended when the journal ended, at {at}"
    )


def _rounds_of_last_job(journal: Journal) -> list[Round]:
    """The last rounds whose numbers continue: another number begins another job."""
    found = journal.rounds[-1:]
    for each in reversed(journal.rounds[:-1]):
        if _number_of(each) + 1 != _number_of(found[0]):
            break
        found.insert(0, each)
    return found


def _number_of(round_: Round) -> int:
    """Its number; rank 0's agent that replaces another one learns it from the others."""
    if round_.membership is not None:
        return round_.membership.round
    number: int = round_.events[0].details["round"]
    return number


def _spent_before(journal: Journal) -> Spent:
    """What the time of all rounds but the last one was spent on."""
    spent = Spent()
    *earlier, _ = _rounds_of_last_job(journal)
    for each in earlier:
        size = getattr(each.membership, "world_size", 0)
        round_ = RoundTime(_events_of(each), size)
        spent = spent.with_round(round_, each.last)
    return spent


def _failed_rounds(journal: Journal) -> list[dict[str, Any]]:
    """The rounds that failed, as the report has them."""
    found = []
    rounds = _rounds_of_last_job(journal)
    first = _number_of(rounds[0])
    if first:  # another agent was rank 0's in earlier rounds, and this one has emptied the file
        found.append(lost_rounds(first))
    for each in rounds:
        causes = of_kinds(each.events, "root_cause")
        membership = each.membership
        if not causes or membership is None or not membership.max_restarts:
            continue
        met = each.besides["met"]
        details = causes[0].details
        failed = failed_round(
            membership.round,
            details["ranks"],
            details["text"],
            start=met.time,
            seconds=round(causes[0].time - met.time, 3),
        )
        found.append(failed)
    return found
