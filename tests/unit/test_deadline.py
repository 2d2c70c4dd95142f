"""The time limit for C code that holds Python's lock: the process that watches is not a second copy of the script."""

import sys

import pytest
from conftest import Run

_SCRIPT = """
import os, signal, sys, time
from distboot.base.deadline import deadline
from distboot.base.errors import DistbootError
def handler(number, frame):
    os.write(1, b"handled\\n")
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, handler)
{before}
try:
    with deadline({limit}, DistbootError("join-timeout", "it took too long")):
        {block}
except KeyboardInterrupt:
    os.write(1, b"unwound\\n")
os.write(1, b"went on\\n")
"""


@pytest.mark.parametrize(
    ("block", "printed"),
    [
        ("os.killpg(0, signal.SIGINT); time.sleep(20)", "handled\nunwound\nwent on\n"),
        ("pass", "went on\n"),
    ],
    ids=["ctrl-c", "in-time"],
)
def test_only_the_script_itself_takes_a_signal(run: Run, block: str, printed: str) -> None:
    done = run(sys.executable, "-c", _SCRIPT.format(before="os.setpgrp()", limit=60, block=block))
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


def test_script_that_ignores_children_is_not_harmed(run: Run) -> None:
    before = "signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    done = run(sys.executable, "-c", _SCRIPT.format(before=before, limit=60, block="pass"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "went on\n", "")


@pytest.mark.parametrize(
    "end",
    [
        "ctypes.CDLL(None)._exit(1)",
        # As a launcher does that kills whatever the process has left.
        (
            "os.kill(int(open(f'/proc/self/task/{os.getpid()}/children').read()), 9); "
            "ctypes.CDLL(None).exit(1)"
        ),
    ],
    ids=["at once", "without its watcher"],
)
def test_process_that_c_code_ends_says_so_once(run: Run, end: str) -> None:
    script = _SCRIPT.format(before="import ctypes", limit=60, block=end)
    script = script.replace(
        '"it took too long")', '"it took too long"), DistbootError("mpi-failed", "it has ended")'
    )
    done = run(sys.executable, "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (
        1,
        "",
        "distboot: error[mpi-failed]: it has ended\n",
    )
