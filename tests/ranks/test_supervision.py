"""Failure detection, around scripts that never heard of distboot and with a bare `init`: real processes and signals."""

import json
import os
import re
import resource
import signal
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Run
from launched import all_with, in_both_ways, in_one_way, needs_torch
from ranks import RunRanks
from supervised import ENDS, FAILING, Start, until

# Where the kernel is older than 6.15, and the parent was quicker than the sidecar.
UNSEEN = "exited without reporting a status"
# Of a traceback, or the stack of a crash, what the rank itself shows: not rank 0 on the same host.
SHOWN = {
    "exception": "    raise ValueError('boom')\n",
    "SIGSEGV": "  | Fatal Python error: ",
}
EACH_FOR_ITSELF = "ready()\nuntil(f'end-{rank}')\n"

either = pytest.mark.parametrize("rank", [0, 1])


# In the other way test_exit_codes.py has these ends.
@in_one_way("end, culprit", [*((end, 2) for end in ENDS), ("exception", 0), ("SIGKILL", 0)], 1)
def test_first_failure_reaches_all_and_all_stop(
    start: Start, init: bool, end: str, culprit: int
) -> None:
    statement, code, said = ENDS[end]
    running = start(FAILING % statement, init=init, CULPRIT=str(culprit))
    pids = running.all_ready()
    codes = [code if rank == culprit else 143 for rank in range(3)]
    assert running.fail() == (codes if init else [code] * 3)
    (line,) = {running.first(rank) for rank in range(3) if rank != culprit}
    assert line.startswith(f"rank {culprit} failed first: {said}") or (init and UNSEEN in line)
    assert len(line) <= 160
    assert f", on {os.uname().nodename}" in line
    assert f"(node 0, local rank {culprit}, process {pids[culprit]})" in running.summary()
    if end in SHOWN:
        shows = [rank for rank in range(3) if SHOWN[end] in running.output(rank)]
        assert shows == [culprit]
    report = running.report()
    assert (report["outcome"], report["first_failure"]["rank"]) == ("failed", culprit)
    assert init or [rank["exit_code"] for rank in report["ranks"]] == codes


@in_both_ways
def test_early_end_of_rank_0_is_no_failure(start: Start, init: bool) -> None:
    # It waits a moment for the others, and then they go on without it.
    running = start(EACH_FOR_ITSELF, init=init)
    running.all_ready()
    for rank in (0, 1, 2):
        running.touch(f"end-{rank}")
        assert running.processes[rank].wait(30) == 0
    for rank in (1, 2):
        assert (
            running.first(rank)
            == "rank 0 has exited; failures of other ranks are no longer reported"
        )
    assert (
        init
        or "no failure was seen; exit codes: 0 (rank 0), not known (ranks 1-2)" in running.summary()
    )


@pytest.mark.parametrize(
    ("end", "framework"),
    [
        ("sys.exit(0)", "none"),
        ("raise SystemExit", "none"),
        ("ctx.close(); sys.exit()", "none"),
        pytest.param("pass", "torch", marks=[needs_torch, pytest.mark.all]),
    ],
)
def test_ends_in_good_order_are_no_failures(start_init: Start, end: str, framework: str) -> None:
    running = start_init(EACH_FOR_ITSELF + end, framework=framework)
    running.all_ready()
    for rank in (2, 1, 0):
        running.touch(f"end-{rank}")
        assert running.processes[rank].wait(20) == 0
    assert running.output(1) == running.output(2) == ""
    assert running.summary().endswith("all ended well; exit codes: 0 (ranks 0-2)")


def test_job_that_succeeds_has_one_summary_line(start: Start) -> None:
    running = start()
    assert running.finish() == [0, 0, 0]
    assert running.output(1) == running.output(2) == ""
    assert running.output(0).count("\n") == 1
    assert running.summary().endswith("s: all ended well; exit codes: 0 (ranks 0-2)")
    report = running.report()
    assert (report["outcome"], report["first_failure"], report["later_failures"]) == (
        "ended",
        None,
        0,
    )
    assert {rank["host"] for rank in report["ranks"]} == {os.uname().nodename}


@either
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGSTOP, "no answer for 5 s, though the host answers: stopped or frozen"),
        (signal.SIGKILL, "the connection closed without an exit report, on "),
    ],
)
def test_frozen_or_killed_wrapper_is_a_lost_rank(
    start: Start, rank: int, number: int, said: str
) -> None:
    running = start(DISTBOOT_HEARTBEAT_TIMEOUT="2")
    running.all_ready()
    running.processes[rank].send_signal(number)
    assert running.processes[2].wait(30) == 143
    assert running.first(2).startswith(f"rank {rank} became unreachable first: {said}")
    running.processes[rank].send_signal(signal.SIGCONT)
    running.codes()
    if number == signal.SIGSTOP:  # all others were there
        who = ("the agent of rank 0", "this agent")[rank]
        said = f"became unreachable first: the connection closed while {who} was stopped for "
        assert said in running.first(rank)


def test_rank_0_without_a_file_tells_all(start: Start) -> None:
    running = start()
    running.all_ready()
    resource.prlimit(running.processes[0].pid, resource.RLIMIT_NOFILE, (3, 3))
    os.kill(running.pid(1), signal.SIGKILL)
    assert running.codes() == [137, 137, 137]
    for rank in (0, 2):
        assert running.first(rank).startswith("rank 1 failed first: killed by SIGKILL")
    assert "because of a bug" not in running.output(0)


def test_rank_frozen_before_supervision_is_lost(start: Start) -> None:
    last_comes_late = 'until [ "$RANK" != 2 ] || [ -e met ]; do sleep 0.02; done; exec "$@"'
    running = start(before=["sh", "-c", last_comes_late, "sh"], DISTBOOT_HEARTBEAT_TIMEOUT="2")
    until(lambda: "2/3 ranks joined" in running.output(0))
    os.kill(running.processes[1].pid, signal.SIGSTOP)
    running.touch("met")
    assert [running.processes[rank].wait(30) for rank in (0, 2)] == [143, 143]
    for rank in (0, 2):
        assert running.first(rank).startswith(
            "rank 1 became unreachable first: no answer for 5 s, though the host answers: "
        )


def test_supervision_can_be_off(start: Start) -> None:
    running = start(DISTBOOT_FAILURE_DETECTION="0")
    running.send(1, signal.SIGKILL)
    assert running.processes[1].wait(20) == 137
    running.touch("end")
    assert running.codes() == [0, 137, 0]
    assert [running.output(rank) for rank in range(3)] == ["", "", ""]


@either
def test_rank_without_supervision_is_no_failure(start: Start, rank: int) -> None:
    off = f'[ "$RANK" != {rank} ] || export DISTBOOT_FAILURE_DETECTION=0; exec "$@"'
    assert start(before=["sh", "-c", off, "sh"]).finish() == [0, 0, 0]


@either
def test_sidecar_that_cannot_start_is_only_reported(
    start_init: Start, tmp_path: Path, rank: int
) -> None:
    begin = f"import os, sys\nif os.environ['RANK'] == '{rank}': sys.executable = '/nonexistent'\n"
    (tmp_path / "sitecustomize.py").write_text(begin)
    report = tmp_path / "job.json"
    running = start_init(
        EACH_FOR_ITSELF,
        PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}",
        DISTBOOT_REPORT=str(report),
    )
    running.all_ready()
    running.touch(f"end-{rank}")  # its connections end first
    running.processes[rank].wait(timeout=60)
    for other in {0, 1, 2} - {rank}:
        running.touch(f"end-{other}")
    assert running.codes() == [0, 0, 0]
    said = "warning: failure detection is off for this rank: the monitor process did not start: "
    assert said in running.output(rank)
    outcome = "started" if rank == 0 else "ended"  # nobody watches the job without rank 0's agent
    assert json.loads(report.read_text())["outcome"] == outcome
    journal = report.with_suffix(".jsonl").read_text().splitlines()
    assert outcome in [json.loads(line)["event"] for line in journal]


def test_failed_start_without_a_sidecar_is_reported(run: Run, tmp_path: Path, port: int) -> None:
    report = tmp_path / "job.json"
    script = "import sys; sys.executable = '/nonexistent'; import distboot; distboot.init('none')"
    environ = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DISTBOOT_JOIN_TIMEOUT": "1",
        "DISTBOOT_REPORT": str(report),
    }
    run(sys.executable, "train.py", train=script, env=environ)
    assert json.loads(report.read_text())["first_failure"]["code"] == "missing-rank"
    assert '"start_failed"' in report.with_suffix(".jsonl").read_text()


@pytest.mark.parametrize("missing", ["-- no-such-command", "no-such.py", "-m no_such"])
def test_command_missing_on_one_rank_reaches_all(
    run_ranks: RunRanks, tmp_path: Path, missing: str
) -> None:
    command = (
        f'test $RANK = 1 && set -- -- true || set -- {missing}; exec "$0" -m distboot run "$@"'
    )
    *_, name = missing.split()
    report = tmp_path / "job.json"
    ended = run_ranks(
        "",
        before=["sh", "-c", command, sys.executable],
        places=[{"DISTBOOT_REPORT": str(report)}] * 2,
    )
    assert json.loads(report.read_text())["first_failure"]["code"] == "command-not-found"
    assert [rank.code for rank in ended] == [127, 127]
    assert all("error[command-not-found]" in rank.err and repr(name) in rank.err for rank in ended)


@pytest.mark.parametrize("files", [12, 15, 16, 18])
def test_rank_0_without_files_says_so(run_ranks: RunRanks, files: int) -> None:
    limit = f'test $RANK != 0 || ulimit -n {files}; exec "$0" "$@"'
    script = "import distboot\ndistboot.init('none', join_timeout=20)\n"
    first, *_ = run_ranks(script, before=["sh", "-c", limit, sys.executable], places=[{}] * 4)
    assert "may open" in first.err
    assert "OSError" not in first.err


def test_later_rank_hears_why_no_job_starts(run_ranks: RunRanks) -> None:
    command = (
        'test $RANK = 1 && { sleep 0.8; set -- "$0" true; } || set -- "$0" no-such-command; '
        'exec "$1" -m distboot run -- "$2"'
    )
    first, later = run_ranks("", before=["sh", "-c", command, sys.executable])
    assert (first.code, later.code) == (127, 127)
    assert re.search(r"rank 1 on \S+: rank 0 on '\S+': ", later.err)
    assert "rank 0 says" not in later.err


@pytest.mark.parametrize("contexts", [1, 2, 3])
def test_crash_has_its_stack_in_every_context(run_ranks: RunRanks, contexts: int) -> None:
    script = f"""
import ctypes, distboot
for number in range({contexts}):
    ctx = distboot.init("none", join_timeout=60)
    ctx.barrier()
    if number + 1 < {contexts}:
        ctx.close()
if ctx.rank == 1:
    ctypes.string_at(0)
ctx.barrier()
"""
    said = "".join(rank.err for rank in run_ranks(script))
    assert said.count(": killed by SIGSEGV\n  | Fatal Python error: ") == 1
    assert 'train.py", line 9 in <module>' in said


@pytest.mark.parametrize("before", [(), ("-m", "distboot", "run")], ids=["init", "wrapper"])
@pytest.mark.parametrize("way", ["with", "finally"])
def test_error_that_closes_the_context_names_the_peer(
    run_ranks: RunRanks, before: tuple[str, ...], way: str
) -> None:
    block = {
        "with": "with distboot.init('none', join_timeout=60) as ctx:\n    train(ctx)",
        "finally": (
            "ctx = distboot.init('none', join_timeout=60)\n"
            "try:\n    train(ctx)\nfinally:\n    ctx.close()"
        ),
    }
    script = f"""
import os, time, distboot
def train(ctx):
    ctx.barrier()
    if ctx.rank == 1:
        open("failing", "w").close()
        time.sleep(0.3)
        raise ValueError("the cause")
    while not os.path.exists("failing"):
        time.sleep(0.01)
    raise ConnectionResetError(104, "Connection reset by peer")
{block[way]}
"""
    said = "".join(rank.err for rank in run_ranks(script, before=[sys.executable, *before]))
    assert "rank 1 failed first: uncaught exception: ValueError: the cause" in said
    assert "rank 0 failed first" not in said


@pytest.mark.parametrize("before", [(), ("-m", "distboot", "run")], ids=["init", "wrapper"])
def test_error_after_close_is_its_own(run_ranks: RunRanks, before: tuple[str, ...]) -> None:
    script = """
import os, distboot
with distboot.init("none", join_timeout=60) as ctx:
    ctx.barrier()
if ctx.rank == 1:
    raise ConnectionRefusedError(111, "Connection refused")
"""
    first, second = run_ranks(script, before=[sys.executable, *before])
    assert second.code == 1
    assert "ConnectionRefusedError" in second.err
    assert (
        "rank 1 failed first: uncaught exception: ConnectionRefusedError" in first.err + second.err
    )


@pytest.mark.parametrize(
    ("init", "before"),
    [
        (
            False,
            (
                "import distboot\nctx = distboot.init('none', "
                "join_timeout=60)\nassert not ctx.preempted\n"
            ),
        ),
        (True, "ctx.close()\nctx = distboot.init('none', join_timeout=60)\n"),
    ],
    ids=["below-the-wrapper", "once-more"],
)
def test_further_init_is_supervised(start: Start, init: bool, before: str) -> None:
    running = start(before + FAILING % "os._exit(4)", init=init, CULPRIT="1")
    assert running.fail()[1] == 4
    assert running.first(0) == running.first(2)
    assert running.first(0).startswith("rank 1 failed first: exit code 4") or (
        init and UNSEEN in running.first(0)
    )
    assert running.output(0).count("summary") <= 1


@all_with("torch")
def test_busy_ranks_raise_no_alarm(run: Run) -> None:
    """The soak of `bench/supervision.py`, shortened: load, ranks that are stopped or hold their lock a while."""
    soak = [
        sys.executable,
        str(ROOT / "bench" / "supervision.py"),
        "soak",
        "2",
        "--seconds",
        "20",
        "--load",
        "20",
    ]
    done = run(*soak, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'alarms': 0" in done.stdout


def test_wrapper_without_a_file_to_listen_says_so(run: Run, port: int) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    limit = 'ulimit -n 5; exec "$0" -m distboot run -- true'
    done = run("bash", "-c", limit, sys.executable, env=environ)
    assert "error[too-few-files]: rank 0 on" in done.stderr
    assert done.returncode == 78


LEAKING = """
import contextlib
import os
import resource

import distboot

soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
if os.environ["RANK"] == os.environ["LEAKS"]:
    files = []
    with contextlib.suppress(OSError):
        while True:
            files.append(os.open("/dev/null", os.O_RDONLY))
    for file in files[-int(os.environ["FREE"]) :]:
        os.close(file)
distboot.init("none", join_timeout=3)
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("free", ["2", "5", "7", "8"])
def test_script_that_leaks_files_has_too_few(run_ranks: RunRanks, rank: int, free: str) -> None:
    ended = run_ranks(LEAKING, places=[{"LEAKS": str(rank), "FREE": free}] * 2)
    leaking, other = ended[rank], ended[1 - rank]
    assert "error[too-few-files]: rank" in leaking.err
    assert leaking.code == 78
    assert not re.search(r"OSError|During handling|failure detection is off", leaking.err)
    if rank == 0 and free == "2":  # it cannot listen
        assert other.code == 75
    else:
        assert "error[too-few-files]: rank" in other.err
        assert other.code == 78
