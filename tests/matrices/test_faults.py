"""The fault matrix: every fault, with `init` and with the wrapper, under every launcher, over two hosts.

`make test` takes a cell a fault, `make test-all` more (`_tier`). `make faults` runs all of it, some 20 minutes, and
writes docs/faults.md; with ARGS="-k …" only the cells that were run.
"""

import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from faults import FAULTS, LOST, Fault
from faults_inject import SHORT
from faults_job import GRACE, HOST_OF, LAUNCHERS, RANKS, WAYS, job, require
from hosts import Hosts
from launched import needs_hosts, needs_torch
from page_of_cells import Tables

_SAID = re.compile(r"distboot: rank (\d) on \w+: (.*)")
# The rank that failed says so without its own number, with which its line begins.
_FIRST = re.compile(r"(ranks? \S+ )?(failed|became unreachable) first|stopped by an external \w+: ")
_SLACK = 10  # seconds, for a machine that is busy with other things
# Seconds for the sidecar of `init`, which ends after its script, to write the report, or why not
_SIDECAR = 10.0
# What torch 2.13 does now and then when Python ends while one of Gloo's threads is running.
_IS_TORCHS = "terminate called without an active exception"
_LAUNCHER = 8  # seconds for a launcher to end after the ranks
_WELL = 20  # seconds for a job to end well


@dataclass
class Outcome:
    """What became of a job."""

    # All that distboot said: the rank, and the text
    lines: list[tuple[int, str]] = field(default_factory=list)
    # From the fault to the end of the last script that is left; None: not all ended
    seconds: float | None = None
    report: dict[str, Any] | None = None  # what DISTBOOT_REPORT holds; None for no report
    # Codes of what the launcher started; None: not known
    ended: list[int | None] = field(default_factory=list)
    # Of what was started by hand; None for what did not end
    exits: list[int | None] = field(default_factory=list)
    output: str = ""  # all that was printed

    @property
    def first(self) -> dict[int, list[str]]:
        """What each rank said of the first failure."""
        return {
            rank: [text for each, text in self.lines if each == rank and _FIRST.match(text)]
            for rank in RANKS
        }

    @property
    def codes(self) -> list[int | str | None] | None:
        """The exit code of every rank, as the report has it."""
        ranks = [] if self.report is None else self.report["ranks"]
        return [LOST if one["lost"] else one["exit_code"] for one in ranks] or None


def run(hosts: Hosts, fault: Fault, way: str, launcher: str, index: int) -> Outcome:
    limit = (SHORT if fault.silence else 0) + GRACE + _SLACK
    outcome = Outcome()
    with job(hosts, hosts.shared / f"job-{index}", way, launcher) as one, ExitStack() as undo:
        undo.callback(fault.after, hosts)
        fault.before(hosts)
        one.start(fault.act, fault.actors, 29500 + index, fault.env, beside=fault.cut)
        one.await_ready()
        fault.inject(one)
        if fault.says:
            outcome.seconds = one.await_end_of(sorted(fault.says), limit)
        else:
            (one.folder / "stop").touch()
            one.await_end_of(RANKS, _WELL)
        if fault.silence and isinstance(fault.code, int):
            # Its wrapper or sidecar ends a stopped script, after the others'
            one.await_end_of(fault.culprits, limit)
        if fault.cut:
            undo.close()
        one.kill_stopped()
        outcome.exits = one.exits(_LAUNCHER)
        outcome.ended = one.ended()
        outcome.report = one.report(_SIDECAR if fault.code is not None or not fault.says else 0.0)
        outcome.output = one.output(fault.once, _SIDECAR)
    for rank, text in _SAID.findall(outcome.output):
        if text.startswith("failed first"):
            text = f"rank {rank} {text}"  # noqa: PLW2901
        outcome.lines.append((int(rank), text))
    return outcome


# Python takes seconds to end of an exception on a busy machine, and after three the rank is stopped like all others.
EXCEPTIONS = ("exception", "system-exit", "ulimit")
STOPPED = 143


def check(outcome: Outcome, fault: Fault, way: str, launcher: str) -> None:
    assert "Exception in thread" not in outcome.output
    assert not re.search("/distboot/(agent|job|report|script)/", outcome.output)
    # mpirun passes on nothing more once all ranks have ended, and the sidecar of rank 0 speaks last; so does a wrapper
    # where a Python takes longer than three seconds to end, as the others are stopped first then, and so is mpirun.
    may_be_lost = (
        launcher == "mpirun" and fault.says and (way == "init" or (outcome.seconds or 0.0) >= 3)
    )
    if fault.once:
        assert len(re.findall(fault.once, outcome.output)) in ((0, 1) if may_be_lost else (1,))
    if not fault.says:
        assert not any(outcome.first.values())
        assert outcome.codes == list(fault.well)
        assert set(outcome.exits) == {0}
        assert {*outcome.ended} <= {0, None}
        return
    bound = (SHORT + 1) if fault.silence else 1
    assert outcome.seconds is not None, "a rank that is left did not stop"
    assert outcome.seconds < bound + GRACE
    # Of two that are killed one after the other, the second may have been stopped because of the first.
    is_stopped = (fault.name in EXCEPTIONS and outcome.seconds >= 3) or fault.name == "two"
    sides: dict[str, set[str]] = {}
    for says, lines in _spoken(outcome, fault, launcher):
        assert len(lines) == 1, f"printed instead of {says}: {lines}"
        assert re.match(says, lines[0]), lines[0]
        # Ranks that are cut off cannot agree on the words.
        sides.setdefault(says, set()).add(lines[0].split(": " if fault.cut else ", at ")[0])
    assert sides, "nobody said anything"
    assert all(len(texts) == 1 for texts in sides.values()), sides
    if fault.code is None:
        assert outcome.report is None
    elif outcome.report is None:
        # mpirun has killed rank 0's wrapper as a rank on the other side of a cut had ended
        assert (launcher, fault.cut) == ("mpirun", True)
        assert outcome.ended[0] == 128 + signal.SIGKILL
    else:
        assert outcome.codes is not None
        for rank, code in enumerate(outcome.codes):
            # None: mpirun was quicker than the bound.
            expected: tuple[object, ...] = (fault.code, None) if fault.cut else (fault.code,)
            expected += (STOPPED,) if is_stopped else ()
            expected += (134,) if _IS_TORCHS in outcome.output else ()
            assert code in expected if rank in fault.culprits else code not in (0, LOST), (
                outcome.codes
            )
    # So mpirun (Open MPI 5) does after the loss of a daemon.
    assert 0 not in outcome.exits or (launcher == "mpirun" and fault.name == "launcher")
    _check_exit_codes(outcome, fault, way, launcher)
    if launcher == "mpirun" and isinstance(fault.code, int) and not fault.cut:
        # Of two failures on its own host mpirun (Open MPI 5) keeps the later one, with and without distboot.
        is_second = is_stopped or (way == "init" and 0 in fault.culprits)
        assert outcome.exits == [fault.code] or (is_second and outcome.exits == [STOPPED])
    if launcher == "plain" and isinstance(fault.code, int):
        codes: tuple[int, ...] = (fault.code, STOPPED) if is_stopped else (fault.code,)
        codes += (134,) if _IS_TORCHS in outcome.output else ()
        assert all(outcome.exits[rank] in codes for rank in fault.culprits), outcome.exits


def _check_exit_codes(outcome: Outcome, fault: Fault, way: str, launcher: str) -> None:
    """The job has one, but for what a signal has ended."""
    for rank, code in enumerate(outcome.ended):
        expected = {None, fault.exit_code}
        if way == "init":  # the scripts have no handler; and torch may end one that has
            expected |= {STOPPED, *({134} if _IS_TORCHS in outcome.output else ())}
            # Without its agent nobody tells it that of the job
            if fault.name == "watcher-0" and rank == 0:
                expected.add(1)
        if rank in fault.killed or (
            launcher == "mpirun" and (way == "init" or fault.cut or fault.killed)
        ):
            expected.add(137)  # mpirun kills what it has told to end 0.2 s before
        assert code in expected, f"rank {rank}: {outcome.ended}"
    if way == "wrapper" and launcher in ("mpirun", "srun") and not (fault.killed or fault.cut):
        assert outcome.exits == [fault.exit_code]


def _spoken(outcome: Outcome, fault: Fault, launcher: str) -> list[tuple[str, list[str]]]:
    """What has to be printed of the first failure, once in each log, and the lines that were.

    The ranks of a host share the log of their launcher; of those without one each has its own, and
    so has each where the launcher may not reach them to the end.
    """
    speaking = _speaking(outcome, fault, launcher)
    if launcher == "plain" or (fault.cut and launcher != "torchrun"):
        return [(says, outcome.first[rank]) for rank, says in speaking.items()]
    found: dict[str, tuple[str, list[str]]] = {}
    for rank, says in speaking.items():
        lines = [
            line
            for other in RANKS
            if HOST_OF[other] == HOST_OF[rank]
            for line in outcome.first[other]
        ]
        found[HOST_OF[rank]] = (says, lines)
    if 0 in speaking:
        assert outcome.first[0], "rank 0 printed nothing"
    return list(found.values())


def _speaking(outcome: Outcome, fault: Fault, launcher: str) -> dict[int, str]:
    """The ranks that are left and learn of the first failure, and what is printed of it."""
    # mpirun kills all others 0.2 s after the end of the first, which may come before they see it themselves.
    silent = set()
    if launcher == "mpirun" and fault.cut:
        silent = {HOST_OF[rank] for rank in RANKS if not outcome.first[rank]}
    return {rank: says for rank, says in fault.says.items() if HOST_OF[rank] not in silent}


def text(outcome: Outcome, fault: Fault) -> str:
    exits = "/".join("-" if code is None else str(code) for code in outcome.exits)
    codes = " ".join("?" if code is None else str(code) for code in outcome.codes or [])
    ended = " ".join("?" if code is None else str(code) for code in outcome.ended)
    parts = [f"codes {codes}" if codes else "no report", f"ended {ended}", f"exit {exits}"]
    named = _named(outcome, fault)
    if named or fault.says:
        seconds = "not stopped" if outcome.seconds is None else f"{max(outcome.seconds, 0.1):.1f} s"
        return ", ".join([seconds, named or "nobody is named", *parts])
    return ", ".join(["no alarm", *parts])


def _named(outcome: Outcome, fault: Fault) -> str:
    """Whom the ranks that are left name: `"all name rank 3"`; of those of a host one speaks."""
    groups: dict[str, list[int]] = {}
    for rank, texts in outcome.first.items():
        if texts and (rank in fault.says or not fault.says):
            said = re.search(r"ranks? [\d,-]+", texts[0])
            groups.setdefault(said[0] if said else "nobody", []).append(rank)
    if len(groups) == 1:
        return f"all name {next(iter(groups))}"
    return "; ".join(f"{', '.join(map(str, ranks))} name {who}" for who, ranks in groups.items())


pytestmark = [needs_hosts, needs_torch]

DOCS = Path(__file__).parents[2] / "docs" / "faults.md"
WORKER = Path(__file__).parent / "faults_worker.py"
WRITE = bool(os.environ.get("DISTBOOT_WRITE_FAULTS"))
EVERY = [
    (fault, way, launcher)
    for way in WAYS
    for launcher in LAUNCHERS
    for fault in FAULTS
    if launcher in fault.launchers
]
UNDER_EACH = ("sigkill", "rank-0")  # with `init` and torch, too
# Whose agents take torch, too
WITH_TORCHRUN = ("exception", "sigkill", "rank-0", "watcher-0", "host", "sigterm")

_TABLES = Tables("fault", {fault.name: fault.title for fault in FAULTS}, WAYS, LAUNCHERS)
_index = itertools.count()
_texts: dict[tuple[str, str, str], str] = {}


def _tier(fault: Fault, way: str, launcher: str) -> str:
    """What runs a cell: `make test`, `make test-all` or `make faults`.

    The ranks of the wrapper have no framework, and so are cheap; with `init` each of four imports torch.
    """
    number = FAULTS.index(fault)
    if way == "init":
        return (
            "test-all"
            if launcher == LAUNCHERS[number % 4 - 1] or fault.name in UNDER_EACH
            else "faults"
        )
    quick = ("plain", "mpirun")[number % 2]
    if launcher == (quick if quick in fault.launchers else "mpirun"):
        return "test"
    return "test-all" if launcher != "torchrun" or fault.name in WITH_TORCHRUN else "faults"


def _cells() -> Iterator[object]:
    for fault, way, launcher in EVERY:
        tier = _tier(fault, way, launcher)
        if WRITE or tier != "faults":
            marks = () if tier == "test" else pytest.mark.all
            yield pytest.param(
                fault, way, launcher, id=f"{fault.name}-{way}-{launcher}", marks=marks
            )


@pytest.mark.parametrize(("fault", "way", "launcher"), list(_cells()))
def test_fault(
    hosts: Hosts, request: pytest.FixtureRequest, fault: Fault, way: str, launcher: str
) -> None:
    require(launcher, request, fault.missing)
    shutil.copy(WORKER, hosts.shared / "worker.py")
    outcome = run(hosts, fault, way, launcher, next(_index))
    key = (fault.name, way, launcher)
    _texts[key] = f"**{text(outcome, fault)}**"  # unless it is as it should be
    sys.stdout.write(f"{outcome.output[-8000:]}\n{_texts[key]}\n")
    check(outcome, fault, way, launcher)
    _texts[key] = text(outcome, fault)


def test_page_has_all_faults() -> None:
    text = _TABLES.checked(DOCS, _texts, write=WRITE)
    assert f"`DISTBOOT_GRACE` is {GRACE}." in text
    assert f"(`DISTBOOT_HEARTBEAT_TIMEOUT`) is {SHORT} where" in text
    assert f"less than the grace of {GRACE} s and one more" in text
