"""The report as plain JSON types, and the summary line: pure functions of the events and the membership of a job."""

from __future__ import annotations

import re
import signal
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple, TypeAlias

from .. import __version__
from ..errors import DistbootError
from ..process import FROM_OUTSIDE
from ..rendezvous.membership import Membership, node_size
from ..text import counted, first_line, ranks_said, without_secret
from . import CALLED, PLACE, Event, JobState, slowest

_LONGEST = 4000  # characters of an error
_STOPS = {128 + number: number.name for number in FROM_OUTSIDE}
# Ranks that are missing and have a record each; of more there are only the runs
_MOST_MISSING = 10_000
_MOST_EVENTS = 10_000
_AFTER = {
    "failed later": "failed later",
    "stopped": "stopped",
    "ended": "ended well",
    "not known": "not known",
}
Rounds: TypeAlias = Sequence[Mapping[str, Any]]
_ROUTINE = ("joined", "registered", "phases", "exited")  # one for each rank of a large job


def utc(seconds: float) -> str:
    """A time as the report has it: `"2026-11-22T09:14:02.118+00:00"`."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


class Doubts(NamedTuple):
    """Why a job whose ranks all ended with exit code 0 may not be the job that was meant."""

    # The launcher that each rank ran for a job of its own, if it joins no other; empty: none
    separate_jobs: str = ""
    # What the environment reserves and the job leaves unused
    unused: str = ""

    def said(self, events: Sequence[Event], ended: str) -> str:
        """For people, instead of "ended well"; empty: nothing is in doubt."""
        joined = any(CALLED in one.details for one in events if one.event == "phases")
        if self.separate_jobs and not joined:
            launcher = self.separate_jobs
            return f"each rank ran {launcher} for a job of its own, and none joined the others"
        return f"{ended}, but {self.unused}" if self.unused else ""


def summary_line(
    events: Sequence[Event], membership: Membership, doubts: Doubts, now: float
) -> str:
    """How the job ended, in one line for people."""
    job = JobState(events)
    codes = defaultdict(list)
    for rank in range(membership.world_size):
        codes[job.exit_code(rank)].append(rank)
    if job.root_cause is None:
        well = "all ended well" if codes.keys() == {"0"} else "no failure was seen"
        how = doubts.said(events, "all ended") or well
    else:
        # Which was said when it came: what is new is where that rank was, and when
        cause = job.root_cause.details
        begin = re.split(": | while " if job.is_failure else ", on ", cause["text"], maxsplit=1)[0]
        at = datetime.fromtimestamp(job.root_cause.time, timezone.utc)
        how = f"{begin} at {at:%H:%M:%S} UTC, {cause['location']}"
    later = job.later_failures()
    more = f"; {later} failed after that" if later else ""
    listed = ", ".join(f"{code} ({ranks_said(here)})" for code, here in codes.items())
    length = now - job.registered[0].time
    return f"summary: {_size(membership)}, {length:.1f} s: {how}{more}; exit codes: {listed}"


def job_report(
    events: Sequence[Event],
    membership: Membership,
    doubts: Doubts,
    now: float,
    rounds: Rounds = (),
) -> dict[str, object]:
    """The report of a job whose ranks have met and were supervised, which ends `now`; the events are of its last round.

    `rounds`: those that have failed, as `Restarts.rounds` has them.
    """
    job = JobState(events)
    ranks = [
        _rank(rank, place, job.of_rank(rank), job)
        for rank, place in sorted(_places(membership).items())
    ]
    cause = None
    if job.root_cause is not None:
        known = job.root_cause.details
        first, exited = known["ranks"][0], job.exited.get(known["ranks"][0])
        said = {"text": known["text"], "code": None, "hint": "", "ranks": known["ranks"]}
        traceback = (
            known["traceback"]
            if exited is None
            else exited.details.get("traceback", known["traceback"])
        )
        cause = {**said, **ranks[first], "traceback": traceback}
    more = {
        "outcome": "ended" if cause is None else "failed" if job.is_failure else "stopped",
        "headline": _headline(events, job, membership, doubts),
        "hosts": list(membership.hosts),
        "first_failure" if job.is_failure else "stopped": cause,
        "later_failures": job.later_failures(),
        "ranks": ranks,
    }
    return _report(events, job, now, rounds, more)


def startup_report(
    events: Sequence[Event],
    membership: Membership | None,
    error: BaseException | None,
    now: float,
    rounds: Rounds = (),
) -> dict[str, object]:
    """The report of a job that is not supervised, or not yet; without an error it has started."""
    job = JobState(events)
    unready = {rank for one in events if one.event == "not_ready" for rank in one.details["ranks"]}
    states = {rank: "not ready" if rank in unready else "joined" for rank in job.joined}
    runs = _missing(states, events[0].details["world_size"])
    count = sum(map(len, runs))
    missing = [] if count > _MOST_MISSING else [rank for run in runs for rank in run]
    states |= dict.fromkeys(missing, "missing")
    places = _places(membership) if membership else _places_so_far(job.joined, missing)
    hosts = {
        one["node_rank"]: one["host"]
        for _, one in sorted(places.items(), reverse=True)
        if one["host"]
    }
    failed = isinstance(error, Exception)  # else it was stopped, with Ctrl-C say
    cause = None if error is None else _error(error, missing if count else sorted(unready))
    size, number = events[0].details["world_size"], events[0].details.get("round")
    if cause is None:
        headline = f"All {size} ranks have started; how they ended is not known, as failure detection is off"
    elif failed:
        headline = f"{f'Round {number}' if number else 'The job'} did not start: {cause['text'].splitlines()[0]}"
    elif count:
        said = ranks_said(missing) if missing else f"{count} ranks"
        headline = f"The job was stopped while {said} {'was' if count == 1 else 'were'} missing"
    else:
        headline = "The job was stopped early"
    more = {
        "outcome": "started" if error is None else "failed" if failed else "stopped",
        "headline": headline,
        "hosts": [host for _, host in sorted(hosts.items())],
        "first_failure" if failed else "stopped": cause,
        "unlisted": [[run[0], run[-1]] for run in runs if not missing],
        "ranks": [
            _rank(rank, places.get(rank, _NOWHERE), state, job)
            for rank, state in sorted(states.items())
        ],
    }
    return _report(events, job, now, rounds, more)


def _report(
    events: Sequence[Event], job: JobState, now: float, rounds: Rounds, more: Mapping[str, object]
) -> dict[str, object]:
    """The fields of a report, in their order; `more` has those that are not the same in each."""
    begun = events[0]
    # Of very many events the rare ones first.
    shown = (
        events
        if len(events) <= _MOST_EVENTS
        else sorted(events, key=lambda one: one.event in _ROUTINE)
    )
    in_order = sorted(shown[:_MOST_EVENTS], key=lambda one: one.time)
    return {
        "outcome": "",
        "headline": "",
        "world_size": begun.details["world_size"],
        "launcher": begun.details["launcher"],
        "versions": {"distboot": __version__, **begun.details["versions"]},
        "start": utc(begun.time),
        "end": utc(now),
        "findings": [
            text for one in events if one.event == "all_joined" for text in one.details["findings"]
        ],
        "slowest": slowest({rank: job.steps(rank) for rank in job.joined}),
        "hosts": [],
        "first_failure": None,
        "stopped": None,
        "later_failures": 0,
        "unlisted": [],
        "ranks": [],
        "failed_rounds": [{**one, "start": one["start"] and utc(one["start"])} for one in rounds],
        "events": [{**one._asdict(), "time": utc(one.time)} for one in in_order],
        "events_left_out": len(events) - len(in_order),
        **more,
    }


def _rank(rank: int, place: Mapping[str, object], state: str, job: JobState) -> dict[str, object]:
    processes = job.registered or job.joined  # under the wrapper it is its child that is registered
    ended = job.exited[rank].details if rank in job.exited else {}
    clock = job.clock(rank)
    return {
        "rank": rank,
        **place,
        "pid": processes[rank].details["pid"] or None if rank in processes else None,
        "start": utc(job.registered[rank].time) if rank in job.registered else None,
        "end": utc(ended["at"] - clock.offset) if ended else None,
        "exit_code": ended.get("exit_code"),
        "signal": ended.get("signal"),
        "lost": job.kind_for(rank) == "lost",
        "state": state,
        "steps": {name: utc(when) for name, when in job.steps(rank).items()},
        "clock": {"ahead": round(clock.offset, 6), "within": round(clock.uncertainty, 6)},
    }


def _size(membership: Membership) -> str:
    return f"{counted(membership.world_size, 'rank')} on {counted(len(membership.nodes), 'node')}"


def _place(host: str | None, node_rank: int | None, local_rank: int | None) -> dict[str, Any]:
    return {"host": host, "node_rank": node_rank, "local_rank": local_rank}


_NOWHERE = _place(None, None, None)


def _places(membership: Membership) -> dict[int, dict[str, Any]]:
    return {
        rank: _place(membership.hosts[node], node, local_rank)
        for node, ranks in enumerate(membership.nodes)
        for local_rank, rank in enumerate(ranks)
    }


def _places_so_far(
    joined: Mapping[int, Event], missing: Sequence[int]
) -> dict[int, dict[str, Any]]:
    """Where those are that have joined, and those that are missing where that is proven.

    Either all nodes have the same number of ranks, one node filled after the other, or nodes are counted in the order
    of the ranks.
    """
    there = {rank: joined[rank].details for rank in sorted(joined)}
    here = node_size(
        {rank: tuple(details[name] for name in PLACE) for rank, details in there.items()}
    )
    if here is not None:
        hosts = {rank // here: details["host"] for rank, details in reversed(there.items())}
        return {
            rank: _place(hosts.get(rank // here), *divmod(rank, here))
            for rank in (*there, *missing)
        }
    nodes: dict[int, list[int]] = {}
    for rank, details in there.items():
        nodes.setdefault(details["node"], []).append(rank)
    names = tuple(there[ranks[0]]["host"] for ranks in nodes.values())
    return _places(Membership(names, tuple(map(tuple, nodes.values()))))


def _missing(joined: Iterable[int], world_size: int) -> list[range]:
    """The ranks that are missing, of which there may be millions: a WORLD_SIZE is soon mistyped."""
    there = [*sorted(joined), world_size]
    return [
        range(before + 1, rank)
        for before, rank in zip([-1, *there], there, strict=False)
        if rank > before + 1
    ]


def _headline(
    events: Sequence[Event], job: JobState, membership: Membership, doubts: Doubts
) -> str:
    size, states = membership.world_size, Counter(map(job.of_rank, range(membership.world_size)))
    if job.root_cause is not None:
        text: str = job.root_cause.details["text"]
        counts = [
            f"{states[one]} {said}"
            for one, said in _AFTER.items()
            if states[one] and job.is_failure
        ]
        return text[0].upper() + text[1:] + (f"; {', '.join(counts)}" if counts else "")
    if states["ended"] == size:
        ended = "all ended" if size > 1 else "ended"
        return f"{_size(membership)}: {doubts.said(events, ended) or f'{ended} well'}"
    return f"{_size(membership)}: no failure was seen; how {states['not known']} of them ended is not known"


def _error(error: BaseException, ranks: Sequence[int]) -> dict[str, Any]:
    said: dict[str, Any] = {"text": type(error).__name__, "code": None, "hint": ""}
    stopped = (
        128 + signal.SIGINT
        if isinstance(error, KeyboardInterrupt)
        else getattr(error, "code", None)
    )
    if isinstance(error, DistbootError):
        said = {"text": error.message, "code": error.code, "hint": error.hint}
    elif isinstance(stopped, int) and stopped in _STOPS:
        said["text"] = f"stopped by an external {_STOPS[stopped]}"
    elif str(error):
        said["text"] += f": {first_line(error)}"
    said |= {name: without_secret(said[name])[:_LONGEST] for name in ("text", "hint")}
    return {**said, "ranks": list(ranks), "rank": None, "traceback": ""}
