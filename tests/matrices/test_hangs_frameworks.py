"""A rank of each example that loads its data slowly is named by rank 0, with where it is, until it goes on."""

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import ROOT
from launched import MPI_ENV, TWO_OF_MPIRUN, needs_mpirun, needs_torch
from supervised import Started, until
from test_matrix import ROWS, Row

pytestmark = [pytest.mark.all, needs_torch, needs_mpirun]

AFTER = 5  # seconds: of a rank that counts nothing two stacks are compared, which takes three more
LIMIT = 90
# Instead of the one of the examples: rank 1 sleeps in it until there is a file beside it.
_DIGITS = """
import os, time
from pathlib import Path
import real_digits
from real_digits import *
def load():
    while os.environ["RANK"] == "1" and not Path(__file__).with_name("end").exists():
        time.sleep(0.1)
    return real_digits.load()
"""
# A parameter server has no collective operations, and torch's examples are in test_hangs.py.
FRAMEWORKS = [
    row
    for row in ROWS
    if row.ranks == 2 and row.name not in ("torch", "torch, through the wrapper")
]
NAMED = (
    r"waiting for rank 1 \(\S+\) for \d+ s(, judging by the stacks)?: it is in "
    r"load \(digits.py:8\); rank 0 wait"
)
# Python calls what JAX has compiled without a frame of JAX.
ALL = (
    r"no rank has moved for \d+ s, judging by the stacks: rank 0 is in \S+ "
    r"\(\S+\), rank 1 is in load \(digits."
)


@pytest.mark.parametrize("row", FRAMEWORKS, ids=[row.name for row in FRAMEWORKS])
def test_rank_that_loads_slowly_is_named(
    tmp_path: Path, clean_env: Mapping[str, str], row: Row
) -> None:
    script = row.example.split()[0]
    shutil.copy(ROOT / "examples" / script, tmp_path)
    shutil.copy(ROOT / "examples" / "digits.py", tmp_path / "real_digits.py")
    (tmp_path / "digits.py").write_text(_DIGITS)
    command = [word.replace(str(ROOT / "examples"), str(tmp_path)) for word in row.command()]
    env = {
        **clean_env,
        **MPI_ENV,
        "DISTBOOT_LATE_AFTER": str(AFTER),
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }
    job = Started(tmp_path, [*TWO_OF_MPIRUN, *command], [env])
    try:
        until(lambda: re.search(ALL if row.name == "JAX" else NAMED, job.output(0)), LIMIT)
        (tmp_path / "end").touch()
        assert job.codes(LIMIT) == [0], job.output(0)
    finally:
        job.end()
    assert re.search(r": ranks? (0-)?1 continues?$", job.output(0), re.MULTILINE)
