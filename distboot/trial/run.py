"""The command `try`: it starts all ranks of each launch here, looks on, and prints what would go wrong elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..cli.main import Parser, emit
from ..errors import DistbootError
from ..host import accelerators, free_port
from ..text import ranks_said
from .launches import OF, Launch, Process, environ_of, parse

_DEFAULT = ("mpirun 1x2", "mpirun 2x2", "srun 2x2", "torchrun 2x2", "kubeflow 3+1")
_HOOK = str(Path(__file__).parent / "injected")
_LATE, _HANG = "10", "25"  # seconds until a rank is late, and until nothing has moved for so long that it is a hang
_STOPPING = 10.0  # seconds for what has to end
_LOOPBACK = ("localhost", "127.", "tcp://localhost", "tcp://127.")
_SHOWN = 20  # lines of the output of a launch that failed
_HEAD = ("as", "runs", "device", "hangs", "ends")


def try_script(arguments: list[str]) -> int:
    """`try`: the exit code is 1 if anything is wrong, or nothing could be tried, else 0."""
    own, command = _options(arguments)
    launches = [parse(text) for text in own.shapes or _DEFAULT]
    is_good, is_tried, width = True, False, max(len(launch.text) for launch in launches)
    emit("  ".join([_HEAD[0].ljust(width), *(f"{name:<8}" for name in _HEAD[1:])]).rstrip())
    for launch in launches:
        found = _Found(*_tried(launch, command, own.timeout))
        row = [launch.text.ljust(width), *(f"{found.column(name):<8}" for name in _HEAD[1:])]
        emit("  ".join(row).rstrip())
        for line in found.lines():
            emit(f"  {line}")
        is_good, is_tried = is_good and not found.is_bad, is_tried or found.is_tried
    return 0 if is_good and is_tried else 1


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
    split = 0  # our options end where the script begins
    while split < len(arguments) and arguments[split].startswith("--") and arguments[split] != "--":
        split += 1 + ("=" not in arguments[split] and parser.takes_value(arguments[split]))
    own, command = parser.parse_args(arguments[:split]), arguments[split:]
    if not command:
        raise DistbootError("usage", "there is no script to try", usage)
    if not 0 < own.timeout < 1e6:
        raise DistbootError("usage", f"--timeout {own.timeout:g} is not a number of seconds", "--timeout 300, say")
    return own, command


class Ends(NamedTuple):
    """How the ranks of a launch have ended."""

    codes: list[int | None]  # by rank; None: not within the time limit
    seconds: float
    output: str


def _tried(launch: Launch, command: Sequence[str], limit: float) -> tuple[Launch, Ends, Mapping[str, Any], list[Any]]:
    """One launch: how its ranks ended, the report of the job, and what the hook told of each rank."""
    with tempfile.TemporaryDirectory(prefix="distboot-try-") as name:
        folder = Path(name)
        processes = launch.processes(free_port())
        with (folder / "output").open("wb") as output:
            begin = time.monotonic()
            started = [
                subprocess.Popen(
                    [sys.executable, "-m", "distboot", "run", *command], env=_environ(launch, process, folder),
                    stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
                )
                for process in processes
            ]  # fmt: skip
            codes = _codes(started, begin + limit)
        ends = Ends(codes, time.monotonic() - begin, (folder / "output").read_text(errors="replace"))
        told = [_lines(folder / f"rank-{process.rank}") for process in processes]
        report = folder / "report.json"
        return launch, ends, json.loads(report.read_text()) if report.exists() else {}, told


def _environ(launch: Launch, process: Process, folder: Path) -> dict[str, str]:
    node = folder / f"node-{process.node}"  # what is on a disk of a node the others do not have
    node.mkdir(exist_ok=True)
    found = environ_of(launch, process, os.environ)
    visible = accelerators.visible(os.environ)
    if len(visible) >= launch.nodes:
        share = len(visible) // launch.nodes
        found["CUDA_VISIBLE_DEVICES"] = ",".join(visible[share * process.node : share * (process.node + 1)])
    path = os.pathsep.join(filter(None, (_HOOK, found.get("PYTHONPATH"))))
    ours = {"DISTBOOT_REPORT": str(folder / "report.json"), "DISTBOOT_TRY": str(folder), "PYTHONPATH": path}
    hangs = {
        "DISTBOOT_LATE_AFTER": _LATE,
        "DISTBOOT_HANG": "stop",
        "DISTBOOT_HANG_AFTER": _HANG,
        "DISTBOOT_JOIN_TIMEOUT": "60",
    }
    return {"OMP_NUM_THREADS": "1", "DISTBOOT_GRACE": "2", **hangs, **found, **ours, "TMPDIR": str(node)}


def _codes(started: Sequence[subprocess.Popen[bytes]], end: float) -> list[int | None]:
    """The exit codes; after the time limit, or an interrupt, what is left is ended."""
    try:
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0.0))
        return [process.returncode for process in started]
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + _STOPPING
            for process in started:
                if process.poll() is None:
                    process.send_signal(number)
            for process in started:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(max(until - time.monotonic(), 0.0))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class _Found:
    """What one launch has shown."""

    def __init__(self, launch: Launch, ends: Ends, report: Mapping[str, Any], told: Sequence[Sequence[Any]]) -> None:
        self._launch, self._ends, self._told = launch, ends, told
        first = report.get("first_failure") or {}
        self._why: str = first.get("text", "")
        states = [rank.get("state") for rank in report.get("ranks", ())]
        is_early = "exited with code 0 while" in self._why
        self.hangs = "no end within the time limit" if None in ends.codes else self._why if "late" in states else ""
        self.apart = (self._why if is_early else "") or self._groups()
        self.device = self._devices()
        self._meets = self._loopback()
        self.is_tried = not any("mpi" in one for rank in told for one in rank)

    @property
    def is_bad(self) -> bool:
        """Whether anything went wrong, as far as it could be tried."""
        return self.is_tried and any((*self._ends.codes, self.hangs, self.apart, self.device, self._meets))

    def column(self, name: str) -> str:
        """What the table says."""
        if not self.is_tried:
            return "-"
        if name == "runs":
            return "no" if any(code != 0 for code in self._ends.codes) or self._meets else f"{self._ends.seconds:.0f} s"
        if name == "device":
            return (
                "wrong" if self.device else "ok" if any("device" in one for rank in self._told for one in rank) else "-"
            )
        return {"hangs": "yes" if self.hangs else "no", "ends": "apart" if self.apart else "together"}[name]

    def lines(self) -> list[str]:
        """What is wrong, a line for each; the end of the output if nothing else says it."""
        if not self.is_tried:
            return ["not tried: the script calls MPI_Init, for which the real mpirun (or srun --mpi=…) is needed"]
        said = list(dict.fromkeys(filter(None, (self._why, self.hangs, self.apart, self.device, self._meets))))
        if said or set(self._ends.codes) == {0}:
            return said
        return self._ends.output.splitlines()[-_SHOWN:]

    def _devices(self) -> str:
        """Ranks that take a device that their node has not, or that another one there has."""
        taken: dict[tuple[int, object, int], int] = {}
        for rank, lines in enumerate(self._told):
            for one in lines:
                if one.get("device") is None:
                    continue
                number, node = one["device"], rank // self._launch.per_node
                count = len(one["visible"].split(",")) if one.get("visible") else self._launch.per_node
                if number >= count:
                    has = f"{count} accelerator{'s' if count > 1 else ''}"
                    return (
                        f"rank {rank} takes device {number} of a node that has {has} ({one['at']}): use the local rank"
                    )
                other = taken.setdefault((node, one.get("visible"), number), rank)
                if other != rank and count > 1:
                    return f"ranks {other} and {rank} of node {node} both take device {number} ({one['at']})"
        return ""

    def _loopback(self) -> str:
        """A rank that looks for rank 0 on its own node."""
        for rank, lines in enumerate(self._told):
            for one in lines:
                if self._launch.nodes > 1 and str(one.get("meets", "")).startswith(_LOOPBACK):
                    return f"rank {rank} looks for rank 0 at {one['meets']}, which is each node itself ({one['at']})"
        return ""

    def _groups(self) -> str:
        """Process groups that are not of all ranks."""
        sizes = defaultdict(list)
        for rank, lines in enumerate(self._told):
            for one in lines:
                if "size" in one and one["size"] != len(self._told):
                    sizes[one["size"]].append(rank)
        return "; ".join(f"{ranks_said(ranks)} trained in a group of {size}" for size, ranks in sizes.items())
