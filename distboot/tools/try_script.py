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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..base import terminal
from ..base.errors import DistbootError
from ..base.settings import unwatched_by
from ..base.text import log_line
from ..cli.output import emit
from ..cli.parser import Parser
from ..cli.run_warnings import misplaced_options, warn_of_options
from ..cli.target import target_of
from ..detection.here import refuse_not_alone
from ..host import accelerators, free_port
from .trial import (
    VARIABLES,
    Launch,
    parse,
    run,
)
from .verdict import (
    HEAD,
    Note,
    Observed,
    Verdict,
    judge,
)

_DEFAULT = ("mpirun 1x2", "mpirun 2x2", "srun 2x2", "torchrun 2x2", "kubeflow 3+1")
_COLUMN = 8  # characters
_STDOUT = 1
_STDERR = 2
# By verdict, the event whose color a row has
_EVENTS = {True: "good", False: "bad", None: "note"}
_OWN = ("--as",)  # no script has it for itself
_OFTEN_OF_SCRIPTS = ("--timeout", "--quiet")
_USAGE = "python -m distboot try [options] script.py | -m module | -- command  [arguments …]"
_OPTIONS = f"""\
--as LAUNCH  launcher, and nodes x ranks per node, or workers + master, in quotes: \
{", ".join(VARIABLES)}; may be given several times (default: {", ".join(_DEFAULT)})
--timeout S  seconds for one launch (default: 120)
-q,--quiet  print only what is wrong"""
# A launch ends soon: a rank that hangs is reported after 10 s, and ends the job after 25 s.
_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "DISTBOOT_GRACE": "2",
    "DISTBOOT_JOIN_TIMEOUT": "60",
    "DISTBOOT_LATE_AFTER": "10",
    "DISTBOOT_HANG": "stop",
    "DISTBOOT_HANG_AFTER": "25",
}


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
        detects=False,
    )
    words, command = parser.split(arguments)
    options = parser.parse_args(words)
    if not command:
        raise DistbootError("usage", "there is no script to try", _USAGE)
    if not 0 < options.timeout < 1e6:
        message = f"--timeout {options.timeout:g} is not a valid number of seconds"
        raise DistbootError("usage", message, "for example --timeout 300")
    launches = [parse(text) for text in options.shapes or _DEFAULT]
    target = target_of(command)
    problem = target.missing()
    if problem is not None:  # each rank of each launch would refuse it
        raise problem
    misplaced = misplaced_options(target, _OWN, _OFTEN_OF_SCRIPTS)
    if misplaced:
        warn_of_options(misplaced, None)
    refuse_not_alone(os.environ)  # each of the others would try the script, too
    screen = _Screen(launches, is_quiet=options.quiet)
    verdicts = set()
    for number, launch in enumerate(launches, 1):
        screen.begin(launch, number)
        verdict = judge(_observe(launch, command, options.timeout))
        screen.end(launch, verdict)
        verdicts.add(verdict.is_good)
    tried = verdicts - {None}
    return 0 if tried == {True} else 1


class _Screen:
    """What is printed: a row for each launch, and which one runs."""

    def __init__(self, launches: Sequence[Launch], *, is_quiet: bool) -> None:
        self._count = len(launches)
        self._width = max(len(launch.text) for launch in launches)
        self._is_quiet = is_quiet  # only what is wrong is printed
        self._has_head = False
        if not is_quiet:
            self._emit_head()

    def begin(self, launch: Launch, number: int) -> None:
        """A launch begins: say so in place on a terminal, else in a line."""
        if self._is_quiet:
            return
        text = f"trying {launch.text} ({number} of {self._count}) …"
        if terminal.can_replace(_STDERR):
            terminal.show(_STDERR, f"distboot: {text}")
        else:
            log_line(None, text)

    def end(self, launch: Launch, verdict: Verdict) -> None:
        """A launch has ended: its row."""
        terminal.clear(_STDERR)
        if self._is_quiet and verdict.is_good:
            return
        self._emit_head()
        text = "\n  ".join([self._row(launch.text, verdict.columns), *verdict.problems])
        if os.isatty(_STDOUT):
            text = terminal.painted(text, _EVENTS[verdict.is_good])
        emit(text)

    def _emit_head(self) -> None:
        if not self._has_head:
            self._has_head = True
            emit(self._row("as", HEAD))

    def _row(self, launch: str, columns: Sequence[str]) -> str:
        padded = [launch.ljust(self._width)]
        padded += [column.ljust(_COLUMN) for column in columns]
        return "  ".join(padded).rstrip()


def _observe(launch: Launch, command: Sequence[str], timeout: float) -> Observed:
    """Run a launch to its end, or to the timeout."""
    with _folder() as folder:
        start = time.monotonic()
        # The ids of all launches are those of a sample: another try on this host is no part of it
        settings = {**_SETTINGS, "DISTBOOT_SECRET": os.urandom(8).hex()}
        if unwatched_by(os.environ):  # then nothing could see a hang: the timeout ends the launch
            del settings["DISTBOOT_HANG"]
            del settings["DISTBOOT_HANG_AFTER"]
        environs = []
        for rank, environ in enumerate(launch.environs(free_port(), os.environ)):
            node = rank // launch.per_node
            environs.append({**settings, **environ, **_of_node(launch, node, folder)})
        wrapper = [sys.executable, "-m", "distboot", "run", *command]
        with (folder / "output").open("wb") as file:
            codes = run(wrapper, environs, timeout, stdout=file, stderr=file)
        seconds = time.monotonic() - start
        output = (folder / "output").read_text(errors="replace")
        report = {}
        if (folder / "report.json").exists():
            report = json.loads((folder / "report.json").read_text())
        return Observed(launch, codes, seconds, output, report, _notes(folder, len(codes)))


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder for a launch; a process that the script has left may keep it from being removed."""
    try:
        made = tempfile.TemporaryDirectory(prefix="distboot-try-", ignore_cleanup_errors=True)
    except OSError as error:
        raise DistbootError(
            "output-failed",
            f"no temporary folder can be made: {error.strerror}",
            "set TMPDIR to a folder that can be written",
        ) from None
    with made as name:
        yield Path(name)


def _of_node(launch: Launch, node: int, folder: Path) -> dict[str, str]:
    """The variables of all ranks on a node: its own disk, and its share of this host's GPUs."""
    disk = folder / f"node-{node}"
    disk.mkdir(exist_ok=True)
    found = {
        "DISTBOOT_REPORT": str(folder / "report.json"),
        "DISTBOOT_TRY": str(folder),
        "TMPDIR": str(disk),
    }
    count = len(accelerators.visible(os.environ))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = list(map(str, range(count)))
    if chosen is not None:
        words = chosen.split(",")[:count]
    share = count // launch.nodes
    if share:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(words[share * node : share * (node + 1)])
    return found


def _notes(folder: Path, ranks: int) -> list[Note]:
    found = []
    for rank in range(ranks):
        path = folder / f"rank-{rank}"
        if path.exists():
            for line in path.read_text().splitlines():
                found.append(Note(rank, json.loads(line)))
    return found
