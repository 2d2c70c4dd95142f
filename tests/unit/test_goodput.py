"""What the time of a job was spent on, over all of its rounds, in the line of its end and in its report."""

from typing import Any

import pytest
from reported import NOON, Log, begun

from distboot.base.units import duration
from distboot.job.journal import line_of, met, read
from distboot.rendezvous.events import Event
from distboot.rendezvous.membership import Membership
from distboot.report.content import Doubts, goodput_line, job_report
from distboot.report.from_journal import goodput_of, report_of

CAUSE = {"ranks": [1], "text": "rank 1 failed first: exit code 3", "traceback": ""}
LATE = {"ranks": [1], "waiting": [0], "text": "…", "stacks": []}
MEMBERS = (("node-0",), ((0, 1),))


def _round(start: float, seconds: float, number: int = 0) -> Log:
    """A round whose ranks have started after 10 seconds, and of which rank 1 fails at its end."""
    log = Log().at(
        start, "rendezvous_started", launcher="openmpi", world_size=2, round=number, versions={}
    )
    for rank in range(2):
        log.at(start + 10, "registered", rank, pid=rank)
    return log.at(start + seconds, "root_cause", 1, kind="failed", location="there", **CAUSE)


def _journal(*rounds: Log) -> list[str]:
    lines: list[str] = []
    for number, log in enumerate(rounds):
        membership = Membership(*MEMBERS, round=number, max_restarts=3)
        doubts = met(membership, separate_jobs="", unused="")
        events = [log[0], Event(log[0].time, None, "met", doubts), *log[1:]]
        events.append(Event(log[-1].time + 5, None, "ended", {"exit_code": 3}))
        lines += map(line_of, events)
    return lines


def test_seconds_of_all_rounds_are_in_the_report() -> None:
    journal = read(_journal(_round(NOON, 100), _round(NOON + 150, 850, 1)))
    report: Any = report_of(journal)
    # Between the rounds, too, nothing was trained: 5 seconds to end, 45 until the next one began
    assert report["spent"] == {"start": 20.0, "training": 930.0, "hang": 0.0, "failure": 55.0}
    assert goodput_of(journal) == (
        "goodput: 93 % of 16 min 45 s was training; start 20 s, failures 55 s"
    )


def test_waits_for_a_late_rank_are_hangs() -> None:
    log = begun(2)
    for rank in range(2):
        log.at(NOON, "registered", rank, pid=rank)
    log.at(NOON + 400, "late", 1, seconds=100.0, **LATE).at(NOON + 500, "late_over", 1)
    membership = Membership(*MEMBERS)
    report: Any = job_report(log, membership, Doubts(), NOON + 1000)
    assert report["spent"] == {"start": 0.0, "training": 800.0, "hang": 200.0, "failure": 0.0}
    line = goodput_line(log, membership, NOON + 1000)
    assert line == "goodput: 80 % of 16 min 40 s was training; hangs 3 min 20 s"


def test_short_job_has_no_line_of_goodput() -> None:
    log = _round(NOON, 40)
    assert not goodput_line(log, Membership(*MEMBERS), NOON + 40)


def test_round_that_did_not_start_is_no_training() -> None:
    log = begun(2).at(NOON + 1, "registered", 0, pid=1)
    report: Any = job_report(log, Membership(*MEMBERS), Doubts(), NOON + 300)
    assert report["spent"] == {"start": 300.0, "training": 0.0, "hang": 0.0, "failure": 0.0}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.00025, "0.25 ms"),
        (99.4, "99.4 s"),
        (100.0, "1 min 40 s"),
        (120.2, "2 min 0 s"),
        (3599.7, "60 min 0 s"),
        (5460.0, "1 h 31 min"),
        (180_000.0, "2 d 2 h"),
    ],
)
def test_durations_are_said_in_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text
