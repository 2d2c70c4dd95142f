"""The report as plain JSON types, and the summary line: pure functions of the events and the membership of a job."""

from __future__ import annotations

import re
import signal
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from .. import __version__
from ..errors import DistbootError
from ..process import FROM_OUTSIDE
from ..rendezvous.membership import Membership, node_size
from ..text import counted, first_line, ranks_said, without_secret
from . import CALLED, Event, StartupTimeline, slowest

_LONGEST = 4000  # characters of an error
_STOPS = {128 + number: number.name for number in FROM_OUTSIDE}
_MOST_MISSING = 10_000  # ranks that are missing and have a record each; of more there are only the runs
_MOST_EVENTS = 10_000
_AFTER = {"failed later": "failed later", "stopped": "stopped", "ended": "ended well", "not known": "not known"}
_ROUTINE = ("joined", "registered", "phases", "exited")  # one for each rank of a large job


class JobState:
    """What the events say of a job whose ranks have met."""

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self.registered: dict[int, Event] = {}  # by rank, as the next one
        self.exited: dict[int, Event] = {}
        self.root_cause: dict[str, Any] | None = None  # the details of that event; None: nothing has gone wrong
        self.caused_at = 0.0  # seconds since the epoch
        self.failed: set[int] = set()  # the ranks of which a failure is known
        self.late: set[int] = set()  # the ranks for which others waited to the end
        for one in events:
            if one.rank is None:
                continue
            if one.event == "root_cause":
                self.root_cause, self.caused_at = one.details, one.time
            elif one.event == "registered":
                self.registered[one.rank] = one
            elif one.event == "exited":
                self.exited[one.rank] = one
            elif one.event in ("late", "late_over"):
                self.late = set(one.details.get("ranks", ()))
            if one.event == "failing" or (one.event == "unreachable" and self.root_cause is None):
                self.failed.add(one.rank)
        self.failed |= {rank for rank, one in self.exited.items() if _outcome_of(one) == "failed later"}

    @property
    def is_failure(self) -> bool:
        """Whether a rank has failed; else nothing has gone wrong, or an external signal has stopped the job."""
        return self.root_cause is not None and self.root_cause["kind"] != "stopped"

    def later_failures(self) -> int:
        """How many ranks have failed besides the root cause."""
        return 0 if self.root_cause is None else len(self.failed.difference(self.root_cause["ranks"]))

    def is_lost(self, rank: int) -> bool:
        """Whether the root cause is that it has become unreachable."""
        cause = self.root_cause
        return cause is not None and cause["kind"] == "lost" and rank in cause["ranks"]

    def of_rank(self, rank: int) -> str:
        """What became of a rank: `state` in the report."""
        if self.is_lost(rank):
            return "lost"
        if self.root_cause is not None and self.is_failure and rank in self.root_cause["ranks"]:
            return "late" if self.root_cause["kind"] == "late" else "failed first"
        outcome = _outcome_of(self.exited[rank]) if rank in self.exited else "not known"
        return "late" if rank in self.late and outcome in ("stopped", "not known") else outcome

    def exit_code(self, rank: int) -> str:
        """The exit code of a rank, for people."""
        code = self.exited[rank].details["exit_code"] if rank in self.exited else None
        return "lost" if self.is_lost(rank) else "not known" if code is None else str(code)


def _outcome_of(exited: Event) -> str:
    details = exited.details
    if details["stopped_by_us"] or details["external_signal"] is not None:
        return "stopped"
    return "ended" if details["exit_code"] == 0 else "failed later"


def utc(seconds: float) -> str:
    """A time as the report has it: `"2026-11-22T09:14:02.118+00:00"`."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def summary_line(events: Sequence[Event], membership: Membership, separate_jobs: str, now: float) -> str:
    """How the job ended, in one line for people; `separate_jobs`: see `job_report`."""
    state = JobState(events)
    later = state.later_failures()
    codes = defaultdict(list)
    for rank in range(membership.world_size):
        codes[state.exit_code(rank)].append(rank)
    if state.root_cause is None:
        well = "all ended well" if codes.keys() == {"0"} else "no failure was seen"
        how = _apart(events, separate_jobs) or well
    else:
        cause = state.root_cause  # which was said when it came: what is new is where that rank was, and when
        end = ": | while " if state.is_failure else ", on "
        begin, at = re.split(end, cause["text"], maxsplit=1)[0], datetime.fromtimestamp(state.caused_at, timezone.utc)
        how = f"{begin} at {at:%H:%M:%S} UTC, {cause['location']}"
    more = f"; {later} failed after that" if later else ""
    listed = ", ".join(f"{code} ({ranks_said(here)})" for code, here in codes.items())
    length = now - state.registered[0].time
    return f"summary: {_size(membership)}, {length:.1f} s: {how}{more}; exit codes: {listed}"


def job_report(
    events: Sequence[Event],
    membership: Membership,
    separate_jobs: str,
    now: float,
    rounds: Sequence[Mapping[str, Any]] = (),
) -> dict[str, object]:
    """The report of a job whose ranks have met and were supervised, which ends `now`; the events are of its last round.

    `separate_jobs`: the launcher that each rank ran for a job of its own, if it joins no other; empty: none. `rounds`:
    those that have failed, as `Restarts.rounds` has them.
    """
    state, timeline = JobState(events), StartupTimeline(events)
    places = sorted(_places(membership).items())
    ranks = [_rank(rank, place, state.of_rank(rank), timeline, state) for rank, place in places]
    cause = None
    if state.root_cause is not None:
        first, text = state.root_cause["ranks"][0], state.root_cause["text"]
        exited = state.exited[first].details if first in state.exited else {}
        said = {"text": text, "code": None, "hint": "", "ranks": state.root_cause["ranks"]}
        cause = {**said, **ranks[first], "traceback": exited.get("traceback", state.root_cause["traceback"])}
    outcome = "ended" if cause is None else "failed" if state.is_failure else "stopped"
    more = {
        "outcome": outcome,
        "headline": _headline(events, state, membership, separate_jobs),
        "hosts": list(membership.hosts),
        "first_failure" if state.is_failure else "stopped": cause,
        "later_failures": state.later_failures(),
        "ranks": ranks,
    }
    return _report(events, timeline, now, rounds, more)


def startup_report(
    events: Sequence[Event],
    membership: Membership | None,
    error: BaseException | None,
    now: float,
    rounds: Sequence[Mapping[str, Any]] = (),
) -> dict[str, object]:
    """The report of a job that is not supervised, or not yet; without an error it has started."""
    timeline = StartupTimeline(events)
    unready = {rank for one in events if one.event == "not_ready" for rank in one.details["ranks"]}
    states = {rank: "not ready" if rank in unready else "joined" for rank in timeline.joined}
    runs = _missing(states, events[0].details["world_size"])
    count = sum(map(len, runs))
    missing = [] if count > _MOST_MISSING else [rank for run in runs for rank in run]
    states |= dict.fromkeys(missing, "missing")
    places = _places(membership) if membership else _places_so_far(timeline.joined, missing)
    hosts = {one["node_rank"]: one["host"] for _, one in sorted(places.items(), reverse=True) if one["host"]}
    failed = isinstance(error, Exception)  # else it was stopped, with Ctrl-C say
    cause = None if error is None else _error(error, missing if count else sorted(unready))
    listed = sorted(states.items())
    ranks = [_rank(rank, places.get(rank, _NOWHERE), state, timeline, JobState()) for rank, state in listed]
    outcome = "started" if error is None else "failed" if failed else "stopped"
    more = {
        "outcome": outcome,
        "headline": _startup_headline(events, missing, count, error),
        "hosts": [host for _, host in sorted(hosts.items())],
        "first_failure" if failed else "stopped": cause,
        "unlisted": [[run[0], run[-1]] for run in runs if not missing],
        "ranks": ranks,
    }
    return _report(events, timeline, now, rounds, more)


def _report(
    events: Sequence[Event],
    timeline: StartupTimeline,
    now: float,
    rounds: Sequence[Mapping[str, Any]],
    more: Mapping[str, object],
) -> dict[str, object]:
    """The fields of a report, in their order; `more` has those that are not the same in each."""
    begun = events[0]
    # Of very many events the rare ones first.
    shown = events if len(events) <= _MOST_EVENTS else sorted(events, key=lambda one: one.event in _ROUTINE)
    in_order = sorted(shown[:_MOST_EVENTS], key=lambda one: one.time)
    return {
        "outcome": "",
        "headline": "",
        "world_size": begun.details["world_size"],
        "launcher": begun.details["launcher"],
        "versions": {"distboot": __version__, **begun.details["versions"]},
        "start": utc(begun.time),
        "end": utc(now),
        "findings": [text for one in events if one.event == "all_joined" for text in one.details["findings"]],
        "slowest": slowest({rank: timeline.steps(rank) for rank in timeline.joined}),
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


def _rank(
    rank: int, place: Mapping[str, object], state: str, timeline: StartupTimeline, job: JobState
) -> dict[str, object]:
    processes = job.registered or timeline.joined  # under the wrapper it is its child that is registered
    ended = job.exited[rank].details if rank in job.exited else {}
    clock = timeline.clock(rank)
    return {
        "rank": rank,
        **place,
        "pid": processes[rank].details["pid"] or None if rank in processes else None,
        "start": utc(job.registered[rank].time) if rank in job.registered else None,
        "end": utc(ended["at"] - clock.offset) if ended else None,
        "exit_code": ended.get("exit_code"),
        "signal": ended.get("signal"),
        "lost": job.is_lost(rank),
        "state": state,
        "steps": {name: utc(when) for name, when in timeline.steps(rank).items()},
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


def _places_so_far(joined: Mapping[int, Event], missing: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Where those are that have joined, and those that are missing where that is proven.

    Either all nodes have the same number of ranks, one node filled after the other, or nodes are counted in the order
    of the ranks.
    """
    there = {rank: joined[rank].details for rank in sorted(joined)}
    told = ("local_rank", "local_world_size", "node_rank")
    here = node_size({rank: tuple(details[name] for name in told) for rank, details in there.items()})
    if here is not None:
        hosts = {rank // here: details["host"] for rank, details in reversed(there.items())}
        return {rank: _place(hosts.get(rank // here), *divmod(rank, here)) for rank in (*there, *missing)}
    nodes: dict[int, list[int]] = {}
    for rank, details in there.items():
        nodes.setdefault(details["node"], []).append(rank)
    names = tuple(there[ranks[0]]["host"] for ranks in nodes.values())
    return _places(Membership(names, tuple(map(tuple, nodes.values()))))


def _missing(joined: Iterable[int], world_size: int) -> list[range]:
    """The ranks that are missing, of which there may be millions: a WORLD_SIZE is soon mistyped."""
    there = [*sorted(joined), world_size]
    return [range(before + 1, rank) for before, rank in zip([-1, *there], there, strict=False) if rank > before + 1]


def _headline(events: Sequence[Event], state: JobState, membership: Membership, separate_jobs: str) -> str:
    size, cause = membership.world_size, state.root_cause
    states = Counter(map(state.of_rank, range(size)))
    if cause is None and states["ended"] == size:
        return f"{_size(membership)}: {_apart(events, separate_jobs) or 'all ' * (size > 1) + 'ended well'}"
    if cause is None:
        return f"{_size(membership)}: no failure was seen; how {states['not known']} of them ended is not known"
    text = cause["text"][0].upper() + cause["text"][1:]
    counts = [f"{states[one]} {said}" for one, said in _AFTER.items() if states[one] and state.is_failure]
    return f"{text}; {', '.join(counts)}" if counts else text


def _apart(events: Sequence[Event], separate_jobs: str) -> str:
    """What is said of ranks that did not work together: each was a launcher, and no process joined with `init`."""
    if not separate_jobs or any(CALLED in one.details for one in events if one.event == "phases"):
        return ""
    return f"each rank ran {separate_jobs} for a job of its own, and none joined the others"


def _startup_headline(events: Sequence[Event], missing: Sequence[int], count: int, error: BaseException | None) -> str:
    if error is None:
        size = events[0].details["world_size"]
        return f"All {size} ranks have started; how they ended is not known, as failure detection is off"
    if isinstance(error, Exception):
        began = f"Round {events[0].details['round']}" if events[0].details.get("round") else "The job"
        return f"{began} did not start: {_text(error).splitlines()[0]}"
    if not count:
        return "The job was stopped early"
    said = ranks_said(missing) if missing else f"{count} ranks"
    return f"The job was stopped while {said} {'was' if count == 1 else 'were'} missing"


def _error(error: BaseException, ranks: Sequence[int]) -> dict[str, object]:
    code, hint = (error.code, without_secret(error.hint)) if isinstance(error, DistbootError) else (None, "")
    text, hint = _text(error), hint[:_LONGEST]
    return {"text": text, "code": code, "hint": hint, "ranks": list(ranks), "rank": None, "traceback": ""}


def _text(error: BaseException) -> str:
    if isinstance(error, DistbootError):
        return without_secret(error.message)[:_LONGEST]
    code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else getattr(error, "code", None)
    if isinstance(code, int) and code in _STOPS:
        return f"stopped by an external {_STOPS[code]}"
    said = type(error).__name__
    return without_secret(f"{said}: {first_line(error)}")[:_LONGEST] if str(error) else said
