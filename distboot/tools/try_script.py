"""`try`: start all ranks of each launch on this host, observe them, and print what would go wrong
elsewhere.

Each rank runs below the wrapper, with the environment that the launcher would give it. A hook in
the script's process writes down which device it takes, which address it connects to, and how large
its process group is.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..base.errors import DistbootError
from ..base.text import counted, ranks_said
from ..cli.output import emit
from ..cli.parser import Parser
from ..cli.target import target_of
from ..detection.here import refuse_not_alone
from ..host import accelerators, free_port
from .trial import (
    VARIABLES,
    Launch,
    parse,
    run,
)

_DEFAULT = ("mpirun 1x2", "mpirun 2x2", "srun 2x2", "torchrun 2x2", "kubeflow 3+1")
_LOOPBACK = ("localhost", "127.", "tcp://localhost", "tcp://127.")
_MOST_LINES = 20  # of the output of a launch that failed
_HEAD = ("runs", "device", "hangs", "ends")
_HANGS = {True: "yes", False: "no"}
_ENDS = {True: "apart", False: "together"}
_USAGE = "python -m distboot try [options] script.py | -m module | -- command  [arguments …]"
_OPTIONS = f"""\
--as LAUNCH  launcher, and nodes x ranks per node, in quotes: {", ".join(VARIABLES)}; \
may be given several times (default: {", ".join(_DEFAULT)})
--timeout S  seconds for one launch (default: 120)"""
# A launch ends soon: a rank that hangs is reported after 10 s, and ends the job after 25 s.
_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "DISTBOOT_GRACE": "2",
    "DISTBOOT_JOIN_TIMEOUT": "60",
    "DISTBOOT_LATE_AFTER": "10",
    "DISTBOOT_HANG": "stop",
    "DISTBOOT_HANG_AFTER": "25",
}


class _Note(NamedTuple):
    """What the hook wrote down about a rank."""

    rank: int
    facts: Mapping[
        str, Any
    ]  # "device" and "visible", "meets", "size" or "mpi"; "at": place in the script


class _Observed(NamedTuple):
    """One launch that has ended, or was ended."""

    launch: Launch
    codes: Sequence[int | None]  # exit codes by rank; None: not ended within the time limit
    seconds: float
    output: str
    report: Mapping[str, Any]  # the job's report; empty if there is none
    notes: Sequence[_Note]

    def notes_with(self, fact: str) -> list[_Note]:
        return [note for note in self.notes if note.facts.get(fact) is not None]


class _Verdict(NamedTuple):
    is_good: bool | None  # None: it cannot be tried
    columns: Sequence[str]  # as `_HEAD` has them
    problems: Sequence[str]


def try_script(arguments: list[str]) -> int:
    """The command `try`: the exit code is 1 if anything is wrong, or if nothing could be tried."""
    parser = Parser(
        "try",
        "Run a script here as other launchers would run it elsewhere, and report what goes wrong.",
        _OPTIONS,
        more={
            "--as": {"dest": "shapes", "action": "append"},
            "--timeout": {"type": float, "default": 120.0},
        },
        usage=_USAGE,
    )
    words, command = parser.split(arguments)
    options = parser.parse_args(words)
    if not command:
        raise DistbootError("usage", "there is no script to try", _USAGE)
    if not 0 < options.timeout < 1e6:
        message = f"--timeout {options.timeout:g} is not a number of seconds"
        raise DistbootError("usage", message, "for example --timeout 300")
    launches = [parse(text) for text in options.shapes or _DEFAULT]
    _refuse_missing(command)
    refuse_not_alone(os.environ)  # each of the others would try the script, too
    width = max(len(launch.text) for launch in launches)
    emit(_row("as".ljust(width), *_HEAD))
    verdicts = set()
    for launch in launches:
        verdict = _judge(_observe(launch, command, options.timeout))
        verdicts.add(verdict.is_good)
        row = _row(launch.text.ljust(width), *verdict.columns)
        emit("\n  ".join([row, *verdict.problems]))
    tried = verdicts - {None}
    return 0 if tried == {True} else 1


def _refuse_missing(command: list[str]) -> None:
    """Refuse once what each rank of each launch would refuse."""
    problem = target_of(command).missing()
    if problem is not None:
        raise problem


def _row(*columns: str) -> str:
    return "  ".join(f"{column:<8}" for column in columns).rstrip()


def _observe(launch: Launch, command: Sequence[str], timeout: float) -> _Observed:
    """Run a launch to its end, or to the timeout."""
    with tempfile.TemporaryDirectory(prefix="distboot-try-") as name:
        folder = Path(name)
        start = time.monotonic()
        environs = []
        for rank, environ in enumerate(launch.environs(free_port(), os.environ)):
            node = rank // launch.per_node
            environs.append({**_SETTINGS, **environ, **_of_node(launch, node, folder)})
        wrapper = [sys.executable, "-m", "distboot", "run", *command]
        with (folder / "output").open("wb") as file:
            codes = run(wrapper, environs, timeout, stdout=file, stderr=file)
        seconds = time.monotonic() - start
        output = (folder / "output").read_text(errors="replace")
        report = {}
        if (folder / "report.json").exists():
            report = json.loads((folder / "report.json").read_text())
        return _Observed(launch, codes, seconds, output, report, _notes(folder, len(codes)))


def _of_node(launch: Launch, node: int, folder: Path) -> dict[str, str]:
    """The variables of all ranks on a node: its own disk, and its share of this host's GPUs."""
    disk = folder / f"node-{node}"
    disk.mkdir(exist_ok=True)
    found = {
        "DISTBOOT_REPORT": str(folder / "report.json"),
        "DISTBOOT_TRY": str(folder),
        "TMPDIR": str(disk),
    }
    visible = accelerators.visible(os.environ)
    share = len(visible) // launch.nodes
    if share:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(visible[share * node : share * (node + 1)])
    return found


def _notes(folder: Path, ranks: int) -> list[_Note]:
    found = []
    for rank in range(ranks):
        path = folder / f"rank-{rank}"
        if path.exists():
            for line in path.read_text().splitlines():
                found.append(_Note(rank, json.loads(line)))
    return found


def _judge(seen: _Observed) -> _Verdict:
    if seen.notes_with("mpi"):
        why = (
            "not tried: the script calls MPI_Init, for which the real mpirun (or srun --mpi=…) "
            "is needed"
        )
        return _Verdict(None, ["-"] * len(_HEAD), [why])
    failure = _first_failure(seen)
    hangs = _hangs(seen, failure)
    separate = _separate(seen, failure)
    device = _wrong_device(seen)
    loopback = _loopback(seen)
    columns = [
        _runs_column(seen, loopback),
        _device_column(seen, device),
        _HANGS[bool(hangs)],
        _ENDS[bool(separate)],
    ]
    problems = list(filter(None, (hangs, separate, device, loopback)))
    is_good = not problems and not any(seen.codes)
    listed = list(dict.fromkeys(filter(None, (failure, *problems))))
    if not listed and any(seen.codes):  # only the output tells
        listed = seen.output.splitlines()[-_MOST_LINES:]
    return _Verdict(is_good, columns, listed)


def _first_failure(seen: _Observed) -> str:
    failure = seen.report.get("first_failure")
    if failure is None:
        return ""
    return str(failure.get("text", ""))


def _runs_column(seen: _Observed, loopback: str) -> str:
    all_succeeded = set(seen.codes) == {0}
    if loopback or not all_succeeded:
        return "no"
    return f"{seen.seconds:.0f} s"


def _device_column(seen: _Observed, wrong: str) -> str:
    if wrong:
        return "wrong"
    if seen.notes_with("device"):
        return "ok"
    return "-"


def _hangs(seen: _Observed, failure: str) -> str:
    if None in seen.codes:
        return "no end within the time limit"
    states = [rank.get("state") for rank in seen.report.get("ranks", ())]
    if "late" in states:
        return failure
    return ""


def _separate(seen: _Observed, failure: str) -> str:
    """Ranks that do not end together, or whose process groups do not have all ranks."""
    if "exited with code 0 while" in failure:
        return failure
    sizes = defaultdict(list)
    for rank, facts in seen.notes_with("size"):
        if facts["size"] != len(seen.codes):
            sizes[facts["size"]].append(rank)
    groups = []
    for size, ranks in sizes.items():
        groups.append(f"{ranks_said(ranks)} trained in a group of {size}")
    return "; ".join(groups)


def _wrong_device(seen: _Observed) -> str:
    """A rank that takes a device that its node does not have, or that is already taken there."""
    taken: dict[tuple[int, object, int], int] = {}
    for rank, facts in seen.notes_with("device"):
        device = facts["device"]
        visible = facts.get("visible")
        count = len(visible.split(",")) if visible else seen.launch.per_node
        if device >= count:
            has = counted(count, "accelerator")
            return (
                f"rank {rank} takes device {device} of a node that has {has} ({facts['at']}): "
                "use the local rank"
            )
        node = rank // seen.launch.per_node
        first = taken.setdefault((node, visible, device), rank)
        if first != rank and count > 1:
            return (
                f"ranks {first} and {rank} of node {node} both take device {device} ({facts['at']})"
            )
    return ""


def _loopback(seen: _Observed) -> str:
    """A rank that connects to rank 0 at its own node, where there are others."""
    if seen.launch.nodes == 1:
        return ""
    for rank, facts in seen.notes_with("meets"):
        address = facts["meets"]
        if address.startswith(_LOOPBACK):
            return (
                f"rank {rank} looks for rank 0 at {address}, which works on one node only "
                f"({facts['at']})"
            )
    return ""
