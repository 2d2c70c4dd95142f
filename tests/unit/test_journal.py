"""The journal of a job as lines of text: what is made from it, and what damage does to it."""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from reported import NOON, Log, begun

from distboot.base.units import duration
from distboot.cli.main import main
from distboot.job.journal import line_of, met, path_beside, read
from distboot.rendezvous.events import Event
from distboot.rendezvous.membership import Membership
from distboot.report.content import Doubts, job_report
from distboot.report.from_journal import goodput_of, report_of, summary_of
from distboot.report.spent import NO_ROUND, RoundTime, goodput_line
from distboot.report.summary import summary_line

PAIR = Membership(("node-0",), ((0, 1),))
DOUBTS = {"separate_jobs": "", "unused": ""}
FAILURE = {"ranks": [1], "text": "rank 1 failed first: exit code 3", "traceback": ""}
LATE = {"ranks": [1], "waiting": [0], "text": "…", "stacks": []}
NODES = (("node-0",), ((0, 1),))
EXIT = {"signal": None, "stopped_by_us": False, "external_signal": None}


def _job() -> Log:
    """Two ranks of which the second one fails."""
    log = begun(2, {0: {}, 1: {}})
    log[0].details["round"] = 0
    log.at(NOON + 6, "all_joined", findings=["odd"])
    for rank in (0, 1):
        log.at(NOON + 7, "registered", rank, pid=100 + rank)
    log.at(NOON + 60, "failing", 1, text="exit code 3")
    cause: dict[str, Any] = {
        "kind": "failed",
        "ranks": [1],
        "text": "rank 1 failed first: exit code 3",
    }
    log.at(NOON + 60, "root_cause", 1, **cause, location="there", traceback="T")
    log.at(NOON + 61, "exited", 1, exit_code=3, at=NOON + 61, **EXIT)
    log.at(NOON + 61.5, "exited", 0, exit_code=143, at=NOON + 61, **EXIT)
    return log


def _lines(log: Log, membership: Membership = PAIR, *, ended: bool = True) -> list[str]:
    events = [*log[:4], Event(NOON + 6, None, "met", met(membership, **DOUBTS)), *log[4:]]
    if ended:
        events.append(Event(NOON + 62, None, "ended", {"exit_code": 3}))
    return list(map(line_of, events))


def test_journal_makes_the_report_of_the_job() -> None:
    log = _job()
    journal = read(_lines(log))
    expected = job_report(log, PAIR, Doubts(), NOON + 62)
    assert json.loads(json.dumps(report_of(journal))) == json.loads(json.dumps(expected))
    assert summary_of(journal) == summary_line(log, PAIR, Doubts(), NOON + 62, 3)


@pytest.mark.parametrize(
    ("lines", "outcome", "headline"),
    [
        (1, "running", "still starting, or killed; 0 of 2 ranks had joined"),
        (3, "running", "still starting, or killed; 2 of 2 ranks had joined"),
        (7, "running", "2 ranks on 1 node: still running, or killed; 2 had not ended"),
        (9, "failed", "Rank 1 failed first: exit code 3"),
    ],
)
def test_journal_without_an_end(lines: int, outcome: str, headline: str) -> None:
    journal = read([*_lines(_job())[:lines], '{"time": 1, "ra'])
    report: Any = report_of(journal)
    assert report["outcome"] == outcome
    assert report["headline"].startswith(headline)
    assert summary_of(journal).startswith("summary: ")
    assert journal.unreadable == 1


def test_restarted_job_has_its_failed_rounds() -> None:
    membership = Membership(("node-0",), ((0, 1),), max_restarts=1)
    again = begun(2, {0: {}, 1: {}})
    again[0].details["round"] = 1
    second = Membership(("node-0",), ((0, 1),), round=1, max_restarts=1)
    journal = read([*_lines(_job(), membership), *_lines(again, second, ended=False)])
    report: Any = report_of(journal)
    [failed] = report["failed_rounds"]
    assert failed["round"] == 0
    assert failed["text"] == "rank 1 failed first: exit code 3"
    assert failed["seconds"] == 54.0
    assert report["outcome"] == "running"


def test_agents_of_nodes_join_for_their_ranks() -> None:
    log = begun(1, {0: {"pid": 9}})
    log.at(NOON + 6, "all_joined", findings=[])
    log.at(NOON + 7, "registered", 1, pid=7)
    membership = Membership(("node-0",), ((0, 1),), by_node=True)
    report: Any = report_of(read(_lines(log, membership, ended=False)))
    assert report["world_size"] == 2
    assert [rank["local_rank"] for rank in report["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    ("report", "journal"),
    [
        ("job.html", "job.jsonl"),
        ("a.b/job", "a.b/job.jsonl"),
        ("/x/job.v2.json", "/x/job.v2.jsonl"),
        ("job.jsonl", "job.jsonl"),
        (".html", ".html.jsonl"),
    ],
)
def test_journal_is_beside_the_report(report: str, journal: str) -> None:
    assert path_beside(report) == journal


def test_damage_is_told_and_never_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line left out and each value replaced: a report, or an error with the name of the file."""
    path = tmp_path / "job.jsonl"
    whole = _lines(_job())
    odd = ["", "x", -1, float("nan"), 1e99, None, [], {}, [[[0, 1 << 40]]], "\u202e", True]
    chance = random.Random(1)
    damaged = []
    for number, line in enumerate(whole):
        content = json.loads(line)
        for name in content["details"]:
            changed = {**content, "details": {**content["details"], name: chance.choice(odd)}}
            damaged.append([*whole[:number], json.dumps(changed) + "\n", *whole[number + 1 :]])
        damaged.append([*whole[:number], *whole[number + 1 :]])
    codes = []
    for form in ([], ["--json"], ["--html", str(tmp_path / "job.html")]):
        for lines in damaged:
            path.write_text("".join(lines))
            codes.append(main(["report", str(path), *form]))
            if codes[-1]:
                assert f"'{path}' is not a valid journal: " in capsys.readouterr().err
    assert set(codes) == {0, 2}


@pytest.mark.parametrize("seconds", [1e18, -1e18, 1e30])
def test_impossible_time_is_told_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: float
) -> None:
    path = tmp_path / "job.jsonl"
    job = _job()
    joined = next(one for one in job if one.event == "joined")
    joined.details["detected"] = seconds
    path.write_text("".join(_lines(job)))
    assert main(["report", str(path)]) == 2
    assert f"'{path}' is not a valid journal: " in capsys.readouterr().err


def test_launcher_of_an_earlier_journal_is_explained() -> None:
    log = begun(2, {0: {}, 1: {}})
    log[0].details["round"] = 0
    log.at(NOON + 6, "all_joined", findings=[])
    for rank in range(2):
        log.at(NOON + 7, "registered", rank, pid=100 + rank)
        log.at(NOON + 9, "exited", rank, exit_code=0, at=NOON + 9, **EXIT)
    doubts = {"separate_jobs": "torchrun", "unused": ""}
    events = [*log[:4], Event(NOON + 6, None, "met", met(PAIR, **doubts)), *log[4:]]
    events.append(Event(NOON + 10, None, "ended", {"exit_code": 0}))
    said = "each rank ran torchrun for a job of its own, and none joined the others"
    assert said in summary_of(read(map(line_of, events)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("train.py", "import distboot\n"),
        ("train.json", '{"outcome": [1]}\n'),
        ("train.jsonl", '{"prompt": "a", "completion": "b"}\n'),
    ],
)
def test_page_does_not_replace_another_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    journal = tmp_path / "job.jsonl"
    journal.write_text("".join(_lines(_job())))
    other = tmp_path / name
    other.write_text(text)
    assert main(["report", str(journal), "--html", str(other)]) == 2
    assert f"the page would replace what is in '{other}'" in capsys.readouterr().err
    assert other.read_text() == text


def test_page_does_not_replace_a_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.jsonl"
    path.write_text("".join(_lines(_job())))
    assert main(["report", str(path), "--html", str(path)]) == 2
    assert "the page would replace the journal" in capsys.readouterr().err
    assert main(["report", str(path)]) == 0
    assert main(["report", "/dev/zero"]) == 2
    assert "it is a device" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "badhosts"])
def test_pipe_without_a_writer_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.setattr("distboot.tools.input_files._WRITER_TIMEOUT", 0.1)
    path = tmp_path / "job.jsonl"
    os.mkfifo(path)
    assert main([command, str(path)]) == 2
    assert "it is a pipe, to which nobody wrote within 0.1 s" in capsys.readouterr().err


# What its time was spent on, over all rounds


def _round(start: float, seconds: float, number: int = 0) -> Log:
    """A round whose ranks have started after 10 seconds, and of which rank 1 fails at its end."""
    log = Log().at(
        start, "rendezvous_started", launcher="openmpi", world_size=2, round=number, versions={}
    )
    for rank in range(2):
        log.at(start + 10, "registered", rank, pid=rank)
    return log.at(start + seconds, "root_cause", 1, kind="failed", location="there", **FAILURE)


def _journal_of(*rounds: Log) -> list[str]:
    lines: list[str] = []
    for number, log in enumerate(rounds):
        membership = Membership(*NODES, round=number, max_restarts=3)
        doubts = met(membership, separate_jobs="", unused="")
        events = [log[0], Event(log[0].time, None, "met", doubts), *log[1:]]
        events.append(Event(log[-1].time + 5, None, "ended", {"exit_code": 3}))
        lines += map(line_of, events)
    return lines


def test_seconds_of_all_rounds_are_in_the_report() -> None:
    journal = read(_journal_of(_round(NOON, 100), _round(NOON + 150, 850, 1)))
    report: Any = report_of(journal)
    # Between the rounds, too, nothing was trained: 5 seconds to end, 45 until the next one began
    assert report["spent"] == {"start": 20.0, "training": 930.0, "hang": 0.0, "failure": 55.0}
    assert goodput_of(journal) == (
        "goodput: 93 % of 16 min 45 s was training; start 20 s, failures 55 s"
    )


def test_rounds_of_an_earlier_job_do_not_count() -> None:
    earlier = _journal_of(_round(NOON, 100), _round(NOON + 150, 850, 1))
    one = _journal_of(_round(NOON + 9000, 100))
    restarted = _journal_of(_round(NOON + 9000, 100), _round(NOON + 9150, 850, 1))
    for last in (one, restarted):
        both = read([*earlier, *last])
        assert report_of(both) == report_of(read(last))
        assert summary_of(both) == summary_of(read(last))
        assert goodput_of(both) == goodput_of(read(last))


def test_waits_for_a_late_rank_are_hangs() -> None:
    log = begun(2)
    for rank in range(2):
        log.at(NOON, "registered", rank, pid=rank)
    log.at(NOON + 400, "late", 1, seconds=100.0, **LATE).at(NOON + 500, "late_over", 1)
    membership = Membership(*NODES)
    report: Any = job_report(log, membership, Doubts(), NOON + 1000)
    assert report["spent"] == {"start": 0.0, "training": 800.0, "hang": 200.0, "failure": 0.0}
    line = goodput_line(NO_ROUND.with_round(RoundTime(log, 2), NOON + 1000))
    assert line == "goodput: 80 % of 16 min 40 s was training; hangs 3 min 20 s"


def test_hang_before_the_start_is_part_of_it() -> None:
    log = begun(2).at(NOON, "registered", 0, pid=1).at(NOON, "registered", 1, pid=2)
    log.at(NOON + 10, "late", 1, seconds=10.0, **LATE).at(NOON + 14, "late_over", 1)
    for rank in range(2):
        log.at(NOON + 15, "phases", rank, group_ready=NOON + 15)
    report: Any = job_report(log, Membership(*NODES), Doubts(), NOON + 100)
    assert report["spent"] == {"start": 15.0, "training": 85.0, "hang": 0.0, "failure": 0.0}


def test_group_after_the_failure_adds_no_time() -> None:
    log = _round(NOON, 20).at(NOON + 25, "phases", 0, group_ready=NOON + 25)
    report: Any = job_report(log, Membership(*NODES), Doubts(), NOON + 30)
    assert report["spent"] == {"start": 20.0, "training": 0.0, "hang": 0.0, "failure": 10.0}


def test_goodput_of_an_open_journal_is_not_known() -> None:
    membership = Membership(*NODES)
    log = begun(2)
    for rank in range(2):
        log.at(NOON + 10, "registered", rank, pid=rank)
    log.at(NOON + 400, "late", 1, seconds=100.0, **LATE).at(NOON + 500, "late_over", 1)
    events = [log[0], Event(NOON, None, "met", met(membership, **DOUBTS)), *log[1:]]
    assert not goodput_of(read(map(line_of, events)))


def test_short_job_has_no_line_of_goodput() -> None:
    log = _round(NOON, 40)
    assert not goodput_line(NO_ROUND.with_round(RoundTime(log, 2), NOON + 40))


def test_round_that_did_not_start_is_no_training() -> None:
    log = begun(2).at(NOON + 1, "registered", 0, pid=1)
    report: Any = job_report(log, Membership(*NODES), Doubts(), NOON + 300)
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
