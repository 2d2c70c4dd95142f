"""The picture on README.md: what a terminal shows of a real job that hangs.

`DISTBOOT_WRITE_PICTURES=1 pytest tests/docs/test_readme_picture.py` makes it anew, in a minute and a half.
"""

import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from conftest import ROOT
from launched import needs_torch
from terminal_picture import lines_of, picture, rows_of
from terminals import terminal

PICTURE = ROOT / "docs" / "pictures" / "hang.svg"
TITLE = "A job of four ranks hangs, and distboot says which rank holds it up, and where it is."
WRITES = bool(os.environ.get("DISTBOOT_WRITE_PICTURES"))
TYPED = "python -m distboot --nproc-per-node 4 train.py"
DATA = """\
import time


def load_batch(rank, step):
    if rank == 3 and step == 4:
        time.sleep(3600)  # a read from shared storage that never returns
    return [float(rank + step)]
"""
TRAIN = """\
import torch
import torch.distributed as dist
from data import load_batch

import distboot

ctx = distboot.init()
ctx.barrier()
for step in range(1, 100):
    batch = torch.tensor(load_batch(ctx.rank, step))
    dist.all_reduce(batch)
    if ctx.is_main:
        print(f"step {step}: loss {8 / (step + batch.item()):.3f}", flush=True)
"""


def _shown(folder: Path, environ: Mapping[str, str]) -> str:
    """What the terminal shows until the stacks of all ranks are there."""
    (folder / "data.py").write_text(DATA)
    (folder / "train.py").write_text(TRAIN)
    late_after = "60" if WRITES else "5"
    names = {"DISTBOOT_HOST": "node-0", "DISTBOOT_LATE_AFTER": late_after}
    command = [sys.executable, "-m", "distboot", *TYPED.split()[3:]]
    with terminal(command, {**environ, **names}, folder=folder, limit=180) as seen:
        seen.wait_for("| ranks 0-2: ")
        seen.wait_for("\n")
        shown = seen.text
    shown = shown.replace(f"on {socket.gethostname()}: ", "on node-0: ").replace("\r", "")
    lines = [line.rpartition("\x1b[K")[2] for line in shown.splitlines()]
    return "\n".join([f"$ {TYPED}", *lines])


def _without_seconds(rows: list[str]) -> str:
    """The lines as one text, as they are wrapped elsewhere where a number is longer."""
    text = " ".join(" ".join(rows).split())
    return re.sub(r"for \d+ s", "for … s", text)


@pytest.mark.all  # four ranks with torch, which hang for five seconds
@needs_torch
def test_picture_is_what_a_hang_shows(tmp_path: Path, clean_env: Mapping[str, str]) -> None:
    shown = _shown(tmp_path, clean_env)
    if WRITES:
        PICTURE.write_text(picture(shown, TITLE))
    drawn = lines_of(PICTURE.read_text())
    assert _without_seconds(drawn) == _without_seconds(rows_of(shown))
    assert "waiting for rank 3 (node-0) for … s: it is in load_batch (data.py:6)" in (
        _without_seconds(drawn)
    )
