"""The tables of docs/explanation/scale.md."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise

from page import table
from simulate_costs import Costs
from simulate_job import Outcome, Setting
from simulate_real import Measured
from simulate_rendezvous import simulated
from simulate_supervision import end_of_all, supervision

Outcomes = Mapping[int, Outcome]  # ranks -> what came of it
LATENCY = 1e-3  # seconds, unless a table says otherwise
_LATENCIES = (1e-4, 1e-3, 1e-2)
_LOOPBACK = 2e-5  # seconds
# Second of rank 0's CPU, or of its link: then the ranks wait for rank 0, and not for each other
_TOO_MUCH = 1.0
_FINE = [round(10 ** (power / 50)) for power in range(75, 251)]  # ranks, to 5 %
_OWN_FILES = 128  # of rank 0, beside those of the lines


def limits(costs: Costs, outcomes: Outcomes) -> str:
    """Where rank 0 is the bottleneck, and with what."""
    supervised = {size: supervision(costs, size) for size in _FINE}
    reached = {
        "roll call: 1 s of CPU": crossing({size: one.cpu for size, one in outcomes.items()}),
        "roll call: 1 s of a link of 10 Gbit/s": crossing(
            {size: one.on_the_link for size, one in outcomes.items()}
        ),
        "roll call: 1 s of a link of 100 Gbit/s": crossing(
            {size: one.on_the_link / 10 for size, one in outcomes.items()}
        ),
        "roll call: ranks that get no answer in 10 s": _between(
            list(outcomes), [one.unanswered > 0 for one in outcomes.values()]
        ),
        "supervision: 0.1 % of a core": _first(
            {size: one.share > 0.001 for size, one in supervised.items()}
        ),
        "supervision: 1 % of a core": _first(
            {size: one.share > 0.01 for size, one in supervised.items()}
        ),
        "supervision: a death known to all after 1 s": _first(
            {size: one.told > 1 for size, one in supervised.items()}
        ),
        "1,024 open files": f"{1024 - _OWN_FILES:,} ranks",
        "65,536 open files": f"{65_536 - _OWN_FILES:,} ranks",
    }
    return table(("what is reached", "at"), reached.items())


def crossing(values: Mapping[int, float], limit: float = _TOO_MUCH) -> str:
    """Where a value that grows with the ranks reaches a limit: between two points, by their power law."""
    size, value = next(iter(values.items()))
    if value >= limit:
        return f"below {size:,} ranks"
    for (low, less), (high, more) in pairwise(values.items()):
        if more >= limit:
            part = math.log(limit / less) / math.log(more / less)
            return f"{_rounded(low * (high / low) ** part):,} ranks"
    return f"not up to {max(values):,}"


def _rounded(size: float) -> int:
    """To two digits: it is a simulation."""
    return int(float(f"{size:.2g}"))


def _between(sizes: Sequence[int], happens: Sequence[bool]) -> str:
    if not any(happens):
        return f"not up to {sizes[-1]:,}"
    first = happens.index(True)
    return (
        f"between {sizes[first - 1]:,} and {sizes[first]:,} ranks"
        if first
        else f"below {sizes[0]:,} ranks"
    )


def _first(happens: Mapping[int, bool]) -> str:
    size = next((size for size, is_so in happens.items() if is_so), None)
    return f"{_rounded(size):,} ranks" if size else f"not up to {max(happens):,}"


def sizes(outcomes: Outcomes) -> str:
    """What grows with the ranks."""
    rows = [
        [
            f"{world_size:,}",
            f"{sum(found.messages.values()):,}",
            f"{found.bytes_in / 1e6:,.1f} and {found.bytes_out / 1e6:,.1f} MB",
            f"{found.cpu:.2f} and {found.cpu_go:.2f} s",
            f"{found.on_the_link:.2f} s",
            _time(found.membership, found),
            f"{found.files:,}",
            f"{found.memory / 1e6:.0f} MB",
        ]
        for world_size, found in outcomes.items()
    ]
    head = (
        "ranks", "messages at rank 0", "bytes in and out", "CPU of rank 0: membership and go", "its link",
        "all have the membership after", "connections", "resident",
    )  # fmt: skip
    return table(head, rows)


def _time(at: float | None, found: Outcome) -> str:
    return (
        f"never: {found.unanswered:,} ranks get no answer"
        if at is None
        else f"{at - found.last_start:.2f} s"
    )


def latencies(costs: Costs, world_size: int) -> str:
    """A large job under each latency, with slow starters, and with ranks that never start."""
    rows = []
    for latency in _LATENCIES:
        setting = Setting(world_size, latency=latency)
        slow, dead = (
            simulated(replace(setting, slow=0.01), costs),
            simulated(replace(setting, dead=0.001), costs),
        )
        assert dead.told is not None
        line = supervision(costs, world_size, latency=latency)
        rows.append([
            f"{latency * 1e3:g} ms",
            _time(slow.membership, slow),
            f"{dead.told - setting.join_timeout:.2f} s, {len(dead.text)} characters",
            f"{dead.unanswered:,}",
            f"{line.told:.2f} s",
        ])  # fmt: skip
    head = (
        "latency", "membership, after the last slow starter", "missing named, after the join timeout",
        "ranks that have given up by then", "a death known to all, after",
    )  # fmt: skip
    return table(head, rows)


def supervised(costs: Costs, sizes: Sequence[int]) -> str:
    """What failure detection costs while nothing happens, and how soon it notices that a host has vanished."""
    rows = []
    for world_size in sizes:
        found = supervision(costs, world_size)
        rows.append([
            f"{world_size:,}",
            f"{found.interval:g} s",
            f"{found.share:.2%}",
            f"{found.told:.2f} s",
            f"{found.silent[0]:.0f} to {found.silent[1]:.0f} s",
            f"{end_of_all(costs, world_size):.2f} s",
        ])  # fmt: skip
    head = (
        "ranks", "between two beats", "of a core of rank 0", "a death known to all, after",
        "a vanished host noticed, after", "CPU for the end of all",
    )  # fmt: skip
    return table(head, rows)


def costs_table(costs: Costs) -> str:
    """What was measured; the words are those of the class."""
    said = dict(re.findall(r"^ +([\w, ]+): (.+)$", str(Costs.__doc__), re.MULTILINE))
    names = [
        each.name
        for each in fields(Costs)
        if not each.name.endswith("_bytes") and each.name in said
    ]
    return table(
        ("cost", "what it is", "CPU"),
        [(name, said[name].rstrip("."), _cost(name, costs)) for name in names],
    )


def _cost(name: str, costs: Costs) -> str:
    value: float = getattr(costs, name)
    return f"{value * 1e9:.3g} ns" if value < 1e-6 else f"{value * 1e6:.2g} µs"


def validation(costs: Costs, jobs: Mapping[int, Measured]) -> str:
    """Real roll calls, and the same simulated."""
    rows = []
    for world_size, real in jobs.items():
        # One process plays all ranks, which come one after the other.
        setting = Setting(world_size, latency=_LOOPBACK, link=math.inf, pace=costs.peer)
        found = simulated(setting, costs)
        rows.append([
            f"{world_size:,}",
            *_compared(found.cpu, real.cpu, "s"),
            *_compared(found.cpu_go, real.go, "s"),
            *_compared(found.memory / 1e6, real.memory / 1e6, "MB"),
            f"{real.took:.2f} s",
        ])  # fmt: skip
    head = (
        "ranks", "CPU until the membership is sent: simulated", "measured", "error",
        "CPU until all may go: simulated", "measured", "error", "memory: simulated", "measured", "error",
        "measured time until all had the membership",
    )  # fmt: skip
    return table(head, rows)


def supervision_validation(costs: Costs, jobs: Mapping[int, Measured]) -> str:
    """Real supervised, and the same simulated."""
    rows = []
    for world_size, real in jobs.items():
        found = supervision(costs, world_size, latency=_LOOPBACK, link=math.inf)
        beat, told = _compared(found.beat, real.beat, "s"), _compared(found.told, real.told, "s")
        rows.append([f"{world_size:,}", *beat, *told])
    head = (
        "ranks", "CPU in 15 s in which nothing happens: simulated", "measured", "error",
        "a death known to all, after: simulated", "measured", "error",
    )  # fmt: skip
    return table(head, rows)


def _compared(ours: float, real: float, unit: str) -> list[str]:
    return [f"{ours:.3g} {unit}", f"{real:.3g} {unit}", f"{ours / real - 1:+.0%}"]
