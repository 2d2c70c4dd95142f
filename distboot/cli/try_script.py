"""The command `try`: it starts all ranks of each launch here, looks on, and prints what would go wrong elsewhere."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import DistbootError
from ..host import accelerators, free_port
from ..text import counted, ranks_said
from ..trial import OF, Launch, parse, run
from .main import Parser, emit

_DEFAULT = ("mpirun 1x2", "mpirun 2x2", "srun 2x2", "torchrun 2x2", "kubeflow 3+1")
_LOOPBACK = ("localhost", "127.", "tcp://localhost", "tcp://127.")
_SHOWN = 20  # lines of the output of a launch that failed
_HEAD = ("runs", "device", "hangs", "ends")


def try_script(arguments: list[str]) -> int:
    """`try`: the exit code is 1 if anything is wrong, or nothing could be tried, else 0."""
    own, command = _options(arguments)
    launches = [parse(text) for text in own.shapes or _DEFAULT]
    is_good, is_tried, width = True, False, max(len(launch.text) for launch in launches)
    emit(_row("as".ljust(width), *_HEAD))
    for launch in launches:
        found = _tried(launch, command, own.timeout)
        emit(_row(launch.text.ljust(width), *found.columns()))
        for line in found.lines():
            emit(f"  {line}")
        is_good, is_tried = is_good and not found.is_bad, is_tried or found.is_tried
    return 0 if is_good and is_tried else 1


def _row(*columns: str) -> str:
    return "  ".join(f"{column:<8}" for column in columns).rstrip()


def _options(arguments: list[str]) -> tuple[Any, list[str]]:
    usage = "python -m distboot try [options] script.py | -m module | -- command  [arguments …]"
    parser = Parser(
        "try", "Run a script here as other launchers would run it elsewhere, and report what goes wrong.", usage
    )
    parser.add_argument(
        "--as",
        dest="shapes",
        metavar="LAUNCH",
        action="append",
        help=f"launcher, and nodes x ranks per node, in quotes: {', '.join(OF)}; may be given several times "
        f"(default: {', '.join(_DEFAULT)})",
    )
    parser.add_argument(
        "--timeout", metavar="S", type=float, default=120.0, help="seconds for one launch (default: 120)"
    )
    words, command = parser.split(arguments)
    own = parser.parse_args(words)
    if not command:
        raise DistbootError("usage", "there is no script to try", usage)
    if not 0 < own.timeout < 1e6:
        raise DistbootError("usage", f"--timeout {own.timeout:g} is not a number of seconds", "--timeout 300, say")
    return own, command


def _tried(launch: Launch, command: Sequence[str], limit: float) -> _Found:
    with tempfile.TemporaryDirectory(prefix="distboot-try-") as name:
        folder, begin = Path(name), time.monotonic()
        found = launch.environs(free_port(), os.environ)
        environs = [_environ(launch, rank // launch.per_node, own, folder) for rank, own in enumerate(found)]
        with (folder / "output").open("wb") as output:
            wrapper = [sys.executable, "-m", "distboot", "run", *command]
            codes = run(wrapper, environs, limit, stdout=output, stderr=output)
        return _Found(launch, codes, time.monotonic() - begin, folder)


def _environ(launch: Launch, node: int, found: dict[str, str], folder: Path) -> dict[str, str]:
    disk = folder / f"node-{node}"  # what is there the other nodes do not have
    disk.mkdir(exist_ok=True)
    visible = accelerators.visible(os.environ)
    if len(visible) >= launch.nodes:
        share = len(visible) // launch.nodes
        found["CUDA_VISIBLE_DEVICES"] = ",".join(visible[share * node : share * (node + 1)])
    ours = {"DISTBOOT_REPORT": str(folder / "report.json"), "DISTBOOT_TRY": str(folder), "TMPDIR": str(disk)}
    hangs = {"DISTBOOT_LATE_AFTER": "10", "DISTBOOT_HANG": "stop", "DISTBOOT_HANG_AFTER": "25"}  # soon
    return {"OMP_NUM_THREADS": "1", "DISTBOOT_GRACE": "2", "DISTBOOT_JOIN_TIMEOUT": "60", **hangs, **found, **ours}


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class _Found:
    """What one launch has shown: the exit codes, by rank, the report of the job, and what the hook tells of ranks."""

    def __init__(self, launch: Launch, codes: list[int | None], seconds: float, folder: Path) -> None:
        self._launch, self._codes, self._seconds = launch, codes, seconds
        self._output = (folder / "output").read_text(errors="replace")
        self._told = [(rank, one) for rank in range(len(codes)) for one in _lines(folder / f"rank-{rank}")]
        path = folder / "report.json"
        report = json.loads(path.read_text()) if path.exists() else {}
        self._why: str = (report.get("first_failure") or {}).get("text", "")
        states = [rank.get("state") for rank in report.get("ranks", ())]
        is_early = "exited with code 0 while" in self._why
        self._hangs = "no end within the time limit" if None in codes else self._why if "late" in states else ""
        self._apart = (self._why if is_early else "") or self._groups()
        self._device, self._meets = self._devices(), self._loopback()
        self.is_tried = not any("mpi" in one for _, one in self._told)

    @property
    def is_bad(self) -> bool:
        """Whether anything went wrong, as far as it could be tried."""
        return self.is_tried and any((*self._codes, self._hangs, self._apart, self._device, self._meets))

    def columns(self) -> list[str]:
        """What the table says, as `_HEAD` has it."""
        if not self.is_tried:
            return ["-"] * 4
        return [
            "no" if any(code != 0 for code in self._codes) or self._meets else f"{self._seconds:.0f} s",
            "wrong" if self._device else "ok" if any("device" in one for _, one in self._told) else "-",
            "yes" if self._hangs else "no",
            "apart" if self._apart else "together",
        ]

    def lines(self) -> list[str]:
        """What is wrong, a line for each; the end of the output if nothing else says it."""
        if not self.is_tried:
            return ["not tried: the script calls MPI_Init, for which the real mpirun (or srun --mpi=…) is needed"]
        said = list(dict.fromkeys(filter(None, (self._why, self._hangs, self._apart, self._device, self._meets))))
        if said or set(self._codes) == {0}:
            return said
        return self._output.splitlines()[-_SHOWN:]

    def _devices(self) -> str:
        """Ranks that take a device that their node has not, or that another one there has."""
        taken: dict[tuple[int, object, int], int] = {}
        for rank, one in self._told:
            if one.get("device") is None:
                continue
            number, node = one["device"], rank // self._launch.per_node
            count = len(one["visible"].split(",")) if one.get("visible") else self._launch.per_node
            if number >= count:
                has = counted(count, "accelerator")
                return f"rank {rank} takes device {number} of a node that has {has} ({one['at']}): use the local rank"
            other = taken.setdefault((node, one.get("visible"), number), rank)
            if other != rank and count > 1:
                return f"ranks {other} and {rank} of node {node} both take device {number} ({one['at']})"
        return ""

    def _loopback(self) -> str:
        """A rank that looks for rank 0 on its own node."""
        for rank, one in self._told:
            if self._launch.nodes > 1 and str(one.get("meets", "")).startswith(_LOOPBACK):
                return f"rank {rank} looks for rank 0 at {one['meets']}, which is each node itself ({one['at']})"
        return ""

    def _groups(self) -> str:
        """Process groups that are not of all ranks."""
        sizes = defaultdict(list)
        for rank, one in self._told:
            if one.get("size") not in (None, len(self._codes)):
                sizes[one["size"]].append(rank)
        return "; ".join(f"{ranks_said(ranks)} trained in a group of {size}" for size, ranks in sizes.items())
