"""The framework matrix: every example under every launcher trains, and to the same accuracy.

`make test-all` takes two cells of each row, and each launcher. `make matrix` runs all of it, some 40 minutes, and
writes docs/matrix.md; with ARGS="-k …" only the cells that were run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import ROOT
from hosts import missing_for_slurm
from launched import needs_torch
from matrix import LAUNCHERS, LEAST, ROWS, SPREAD, Outcome, Row, missing_for, run, senseless

_HEAD = f"""\
# Every framework under every launcher

Each example below was started under each launcher, and this page is what the tests saw:

```console
$ make matrix
```

All train on the same 1440 images of scikit-learn's digits; a cell has the number of ranks and the accuracy over the
357 others, which must be {LEAST} or better, and within {SPREAD} of all others of its row. The launchers are the real
ones: Open MPI 5.0, Open MPI 4.1, MPICH 4.0, Slurm's srun (two hosts, but for three ranks one), horovodrun with Gloo.
"By hand" are processes with `RANK`, `WORLD_SIZE` and the address. The shapes of Azure ML are its variables, set by
hand, as there is no Azure ML in a test: an MPI job is Open MPI 5, a PyTorch job has `RANK`, a TensorFlow job
`TF_CONFIG`.

"refused" is a pair that makes no sense, and the code of the error that says so. A cell **in bold** is not what it
should be, and "-" could not be had on the machine.
"""

_FOOT = """\
## How to read it

- mpi4py needs an MPI launcher: elsewhere each process would be a world of its own, and that is refused.
- TensorFlow's parameter servers take three ranks: chief, worker, and one parameter server. On one process it trains
  with the default strategy.
- In the shape of Azure ML's TensorFlow job the cluster is that of the given `TF_CONFIG`.
- The scripts "through the wrapper" do not import distboot: `python -m distboot run script.py` under each launcher.
"""


def text(row: Row, launcher: str, outcome: Outcome) -> str:
    refusal = senseless(row, launcher)
    return f"refused: `{refusal}`" if refusal else f"{outcome.ranks}: {outcome.accuracy:.3f}"


def page(texts: Mapping[tuple[str, str], str]) -> str:
    lines = [f"| | {' | '.join(LAUNCHERS)} |", "|---" * (len(LAUNCHERS) + 1) + "|"]
    for row in ROWS:
        cells = [texts.get((row.name, launcher), "-") for launcher in LAUNCHERS]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    return "\n".join([_HEAD, *lines, "", _FOOT])


def cells(page_text: str) -> dict[tuple[str, str], str]:
    names = {row.title: row.name for row in ROWS}
    found = {}
    for line in page_text.splitlines():
        title, *texts = line.strip("| ").split(" | ")
        if title in names:
            found.update({(names[title], launcher): one for launcher, one in zip(LAUNCHERS, texts, strict=True)})
    return found


def accuracies(texts: Mapping[tuple[str, str], str], row: Row) -> list[float]:
    mine = [texts.get((row.name, launcher), "-") for launcher in LAUNCHERS]
    return [float(one.split(": ")[1]) for one in mine if one[:1].isdigit()]


pytestmark = [pytest.mark.all, needs_torch]

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
