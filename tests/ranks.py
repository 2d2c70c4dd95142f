"""Ranks that are started by hand, each with its own variables, and run one script to its end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WRAPPER = [sys.executable, "-m", "distboot", "run"]


@dataclass(frozen=True)
class Rank:
    """How a rank has ended, and what it has printed."""

    code: int
    out: str
    err: str

    def line(self) -> dict[str, Any]:
        """The one line of JSON that it has printed, having ended well."""
        assert self.code == 0, self.out + self.err
        (found,) = [line for line in self.out.splitlines() if line.startswith("{")]
        line: dict[str, Any] = json.loads(found)
        return line


def run_ranks(
    script: str,
    env: Mapping[str, str],
    port: int,
    folder: Path,
    *,
    before: Sequence[str] = (sys.executable,),
    places: Sequence[Mapping[str, str]] = ({}, {}),
) -> list[Rank]:
    """Run a script as one job, one rank for each of the places.

    Args:
        script: of all ranks.
        env: their environment.
        port: where rank 0 is to listen.
        folder: their working directory.
        before: what to run it with.
        places: the variables of each rank besides RANK.
    """
    path = folder / "train.py"
    path.write_text(script)
    job = {"WORLD_SIZE": str(len(places)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [*before, str(path)], env={**env, **job, "RANK": str(rank), **place}, cwd=folder,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank, place in enumerate(places)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=180) for process in started]
        return [Rank(process.returncode, *text) for process, text in zip(started, said, strict=True)]
    finally:
        for process in started:
            process.kill()
            process.wait(10)
