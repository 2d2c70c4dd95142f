"""Failure detection under torchrun: every attempt has its own, and torchrun's report of the failure is whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launched import needs_torch

pytestmark = needs_torch

SCRIPT = """
import os, sys, time
if {init}:
    import distboot
    ctx = distboot.init("torch", join_timeout=60)
    import torch
    torch.distributed.all_reduce(torch.ones(1))  # in a group of this attempt
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if rank == 1 and attempt < 2:
    raise ValueError(f"boom of attempt {{attempt}}") if attempt else SystemExit(3)
time.sleep(1 if attempt == 2 else 60)
os.write(1, f"attempt {{attempt}} rank {{rank}} done\\n".encode())  # one write: the ranks share the pipe
"""
_BOTH = pytest.mark.parametrize(
    "init", [pytest.param(True, id="init", marks=pytest.mark.all), pytest.param(False, id="wrapper")]
)


def _torchrun(env: dict[str, str], folder: Path, restarts: int, *, init: bool) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT.format(init=init))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
        *(f"--max-restarts={restarts}", *(() if init else ("-m", "distboot")), "train.py"),
    ]
    more = {"OMP_NUM_THREADS": "1", "DISTBOOT_REPORT": "report.json"}
    return subprocess.run(
        command, env={**env, **more}, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


@_BOTH
def test_every_attempt_has_a_supervision_of_its_own(clean_env: dict[str, str], tmp_path: Path, init: bool) -> None:
    done = _torchrun(clean_env, tmp_path, 2, init=init)
    assert done.returncode == 0, done.stderr[-3000:]
    firsts = [line for line in done.stderr.splitlines() if "rank 0 on " in line and ": rank 1 failed first: " in line]
    firsts = [line for line in firsts if "summary" not in line]
    assert len(firsts) == 2, done.stderr[-3000:]
    assert "exit code 3" in firsts[0]
    assert "uncaught exception: ValueError: boom of attempt 1" in firsts[1]
    assert "all ended well" in done.stderr
    assert sorted(done.stdout.splitlines()) == ["attempt 2 rank 0 done", "attempt 2 rank 1 done"]


@_BOTH
def test_torchrun_shows_who_failed_first_with_the_traceback(
    clean_env: dict[str, str], tmp_path: Path, init: bool
) -> None:
    done = _torchrun(clean_env, tmp_path, 1, init=init)
    assert done.returncode == 1
    cause = done.stderr.rpartition("Root Cause (first observed failure):")[2]
    assert "rank      : 1 (local_rank: 1)" in cause
    assert "exitcode  : 1 " in cause
    assert "ValueError: boom of attempt 1" in cause
