"""How long until a job says which rank is missing or dead, and until it stops: distboot against launchers alone.

Four ranks on two hosts, with the defaults of everybody. The missing one is started, and held up before it comes to the
meeting, as by a file system that hangs; the dead one is killed (SIGKILL) while the others wait for it in a collective
operation; or the second host, with ranks 2 and 3, drops off the network then. Everything that the launcher prints is
read: the first line that names the rank, or the host, counts, whoever wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from hosts import Hosts, HostsError, Slurm, missing_for_hosts, missing_for_slurm
from jobs import BOUND, WAYS, Job
from measure import Effort, Series, UnmeasuredError, last_line
from page import Section, Table
from plot import Bar, bars

_TITLES = {"missing": "A rank is missing", "dead": "A rank is dead", "lost": "A host is lost"}


@dataclass
class Outcome:
    """What came of one way in one case; a time is None where there was none within the bound."""

    named: list[float | None] = field(default_factory=list)
    stopped: list[float | None] = field(default_factory=list)
    words: str = ""
    why: str = ""


def section(effort: Effort) -> Section:
    """All cases, all ways."""
    found = {case: {way.name: Outcome() for way in WAYS} for case in _TITLES}
    if why := missing_for_hosts():
        for outcomes in found.values():
            for outcome in outcomes.values():
                outcome.why = why
    else:
        for number in range(effort.rounds(3)):
            for case, outcomes in list(found.items())[: 2 if number else 3]:
                _round(case, outcomes, number)
    head = ("way", "named after", "all stopped after", "what it said")
    tables = [
        Table(
            title, head, [_row(name, each) for name, each in found[case].items()],
            _meaning(case, found[case]), (f"{case}.svg", _plot(title, found[case])),
        )
        for case, title in _TITLES.items()
    ]  # fmt: skip
    return Section(tables)


def _round(case: str, outcomes: dict[str, Outcome], number: int) -> None:
    """Once all ways that have something to say; the silent ones have been waited for in the first round."""
    with _cluster() as (hosts, no_slurm), ExitStack() as jobs:
        running: list[tuple[Job, Outcome]] = []
        for index, way in enumerate(WAYS):
            outcome = outcomes[way.name]
            if way.needs_slurm and no_slurm:
                outcome.why = no_slurm
            if outcome.why or (number and None in outcome.named):
                continue
            job = Job(hosts, way, case, hosts.shared / f"{case}-{number}-{index}", 29500 + index)
            jobs.callback(job.end)
            try:  # one after the other: the start is not what is measured
                job.until_there()
            except UnmeasuredError as error:
                outcome.why = str(error)
            else:
                running.append((job, outcome))
        _strike(case, hosts, [job for job, _ in running])
        for job, outcome in running:
            job.until_told()
            if case != "missing":
                job.until_over()
            outcome.named.append(job.named)
            outcome.stopped.append(job.over)
            outcome.words = outcome.words or job.words


def _strike(case: str, hosts: Hosts, jobs: Sequence[Job]) -> None:
    """Let happen what the case is about; where a rank is missing, that has begun."""
    if case == "dead":
        for job in jobs:
            job.kill_rank()
            job.until_told(5)  # one after the other, and the silent ones go on in the background
    if case == "lost":
        hosts.run("nodeb", ["ip", "link", "set", "eth0", "down"])
        for job in jobs:
            job.begin()


@contextmanager
def _cluster() -> Iterator[tuple[Hosts, str | None]]:
    """Hosts, with Slurm if it can be had; else why not."""
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts.up())
        why = missing_for_slurm()
        if why is None:
            try:
                # Its default, for which the tests do not wait.
                stack.enter_context(Slurm.up(hosts, "SlurmdTimeout=300\n"))
            except HostsError as error:
                why = last_line(str(error))
        yield hosts, why


def _row(name: str, outcome: Outcome) -> tuple[str, ...]:
    if outcome.why or not outcome.named:
        return (name, f"not measured: {outcome.why}", "", "")
    words = outcome.words if len(outcome.words) <= 110 else outcome.words[:109] + "…"
    return (
        name,
        _after(outcome.named),
        _after(outcome.stopped, "not"),
        f"`{words.replace('|', '¦').replace('`', '')}`" if words else "",
    )


def _after(times: Sequence[float | None], silent: str = "nothing") -> str:
    if None in times:
        return f"{silent} in {BOUND} s"
    return Series(tuple(time for time in times if time is not None)).said()


def _meaning(case: str, outcomes: dict[str, Outcome]) -> str:
    measured = {name: outcome for name, outcome in outcomes.items() if outcome.named}
    silent = [name for name, outcome in measured.items() if None in outcome.named]
    named = f"In {BOUND} s nobody named the rank or its host under: {', '.join(silent) or 'none of these'}. "
    if case == "missing":
        return named + (
            "A job that waits holds all of its machines, and nobody knows for whom. distboot repeats who is missing "
            "and ends the job after its join timeout, 300 s by default; torch 2.13's `default_pg_timeout` is 30 min."
        )
    if case == "lost":
        return named + (
            "A machine that loses its power or its kernel looks the same to the others. distboot waits for the bound "
            "of `DISTBOOT_HEARTBEAT_TIMEOUT`, 15 s by default. All have stopped when the launchers have ended, also "
            "the one on the lost host. Measured once."
        )
    return named + (
        "The line tells whose log to read, and the end frees the machines. The last column has the first line that "
        "names the rank, whoever wrote it; distboot's stands in the log of every other rank, too."
    )


def _plot(title: str, outcomes: dict[str, Outcome]) -> str:
    rows = []
    for name, outcome in outcomes.items():
        times = Series(tuple(time for time in outcome.named if time is not None))
        ours = name.startswith("distboot")
        if None in outcome.named:
            rows.append(Bar(name, BOUND, f"not in {BOUND} s", ours, silent=True))
        elif times.values:
            rows.append(Bar(name, times.median, f"{times.median:.1f} s", ours))
    return bars(
        f"{title}: until a line names it",
        rows,
        "Seconds, median; four ranks on two hosts, default settings",
    )
