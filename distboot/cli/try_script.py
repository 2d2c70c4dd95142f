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

from ..detection.here import refuse_not_alone
from ..errors import DistbootError
from ..host import accelerators, free_port
from ..text import counted, ranks_said
from ..trial import OF, Launch, parse, run
from .main import Parser, emit

_DEFAULT = ("mpirun 1x2", "mpirun 2x2", "srun 2x2", "torchrun 2x2", "kubeflow 3+1")
_LOOPBACK = ("localhost", "127.", "tcp://localhost", "tcp://127.")
_SHOWN = 20  # lines of the output of a launch that failed
_HEAD = ("runs", "device", "hangs", "ends")
_Told = list[tuple[int, dict[str, Any]]]  # a rank, and what the hook says of it


def try_script(arguments: list[str]) -> int:
    """`try`: the exit code is 1 if anything is wrong, or nothing could be tried, else 0."""
    usage = "python -m distboot try [options] script.py | -m module | -- command  [arguments …]"
    parser = Parser(
        "try",
        "Run a script here as other launchers would run it elsewhere, and report what goes wrong.",
        f"--as LAUNCH  launcher, and nodes x ranks per node, in quotes: {', '.join(OF)}; may be given several times "
        f"(default: {', '.join(_DEFAULT)})\n"
        "--timeout S  seconds for one launch (default: 120)",
        more={
            "--as": {"dest": "shapes", "action": "append"},
            "--timeout": {"type": float, "default": 120.0},
        },
        usage=usage,
    )
    words, command = parser.split(arguments)
    own = parser.parse_args(words)
    if not command:
        raise DistbootError("usage", "there is no script to try", usage)
    if not 0 < own.timeout < 1e6:
        raise DistbootError(
            "usage", f"--timeout {own.timeout:g} is not a number of seconds", "--timeout 300, say"
        )
    launches = [parse(text) for text in own.shapes or _DEFAULT]
    refuse_not_alone(os.environ)  # each of the others would try the script, too
    width, verdicts = max(len(launch.text) for launch in launches), set()
    emit(_row("as".ljust(width), *_HEAD))
    for launch in launches:
        is_good, columns, lines = _tried(launch, command, own.timeout)
        verdicts.add(is_good)
        emit("\n  ".join([_row(launch.text.ljust(width), *columns), *lines]))
    return 0 if True in verdicts and False not in verdicts else 1


def _row(*columns: str) -> str:
    return "  ".join(f"{column:<8}" for column in columns).rstrip()


def _tried(
    launch: Launch, command: Sequence[str], limit: float
) -> tuple[bool | None, tuple[str, ...], Sequence[str]]:
    """Whether a launch went well (None: it cannot be tried), its columns as `_HEAD` has them, and what is wrong."""
    with tempfile.TemporaryDirectory(prefix="distboot-try-") as name:
        folder, begin = Path(name), time.monotonic()
        found = launch.environs(free_port(), os.environ)
        environs = [
            _environ(launch, rank // launch.per_node, own, folder) for rank, own in enumerate(found)
        ]
        with (folder / "output").open("wb") as file:
            wrapper = [sys.executable, "-m", "distboot", "run", *command]
            codes = run(wrapper, environs, limit, stdout=file, stderr=file)
        seconds, output = time.monotonic() - begin, (folder / "output").read_text(errors="replace")
        path = folder / "report.json"
        report = json.loads(path.read_text()) if path.exists() else {}
        # What the hook has told of each rank.
        told = [
            (rank, one) for rank in range(len(codes)) for one in _lines(folder / f"rank-{rank}")
        ]
    if any("mpi" in one for _, one in told):
        why = "not tried: the script calls MPI_Init, for which the real mpirun (or srun --mpi=…) is needed"
        return None, ("-",) * len(_HEAD), [why]
    why = (report.get("first_failure") or {}).get("text", "")
    is_late = "late" in [rank.get("state") for rank in report.get("ranks", ())]
    hangs = "no end within the time limit" if None in codes else why if is_late else ""
    apart = why if "exited with code 0 while" in why else _small_groups(told, len(codes))
    device, meets = (
        _wrong_device(told, launch.per_node),
        _loopback(told) if launch.nodes > 1 else "",
    )
    columns = (
        "no" if any(code != 0 for code in codes) or meets else f"{seconds:.0f} s",
        "wrong" if device else "ok" if any("device" in one for _, one in told) else "-",
        "yes" if hangs else "no",
        "apart" if apart else "together",
    )
    wrong = list(dict.fromkeys(filter(None, (why, hangs, apart, device, meets))))
    if not wrong and any(codes):  # nothing else says it
        wrong = output.splitlines()[-_SHOWN:]
    return not any((*codes, hangs, apart, device, meets)), columns, wrong


def _environ(launch: Launch, node: int, found: dict[str, str], folder: Path) -> dict[str, str]:
    disk = folder / f"node-{node}"  # what is there the other nodes do not have
    disk.mkdir(exist_ok=True)
    visible = accelerators.visible(os.environ)
    if len(visible) >= launch.nodes:
        share = len(visible) // launch.nodes
        found["CUDA_VISIBLE_DEVICES"] = ",".join(visible[share * node : share * (node + 1)])
    ours = {
        "DISTBOOT_REPORT": str(folder / "report.json"),
        "DISTBOOT_TRY": str(folder),
        "TMPDIR": str(disk),
    }
    # Soon
    hangs = {"DISTBOOT_LATE_AFTER": "10", "DISTBOOT_HANG": "stop", "DISTBOOT_HANG_AFTER": "25"}
    return {
        "OMP_NUM_THREADS": "1",
        "DISTBOOT_GRACE": "2",
        "DISTBOOT_JOIN_TIMEOUT": "60",
        **hangs,
        **found,
        **ours,
    }


def _lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _wrong_device(told: _Told, per_node: int) -> str:
    """A rank that takes a device that its node does not have, or that another rank there has taken."""
    taken: dict[tuple[int, object, int], int] = {}
    for rank, one in told:
        number, visible = one.get("device"), one.get("visible")
        if number is None:
            continue
        count, node = len(visible.split(",")) if visible else per_node, rank // per_node
        if number >= count:
            has = counted(count, "accelerator")
            return f"rank {rank} takes device {number} of a node that has {has} ({one['at']}): use the local rank"
        other = taken.setdefault((node, visible, number), rank)
        if other != rank and count > 1:
            return (
                f"ranks {other} and {rank} of node {node} both take device {number} ({one['at']})"
            )
    return ""


def _loopback(told: _Told) -> str:
    """A rank that looks for rank 0 on its own node."""
    for rank, one in told:
        if str(one.get("meets", "")).startswith(_LOOPBACK):
            return f"rank {rank} looks for rank 0 at {one['meets']}, which is each node itself ({one['at']})"
    return ""


def _small_groups(told: _Told, ranks: int) -> str:
    """Process groups that are not of all ranks."""
    sizes = defaultdict(list)
    for rank, one in told:
        if one.get("size") not in (None, ranks):
            sizes[one["size"]].append(rank)
    return "; ".join(
        f"{ranks_said(ranks)} trained in a group of {size}" for size, ranks in sizes.items()
    )
