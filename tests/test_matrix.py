"""The framework matrix: every example under every launcher trains, and to the same accuracy.

A run of the tests takes two cells of each row, and each launcher. All of it, some 40 minutes, and then
`docs/matrix.md`:
    DISTBOOT_WRITE_MATRIX=1 make test ARGS=tests/test_matrix.py
With -k, only the cells that were run are written.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from hosts import missing_for_slurm
from launched import needs_torch
from matrix import LAUNCHERS, LEAST, ROWS, SPREAD, Row, missing_for, run, senseless
from matrix_page import accuracies, cells, page, text

pytestmark = needs_torch

DOCS = ROOT / "docs" / "matrix.md"
WRITE = bool(os.environ.get("DISTBOOT_WRITE_MATRIX"))
# Two launchers for each row, so that each launcher has its turn.
USUAL = {row.name: (LAUNCHERS[1 + index % 12], LAUNCHERS[1 + (index + 5) % 12]) for index, row in enumerate(ROWS)}
CELLS = [(row, launcher) for row in ROWS for launcher in LAUNCHERS if WRITE or launcher in USUAL[row.name]]

_texts: dict[tuple[str, str], str] = {}


@pytest.mark.parametrize(("row", "launcher"), CELLS, ids=[f"{row.name}-{launcher}" for row, launcher in CELLS])
def test_cell(request: pytest.FixtureRequest, tmp_path: Path, row: Row, launcher: str) -> None:
    clean_env, port = (request.getfixturevalue(name) for name in ("clean_env", "port"))
    missing = missing_for_slurm() if launcher == "srun" else missing_for(launcher)
    if missing:
        pytest.skip(missing)
    slurm = request.getfixturevalue("slurm") if launcher == "srun" else None
    outcome = run(row, launcher, clean_env, port, slurm=slurm, folder=tmp_path)
    if launcher == "deepspeed":  # which leaves its shared memory behind
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            left.unlink()
    _texts[row.name, launcher] = "**failed**"  # unless it is as it should be
    sys.stdout.write(outcome.output[-8000:])
    refusal = senseless(row, launcher)
    if refusal:
        assert outcome.exit_code != 0
        assert f"error[{refusal}]" in outcome.output
    else:
        assert (outcome.exit_code, outcome.ranks) == (0, 1 if launcher == "one process" else row.ranks)
        assert outcome.accuracy >= LEAST
    _texts[row.name, launcher] = text(row, launcher, outcome)


def test_page_has_all_cells() -> None:
    found = {**(cells(DOCS.read_text()) if DOCS.exists() else {}), **_texts}  # what was not run now stays as it is
    if WRITE:
        DOCS.write_text(page(found))
    assert page(cells(DOCS.read_text())) == DOCS.read_text()
    for row in ROWS:
        reached = accuracies(found, row)
        assert max(reached, default=0) - min(reached, default=0) <= SPREAD, f"{row.name}: {reached}"
