"""`ctx.preempted` turns true at the same read on all ranks, whichever of them is asked to stop, and how."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import Run
from launched import MPI_ENV, TWO_OF_MPIRUN, needs_mpirun
from ranks import RunRanks
from supervised import Job, Start, until

# Each rank says that it trains once it has come to its fifth step, and at which read it was told to stop.
TRAIN = """
step = 0
while True:
    step += 1
    if ctx.preempted:
        break
    ctx.barrier()
    if step == 5:
        ready()
    if step > 5 and step == int(os.environ.get("STOP_ITSELF", "0")) and rank == 2:
        ctx.request_stop()
    time.sleep(float(os.environ.get("STEP", "0.01")) * (1 + rank))
ctx.barrier()  # the checkpoint's: that of a rank that left its loop a step early would meet the training's
Path(f"stopped-{rank}").write_text(str(step))
"""
READS = """
while not ctx.preempted:
    ready()
    time.sleep(0.02)
Path(f"stopped-{rank}").touch()
"""
BELOW = "import distboot\nctx = distboot.init('none', join_timeout=60)\n"


def _all_end_well(run_ranks: RunRanks, script: str, ranks: int, **env: str) -> None:
    for rank in run_ranks(script, places=[{}] * ranks, DISTBOOT_JOIN_TIMEOUT="60", **env):
        assert rank.code == 0, rank.err


def stopped_at(job: Job) -> list[int]:
    """The read at which each rank was told to stop, once all have ended well."""
    assert job.codes() == [0] * job.ranks, "\n".join(map(job.output, range(job.ranks)))
    return [int((job.folder / f"stopped-{rank}").read_text()) for rank in range(job.ranks)]


@pytest.mark.parametrize(
    ("init", "asked", "env", "said"),
    [
        (True, [0], {}, "rank 0 was asked to stop (SIGTERM)"),
        (True, [3], {}, "rank 3 was asked to stop (SIGTERM)"),
        (False, [1, 2], {}, "was asked to stop (SIGTERM)"),
        (False, [0, 1, 2, 3], {}, "was asked to stop (SIGTERM)"),
        # As `sbatch --signal=USR1@120` does to every process of the job.
        (True, [0, 1, 2, 3], {"DISTBOOT_STOP_SIGNALS": "SIGUSR1"}, "was asked to stop (SIGUSR1)"),
        # Python has a handler of its own for it
        (True, [1], {"DISTBOOT_STOP_SIGNALS": "SIGINT"}, "rank 1 was asked to stop (SIGINT)"),
        (False, [], {"STOP_ITSELF": "20"}, "rank 2 was asked to stop (ctx.request_stop())"),
        (True, [3], {"DISTBOOT_FAILURE_DETECTION": "0"}, "rank 3 was asked to stop (SIGTERM)"),
    ],
    ids=["rank-0", "rank-3", "two", "all", "USR1", "INT", "request_stop", "no-failure-detection"],
)
def test_all_ranks_stop_at_the_same_read(
    start: Start, init: bool, asked: list[int], env: dict[str, str], said: str
) -> None:
    job = start(("" if init else BELOW) + TRAIN, ranks=4, init=init, **env)
    job.all_ready()
    for rank in asked:
        job.send(rank, signal.Signals[env.get("DISTBOOT_STOP_SIGNALS", "SIGTERM")])
    (read,) = set(stopped_at(job))
    assert f"{said}: all ranks stop at read {read} of ctx.preempted\n" in job.output(0)
    if "DISTBOOT_FAILURE_DETECTION" not in env:
        events = [event["event"] for event in job.report()["events"]]
        assert events.index("stop_requested") < events.index("stop_agreed")


def test_job_stops_before_its_end(start_init: Start) -> None:
    end = {"DISTBOOT_STOP_BEFORE_END": "30", "SLURM_JOB_END_TIME": str(round(time.time()) + 36)}
    (read,) = set(stopped_at(start_init(TRAIN, ranks=3, STEP="0.1", **end)))
    assert read > 1


@pytest.mark.parametrize("asks", ["ctx.request_stop()", "SIGUSR1"])
def test_stop_before_the_first_read_is_printed(start_init: Start, asks: str) -> None:
    script = """
ready()
if rank == 1:
    ctx.request_stop() if os.environ["ASKS"] == "ctx.request_stop()" else until("signalled")
until("go")
"""
    job = start_init(script + READS, ranks=2, DISTBOOT_STOP_SIGNALS="USR1", ASKS=asks)
    job.all_ready()
    if asks == "SIGUSR1":
        job.send(1, signal.SIGUSR1)
        job.touch("signalled")
    said = f"rank 1 was asked to stop ({asks}): all ranks stop at read 1 of ctx.preempted"
    until(lambda: said in job.output(0))
    job.touch("go")
    assert job.codes() == [0, 0], job.output(0)
    assert job.output(0).count("stop at read") == 1


_ASKS_FOR_ANOTHER_START = """
if rank == 1:
    eval(os.environ["ASK"])
while not ctx.preempted:
    time.sleep(0.02)
sys.exit(143)
"""


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        ("ctx.request_stop()", "ctx.request_stop()"),
        ("os.kill(os.getpid(), signal.SIGUSR1)", "SIGUSR1"),
    ],
)
def test_code_143_after_agreed_stop_names_why(start_init: Start, ask: str, why: str) -> None:
    job = start_init(_ASKS_FOR_ANOTHER_START, ranks=2, DISTBOOT_STOP_SIGNALS="USR1", ASK=ask)
    assert job.codes() == [143, 143], job.output(0)
    # The summary comes last, from an agent that ends after its script
    assert job.summary().endswith(f": rank 1 was asked to stop ({why}); {_ALL_143}")
    assert f"stopped as agreed: rank 1 was asked to stop ({why}), on " in job.output(0)
    assert "external" not in job.output(0)


_ALL_143 = "exit codes: 143 (job), 143 (ranks 0-1)"
_OLD_END = {"DISTBOOT_STOP_BEFORE_END": "120", "DISTBOOT_JOB_END_TIME": "1763888400"}


def test_end_before_the_start_is_named(start_init: Start) -> None:
    job = start_init(READS, ranks=2, **_OLD_END)
    assert job.codes() == [0, 0], job.output(0)
    said = "was asked to stop (DISTBOOT_JOB_END_TIME='1763888400', 2025-11-23 09:00:00 UTC, was "
    (line,) = [line for line in job.output(0).splitlines() if said in line]
    assert " before the start): all ranks stop at read 1 of ctx.preempted" in line


@pytest.mark.parametrize(
    ("ask", "env", "why"),
    [
        ("", _OLD_END, "DISTBOOT_JOB_END_TIME='1763888400', 2025-11-23 09:00:00 UTC, was "),
        ("ctx.request_stop()", {}, "ctx.request_stop()"),
        ("os.kill(os.getpid(), signal.SIGUSR1)", {"DISTBOOT_STOP_SIGNALS": "USR1"}, "SIGUSR1"),
    ],
    ids=["old-end", "request_stop", "USR1"],
)
def test_process_without_an_agent_prints_why(
    run: Run, ask: str, env: dict[str, str], why: str
) -> None:
    script = f"""
import distboot, os, signal, time
ctx = distboot.init("none")
{ask}
while not ctx.preempted:
    time.sleep(0.01)
assert ctx.preempted
"""
    ended = run(sys.executable, "-c", script, env=env)
    assert ended.returncode == 0, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"distboot: asked to stop ({why}")
    assert "): this process stops at read " in line


def test_job_that_ends_in_thousands_of_years_starts(run: Run) -> None:
    script = "import distboot; print(distboot.init('none').preempted)"
    end = {"DISTBOOT_STOP_BEFORE_END": "30", "DISTBOOT_JOB_END_TIME": "99999999999"}
    ended = run(sys.executable, "-c", script, env=end)
    assert (ended.stdout, ended.stderr) == ("False\n", "")


def test_ranks_that_do_not_read_hold_up_none(start_init: Start) -> None:
    script = """
if rank in (1, 2):
    ready()
    rank == 1 or until("stopped-0")
    sys.exit()
"""
    job = start_init(script + READS, ranks=4, DISTBOOT_STOP_SIGNALS="USR1")
    job.all_ready()
    job.processes[1].wait(20)
    job.send(3, signal.SIGUSR1)
    assert job.codes() == [0, 0, 0, 0], job.output(0)


# Rank 0's checkpoint takes longer than its agent waits for the others once that has been written
FAILS_TO_SAVE = """
while not ctx.preempted:
    ready()
    time.sleep(0.02)
time.sleep(5.5 + rank)
if rank == 1:
    raise RuntimeError("disk full while saving")
"""


@pytest.mark.all
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1], ids=["TERM", "USR1"])
@pytest.mark.parametrize("init", [True, False], ids=["init", "below-the-wrapper"])
def test_save_that_fails_after_rank_0s_is_reported(start: Start, number: int, init: bool) -> None:
    job = start(
        ("" if init else BELOW) + FAILS_TO_SAVE,
        ranks=2,
        init=init,
        DISTBOOT_STOP_SIGNALS="USR1",
    )
    job.all_ready()
    job.send(0, number)
    assert job.codes() == [0, 1], job.output(0)
    report = job.report()
    assert [rank["exit_code"] for rank in report["ranks"]] == [0, 1]
    assert "exit codes: 1 (job), 0 (rank 0), 1 (rank 1)" in job.output(0)


def test_rank_that_never_reads_is_named(start_init: Start) -> None:
    # As with `if ctx.is_main and ctx.preempted:`
    script = """
if rank == 1:
    ready()
    until("stopped-0")
    ctx.barrier()
"""
    job = start_init(script + READS, ranks=2, DISTBOOT_STOP_SIGNALS="USR1")
    job.all_ready()
    job.send(0, signal.SIGUSR1)
    assert job.codes()[0] == 0
    said = "ctx.preempted, which this rank has never read: read it on all ranks, at the same place"
    assert f"warning: other ranks were told to stop by {said}\n" in job.output(1)


@pytest.mark.parametrize("init", [True, False], ids=["init", "below-the-wrapper"])
@pytest.mark.parametrize("asks", ["signal", "request_stop"])
def test_next_context_receives_an_earlier_signal(start: Start, init: bool, asks: str) -> None:
    script = """
while not ctx.preempted:
    ready()
    if os.environ["ASKS"] == "request_stop" and rank == 1:
        ctx.request_stop()
    time.sleep(0.02)
ctx.close()
ctx = distboot.init("none", join_timeout=60)
step = 0
while step < 200:
    step += 1
    if ctx.preempted:
        break
    ctx.barrier()
Path(f"stopped-{rank}").write_text(str(step))
"""
    job = start(
        ("" if init else BELOW) + script,
        ranks=2,
        init=init,
        DISTBOOT_STOP_SIGNALS="USR1",
        ASKS=asks,
    )
    job.all_ready()
    if asks == "signal":
        job.send(1, signal.SIGUSR1)
    (read,) = set(stopped_at(job))
    assert read == 200 if asks == "request_stop" else read < 200


@pytest.mark.parametrize("ranks", [1, 2])
def test_signal_counts_though_an_earlier_context_was_closed(
    run_ranks: RunRanks, ranks: int
) -> None:
    script = """
import os, signal, distboot
for handler in (signal.SIG_DFL, lambda *_: runs.append(1), signal.SIG_DFL):
    runs = []
    with distboot.init("none") as ctx:
        assert not ctx.preempted
        ctx.barrier()
    signal.signal(signal.SIGTERM, handler)
signal.signal(signal.SIGTERM, lambda number, frame: (runs.append(2), before(number, frame)))
with distboot.init("none") as ctx:
    assert not ctx.preempted
    before = signal.getsignal(signal.SIGTERM)  # ours, which calls the script's, which calls ours
    ctx.barrier()
    os.kill(os.getpid(), signal.SIGTERM)
    assert ctx.preempted and runs == [2]
"""
    _all_end_well(run_ranks, script, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_handler_that_cannot_be_set_changes_nothing(run_ranks: RunRanks, ranks: int) -> None:
    script = """
import os, signal, threading, time, distboot
def train():
    ctx = distboot.init("none")
    assert not ctx.preempted
    try:
        signal.signal(signal.SIGTERM, print)
    except ValueError as error:  # only in the main thread
        print(error)
    ctx.barrier()
    os.kill(os.getpid(), signal.SIGTERM)
    while not ctx.preempted:
        time.sleep(0.01)
    ctx.barrier()
    saved.append(1)
saved = []
thread = threading.Thread(target=train)
thread.start()
thread.join()
assert saved
signal.signal(signalnum=signal.SIGUSR1, handler=signal.SIG_IGN)
signal.signal(signalnum=signal.SIGTERM, handler=signal.SIG_IGN)
"""
    _all_end_well(run_ranks, script, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_signal_counts_in_a_thread_after_a_reset(run_ranks: RunRanks, ranks: int) -> None:
    script = """
import os, signal, threading, time, distboot
def train():
    with distboot.init("none") as ctx:
        assert not ctx.preempted
        ctx.barrier()
        if last:
            os.kill(os.getpid(), signal.SIGTERM)
            while not ctx.preempted:
                time.sleep(0.01)
            ctx.barrier()
            saved.append(1)
saved = []
for last in (False, True):
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
assert saved
"""
    _all_end_well(run_ranks, script, ranks)


@pytest.mark.parametrize("shield", ["0", ""])
def test_signal_ends_a_fork_as_ever(run_ranks: RunRanks, shield: str) -> None:
    script = """
import multiprocessing, os, signal, time, distboot
ctx = distboot.init("none")
assert not ctx.preempted
for number in (signal.SIGTERM, signal.SIGUSR2):
    pid = os.fork()
    if not pid:
        signal.pause()
        os._exit(9)
    os.kill(pid, number)
    assert os.waitpid(pid, 0)[1] == number
process = multiprocessing.get_context("fork").Process(target=signal.pause)
process.start()
process.terminate()
process.join()
assert process.exitcode == -signal.SIGTERM
signal.signal(signal.SIGTERM, lambda *_: os._exit(3))
pid = os.fork()
if not pid:
    time.sleep(60)
os.kill(pid, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3, "a handler that was set since"
"""
    env = {"DISTBOOT_STOP_SIGNALS": "USR2", "DISTBOOT_SHIELD_WORKERS": shield}
    (rank,) = run_ranks(script, places=[{}], **env)
    assert rank.code == 0, rank.err


@pytest.mark.parametrize(
    "ask",
    [
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.kill(os.getpid(), signal.SIGUSR2)",
        "ctx.request_stop()",
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_next_read_is_true_but_not_in_forks(run_ranks: RunRanks, ask: str, ranks: int) -> None:
    script = """
import os, signal, time, distboot
ctx = distboot.init("none")
assert not ctx.preempted
pid = os.fork()
if not pid:
    ctx.request_stop()  # of a fork, which is not the rank
    os._exit(ctx.preempted)
assert os.waitpid(pid, 0)[1] == 0
assert not ctx.preempted
ctx.barrier()
%s
assert ctx.preempted and ctx.preempted
ctx.close()
assert ctx.preempted
"""
    _all_end_well(run_ranks, script % ask, ranks, DISTBOOT_STOP_SIGNALS="USR2")


def test_frozen_agent_is_left_behind_and_named(start_init: Start) -> None:
    job = start_init(READS, ranks=3, DISTBOOT_GRACE="3", DISTBOOT_STOP_SIGNALS="USR1")
    job.all_ready()
    frozen = sidecar_of(job, 2)
    os.kill(frozen, signal.SIGSTOP)
    try:
        job.send(1, signal.SIGUSR1)
        until(lambda: (job.folder / "stopped-0").exists() and (job.folder / "stopped-1").exists())
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert job.codes() == [0, 0, 0]
    assert "rank 2 did not report in time, and may stop at a different read" in job.output(0)


def sidecar_of(job: Job, rank: int) -> int:
    """The agent of a rank, which has the environment of its script."""
    own = {f"{name}={job.environs[rank][name]}".encode() for name in ("RANK", "MASTER_PORT")}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_sidecar = b"distboot.agent.sidecar" in (process / "cmdline").read_bytes()
            if is_sidecar and own <= set((process / "environ").read_bytes().split(b"\0")):
                return int(process.name)
    raise AssertionError(f"rank {rank} has no agent")


# Rank 1 has nothing to save, and its exit code makes mpirun kill the rank that is left
_SAVES_LONGER = """
import distboot, os, signal, sys, time
ctx = distboot.init("none", join_timeout=60)
step = 0
while not ctx.preempted:
    step += 1
    if step == 5 and ctx.rank == 1:
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(0.02)
if ctx.is_main:
    time.sleep(2)
    print("saved", flush=True)
sys.exit(143)
"""


@needs_mpirun
def test_mpirun_lets_all_save_after_sigterm(run: Run, port: int) -> None:
    env = {**MPI_ENV, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [*TWO_OF_MPIRUN, sys.executable, "-m", "distboot", "train.py"]
    ended = run(*command, train=_SAVES_LONGER, env=env)
    output = ended.stdout + ended.stderr
    assert ("saved\n" in output, ended.returncode) == (True, 143), output
    assert "exit codes: 143 (job), 143 (ranks 0-1)" in output
