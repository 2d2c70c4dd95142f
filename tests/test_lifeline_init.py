"""The lifeline of a bare `init`, which a guard beside the script keeps: real torch, real Gloo, real signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launched import needs_torch
from lifelines import ENDS, FAILING_TORCH, Start, job, until

pytestmark = needs_torch

UNSEEN = "ended without a word"  # where the kernel is older than 6.15, and the parent was quicker than the guard


@pytest.mark.parametrize(("way", "culprit"), [(way, 2) for way in ENDS] + [("exception", 0), ("SIGKILL", 0)])
def test_first_failure_is_known_to_all_and_all_stop(start_init: Start, way: str, culprit: int) -> None:
    statement, code, said = ENDS[way]
    running = start_init(FAILING_TORCH % statement, CULPRIT=str(culprit))
    pids = running.all_ready()
    running.touch("fail")
    codes = running.codes()
    assert codes[culprit] == code
    # Gloo's exception of a lost peer may come before our TERM.
    assert all(code in (1, 143) for rank, code in enumerate(codes) if rank != culprit)
    survivors = {running.first(rank) for rank in range(3) if rank != culprit}
    assert len(survivors) == 1
    (line,) = survivors
    assert any(line.startswith(f"rank {culprit} failed first: {text}") for text in (said, UNSEEN))
    assert f"process {pids[culprit]})" in line
    report = running.report()
    assert (report["outcome"], report["first_failure"]["rank"]) == ("failed", culprit)


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "raise SystemExit", "ctx.close(); sys.exit()"])
def test_ends_in_good_order_are_no_failures(start_init: Start, end: str) -> None:
    running = start_init(f"ready()\nuntil(f'end-{{rank}}')\n{end}\n")
    running.all_ready()
    for rank in (2, 1, 0):
        running.touch(f"end-{rank}")
        assert running.processes[rank].wait(20) == 0
    assert running.output(1) == running.output(2) == ""
    assert running.summary().endswith("all ended well; exit codes: 0 (ranks 0-2)")


def test_early_end_of_rank_0_is_none(start_init: Start) -> None:
    running = start_init("ready()\nuntil(f'end-{rank}')\n")
    running.all_ready()
    running.touch("end-0")
    assert running.processes[0].wait(30) == 0
    for rank in (1, 2):
        running.touch(f"end-{rank}")
        assert running.processes[rank].wait(30) == 0
        assert running.first(rank) == "rank 0 has ended: from now on no rank is told how another one ends"


def test_term_from_outside_ends_all_at_once_and_is_no_failure(start_init: Start) -> None:
    running = start_init(FAILING_TORCH % "pass", CULPRIT="1")
    pids = running.all_ready()
    os.kill(pids[0], signal.SIGTERM)  # blocked in a collective operation
    assert running.codes() == [143, 143, 143]
    assert running.first(2).startswith("stopped by SIGTERM from outside: rank 0 got it first, on ")
    assert running.report()["outcome"] == "stopped"


def test_uncaught_keyboard_interrupt_is_from_outside(start_init: Start) -> None:
    running = start_init(FAILING_TORCH % "raise KeyboardInterrupt", CULPRIT="1")
    running.all_ready()
    running.touch("fail")
    running.codes()
    assert running.first(2).startswith("stopped by SIGINT from outside: rank 1 got it first, on ")
    assert running.report()["outcome"] == "stopped"


def test_preempted_is_for_scripts_that_ask(start_init: Start) -> None:
    script = """
assert not ctx.preempted
ready()
while not ctx.preempted:
    time.sleep(0.02)
Path(f"saved-{rank}").touch()
sys.exit(0 if rank else 12)
"""
    running = start_init(script)
    pids = running.all_ready()
    os.kill(pids[2], signal.SIGTERM)
    assert running.codes() == [12, 0, 0]
    assert len(list(running.folder.glob("saved-*"))) == 3
    assert "stopped by SIGTERM from outside: rank 2 got it first" in running.summary()


def test_success_after_the_failure_of_another_rank_is_none(start_init: Start) -> None:
    script = """
asked = ctx.preempted
ready()
if rank == 1:
    until("fail")
    os._exit(5)
while not ctx.preempted:
    time.sleep(0.02)
Path(f"saved-{rank}").touch()
"""
    running = start_init(script)
    running.all_ready()
    running.touch("fail")
    codes = running.codes()
    assert codes[1] == 5
    assert codes[0] == codes[2] == 137
    assert len(list(running.folder.glob("saved-*"))) == 2


def test_script_that_ignores_term_is_killed_after_the_grace(start_init: Start) -> None:
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAILING_TORCH % "os._exit(5)"
    running = start_init(script.replace("dist.all_reduce(torch.ones(1))", ""), CULPRIT="1", DISTBOOT_GRACE="1")
    running.all_ready()
    running.touch("fail")
    assert running.codes() == [137, 5, 137]


def test_script_that_was_stopped_or_held_the_lock_for_a_while_is_no_failure(start_init: Start) -> None:
    script = """
ready()
if rank == 1:
    import ctypes
    ctypes.PyDLL(None).sleep(4)  # with Python's lock
until("end")
"""
    running = start_init(script, DISTBOOT_LIFELINE_TIMEOUT="2")
    pids = running.all_ready()
    os.kill(pids[2], signal.SIGSTOP)
    import time

    time.sleep(1)  # shorter than the bound: what is tested is that nothing happens
    os.kill(pids[2], signal.SIGCONT)
    time.sleep(4)
    running.touch("end")
    assert running.codes() == [0, 0, 0]
    assert "all ended well" in running.summary()


def test_script_that_is_stopped_for_ever_is_a_failure(start_init: Start) -> None:
    running = start_init(DISTBOOT_LIFELINE_TIMEOUT="2", DISTBOOT_GRACE="1")
    running.send(1, signal.SIGSTOP)
    assert running.codes()[2] == 143
    assert running.first(2).startswith("rank 1 failed first: stopped by a signal (SIGSTOP?) for 2 s")


def test_script_with_init_under_the_wrapper_has_the_wrappers_lifeline(
    clean_env: dict[str, str], port: int, tmp_path: Path
) -> None:
    script = (
        "import distboot\nctx = distboot.init(join_timeout=60)\nassert not ctx.preempted\n"
        + FAILING_TORCH % "os._exit(4)"
    )
    with job({**clean_env, "CULPRIT": "1"}, port, tmp_path, script) as running:
        running.all_ready()
        running.touch("fail")
        codes = running.codes()
        assert codes[1] == 4
        assert running.first(0) == running.first(2)
        assert running.first(0).startswith("rank 1 failed first: exit code 4")


_UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.skipif(os.geteuid() != 0, reason="a process namespace needs root")
def test_script_that_is_process_1_of_a_container_is_stopped(start_init: Start) -> None:
    running = start_init(FAILING_TORCH % "sys.exit(3)", ranks=2, before=_UNSHARE, CULPRIT="1", DISTBOOT_GRACE="1")
    for rank in range(2):
        until((running.folder / f"pid-{rank}").exists)
    running.touch("fail")
    codes = running.codes()
    assert codes[1] == 3
    assert codes[0] != 0
    assert running.first(0).startswith("rank 1 failed first: exit code 3")


def test_alone_there_is_nobody_to_watch(start_init: Start) -> None:
    running = start_init("", ranks=1, DISTBOOT_REPORT="")  # with one there is something to watch for
    assert running.codes() == [0]
    assert running.output(0) == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_guard_that_cannot_start_is_said_and_the_training_goes_on(
    clean_env: dict[str, str], port: int, tmp_path: Path, rank: int
) -> None:
    begin = f"import os, sys\nif os.environ['RANK'] == '{rank}': sys.executable = '/nonexistent'\n"
    (tmp_path / "sitecustomize.py").write_text(begin)
    env = {**clean_env, "PYTHONPATH": f"{tmp_path}{os.pathsep}{clean_env.get('PYTHONPATH', '')}"}
    with job(env, port, tmp_path, init=True) as running:
        running.all_ready()
        running.touch("end")
        assert running.codes() == [0, 0, 0]
        assert "warning: this rank has no lifeline: " in running.output(rank)
