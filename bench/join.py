"""The roll call against torch's TCPStore at the same numbers of ranks, and how soon it names who does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import rendezvous
from measure import PYTHON, Contender, Effort, Series, UnmeasuredError, interleaved, output_of
from page import Limit, Section, Table, promise
from plot import lines
from rendezvous import Cost

_SIZES = {64: 5, 256: 5, 1024: 5, 4096: 5, 10000: 3}  # number of ranks -> rounds
_LIMITS: dict[int, float | None] = {1024: None, 4096: 100, 10000: None}  # -> megabytes
_MOST_MS = {1024: 0.1, 4096: 0.1, 10000: 0.06}  # of a rank
_OURS, _THEIRS = "distboot: roll call", "torch: TCPStore"
_SIDES = {_OURS: ("rendezvous.py", "rank0"), _THEIRS: ("tcpstore.py", "root")}
_FOLDER = Path(__file__).parent

Side = tuple[Series, list[Cost]]


def section(effort: Effort) -> Section:
    """Both, and the promises of the roll call."""
    found = {ranks: _measured(ranks, effort.rounds(rounds)) for ranks, rounds in _SIZES.items()}
    rows = [
        (f"{ranks:,}", name, *_cells(sides[name], sides[_OURS]))
        for ranks, sides in found.items()
        for name in sides
    ]
    most = max(_SIZES)
    wall = found[most][_OURS][0].median
    table = Table(
        "All ranks meet",
        (
            "ranks",
            "way",
            "wall time",
            "ratio",
            "CPU of rank 0",
            "memory of rank 0",
            "of it for the ranks",
        ),
        rows,
        f"A job of {most:,} ranks meets in {wall:.1f} s here, all of them simulated on this machine. torch's store is "
        "the cheaper one: it is in C++, and counts. When it is through, no rank knows of another one, and they "
        "exchange their addresses later. After the roll call every rank has the membership, with hosts, versions and "
        "settings of all compared, and a connection that tells who dies. On both sides the server is the real one, "
        "and the other ranks are one loop in another process.",
        ("join.svg", _plot(found)),
    )
    limits = [
        *(_limit(ranks, found[ranks][_OURS]) for ranks in _LIMITS),
        _of_nodes(effort),
        *map(_naming, rendezvous.CASES),
    ]
    return Section([table], limits)


def _measured(ranks: int, rounds: int) -> dict[str, Side]:
    costs: dict[str, list[Cost]] = {name: [] for name in _SIDES}

    def once(name: str) -> float:
        file, mode = _SIDES[name]
        said = output_of([PYTHON, str(_FOLDER / file), mode, str(ranks)])
        try:
            costs[name].append(Cost(*map(float, said.splitlines()[-1].split())))
        except (IndexError, TypeError, ValueError):
            raise UnmeasuredError(f"said {said[-80:]!r}") from None
        return costs[name][-1].wall

    series = interleaved(
        [Contender(name, partial(once, name)) for name in _SIDES], rounds, warm=False
    )
    return {name: (series[name], costs[name]) for name in _SIDES}


def _cells(side: Side, ours: Side) -> tuple[str, ...]:
    series, costs = side
    if not series.values:
        return (series.said(), "", "", "", "")
    ratio = f"{series.median / ours[0].median:.2f} ×"
    cpu = _of(costs, lambda cost: cost.cpu)
    resident, more = _of(costs, lambda cost: cost.resident), _of(costs, lambda cost: cost.more)
    return (
        series.said("ms", 0),
        "" if side is ours else ratio,
        cpu.said("ms", 0),
        f"{resident.median:.0f} MB",
        f"{more.median:.0f} MB",
    )


def _of(costs: list[Cost], part: Callable[[Cost], float]) -> Series:
    return Series(tuple(map(part, costs)))


def _limit(ranks: int, side: Side) -> Limit:
    series, costs = side
    megabytes = _LIMITS[ranks]
    most_ms = _MOST_MS[ranks]
    limit = f"≤ {most_ms:g} ms a rank" + (f", ≤ {megabytes:.0f} MB" if megabytes else "")
    what = f"rank 0 in a roll call of {ranks:,} ranks (simulated, real sockets)"
    if not series.values:
        return Limit(what, series.said(), limit, None)
    took, most = series.median / ranks * 1e3, max(cost.resident for cost in costs)
    return Limit(
        what,
        f"{took:.3f} ms a rank, {most:.0f} MB",
        limit,
        took <= most_ms and most <= (megabytes or math.inf),
    )


def _of_nodes(effort: Effort) -> Limit:
    """All ranks of a job whose agents have eight each."""
    command = [PYTHON, str(_FOLDER / "rendezvous.py"), "rank0", "1250", "8"]
    contender = Contender("nodes", lambda: float(output_of(command).split()[0]))
    found = interleaved([contender], effort.rounds(5), warm=False)["nodes"]
    return promise(
        "10,000 ranks of 1,250 agents meet (simulated, real sockets)", found, 0.4, "≤ 0.4 s"
    )


def _naming(what: str) -> Limit:
    """How soon every rank has the error that names the culprit, after the last of them has arrived."""
    code, join_timeout, ranks = rendezvous.CASES[what]
    codes, took = rendezvous.naming(join_timeout, *ranks)
    limit = 1.0 + (join_timeout if code == "missing-rank" else 0.0)
    reached = took <= limit and codes == [code] * (len(ranks) + 1)
    return Limit(f"{what} named on every rank", f"after {took:.2f} s", f"≤ {limit:g} s", reached)


def _plot(found: dict[int, dict[str, Side]]) -> str:
    points: dict[str, list[tuple[float, float]]] = {}
    for name in _SIDES:
        walls = [
            (float(ranks), sides[name][0].median)
            for ranks, sides in found.items()
            if sides[name][0].values
        ]
        points[name] = walls
    for name, label in ((_OURS, "distboot: CPU of rank 0"), (_THEIRS, "torch: CPU of rank 0")):
        every = (
            (float(ranks), _of(sides[name][1], lambda cost: cost.cpu))
            for ranks, sides in found.items()
        )
        points[label] = [(ranks, cpu.median) for ranks, cpu in every if cpu.values]
    return lines(
        "All ranks meet at rank 0", "ranks (simulated, real sockets)", "seconds (median)", points
    )
