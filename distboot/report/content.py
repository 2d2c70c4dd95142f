"""The report as plain JSON types: a pure function of a job's events and membership."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from ..base.table import first_that_holds
from ..base.text import counted, ranks_said
from ..base.version import __version__
from ..rendezvous.events import CALLED, PLACE, Event, spread_alike
from ..rendezvous.membership import Membership, node_size
from ..script.separate_model import DOUBTFUL
from .all_reduce import all_reduce_of
from .job_state import JobState, of_kinds
from .spent import NO_ROUND, RoundTime, Spent
from .start_failure import StartFailure
from .steps import slowest

Rounds: TypeAlias = Sequence[Mapping[str, Any]]
Place: TypeAlias = dict[str, Any]  # host, node_rank and local_rank; None: not known

# Missing ranks that have a record each; if there are more, the report has only ranges of them.
_MOST_MISSING = 10_000
_MOST_EVENTS = 10_000
_ROUTINE = ("joined", "registered", "phases", "exited")  # one for each rank of a large job
FAILED_LATER = "failed after that"
# State of a rank after a failure -> how the headline counts it
_AFTER_FAILURE = {
    "failed later": FAILED_LATER,
    "stopped": "stopped",
    "ended": "ended well",
    "not known": "not known",
}


def utc(seconds: float) -> str:
    """A time as the report has it: `"2026-11-22T09:14:02.118+00:00"`; `ValueError`: not a time."""
    return date_of(seconds).isoformat(timespec="milliseconds")


def date_of(seconds: float) -> datetime:
    """A time in UTC, of seconds since the epoch; `ValueError`: not a time."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc)
    except OSError as error:  # the C library's, of a year that does not fit into 32 bits
        raise ValueError(f"{seconds:g} is not a time: {error.strerror}") from None


class Doubts(NamedTuple):
    """Why a job whose ranks all ended with exit code 0 may not be the job that was meant."""

    # That each rank ran a launcher which started a job of its own; else empty
    separate_jobs: str = ""
    # What the environment reserves and the job leaves unused
    unused: str = ""

    def describe(self, events: Sequence[Event], ended: str) -> str:
        """For people, in place of "ended well"; empty if nothing is in doubt."""
        if self.separate_jobs and not _has_called_init(events):
            return self.separate_jobs
        doubts = filter(None, (_hidden_failure(events), _separate_models(events), self.unused))
        doubt = next(doubts, "")
        if not doubt:
            return ""
        return f"{ended}, but {doubt}"


def _hidden_failure(events: Sequence[Event]) -> str:
    """Of a rank with exit code 0: what failed first below its process; empty: nothing did."""
    found = [one for one in of_kinds(events, "exited") if "hides" in one.details]
    found.sort(key=lambda one: one.details["hides"]["is_secondary"])
    texts = [f"rank {one.rank}: {one.details['hides']['text']}" for one in found]
    return next(iter(texts), "")


def _separate_models(events: Sequence[Event]) -> str:
    """`"ranks 0-3 trained separately"`, if that was so to the end; else empty."""
    found = of_kinds(events, "separate_models", "separate_models_over")
    if not found or "ranks" not in found[-1].details:
        return ""
    last = found[-1].details
    trained = "trained"
    if last.get("reason") in DOUBTFUL:
        trained = "may have trained"
    return f"{ranks_said(last['ranks'])} {trained} separately"


def _has_called_init(events: Sequence[Event]) -> bool:
    return any(CALLED in one.details for one in of_kinds(events, "phases"))


def restarts_text(rounds: Rounds, current: int) -> str:
    """`", after 2 restarts"`."""
    earlier = rounds_before(rounds, current)
    if not earlier:
        return ""
    return f", after {counted(len(earlier), 'restart')}"


def rounds_before(rounds: Rounds, current: int) -> Rounds:
    """The records of the rounds that failed before this one."""
    return [one for one in rounds if one["round"] < current]


def job_report(
    events: Sequence[Event],
    membership: Membership,
    doubts: Doubts,
    now: float,
    rounds: Rounds = (),
    *,
    before: Spent = NO_ROUND,
) -> dict[str, object]:
    """The report of a job whose ranks met and were supervised; it ends `now`.

    `events` are those of the last round, `rounds` the failed ones, as `Restarts.rounds` has them,
    and `before` is what the time of those was spent on.
    """
    job = JobState(events)
    ranks = []
    for rank, place in sorted(_places(membership).items()):
        ranks.append(_rank(rank, place, job.of_rank(rank), job))
    fields: dict[str, object] = {
        "outcome": "ended",
        "headline": _headline(events, job, membership, doubts)
        + restarts_text(rounds, membership.round),
        "hosts": list(membership.hosts),
        "later_failures": job.later_failures(),
        "ranks": ranks,
    }
    if job.is_failure:
        fields["outcome"] = "failed"
        fields["first_failure"] = _root_cause(job, ranks)
    elif job.root_cause is not None:
        fields["outcome"] = "stopped"
        fields["stopped"] = _root_cause(job, ranks)
    spent = before.with_round(RoundTime(events, membership.world_size), now)
    return _report(events, job, spent, rounds, fields)


def _root_cause(job: JobState, ranks: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """The root cause, with the record of its first rank."""
    assert job.root_cause is not None
    cause = job.root_cause.details
    first = cause["ranks"][0]
    traceback = cause["traceback"]
    if first in job.exited:
        traceback = job.exited[first].details.get("traceback", traceback)
    return {
        "text": cause["text"],
        "code": None,
        "hint": "",
        "ranks": cause["ranks"],
        **ranks[first],
        "traceback": traceback,
    }


def startup_report(
    events: Sequence[Event],
    membership: Membership | None,
    failure: StartFailure | None,
    now: float,
    rounds: Rounds = (),
    *,
    before: Spent = NO_ROUND,
) -> dict[str, object]:
    """The report of a job that is not supervised, or not yet; without a failure it has started."""
    if membership is None:
        events = spread_alike(events)
    job = JobState(events)
    unready = _unready(events)
    missing = _Missing.of(job.joined, events[0].details["world_size"])
    states = dict.fromkeys(job.joined, "joined")
    states.update(dict.fromkeys(unready & states.keys(), "not ready"))
    states.update(dict.fromkeys(missing.listed, "missing"))
    if membership is None:
        places = _places_so_far(job.joined, missing.listed)
    else:
        places = _places(membership)
    ranks = []
    for rank, state in sorted(states.items()):
        ranks.append(_rank(rank, places.get(rank, _NOWHERE), state, job))
    fields: dict[str, object] = {
        "outcome": "started",
        "headline": _startup_headline(events, failure, missing, rounds),
        "hosts": _hosts(places),
        "unlisted": missing.unlisted,
        "ranks": ranks,
    }
    if failure is not None:
        ranks_of_it = sorted(unready)
        if missing.total:
            ranks_of_it = missing.listed
        cause = failure.as_cause(ranks_of_it)
        if failure.is_stop:
            fields.update(outcome="stopped", stopped=cause)
        else:
            fields.update(outcome="failed", first_failure=cause)
    spent = before.with_round(RoundTime(events), now)
    return _report(events, job, spent, rounds, fields)


def _unready(events: Sequence[Event]) -> set[int]:
    found: set[int] = set()
    for one in of_kinds(events, "not_ready"):
        found.update(one.details["ranks"])
    return found


def _startup_headline(
    events: Sequence[Event], failure: StartFailure | None, missing: _Missing, rounds: Rounds
) -> str:
    started = events[0].details
    if failure is None:
        return (
            f"All {started['world_size']} ranks have started; how they ended is not known, "
            "as failure detection is off"
        )
    if not failure.is_stop:
        what = "The job"
        if started.get("round"):
            what = f"Round {started['round']}"
        return f"{what} did not start: {failure.text.splitlines()[0]}"
    number = started.get("round", 0)
    earlier = rounds_before(rounds, number)
    if earlier:  # it was stopped while its ranks met again: why they had to is worth more
        first = _as_sentence(earlier[-1]["text"])
        return f"{first}; the job was stopped before restart {number}"
    during = f"The job was stopped while {ranks_said(missing.listed)}"
    return first_that_holds(
        (missing.total == 0, "The job was stopped early"),
        (missing.total == 1, f"{during} was missing"),
        (missing.listed != [], f"{during} were missing"),
        (True, f"The job was stopped while {missing.total} ranks were missing"),
    )


def _report(
    events: Sequence[Event],
    job: JobState,
    spent: Spent,
    rounds: Rounds,
    fields: Mapping[str, object],
) -> dict[str, object]:
    """All fields of a report, in their order; `fields` has those that differ between reports."""
    started = events[0]
    shown = _most_telling(events)
    hosts: Any = fields["hosts"]
    return {
        "outcome": "",
        "headline": "",
        "world_size": started.details["world_size"],
        "launcher": started.details["launcher"],
        "versions": {"distboot": __version__, **started.details["versions"]},
        "start": utc(started.time),
        "end": utc(spent.until),
        "spent": {kind: round(seconds, 3) for kind, seconds in spent.by_kind().items()},
        "findings": _findings(events),
        "nodes": _nodes(events),
        "allreduce": all_reduce_of(events, hosts),
        "slowest": slowest({rank: job.steps(rank) for rank in job.joined}),
        "hosts": [],
        "first_failure": None,
        "stopped": None,
        "later_failures": 0,
        "unlisted": [],
        "ranks": [],
        "failed_rounds": [{**one, "start": one["start"] and utc(one["start"])} for one in rounds],
        "events": list(map(_as_json, shown)),
        "events_left_out": len(events) - len(shown),
        **fields,
    }


def _as_json(event: Event) -> dict[str, object]:
    details = dict(event.details)
    if event.event == "checked":  # the table of nodes has the rest
        details.pop("nodes", None)
    return {**event._asdict(), "time": utc(event.time), "details": details}


def _most_telling(events: Sequence[Event]) -> list[Event]:
    """The events by time; if there are too many, without some of the routine ones."""
    by_importance = list(events)
    if len(events) > _MOST_EVENTS:
        by_importance.sort(key=lambda one: one.event in _ROUTINE)
    return sorted(by_importance[:_MOST_EVENTS], key=lambda one: one.time)


def _findings(events: Sequence[Event]) -> list[str]:
    found: list[str] = []
    for one in of_kinds(events, "all_joined", "checked"):
        found.extend(one.details["findings"])
        found.extend(one.details.get("variables", ()))
    return found


def _nodes(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The rows of the table of nodes, as the last check has seen them; none: there was none."""
    found: list[dict[str, Any]] = []
    for one in of_kinds(events, "checked"):
        found = one.details.get("nodes", [])
    return found


def _rank(rank: int, place: Place, state: str, job: JobState) -> dict[str, object]:
    """The record of a rank."""
    clock = job.clocks.of(rank)
    record: dict[str, object] = {
        "rank": rank,
        **place,
        "pid": None,
        "start": None,
        "end": None,
        "cpus": None,
        "exit_code": None,
        "signal": None,
        "lost": job.kind_for(rank) == "lost",
        "state": state,
        "steps": {name: utc(when) for name, when in job.steps(rank).items()},
        "clock": {"ahead": round(clock.offset, 6), "within": round(clock.uncertainty, 6)},
    }
    processes = job.registered or job.joined  # the wrapper joins, and registers its child
    if rank in processes:
        record["pid"] = processes[rank].details["pid"] or None
        record["cpus"] = processes[rank].details.get("cpus") or None
    if rank in job.registered:
        record["start"] = utc(job.registered[rank].time)
    if rank in job.exited:
        ended = job.exited[rank].details
        record["end"] = utc(ended["at"] - clock.offset)
        record["exit_code"] = ended.get("exit_code")
        record["signal"] = ended.get("signal")
    return record


def size_of(membership: Membership) -> str:
    """`"8 ranks on 2 nodes"`."""
    return f"{counted(membership.world_size, 'rank')} on {counted(len(membership.nodes), 'node')}"


def _place(host: str | None, node_rank: int | None, local_rank: int | None) -> Place:
    return {"host": host, "node_rank": node_rank, "local_rank": local_rank}


_NOWHERE = _place(None, None, None)


def _places(membership: Membership) -> dict[int, Place]:
    found = {}
    for node, ranks in enumerate(membership.nodes):
        for local_rank, rank in enumerate(ranks):
            found[rank] = _place(membership.hosts[node], node, local_rank)
    return found


def _hosts(places: Mapping[int, Place]) -> list[str]:
    """By node, the host of the first rank whose host is known."""
    found: dict[int, str] = {}
    for _, place in sorted(places.items()):
        if place["host"]:
            found.setdefault(place["node_rank"], place["host"])
    return [host for _, host in sorted(found.items())]


def _places_so_far(joined: Mapping[int, Event], missing: Sequence[int]) -> dict[int, Place]:
    """The places of the ranks that have joined, and of missing ranks where they are certain.

    Either all nodes have the same number of ranks, one node filled after the other, or nodes are
    counted in the order of the ranks.
    """
    there = {rank: joined[rank].details for rank in sorted(joined)}
    places = {rank: tuple(details[name] for name in PLACE) for rank, details in there.items()}
    ranks_per_node = node_size(places)
    if ranks_per_node is None:
        return _places_in_order(there)
    hosts: dict[int, str] = {}
    for rank, details in there.items():
        hosts.setdefault(rank // ranks_per_node, details["host"])
    found = {}
    for rank in (*there, *missing):
        node, local_rank = divmod(rank, ranks_per_node)
        found[rank] = _place(hosts.get(node), node, local_rank)
    return found


def _places_in_order(there: Mapping[int, Mapping[str, Any]]) -> dict[int, Place]:
    nodes: dict[int, list[int]] = {}
    for rank, details in there.items():
        nodes.setdefault(details["node"], []).append(rank)
    hosts = tuple(there[ranks[0]]["host"] for ranks in nodes.values())
    return _places(Membership(hosts, tuple(map(tuple, nodes.values()))))


class _Missing(NamedTuple):
    """The ranks that have not joined: there may be millions, as a WORLD_SIZE is easily mistyped."""

    total: int
    listed: list[int]  # all of them, or none if there are too many
    unlisted: list[list[int]]  # if there are too many, first and last of each run

    @classmethod
    def of(cls, joined: Iterable[int], world_size: int) -> _Missing:
        runs = _missing_runs(joined, world_size)
        total = sum(map(len, runs))
        if total <= _MOST_MISSING:
            return cls(total, list(chain.from_iterable(runs)), [])
        ends = [[run[0], run[-1]] for run in runs]
        return cls(total, [], ends)


def _missing_runs(joined: Iterable[int], world_size: int) -> list[range]:
    found = []
    expected = 0
    for rank in (*sorted(joined), world_size):
        if rank > expected:
            found.append(range(expected, rank))
        expected = rank + 1
    return found


def _headline(
    events: Sequence[Event], job: JobState, membership: Membership, doubts: Doubts
) -> str:
    states = Counter(map(job.of_rank, range(membership.world_size)))
    if job.root_cause is not None:
        text = _as_sentence(job.root_cause.details["text"])
        if job.then is not None:  # the text says how it ended
            states[job.of_rank(job.then)] -= 1
        if job.is_failure:
            text = "; ".join(filter(None, (text, _counts(states))))
        return text
    size = size_of(membership)
    if states["ended"] < membership.world_size:
        unknown = states["not known"]
        return f"{size}: no failure was seen; how {unknown} of them ended is not known"
    ended = "ended"
    if membership.world_size > 1:
        ended = "all ended"
    doubt = doubts.describe(events, ended)
    return f"{size}: {doubt or f'{ended} well'}"


def _as_sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def _counts(states: Mapping[str, int]) -> str:
    """How the other ranks ended after a failure.

    `"1 other rank failed after that, 14 stopped"`
    """
    found: list[str] = []
    for state, text in _AFTER_FAILURE.items():
        count = states[state]
        if not count:
            continue
        who = str(count)
        if not found:  # "rank 1 failed first: …; 1 stopped" reads as if rank 1 had
            who = counted(count, "other rank")
        found.append(f"{who} {text}")
    return ", ".join(found)
