"""Failure detection under torchrun: every attempt has its own, and torchrun's report of the failure is whole."""

import sys

import pytest
from conftest import Run
from launched import needs_torch

pytestmark = needs_torch


@pytest.mark.all
@pytest.mark.parametrize("init", [True, False])
def test_torchrun_shows_the_first_failure_of_each_attempt(run: Run, init: bool) -> None:
    script = """
import ctypes, os, sys, time
if {init}:
    # Libraries that end slowly, after the exit code of the script is known, as on a busy host
    for _ in range(4):
        ctypes.CDLL(None).__cxa_atexit(ctypes.CDLL(None).sleep, 1, 0)
    import distboot
    ctx = distboot.init("torch", join_timeout=60)
    import torch
    torch.distributed.all_reduce(torch.ones(1))  # in a group of this attempt
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if rank == 1:
    raise ValueError(f"boom of attempt {{attempt}}") if attempt else SystemExit(3)
time.sleep(60)
"""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
    ]
    done = run(
        *torchrun, *(() if init else ("-m", "distboot")), "train.py", train=script.format(init=init)
    )
    assert done.returncode == 1
    firsts = [
        line
        for line in done.stderr.splitlines()
        if "rank 0 on " in line and ": rank 1 failed first: " in line
    ]
    firsts = [line for line in firsts if "summary" not in line]
    assert len(firsts) == 2, done.stderr[-3000:]
    assert "exit code 3" in firsts[0]
    assert "uncaught exception: ValueError: boom of attempt 1" in firsts[1]
    cause = done.stderr.rpartition("Root Cause (first observed failure):")[2]
    assert "rank      : 1 (local_rank: 1)" in cause
    assert "exitcode  : 1 " in cause
    assert "ValueError: boom of attempt 1" in cause
