"""One exit code for the job: which, and that every process ends with it that is not done or ended by a signal."""

import os
import signal
from pathlib import Path

import pytest
from conftest import ROOT
from launched import in_both_ways, in_one_way
from supervised import ENDS, FAILING, Start, raised, until

from distboot.job.exit_status import ExitStatus
from distboot.job.root_cause import RootCause, from_signal, ranks_of
from distboot.rendezvous.membership import Membership

OF_A_PEER = raised("RuntimeError: Connection closed by peer").exception
BOOM = raised("ValueError: boom").exception
FAILED = RootCause((1,), True, "rank 1 failed first", exit_code=3)
LOST = RootCause((1,), True, "rank 1 became unreachable first")
(ANY,) = ranks_of(Membership(("host",), ((0,),)))
STOPPED = from_signal(ANY, signal.SIGTERM)
OWN = 0
# Why the job ends; how a rank ended; with what its process ends.
CODES = [
    (FAILED, ExitStatus(code=0), OWN),
    (FAILED, ExitStatus(code=3), 3),
    (FAILED, ExitStatus(code=0, stopped_by_us=True), 3),
    (FAILED, ExitStatus(code=9, stopped_by_us=True), 3),
    (FAILED, ExitStatus(code=0, external_signal=15), 3),  # the launcher answers a failure
    (FAILED, ExitStatus(signal=15, stopped_by_us=True), 3),
    (FAILED, ExitStatus(signal=9, stopped_by_us=True), 3),
    (FAILED, ExitStatus(signal=6), 3),  # as torch ends now and then when it was asked to
    (FAILED, ExitStatus(code=1, exception=OF_A_PEER), 3),
    (FAILED, ExitStatus(code=7), 3),
    (LOST, ExitStatus(code=0), OWN),
    (LOST, ExitStatus(signal=15, stopped_by_us=True), 143),
    (LOST, ExitStatus(code=0, stopped_by_us=True), 143),
    (LOST, ExitStatus(code=1, exception=OF_A_PEER), 143),
    (STOPPED, ExitStatus(code=0, external_signal=15), OWN),
    (STOPPED, ExitStatus(code=9, external_signal=15), OWN),
    (STOPPED, ExitStatus(code=1, exception=BOOM, external_signal=15), OWN),
    (STOPPED, ExitStatus(code=1, exception=OF_A_PEER, external_signal=15), 143),
    (STOPPED, ExitStatus(signal=15, external_signal=15), 143),
    (STOPPED, ExitStatus(signal=9, external_signal=15), 143),  # after the grace
    (from_signal(ANY, signal.SIGINT), ExitStatus(signal=15, external_signal=15), 130),
]
FIRST = [
    (ExitStatus(exception=BOOM), 1),  # it has not ended yet
    (ExitStatus(code=1, exception=BOOM), 1),
    (ExitStatus(code=3), 3),
    (ExitStatus(code=7, exception=BOOM), 7),  # a hook of its own
    (ExitStatus(signal=9), 137),
    (ExitStatus(signal=11, crash="Fatal Python error: Segmentation fault"), 139),
    (ExitStatus(cause="stopped by a signal (SIGSTOP?) for 15 s"), 143),
    (ExitStatus(), 143),
    (ExitStatus(code=1 << 40), 143),  # what a peer may say
]


@pytest.mark.parametrize(("cause", "end", "code"), CODES)
def test_code_of_each_rank(cause: RootCause, end: ExitStatus, code: int) -> None:
    assert cause.exit_code_for(end) == code


@pytest.mark.parametrize(("end", "code"), FIRST)
def test_code_of_the_job(end: ExitStatus, code: int) -> None:
    assert end.code_of_job == code


# It saves, and ends as a script does: at its end, by sys.exit, or by an exception.
SAVING = """
class Stop(Exception):
    pass
def stop(*_):
    print("TERM", flush=True)
    raise Stop
signal.signal(signal.SIGTERM, stop)
try:
    exec(%r)
except Stop:
    Path(f"saved-{rank}").touch()
    %s
"""


@in_one_way("end", ENDS)
def test_ranks_that_save_end_with_the_failures_code(start: Start, init: bool, end: str) -> None:
    statement, code, _ = ENDS[end]
    running = start(SAVING % (FAILING % statement, "sys.exit(rank)"), init=init, CULPRIT="1")
    assert running.fail() == [code] * 3
    assert [running.output(rank).count("TERM\n") for rank in range(3)] == [1, 0, 1]
    assert sorted(path.name for path in running.folder.glob("saved-*")) == ["saved-0", "saved-2"]


@in_one_way("leave", ["time.sleep(1.5)", "raise", "raise SystemExit(rank)", "sys.exit('saved')"])
def test_however_they_end(start: Start, init: bool, leave: str) -> None:
    script = "import atexit\natexit.register(print, 'last', flush=True)\n" + SAVING
    running = start(script % (FAILING % "os._exit(5)", leave), init=init, CULPRIT="1")
    assert running.fail() == [5, 5, 5]
    assert all("last\n" in running.output(rank) for rank in (0, 2)), (
        "what the script has registered is called"
    )


@in_both_ways
def test_code_of_an_exception_is_its_own(start: Start, init: bool) -> None:
    failure = "import atexit\n    atexit.register(os._exit, 7)\n    raise ValueError('boom')"
    running = start(SAVING % (FAILING % failure, "pass"), init=init, CULPRIT="1")
    assert running.fail() == [7, 7, 7]


def test_script_stopped_before_the_code_has_failed(start_init: Start, tmp_path: Path) -> None:
    """Of what is registered to be called at the end, what was registered before `init` comes last."""
    before = tmp_path / "before"
    before.mkdir()
    (before / "sitecustomize.py").write_text(
        "import atexit, sys\natexit.register(lambda: sys.late())\n"
    )
    script = """
def late():
    Path(f"late-{rank}").touch()
    while not stopped:
        time.sleep(0.02)
stopped, sys.late = [], late if rank != 1 else int
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
ready()
if rank == 1:
    until("fail")
    os._exit(5)
"""
    running = start_init(script, PYTHONPATH=f"{before}{os.pathsep}{ROOT}")
    running.all_ready()
    until(lambda: len(list(running.folder.glob("late-*"))) == 2)
    running.touch("fail")
    assert running.codes() == [137, 5, 137]


_CONSEQUENCE = """
sys.modules["mpi4py"] = os  # in place of what speaks to peers
ready()
until("fail")
if rank == 1:
    %s
raise RuntimeError("Connection closed by peer")
"""


@in_one_way("end", ["sys.exit", "SystemExit", "SIGKILL", "exception"])
def test_secondary_failures_end_silently_with_its_code(start: Start, init: bool, end: str) -> None:
    statement, code, _ = ENDS[end]
    running = start(_CONSEQUENCE % statement, init=init)
    assert running.fail() == [code] * 3
    assert running.first(0) == running.first(2)
    assert running.first(0).startswith("rank 1 failed first: ")
    assert ["\nTraceback" in f"\n{running.output(rank)}" for rank in range(3)] == [
        False,
        end == "exception",
        False,
    ]


@in_both_ways
def test_rank_missing_something_else_shows_its_traceback(start: Start, init: bool) -> None:
    running = start(
        _CONSEQUENCE.replace("raise", "rank == 1 or until('end')\nraise") % "pass", init=init
    )
    assert running.fail()[1] == 1
    assert running.first(0).startswith("rank 1 failed first, because a peer disconnected: ")
    assert ["\nTraceback" in f"\n{running.output(rank)}" for rank in range(3)] == [
        False,
        True,
        False,
    ]


@in_both_ways
def test_rank_that_was_done_before_has_succeeded(start: Start, init: bool) -> None:
    running = start(
        "ready()\nuntil(f'end-{rank}')\nrank == 1 and os._exit(5)\nuntil('end')\n", init=init
    )
    running.all_ready()
    running.touch("end")
    running.touch("end-2")
    until(
        lambda: (
            (init and running.processes[2].poll() == 0)
            or not Path(f"/proc/{running.pid(2)}").exists()
        )
    )
    running.touch("end-1")
    assert running.codes()[1:] == [5, 0]


@in_both_ways
def test_stop_after_which_all_succeed_is_success(start: Start, init: bool) -> None:
    running = start(SAVING % ("ready()\nuntil('end')", "pass"), init=init)
    pids = running.all_ready()
    os.kill(running.processes[1].pid if not init else pids[1], signal.SIGTERM)
    assert running.codes() == [0, 0, 0]


def test_stop_and_a_checkpoint_that_cannot_be_written(start: Start) -> None:
    """The script's own failure is no reason to try again; those that miss it have none."""
    leave = (
        "raise ValueError('disk full') if rank == 1 else RuntimeError('Connection closed by peer')"
    )
    running = start(SAVING % ("ready()\nuntil('end')", leave))
    running.all_ready()
    running.processes[0].terminate()
    assert running.codes() == [143, 1, 143]


HANDLER_RAISES = """
import signal
def handler(*_):
    raise RuntimeError('interrupted')
signal.signal(signal.SIGTERM, handler)
ready()
until('end')
"""


@in_both_ways
def test_exception_of_a_signal_handler_is_no_failure(start: Start, init: bool) -> None:
    running = start(HANDLER_RAISES, init=init)
    pids = running.all_ready()
    os.kill(pids[1] if init else running.processes[1].pid, signal.SIGTERM)
    running.codes()
    assert ": stopped by an external SIGTERM" in running.summary()
    assert "failed first" not in running.summary()
