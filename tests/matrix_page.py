"""`docs/matrix.md`: the framework matrix as a page."""

from __future__ import annotations

from collections.abc import Mapping

from matrix import LAUNCHERS, LEAST, ROWS, SPREAD, Outcome, Row, senseless

_HEAD = f"""\
# Every framework under every launcher

Each example below was started under each launcher, and this page is what the tests saw:

```console
$ DISTBOOT_WRITE_MATRIX=1 make test ARGS=tests/test_matrix.py
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
    """A cell."""
    refusal = senseless(row, launcher)
    return f"refused: `{refusal}`" if refusal else f"{outcome.ranks}: {outcome.accuracy:.3f}"


def page(texts: Mapping[tuple[str, str], str]) -> str:
    """The page, from the texts of the cells by row and launcher."""
    lines = [f"| | {' | '.join(LAUNCHERS)} |", "|---" * (len(LAUNCHERS) + 1) + "|"]
    for row in ROWS:
        cells = [texts.get((row.name, launcher), "-") for launcher in LAUNCHERS]
        lines.append(f"| {row.title} | {' | '.join(cells)} |")
    return "\n".join([_HEAD, *lines, "", _FOOT])


def cells(page_text: str) -> dict[tuple[str, str], str]:
    """The texts of the cells of a page."""
    names = {row.title: row.name for row in ROWS}
    found = {}
    for line in page_text.splitlines():
        title, *texts = line.strip("| ").split(" | ")
        if title in names:
            found.update({(names[title], launcher): one for launcher, one in zip(LAUNCHERS, texts, strict=True)})
    return found


def accuracies(texts: Mapping[tuple[str, str], str], row: Row) -> list[float]:
    """Those of a row's cells that trained."""
    mine = [texts.get((row.name, launcher), "-") for launcher in LAUNCHERS]
    return [float(one.split(": ")[1]) for one in mine if one[:1].isdigit()]
