"""The events of a job and the steps of each rank: how they become the report and its page, and what is bounded."""

import json
import re
import time
from typing import Any, get_args

import pytest
from conftest import PACKAGE, ROOT
from inside import replace
from rendezvous_peers import record
from reported import NOON, Log, begun, join

from distboot.base.errors import DistbootError
from distboot.job.journal import line_of, read
from distboot.job.messages import Phases
from distboot.job.restarts import failed_round
from distboot.rendezvous.events import (
    ClockOffset,
    Clocks,
    Event,
    EventLog,
    HostClock,
    JoinLog,
    Kind,
    clock_time,
    job_time,
    own_clock,
    own_steps,
    since_boot,
)
from distboot.rendezvous.membership import Membership
from distboot.rendezvous.protocol import ProtocolError, decode, encode
from distboot.report.content import (
    Doubts,
    job_report,
    startup_report,
)
from distboot.report.files import page
from distboot.report.job_state import JobState
from distboot.report.start_failure import StartFailure
from distboot.report.steps import slowest, spans
from distboot.report.summary import summary_line

PAIR = Membership(("node-0",), ((0, 1),))
HOSTILE = "</script><!-- <script>alert(1)</script> {{report}} \u2028 \udcff & '\""
WORDS = "rank 1 failed first: exit code 3, there, at noon"
CAUSE = {"ranks": [1], "text": WORDS, "location": "there", "traceback": "T"}
EXIT = {"signal": None, "stopped_by_us": False, "external_signal": None, "at": NOON + 60}


def _trained(size: int) -> Log:
    log = begun(size, {rank: {"pid": rank + 1} for rank in range(size)}).at(
        NOON + 6, "all_joined", findings=["odd"]
    )
    for rank in range(size):
        log.at(NOON + 7, "registered", rank, pid=100 + rank).at(
            NOON + 8, "phases", rank, group_ready=NOON + 7.5
        )
    return log


def test_report_is_made_of_events_and_membership_alone() -> None:
    log = _trained(2).at(NOON + 60, "failing", 1, text="exit code 3")
    log.at(NOON + 60, "root_cause", 1, kind="failed", **CAUSE)
    log.at(
        NOON + 61,
        "exited",
        1,
        exit_code=3,
        **EXIT,
        traceback="whole",
    )
    log.at(NOON + 62, "exited", 0, exit_code=143, **{**EXIT, "stopped_by_us": True})
    copy = EventLog.from_json(json.loads(json.dumps(log)))
    assert copy == log
    report: Any = job_report(copy, PAIR, Doubts(), NOON + 63)
    assert report["headline"] == (
        "Rank 1 failed first: exit code 3, there, at noon; 1 other rank stopped"
    )
    ranks = [(one["state"], one["exit_code"], one["pid"]) for one in report["ranks"]]
    assert ranks == [("stopped", 143, 100), ("failed first", 3, 101)]
    assert (report["first_failure"]["traceback"], report["findings"]) == ("whole", ["odd"])
    assert [one["event"] for one in report["events"]][-4:] == [
        "failing",
        "root_cause",
        "exited",
        "exited",
    ]
    assert report["events"][0]["time"] == report["start"]
    said = "summary: 2 ranks on 1 node, 63.0 s: rank 1 failed first at 11:07:40 UTC, there"
    said += f": {WORDS.partition(': ')[2]}; exit codes: "
    assert summary_line(log, PAIR, Doubts(), NOON + 63) == said + "143 (rank 0), 3 (rank 1)"


@pytest.mark.parametrize("kinds", [2, 50])
def test_summary_is_of_at_most_220_characters(kinds: int) -> None:
    log = _trained(104).at(NOON + 60, "root_cause", 1, kind="failed", **CAUSE)
    for rank in range(104):
        log.at(NOON + 61, "exited", rank, exit_code=1 + rank % kinds, **EXIT)
    membership = Membership(("a",), (tuple(range(104)),))
    said = summary_line(log, membership, Doubts(), NOON + 63, 1)
    assert len(said) <= 220
    assert "; exit codes: 1 (job), 1 (" in said
    assert kinds > 2 or said.endswith("1 (job), 1 (52 ranks), 2 (52 ranks)")
    assert kinds == 2 or said.endswith(", 5 (2 ranks), 45 others")


@pytest.mark.parametrize(("host", "message"), [("h" * 130, "e" * 60), ("h" * 98, "e " * 59)])
def test_summary_leaves_out_whole_words(host: str, message: str) -> None:
    where = f"on {host} (node 1, local rank 1, process 12345)"
    text = f"rank 1 failed first: {message}, in load (data.py:41), {where}"
    cause = {**CAUSE, "text": text, "location": where}
    log = _trained(2).at(NOON + 60, "root_cause", 1, kind="failed", **cause)
    said = summary_line(log, PAIR, Doubts(), NOON + 63, 1)
    assert len(said) <= 220
    words, codes = said.split(" …; exit codes: ")
    assert codes == "1 (job), not known (2 ranks)"
    assert words.split()[-1] in f"{text} process 12345):".split()


def test_summary_leaves_out_what_is_least_missed() -> None:
    where = "on node-a (node 1, local rank 1, process 12345)"
    why = f"uncaught exception: ModuleNotFoundError: No module named 'nosuchmod{'x' * 30}'"
    text = f"rank 1 failed first: {why}, in <module> (imp.py:1)"
    cause = {**CAUSE, "text": text, "location": where}
    log = _trained(2).at(NOON + 60, "root_cause", 1, kind="failed", **cause)
    log.at(NOON + 61, "exited", 0, exit_code=143, **{**EXIT, "stopped_by_us": True})
    log.at(NOON + 62, "exited", 1, exit_code=1, **EXIT)
    rounds = [{"round": 0, "text": text, "start": None}]
    membership = replace(PAIR, round=1)
    said = summary_line(log, membership, Doubts(), NOON + 63, 1, rounds=rounds)
    kept = "No module named 'nosuc…xxxxxxxxxxxxxx', in imp.py:1, after 1 restart; exit"
    assert f"on node-a: ModuleNotFoundError: {kept}" in said
    assert said.endswith(", after 1 restart; exit codes: 1 (job), 143 (rank 0), 1 (rank 1)")
    assert len(said) <= 220


WORKER = (
    "ValueError: Caught ValueError in DataLoader worker process 0. … ValueError: corrupt sample 40"
)
HANG = "the ranks have waited for each other for 9 s"
TIMED_OUT = "then rank 0 failed: Timed out waiting 12000 ms (timeout= of init)"
GOT = "; the wrapper of node 0 got it"
LOADS = "rank 1 (node-a) had held up the job for 17 s, in load_batch (data.py:41)"
NODE_A = {"location": "on node-a (node 0, local rank 1, process 27783)"}


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (
            "failed",
            (
                "rank 1 failed first: error[rank-failed]: main_first(): the block failed on "
                "rank 0: OSError: disk full, on node-a, in <module> (train.py:2)"
            ),
            (
                "rank 1 failed first at 11:07:40 UTC, on node-a: block failed on rank 0: "
                "OSError: disk full, in <module> (train.py:2); 1 other rank failed after that"
            ),
        ),
        (
            "failed",
            (
                "rank 1 failed first: uncaught exception: ModuleNotFoundError: No module named "
                "'numpy', on node-a, in <module> (train.py:2)"
            ),
            (
                "rank 1 failed first at 11:07:40 UTC, on node-a: ModuleNotFoundError: No module "
                "named 'numpy', in train.py:2; 1 other rank failed after that"
            ),
        ),
        (
            "failed",
            f"rank 1 failed first: {WORKER}, on node-a, in <module> (dlw.py:20)",
            (
                "rank 1 failed first at 11:07:40 UTC, on node-a: ValueError: Caught ValueError in "
                "DataLo…rupt sample 40, in dlw.py:20; 1 other rank failed after that"
            ),
        ),
        (
            "late",
            (
                f"{HANG}: rank 0 waits in a (x.py:3), rank 1 waits in long_b (x.py:9),"
                " and DISTBOOT_HANG=stop ends all ranks"
            ),
            (
                f"{HANG} until 11:07:40 UTC: rank 0 in a (x.py:3), "
                "rank 1 in long_b (x.py:9); 1 other rank failed after that"
            ),
        ),
        (
            "late",
            (
                "rank 1 (node-a) held up the job for 9 s: it is in main (f.py:40), and "
                "DISTBOOT_HANG=stop ends all ranks; rank 0 waits in all_reduce (f.py:21), "
                "collective operation 1,006, rank 1 has begun 1,005"
            ),
            (
                "rank 1 (node-a) held up the job for 9 s until 11:07:40 UTC: "
                "in main (f.py:40); rank 0 in all_reduce (f.py:21); 1 other rank failed after that"
            ),
        ),
        (
            "late",
            (
                "rank 1 (node-a) held up the job for 9 s: it is in read_the_next_shard "
                "(loading.py:40), and DISTBOOT_HANG=stop ends all ranks; rank 0 waits in "
                "all_reduce (f.py:21), collective operation 6, rank 1 has begun at least 5"
            ),
            (
                "rank 1 (node-a) held up the job for 9 s until 11:07:40 UTC: "
                "it is in read_the_next_shard (loading.py:40); rank 0 waits in all_reduce (f.py:21)"
            ),
        ),
        (
            "late",
            (
                "rank 1 (node-a) held up the job for 9 s, judging by the stacks: it is in main "
                "(f.py:40), and DISTBOOT_HANG=stop ends all ranks; rank 0 waits in barrier (f.py:9)"
            ),
            (
                "rank 1 (node-a) held up the job for 9 s until 11:07:40 UTC: "
                "in main (f.py:40); rank 0 in barrier (f.py:9); 1 other rank failed after that"
            ),
        ),
        (
            "late",
            (
                "no rank has moved for 9 s, judging by the stacks: ranks 0-1 are in load (f.py:40), "
                "and DISTBOOT_HANG=stop ends all ranks"
            ),
            (
                "no rank has moved for 9 s until 11:07:40 UTC: ranks 0-1 are in load (f.py:40), "
                "and DISTBOOT_HANG=stop ends all ranks; 1 other rank failed after that"
            ),
        ),
        (
            "late",
            f"rank 1 (node-a) held up the job for 12 s: it is in load (f.py:3); {TIMED_OUT}",
            (
                "rank 1 (node-a) held up the job for 12 s until 11:07:40 UTC: in load (f.py:3); "
                f"{TIMED_OUT}"
            ),
        ),
        (
            "late",
            f"ranks 0, 2 (2 hosts) held up the job for 9 s: it is in m_m (file.py:38); {TIMED_OUT}",
            (
                "ranks 0, 2 (2 hosts) held up the job for 9 s until 11:07:40 UTC: in m_m (file.py:38); "
                f"{TIMED_OUT.removesuffix(' (timeout= of init)')}"
            ),
        ),
        (
            "stopped",
            f"stopped by an external SIGTERM after {LOADS}{GOT}, on node-a",
            f"stopped by an external SIGTERM after {LOADS} at 11:07:40 UTC, on node-a",
        ),
        (
            "stopped",
            "stopped as agreed: rank 1 was asked to stop (ctx.request_stop()), on node-a",
            (
                "stopped as agreed at 11:07:40 UTC, on node-a: rank 1 was asked to stop "
                "(ctx.request_stop()); 1 other rank failed after that"
            ),
        ),
        (
            "stopped",
            f"stopped by an external SIGTERM: {GOT[2:]}, on node-a",
            (
                f"stopped by an external SIGTERM: {GOT[2:]} at 11:07:40 UTC, on node-a; "
                "1 other rank failed after that"
            ),
        ),
        (
            "stopped",
            "stopped by an external SIGTERM: rank 1 got it first, on node-a",
            (
                "stopped by an external SIGTERM: rank 1 got it first at 11:07:40 UTC, "
                "on node-a (node 0, local rank 1, process 27783); 1 other rank failed after that"
            ),
        ),
    ],
    ids=[
        "block of the leader",
        "import",
        "DataLoader",
        "hang",
        "hang with counts",
        "hang at a long place",
        "hang by the stacks",
        "hang without a wait",
        "timeout of torch",
        "timeout of two hosts",
        "stop of a hang",
        "agreed stop",
        "stop of a wrapper",
        "stop of a rank",
    ],
)
def test_summary_uses_its_room_for_why(kind: str, text: str, said: str) -> None:
    log = _trained(2).at(NOON + 60, "root_cause", 1, kind=kind, **{**CAUSE, "text": text, **NODE_A})
    log.at(NOON + 61, "exited", 0, exit_code=1, **EXIT)
    log.at(NOON + 62, "exited", 1, exit_code=1, **EXIT)
    line = summary_line(log, PAIR, Doubts(), NOON + 63, 1)
    codes = "exit codes: 1 (job), 1 (ranks 0-1)"
    assert line == f"summary: 2 ranks on 1 node, 63.0 s: {said}; {codes}"
    report: Any = job_report(log, PAIR, Doubts(), NOON + 63)
    assert kind != "failed" or report["headline"].endswith("; 1 other rank failed after that")


@pytest.mark.parametrize(
    ("when", "host", "short"),
    [
        (" while 3 others were still training", "there", ""),
        (" before the framework could start", "on node-0", " before the framework could start"),
    ],
)
def test_summary_refers_to_the_early_ranks_headline(when: str, host: str, short: str) -> None:
    text = f"rank 1 exited with code 0{when}, {host}; then rank 0 failed, because it did"
    log = _trained(2).at(NOON + 60, "failing", 0, text="a peer disconnected")
    log.at(NOON + 60, "root_cause", 1, kind="failed", then=0, **{**CAUSE, "text": text})
    log.at(NOON + 61, "exited", 0, exit_code=143, **{**EXIT, "stopped_by_us": True})
    said = summary_line(log, PAIR, Doubts(), NOON + 63)
    assert f"s: rank 1 exited with code 0{short} at 11:07:40 UTC, there; exit codes: " in said
    report: Any = job_report(log, PAIR, Doubts(), NOON + 63)
    assert report["headline"].endswith("; then rank 0 failed, because it did")
    assert report["later_failures"] == 0


@pytest.mark.parametrize(
    ("kind", "code", "more", "state", "later"),
    [
        ("failed", 1, {}, "failed later", 1),
        ("failed", 143, {"external_signal": 15}, "stopped", 0),
        ("stopped", 0, {}, "ended", 0),
        ("lost", 0, {"stopped_by_us": True}, "stopped", 0),
    ],
)
def test_state_follows_from_the_events(
    kind: str, code: int, more: dict[str, Any], state: str, later: int
) -> None:
    log = (
        Log()
        .at(NOON, "root_cause", 1, kind=kind, **CAUSE)
        .at(NOON, "exited", 0, exit_code=code, **{**EXIT, **more})
    )
    job = JobState(log)
    assert (job.of_rank(0), job.later_failures()) == (state, later)
    assert (
        job.of_rank(1) == {"failed": "failed first", "lost": "lost", "stopped": "not known"}[kind]
    )


@pytest.mark.parametrize("kind", ["late", "failed", ""])
def test_rank_awaited_to_the_end_is_late(kind: str) -> None:
    log = (
        Log()
        .at(
            NOON,
            "late",
            0,
            ranks=[0],
            text="once",
            stacks=[],
        )
        .at(NOON, "late_over", 0)
    )
    log.at(
        NOON,
        "late",
        1,
        ranks=[1, 2],
        text="waiting for ranks 1-2",
        stacks=[],
    )
    for rank, more in {
        0: {"exit_code": 1},
        1: {"exit_code": 143, "external_signal": 15},
        2: {"exit_code": 0},
    }.items():
        log.at(NOON, "exited", rank, **{**EXIT, **more})
    job = JobState(log.at(NOON, "root_cause", 1, kind=kind, **CAUSE) if kind else log)
    assert [job.of_rank(rank) for rank in range(3)] == [
        "failed later",
        "failed first" if kind == "failed" else "late",
        "ended",
    ]


def test_rank_that_left_while_joining_is_missing() -> None:
    log = JoinLog(record(0, 3))
    for rank in (1, 2):
        log.joined(record(rank, 3), welcomed=0.0)
    log.add("left", 1)
    report: Any = startup_report(
        log, None, StartFailure.from_error(DistbootError("missing-rank", "2 of 3")), NOON
    )
    assert [one["state"] for one in report["ranks"]] == ["joined", "missing", "joined"]


def test_stop_before_restart_names_the_failure() -> None:
    log = Log().at(
        NOON, "rendezvous_started", launcher="openmpi", world_size=2, round=2, versions={}
    )
    log.at(NOON, "joined", 0, **join())
    rounds = [
        failed_round(
            number, [1], f"rank 1 failed first: exit code {3 + number}", start=NOON, seconds=5
        )
        for number in range(2)
    ]
    stop = StartFailure.from_error(SystemExit(143))
    report = startup_report(log, None, stop, NOON + 1, rounds)
    headline = "Rank 1 failed first: exit code 4; the job was stopped before restart 2"
    assert report["headline"] == headline


def test_events_of_large_jobs_are_bounded_by_kind() -> None:
    log = _trained(4000).at(NOON + 60, "root_cause", 1, kind="failed", **CAUSE)
    membership = Membership(("node-0",), (tuple(range(4000)),))
    report: Any = job_report(log, membership, Doubts(), NOON + 63)
    assert (len(report["events"]), report["events_left_out"]) == (10_000, 2_003)
    assert report["events"][-1]["event"] == "root_cause"
    assert sorted(report["events"], key=lambda one: one["time"]) == report["events"]


def test_repeated_messages_of_a_rank_are_bounded() -> None:
    log = EventLog()
    for _ in range(10_000):
        log.add("phases", 3, group_ready=1.0)
    log.add("exited", 3)
    assert len(log) == 101


def test_all_late_ranks_are_added_up() -> None:
    log = EventLog()
    for _ in range(150):
        log.add("late", 3, ranks=[3], waiting=[0], seconds=60.0, text="", stacks=["a place"])
        log.add("late_over", 3)
    assert len(log) == 300
    assert [one.details["stacks"] for one in log[0:300:50]] == [["a place"]] * 4 + [[]] * 2


def test_page_works_without_script_and_escapes_markup() -> None:
    log = begun(2, {0: {"host": HOSTILE}}, launcher=HOSTILE)
    report = startup_report(
        log,
        None,
        StartFailure.from_error(DistbootError("missing-rank", HOSTILE, HOSTILE)),
        NOON + 300,
    )
    text = page(report)
    assert text.count("<script") == text.count("</script>") == 2
    assert text.count("<!--") == 0
    data = text.partition('id="report">')[2].partition("</script>")[0]
    assert json.loads(data) == report
    nonces = re.findall(r"nonce-(\w+)'|nonce=\"(\w+)\"", text)
    assert len({found for pair in nonces for found in pair if found}) == 1
    static = re.sub(r"<(style|script).*?</\1>", "", text, flags=re.DOTALL)
    assert '<span class="badge failed">failed</span>' in static
    shown = (
        "&lt;/script&gt;&lt;!-- &lt;script&gt;alert(1)&lt;/script&gt; {{report}} "
        "\\u2028 \\udcff &amp; &#x27;&quot;"
    )
    assert f"<h1>The job did not start: {shown[:60]}" in static
    assert f"<p>{shown}</p>" in static
    assert f"<b>What to do:</b> {shown}" in static


def test_every_event_is_documented() -> None:
    table = (
        (ROOT / "docs" / "how-to" / "report.md")
        .read_text()
        .partition("### Events")[2]
        .partition("\n## ")[0]
    )
    assert tuple(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == get_args(Kind)


def test_template_uses_no_network_and_writes_no_markup() -> None:
    template = (PACKAGE / "report" / "page.html").read_text()
    assert not re.search(
        r"https?:|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", template
    )


@pytest.mark.parametrize(
    "times",
    [
        *(None, [], {str(number): 1.0 for number in range(100)}),
        *({"group_ready": time} for time in ("now", True, -1.0, 1e300, float("nan"))),
    ],
)
def test_steps_that_are_none_are_refused(times: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(Phases(times)), Phases)


def test_steps_of_a_newer_distboot_are_left_out() -> None:
    assert own_steps({"group_ready": 5, "coffee_made": 6}) == {"group_ready": 5.0}


def test_clock_is_bracketed_by_those_of_rank_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = JoinLog(record(0, 3))
    monkeypatch.setattr("distboot.rendezvous.events.job_time", lambda: 101.0)
    for rank, node in ((1, "a"), (2, "b")):
        log.joined(record(rank, 3, node=node, clock=107.0), welcomed=100.0)
    assert JobState(log).clocks.of(2) == ClockOffset(offset=6.5, uncertainty=0.5)
    assert Clocks(log).offsets() == {1: 0.0, 2: 6.5}  # rank 1 is on rank 0's own host


@pytest.mark.parametrize("step", [-300.0, 3600.0])
def test_step_of_the_clock_changes_no_event(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    right = time.time
    log = EventLog()
    log.add("all_joined")
    monkeypatch.setattr(time, "time", lambda: right() + step)
    monkeypatch.setattr(own_clock, "booted", own_clock.booted)
    log.add("late")
    assert 0 <= log.note("ended") - log[0].time < 60
    own_clock.read()
    next_round = JoinLog(record(0, 2))
    next_round.joined(record(1, 2, node="b", clock=time.time()), welcomed=job_time())
    assert 0 <= next_round[0].time - log[0].time < 60
    assert [round(JobState(next_round).clocks.of(rank).offset) for rank in (0, 1)] == [step, step]
    assert Clocks(next_round).offsets() == {1: pytest.approx(0, abs=1)}


@pytest.mark.parametrize("step", [-300.0, 3600.0])
def test_step_of_the_clock_moves_no_rank(monkeypatch: pytest.MonkeyPatch, step: float) -> None:
    right = time.time
    before = clock_time()
    monkeypatch.setattr(time, "time", lambda: right() + step)
    assert 0 <= clock_time() - before < 60


@pytest.mark.parametrize("now", [-2e9, 5e9])
def test_clock_that_is_far_off_goes_on(monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    monkeypatch.setattr(time, "time", lambda: now)
    clock = HostClock()
    assert clock.at(since_boot() + 3600) - clock.at(since_boot()) == pytest.approx(3600, abs=60)
    line = line_of(Event(clock.at(since_boot()), None, "late_over", {}))
    first = line_of(Event(clock.at(since_boot()), None, "rendezvous_started", {}))
    assert read([first, line]).unreadable == 0


def test_times_of_a_rank_are_rank_0_times() -> None:
    log = begun(2).at(12.0, "joined", 1, **join(process_start=107.0, detected=108.0, offset=97.5))
    log.at(13.0, "all_joined", findings=[]).at(16.0, "phases", 1, group_ready=112.5)
    assert JobState(EventLog.from_json(json.loads(json.dumps(log)))).steps(1) == {
        "process_start": 9.5,
        "detected": 10.5,
        "joined": 12.0,
        "all_joined": 13.0,
        "group_ready": 15.0,
    }


def test_phases_are_between_what_is_known() -> None:
    assert spans({}) == {}
    known = {"detected": 5.0, "joined": 6.0, "all_joined": 9.0, "framework_imported": 12.0}
    assert spans(known) == {"join": (5.0, 6.0), "wait": (6.0, 9.0), "import": (9.0, 12.0)}
    # Clocks differ a little
    assert spans({"joined": 6.0, "all_joined": 5.9}) == {"wait": (5.9, 5.9)}


def test_slowest_of_a_phase_has_the_usual_time() -> None:
    ranks = {
        rank: {"process_start": 1.0, "detected": 2.0 + 5 * (rank == 2), "joined": 9.0}
        for rank in range(4)
    }
    found = [(one["step"], one["rank"], one["seconds"], one["median"]) for one in slowest(ranks)]
    assert found == [
        ("process_start", 0, 0.0, 0.0),
        ("detected", 2, 6.0, 1.0),
        ("joined", 0, 7.0, 7.0),
    ]
