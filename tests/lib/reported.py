"""Reports of jobs that need not run: the events that rank 0 would have seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distboot.job import journal
from distboot.rendezvous.events import Event, EventLog, Kind
from distboot.report.from_journal import report_of
from distboot.report.metrics import Metrics

NOON = 1_795_000_000.0


class Log(EventLog):
    """The events of a job, at times that a test gives."""

    def at(self, time: float, event: Kind, rank: int | None = None, **details: Any) -> Log:
        self.append(Event(time, rank, event, details))
        return self


def begun(
    world_size: int, joined: Mapping[int, Mapping[str, Any]] = {}, launcher: str = "openmpi"
) -> Log:
    """The events of a rendezvous that begins at noon, where these ranks join 5 seconds later."""
    log = Log().at(
        NOON, "rendezvous_started", launcher=launcher, world_size=world_size, versions={}
    )
    for rank, details in joined.items():
        log.at(NOON + 5, "joined", rank, **join(**details))
    return log


def join(**details: Any) -> dict[str, Any]:
    usual = {
        "host": "node-0",
        "node": 0,
        "pid": 7,
        "local_rank": None,
        "local_world_size": None,
        "node_rank": None,
    }
    times = {"process_start": NOON, "detected": NOON, "offset": 0.0, "uncertainty": 0.0}
    return {**usual, **times, **details}


def metrics_text(events: Iterable[Event], now: float) -> str:
    """The metrics of a job with these events."""
    metrics = Metrics()
    for event in events:
        metrics.take(event)
    return metrics.text(now)


def events_of_journal(path: Path) -> list[Event]:
    """All events of a journal of one round, in the order of time."""
    (round_,) = journal.read(path.read_text().splitlines()).rounds
    every = [*round_.events, *round_.besides.values(), *round_.heard]
    return sorted(every, key=lambda event: event.time)


def report_of_journal(path: Path) -> Any:
    """The report that is made of a journal."""
    return report_of(journal.read(path.read_text().splitlines()))
