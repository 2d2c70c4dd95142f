"""The metrics of a job, from the events of real journals and of jobs that need not run; both parsers read them."""

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics_parser
from reported import NOON, Log, begun, events_of_journal, metrics_text, report_of_journal

JOURNALS = sorted((Path(__file__).parents[1] / "journals").glob("*.jsonl"))
EXIT = {"signal": None, "stopped_by_us": False, "external_signal": None, "at": NOON}
LATE = {"ranks": [1], "waiting": [0], "text": "…", "stacks": [], "seconds": 60.0}
CAUSE = {"ranks": [1], "text": 'rank 1 failed first: "\\', "location": "on b\nc", "traceback": "T"}


def _read(text: str) -> dict[str, Any]:
    """The values by name and labels, as the parsers of both formats read them."""
    found: dict[str, Any] = {}
    read: Any = openmetrics_parser.text_string_to_metric_families
    for family in read(text):
        for sample in family.samples:
            words = [sample.name, *(f"{name}={value}" for name, value in sample.labels.items())]
            found[" ".join(words)] = sample.value
    older = {
        sample.name
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert older == {name.partition(" ")[0] for name in found}
    return found


def _running() -> Log:
    """Two ranks that have joined 5 s after noon, and started 10 s after it."""
    log = begun(2, {rank: {} for rank in range(2)}).at(NOON + 5, "all_joined", findings=[])
    log[0].details["round"] = 0
    for rank in range(2):
        log.at(NOON + 10, "registered", rank, pid=100 + rank)
    return log


def _spent(found: dict[str, Any]) -> list[float]:
    kinds = ("start", "training", "hang", "failure")
    return [found[f"distboot_spent_seconds on={kind}"] for kind in kinds]


@pytest.mark.parametrize("path", JOURNALS, ids=[path.stem for path in JOURNALS])
def test_metrics_of_real_journals(path: Path) -> None:
    events = events_of_journal(path)
    first, last = events[0].time, events[-1].time
    found = _read(metrics_text(events, last))
    assert found["distboot_ranks state=expected"] == 3
    assert found["distboot_ranks state=missing"] == 0
    is_stopped = path.stem == "stopped-by-sigterm"
    assert found["distboot_phase phase=failed"] == (not is_stopped)
    assert found["distboot_phase phase=stopped"] == is_stopped
    (failure,) = [name for name in found if name.startswith("distboot_first_failure")] or [""]
    assert ("kind=" in failure) == (path.stem != "stopped-by-sigterm")
    # Without the moment in which ranks end that were told to stop
    assert sum(_spent(found)) == pytest.approx(last - first, abs=0.5)


@pytest.mark.parametrize("path", JOURNALS, ids=[path.stem for path in JOURNALS])
def test_ranks_are_counted_as_in_the_report(path: Path) -> None:
    states = [rank["state"] for rank in report_of_journal(path)["ranks"]]
    events = events_of_journal(path)
    found = _read(metrics_text(events, events[-1].time))
    failed = states.count("failed first") + states.count("failed later") + states.count("lost")
    assert found["distboot_ranks state=failed"] == failed
    assert found["distboot_ranks state=stopped"] == states.count("stopped")
    assert found["distboot_ranks state=ended"] == states.count("ended")


def test_start_that_a_signal_stops_has_not_failed() -> None:
    log = begun(2, {0: {}})
    log[0].details["round"] = 0
    stop = {"text": "stopped by an external SIGTERM", "code": None, "hint": "", "is_stop": True}
    log.at(NOON + 6, "start_failed", None, **stop)
    found = _read(metrics_text(log, NOON + 7))
    assert found["distboot_phase phase=stopped"] == 1
    assert not [name for name in found if name.startswith("distboot_first_failure")]


def test_rank_that_disconnects_later_has_failed() -> None:
    log = _running().at(NOON + 19, "unreachable", 0, text="…")
    log.at(NOON + 20, "root_cause", 1, kind="failed", **CAUSE)
    log.at(NOON + 20, "exited", 1, exit_code=1, **EXIT)
    found = _read(metrics_text(log, NOON + 21))
    assert found["distboot_ranks state=failed"] == 2


def test_ranks_that_are_missing_are_counted() -> None:
    log = begun(4, {0: {}, 2: {}})
    log[0].details["round"] = 0
    found = _read(metrics_text(log, NOON + 60))
    assert found["distboot_ranks state=missing"] == 2
    assert found["distboot_phase phase=joining"] == 1
    assert _spent(found) == [60, 0, 0, 0]


def test_late_rank_is_shown_with_its_seconds() -> None:
    log = _running().at(NOON + 100, "late", 1, **LATE)
    found = _read(metrics_text(log, NOON + 110))
    assert found["distboot_late_ranks"] == 1
    assert found["distboot_late_seconds rank=1"] == 70
    assert _spent(found) == [10, 30, 70, 0]
    log.at(NOON + 120, "late_over", 1)
    found = _read(metrics_text(log, NOON + 200))
    assert found["distboot_late_ranks"] == 0
    assert found["distboot_late_seconds rank=1"] == 80
    assert _spent(found) == [10, 110, 80, 0]


def test_rank_that_catches_up_is_not_late() -> None:
    log = _running().at(NOON + 100, "late", 1, **{**LATE, "ranks": [0, 1]})
    log.at(NOON + 130, "late", 1, **{**LATE, "seconds": 90.0})
    found = _read(metrics_text(log, NOON + 140))
    assert found["distboot_late_ranks"] == 1
    assert found["distboot_late_seconds rank=0"] == 90
    assert found["distboot_late_seconds rank=1"] == 100
    assert _spent(found) == [10, 30, 100, 0]


def test_second_group_of_a_script_is_training() -> None:
    log = _running()
    for at in (20, 400):
        for rank in range(2):
            log.at(NOON + at, "phases", rank, group_ready=NOON + at)
    assert _spent(_read(metrics_text(log, NOON + 500))) == [20, 480, 0, 0]


def test_seconds_of_all_rounds_are_added() -> None:
    log = _running().at(NOON + 50, "root_cause", 1, kind="failed", **CAUSE)
    log.at(NOON + 52, "exited", 1, exit_code=1, **EXIT)
    log.at(NOON + 53, "ended", None, exit_code=1)
    again = {"launcher": "openmpi", "world_size": 2, "round": 1, "versions": {}}
    log.at(NOON + 60, "rendezvous_started", None, **again)
    for rank in range(2):
        log.at(NOON + 65, "registered", rank, pid=200 + rank)
    log.at(NOON + 70, "stop_requested", 0, text="SIGTERM")
    found = _read(metrics_text(log, NOON + 100))
    assert _spent(found) == [15, 75, 0, 10]
    assert found["distboot_restarts"] == 1
    assert found["distboot_stop_requests"] == 1
    assert found["distboot_phase phase=running"] == 1
    # The failure before stays visible, with what its text has escaped for a terminal
    (failure,) = [name for name in found if name.startswith("distboot_first_failure")]
    assert failure == (
        'distboot_first_failure kind=failed rank=1 where=on b\\nc text=rank 1 failed first: "\\'
    )


def test_time_stands_still_after_the_end() -> None:
    log = _running()
    for rank in range(2):
        log.at(NOON + 30, "exited", rank, exit_code=0, **EXIT)
    log.at(NOON + 30, "ended", None, exit_code=None)
    found = _read(metrics_text(log, NOON + 500))
    assert _spent(found) == [10, 20, 0, 0]
    assert found["distboot_phase phase=ended"] == 1
    assert found["distboot_ranks state=ended"] == 2


def test_many_late_ranks_are_bounded() -> None:
    log = _running()
    for number in range(3):
        ranks = list(range(number * 1000, number * 1000 + 1000))
        log.at(NOON + 100 + number, "late", 0, **{**LATE, "ranks": ranks})
        log.at(NOON + 100 + number, "late_over", 0)
    text = metrics_text(log, NOON + 200)
    assert len(re.findall("distboot_late_seconds{", text)) == 100
