"""Signals that a script ignores, or handles and goes on: nothing else comes of them, in this round and later."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from conftest import Run
from supervised import Job, Start, until

SIGNALS = ("HUP", "INT", "QUIT")
# How the script outlives a signal: as under nohup, or with a handler of its own.
BEFORE = {
    "ignored": ("sh", "-c", 'trap "" HUP INT QUIT; exec "$@"', "sh"),
    "handled": (),
}
_SCRIPT = """
round_ = int(os.environ["DISTBOOT_RESTART_COUNT"])
print("round", round_, "rank", rank, flush=True)
def outlive(number, frame):
    Path(f"got-{rank}").touch()
if os.environ["HOW"] == "handled":
    for name in ("HUP", "INT", "QUIT"):
        signal.signal(getattr(signal, "SIG" + name), outlive)
ready()
if round_ == 0:
    if rank == 1:
        until("fail")
        os.kill(os.getpid(), signal.SIGKILL)
    until("end")
"""
_ENV = {"DISTBOOT_MAX_RESTARTS": "2"}


def _is_passed_on(job: Job, rank: int, how: str) -> Callable[[], bool]:
    """Whether the wrapper of a rank has taken a signal, and its script has it."""
    status = Path(f"/proc/{job.processes[rank].pid}/status")

    def holds() -> bool:
        (pending,) = re.findall(r"^ShdPnd:\s*(\w+)$", status.read_text(), re.MULTILINE)
        return not int(pending, 16) and (how == "ignored" or (job.folder / f"got-{rank}").exists())

    return holds


def _rounds(job: Job, rank: int) -> list[int]:
    return [
        int(number) for number in re.findall(r"^round (\d+) rank", job.output(rank), re.MULTILINE)
    ]


@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("how", BEFORE)
def test_outlived_signal_leaves_the_restarts_as_they_are(start: Start, how: str, name: str) -> None:
    job = start(_SCRIPT, 2, before=BEFORE[how], **_ENV, HOW=how)
    job.all_ready()
    for rank in (0, 1):
        os.kill(job.processes[rank].pid, signal.Signals[f"SIG{name}"])
        until(_is_passed_on(job, rank, how))
    job.touch("fail")
    assert job.codes() == [0, 0]
    assert [_rounds(job, rank) for rank in (0, 1)] == [[0, 1], [0, 1]]
    assert job.report()["outcome"] == "ended"


def test_signal_that_ends_a_script_ends_the_restarts(start: Start) -> None:
    job = start(_SCRIPT, 2, **_ENV, HOW="neither")
    job.all_ready()
    os.kill(job.processes[1].pid, signal.SIGHUP)
    assert job.codes() == [129, 129]
    assert [_rounds(job, rank) for rank in (0, 1)] == [[0], [0]]
    assert "stopped by an external SIGHUP: rank 1 got it first" in job.output(0)


@pytest.mark.parametrize("name", ["HUP", "QUIT"])
def test_outlived_signal_between_two_rounds_has_no_effect(start: Start, name: str) -> None:
    job = start(_SCRIPT, 2, **_ENV, HOW="handled", DISTBOOT_RESTART_DELAY="2")
    job.all_ready()
    os.kill(job.processes[0].pid, signal.Signals[f"SIG{name}"])
    until(_is_passed_on(job, 0, "handled"))
    job.touch("fail")
    until(lambda: "restart 1 of 2: " in job.output(0))
    os.kill(job.processes[0].pid, signal.Signals[f"SIG{name}"])
    assert job.codes() == [0, 0]
    assert f"SIG{name} arrived while no rank was running, and had no effect" in job.output(0)


@pytest.mark.parametrize("name", SIGNALS)
def test_ignored_signal_after_the_script_ends_nothing(start: Start, name: str) -> None:
    script = _SCRIPT.replace('    until("end")', '    if rank: until("end")')
    job = start(script, 2, before=BEFORE["ignored"], **_ENV, HOW="ignored")
    last = job.pid(0)
    until(lambda: not Path(f"/proc/{last}").exists())
    os.kill(job.processes[0].pid, signal.Signals[f"SIG{name}"])
    until(_is_passed_on(job, 0, "ignored"))
    assert job.fail() == [0, 0]
    assert _rounds(job, 0) == [0, 1]


_OF_NODE = """
import os, signal, sys, time
rank, round_ = int(os.environ["RANK"]), int(os.environ["DISTBOOT_RESTART_COUNT"])
print("round", round_, "rank", rank, flush=True)
if round_ == 0:
    signal.signal(signal.SIGHUP, lambda *_: open(f"got-{rank}", "w"))
    open(f"ready-{rank}", "w")
    while not os.path.exists("got-0") or not os.path.exists("got-1"):
        if rank == 0 and os.path.exists("ready-1"):
            os.kill(os.getppid(), signal.SIGHUP)
        time.sleep(0.05)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(99)
"""


def test_outlived_signal_leaves_restarts_of_a_node(distboot: Run) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "train.py")
    done = distboot(*options, train=_OF_NODE)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"round \d rank \d", done.stdout)) == [
        f"round {number} rank {rank}" for number in (0, 1) for rank in (0, 1)
    ]


_LATER = "signal.signal(signal.SIGINT, lambda *_: open('got', 'w')); open('ready', 'w')\n"
LATER: dict[str, tuple[Sequence[str], int]] = {
    "killed": (("until('fail'); os.kill(os.getpid(), signal.SIGKILL)",), 137),
    "well": (("until('fail')",), 0),
}


@pytest.mark.parametrize("end", LATER)
def test_outlived_signal_leaves_the_end_alone(
    clean_env: dict[str, str], tmp_path: Path, end: str
) -> None:
    """The exit code is that of the script, and what it has left behind stays, as without the signal."""
    lines, code = LATER[end]
    left = (
        "import subprocess; left = subprocess.Popen(['sleep', '99']); print(left.pid, flush=True)\n"
    )
    until_ = "def until(name):\n    while not os.access(name, os.F_OK): time.sleep(0.02)\n"
    script = f"import os, signal, time\n{until_}{left}{_LATER}{lines[0]}\n"
    command = [sys.executable, "-m", "distboot", "run", "--", sys.executable, "-c", script]
    with subprocess.Popen(
        command, cwd=tmp_path, env=clean_env, stdout=subprocess.PIPE, text=True
    ) as wrapper:
        assert wrapper.stdout is not None
        left_behind = int(wrapper.stdout.readline())
        until((tmp_path / "ready").exists)
        os.kill(wrapper.pid, signal.SIGINT)
        until((tmp_path / "got").exists)
        (tmp_path / "fail").touch()
        assert wrapper.wait(10) % 256 == code
        os.kill(left_behind, signal.SIGKILL)  # it is there
