"""The fault matrix: every fault, with `init` and with the wrapper, under every launcher, over two hosts.

A run of the tests takes a part of it (`_is_usual`). All of it, and the table in `docs/faults.md`, in NN minutes:
    DISTBOOT_WRITE_FAULTS=1 make test ARGS=tests/test_faults.py
"""

from __future__ import annotations

import itertools
import os
import shutil
from pathlib import Path

import pytest
from faults import FAULTS, Fault
from faults_cell import check, run, text
from faults_job import LAUNCHERS, WAYS
from hosts import Hosts, missing_for_hosts
from launched import needs_torch

pytestmark = [pytest.mark.skipif(missing_for_hosts() is not None, reason=str(missing_for_hosts())), needs_torch]

DOCS = Path(__file__).parent.parent / "docs" / "faults.md"
WRITE = bool(os.environ.get("DISTBOOT_WRITE_FAULTS"))
CELLS = [(fault, way, launcher) for way in WAYS for launcher in LAUNCHERS for fault in FAULTS]

_index = itertools.count()
_texts: dict[tuple[str, str, str], str] = {}


@pytest.mark.parametrize(
    ("fault", "way", "launcher"), CELLS, ids=lambda value: value.name if isinstance(value, Fault) else value
)
def test_fault(hosts: Hosts, request: pytest.FixtureRequest, fault: Fault, way: str, launcher: str) -> None:
    if fault.missing:
        pytest.skip(fault.missing)
    if launcher == "srun":
        request.getfixturevalue("slurm")
    shutil.copy(Path(__file__).parent / "faults_worker.py", hosts.shared / "worker.py")
    outcome = run(hosts, fault, way, launcher, next(_index))
    key = (fault.name, way, launcher)
    _texts[key] = f"**{text(outcome, fault)}**"  # unless it is as it should be
    print(outcome.output[-8000:], outcome, _texts[key], sep="\n")
    check(outcome, fault, launcher)
    _texts[key] = text(outcome, fault)
