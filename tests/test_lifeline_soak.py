"""The soak of `bench/lifeline.py`, shortened: load, ranks that are stopped or hold their lock a while; no alarm."""

from __future__ import annotations

import sys

from conftest import ROOT, Run
from launched import needs_torch

pytestmark = needs_torch


def test_busy_ranks_raise_no_alarm(run: Run) -> None:
    soak = [sys.executable, str(ROOT / "bench" / "lifeline.py"), "soak", "2", "--seconds", "20", "--load", "20"]
    done = run(*soak, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'alarms': 0" in done.stdout
