"""How the other ranks of a wrapper's job stop, and what SIGTERM from outside is: real processes, real signals."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from lifelines import DEFAULT, FAILING, Start, until


def test_survivors_have_the_grace_for_a_checkpoint_and_no_success(start: Start) -> None:
    checkpoint = """
def save(*_):
    time.sleep(1.5)
    Path(f"saved-{rank}").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
"""
    running = start(checkpoint + FAILING % "os._exit(5)", CULPRIT="1")
    running.all_ready()
    running.touch("fail")
    assert running.codes() == [143, 5, 143]
    assert sorted(path.name for path in running.folder.glob("saved-*")) == ["saved-0", "saved-2"]


# Blocked in C with Python's lock held, and stopped: no handler of Python's runs there.
@pytest.mark.parametrize(
    "blocked",
    [
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); until('end')",
        "signal.signal(signal.SIGTERM, print)\nimport ctypes\nctypes.PyDLL(None).sleep(60)",
        "os.kill(os.getpid(), signal.SIGSTOP)",
    ],
    ids=["ignores-TERM", "holds-the-lock", "stopped"],
)
def test_survivor_that_does_not_stop_is_killed_after_the_grace(start: Start, blocked: str) -> None:
    script = """
ready()
if rank == 1:
    until("fail")
    os._exit(5)
if rank == 2:
    exec(%r)
until("end")
"""
    running = start(script % blocked, DISTBOOT_GRACE="1")
    pids = running.all_ready()
    if "STOP" in blocked:
        until(lambda: Path(f"/proc/{pids[2]}/stat").read_text().split()[2] == "T")
    running.touch("fail")
    codes = running.codes()
    assert codes[:2] == [143, 5]
    assert codes[2] in (137, 143)  # who was stopped goes on, and is ended by TERM
    assert running.first(2) == running.first(0)


def test_term_from_outside_stops_all_and_is_no_failure(start: Start) -> None:
    script = """
def stop(*_):
    print("TERM", flush=True)
    sys.exit(0 if rank == 0 else 9)
signal.signal(signal.SIGTERM, stop)
"""
    running = start(script + DEFAULT)
    running.all_ready()
    running.processes[1].terminate()
    assert running.codes() == [0, 9, 9]
    assert [running.output(rank).count("TERM\n") for rank in range(3)] == [1, 1, 1]
    assert running.first(2).startswith("stopped by SIGTERM from outside: rank 1 got it first, on ")
    assert "stopped by SIGTERM from outside" in running.summary()
    assert running.report()["outcome"] == "stopped"


def test_child_that_ignores_term_from_outside_is_killed_after_the_grace(start: Start) -> None:
    running = start("signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + DEFAULT, DISTBOOT_GRACE="1")
    running.all_ready()
    running.processes[1].terminate()
    assert running.codes() == [137, 137, 137]
    assert running.report()["outcome"] == "stopped"


def test_other_signals_are_for_the_script_alone(start: Start) -> None:
    script = "signal.signal(signal.SIGUSR1, lambda *_: Path(f'usr1-{rank}').touch())\n" + DEFAULT
    running = start(script)
    running.all_ready()
    running.processes[1].send_signal(signal.SIGUSR1)
    until((running.folder / "usr1-1").exists)
    running.touch("end")
    assert running.codes() == [0, 0, 0]


def test_what_a_shell_has_started_does_not_outlive_the_job(start: Start) -> None:
    script = """
import subprocess
if rank != 1:
    inner = "import signal, time; signal.signal(15, signal.SIG_IGN); print('in', flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", inner], stdout=subprocess.PIPE)
    child.stdout.readline()
    Path(f"inner-{rank}").write_text(str(child.pid))
"""
    running = start(script + FAILING % "os._exit(5)", CULPRIT="1", DISTBOOT_GRACE="1")
    running.all_ready()
    inner = [int(path.read_text()) for path in running.folder.glob("inner-*")]
    running.touch("fail")
    assert running.codes() == [143, 5, 143]
    assert len(inner) == 2
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in inner))


def test_term_for_rank_0_that_waits_for_the_others_is_no_failure_of_theirs(start: Start) -> None:
    running = start("ready()\nuntil(f'end-{rank}')\n")
    running.all_ready()
    running.touch("end-0")
    until(lambda: not Path(f"/proc/{running.pid(0)}").exists())
    running.processes[0].terminate()
    assert running.processes[0].wait(20) == 0
    for rank in (1, 2):
        running.touch(f"end-{rank}")
    assert running.codes() == [0, 0, 0]
    assert "no failure was seen" in running.summary()


def test_stderr_that_nobody_reads_does_not_keep_a_survivor(start: Start) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 65536)
    os.set_blocking(writing, True)
    running = start(FAILING % "os._exit(5)", stderr=writing, CULPRIT="1")
    running.all_ready()
    running.touch("fail")
    assert running.codes() == [143, 5, 143]
    os.close(reading)
    os.close(writing)
