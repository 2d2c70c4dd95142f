"""The state of a job and of each of its ranks, according to its events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ..base.table import first_that_holds
from ..rendezvous.events import Clocks, Event
from .steps import PHASES

# Kind of a root cause -> state of its ranks
_STATE_OF_CAUSE = {"failed": "failed first", "lost": "lost", "late": "late"}
_NO_CAUSE: dict[str, Any] = {"kind": "", "ranks": []}
# State of a rank, by its outcome, if others waited for it at the end
_STATE_OF_LATE = {"stopped": "late", "not known": "late"}


class JobState:
    """The state of a job according to its events."""

    def __init__(self, events: Sequence[Event]) -> None:
        # The last event of a kind, by rank
        self.registered = _last_by_rank(events, "registered")
        self.exited = _last_by_rank(events, "exited")
        self.joined: dict[Any, Event] = {}  # without those that left
        last = _last_by_rank(events, "joined", "left")
        for rank, one in last.items():
            if one.event == "joined":
                self.joined[rank] = one
        # None: no failure, and no external signal
        self.root_cause = _last(events, "root_cause")
        self._cause = _NO_CAUSE
        if self.root_cause is not None:
            self._cause = self.root_cause.details
        # The rank whose failure the root cause names, too; None: there is none
        self.then: int | None = self._cause.get("then")
        self._all_joined = _last(events, "all_joined")
        # Ranks that others waited for at the end
        self.late: set[int] = set()
        for one in of_kinds(events, "late", "late_over"):
            ranks = one.details.get("ranks", ())
            self.late = set(ranks)
        # Ranks with a known failure
        self.failed = _failed_ranks(events)
        for rank in self.exited:
            if self._outcome(rank) == "failed later":
                self.failed.add(rank)
        # The steps that each rank reports, with their times
        self._own: dict[Any, dict[str, float]] = defaultdict(dict)
        for one in of_kinds(events, "phases"):
            times = self._own[one.rank]
            times.update(one.details)
        self.clocks = Clocks(events)

    @property
    def is_failure(self) -> bool:
        """Whether a rank has failed; an external signal that stopped the job is not a failure."""
        return self._cause["kind"] not in ("", "stopped")

    def later_failures(self) -> int:
        """How many ranks have failed besides those that the root cause names."""
        if self.root_cause is None:
            return 0
        later = self.failed.difference(self._cause["ranks"], [self.then])
        return len(later)

    def kind_for(self, rank: int) -> str:
        """The kind of the root cause if it is this rank's, else empty."""
        kind = ""
        if rank in self._cause["ranks"]:
            kind = self._cause["kind"]
        return kind

    def of_rank(self, rank: int) -> str:
        """The state of a rank, as the report names it."""
        kind = self.kind_for(rank)
        if kind in _STATE_OF_CAUSE:
            return _STATE_OF_CAUSE[kind]
        outcome = self._outcome(rank)
        if rank in self.late:
            return _STATE_OF_LATE.get(outcome, outcome)
        return outcome

    def exit_code(self, rank: int) -> str:
        """The exit code of a rank, for people."""
        if self.kind_for(rank) == "lost":
            return "lost"
        code = None
        if rank in self.exited:
            details = self.exited[rank].details
            code = details["exit_code"]
        if code is None:
            return "not known"
        return str(code)

    def steps(self, rank: int) -> dict[str, float]:
        """The times of the steps of a rank by rank 0's clock, in order, without unknown ones."""
        joined = self.joined.get(rank)
        if joined is None:
            return {}
        offset = self.clocks.of(rank).offset
        by_own_clock = {
            "process_start": joined.details["process_start"],
            "detected": joined.details["detected"],
            **self._own.get(rank, {}),
        }
        times = {"joined": joined.time}
        if self._all_joined is not None:
            times["all_joined"] = self._all_joined.time
        found = {}
        for phase in PHASES:
            name = phase.end
            when = by_own_clock.get(name, 0.0)
            if name in times:
                found[name] = times[name]
            elif when:  # 0.0: not known
                found[name] = when - offset
        return found

    def _outcome(self, rank: int) -> str:
        """How a rank ended, whatever the root cause is."""
        if rank not in self.exited:
            return "not known"
        details = self.exited[rank].details
        has_signal = details["external_signal"] is not None
        return first_that_holds(
            (details["stopped_by_us"] or has_signal, "stopped"),
            (details["exit_code"] == 0, "ended"),
            (True, "failed later"),
        )


def _failed_ranks(events: Sequence[Event]) -> set[Any]:
    """The ranks that have failed or become unreachable, and have not returned.

    After the root cause, ranks end and become unreachable without a failure of their own.
    """
    failed = set()
    stopped: set[Any] = set()  # those whose failure a signal from outside may explain
    failures = {"failing", "unreachable"}
    for one in events:
        if one.event in failures:
            failed.add(one.rank)
        elif one.event == "reachable":
            failed.discard(one.rank)
        elif one.event == "root_cause":
            failures.discard("unreachable")
            failed -= stopped
        if one.details.get("external_signal") is not None:
            stopped.add(one.rank)
    return failed


def of_kinds(
    events: Iterable[Event],
    *kinds: str,
) -> list[Event]:
    """The events of these kinds."""
    found = filter(lambda one: one.event in kinds, events)
    return list(found)


def _last_by_rank(
    events: Sequence[Event],
    *kinds: str,
) -> dict[Any, Event]:
    """The last event of these kinds for each rank."""
    return {one.rank: one for one in of_kinds(events, *kinds)}


def _last(events: Sequence[Event], kind: str) -> Event | None:
    return next(reversed(of_kinds(events, kind)), None)
