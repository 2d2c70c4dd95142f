"""How far one rank 0 goes: the roll call and the lifeline simulated up to 100,000 ranks, fed with costs measured first.

    python bench/simulate.py

measures what each message costs the real code (`simulate_costs`), holds the simulation (`simulate_rollcall`,
`simulate_lifeline`) against real roll calls of up to 10,000 ranks, and writes bench/scale.svg, bench/scale-lifeline.svg
and the figures of docs/explanation/scale.md.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from page import table  # noqa: E402 - beside this file, and so are the next
from plot import lines  # noqa: E402
from simulate_costs import Costs, Measured, measured  # noqa: E402
from simulate_lifeline import Lifeline, lifeline  # noqa: E402
from simulate_rollcall import RANKS_A_NODE, Outcome, Setting, simulated  # noqa: E402

PAGE = ROOT / "docs" / "explanation" / "scale.md"
SHAPES = {"flat": 1, "tree": RANKS_A_NODE}
VALIDATED = (1024, 4096, 10_000)
SIZES = (64, 256, 1024, 4096, 10_000, 20_000, 40_000, 100_000)
LATENCIES = (1e-4, 1e-3, 1e-2)
_LOOPBACK = 2e-5  # seconds
_TOO_MUCH = 1.0  # second of rank 0's CPU, or of its link: then the ranks wait for rank 0, and not for each other


def validation(costs: Costs, roll_calls: dict[int, Measured]) -> str:
    """Real flat roll calls, and the same simulated."""
    rows = []
    for world_size, real in roll_calls.items():
        # One process plays all ranks: they come one after the other, and the link is memory.
        setting = Setting(world_size, latency=_LOOPBACK, link=math.inf, pace=costs.peer)
        found = simulated(setting, costs)
        rows.append([
            f"{world_size:,}",
            *_compared(found.cpu, real.cpu, "s"),
            *_compared(found.memory / 1e6, real.memory / 1e6, "MB"),
        ])  # fmt: skip
    head = ("ranks", "CPU of rank 0: simulated", "measured", "error", "memory: simulated", "measured", "error")
    return table(head, rows)


def _compared(ours: float, real: float, unit: str) -> list[str]:
    return [f"{ours:.3g} {unit}", f"{real:.3g} {unit}", f"{ours / real - 1:+.0%}"]


def costs_table(costs: Costs) -> str:
    """What was measured; the words are those of the class."""
    said = dict(re.findall(r"^ +([\w, ]+): (.+)$", str(Costs.__doc__), re.MULTILINE))
    names = [each.name for each in fields(Costs) if not each.name.endswith("_bytes") and each.name in said]
    return table(("cost", "what it is", ""), [(name, said[name], _cost(name, costs)) for name in names])


def _cost(name: str, costs: Costs) -> str:
    value: float = getattr(costs, name)
    if name == "byte":
        return f"{value * 1e9:.2f} ns"
    return f"{value * 1e6:.2g} µs"


def sizes_table(outcomes: dict[tuple[str, int], Outcome]) -> str:
    """What grows with the ranks."""
    rows = []
    for (shape, world_size), found in outcomes.items():
        rows.append([
            f"{world_size:,}",
            shape,
            f"{sum(found.messages.values()):,}",
            f"{found.bytes_in / 1e6:,.1f} and {found.bytes_out / 1e6:,.1f} MB",
            f"{found.cpu:.2f} s",
            f"{found.on_the_link:.2f} s",
            _time(found.roster, found),
            f"{found.files:,}",
            f"{found.memory / 1e6:.0f} MB",
        ])  # fmt: skip
    head = (
        "ranks", "shape", "messages at rank 0", "bytes in and out", "CPU of rank 0", "its link", "all have the roster",
        "open files", "resident",
    )  # fmt: skip
    return table(head, rows)


def _time(at: float | None, found: Outcome) -> str:
    return f"never: {found.unanswered:,} ranks get no answer" if at is None else f"{at - found.last_start:.2f} s"


def latencies_table(costs: Costs, world_size: int) -> str:
    """The whole job under each latency, with slow starters, and with ranks that never start."""
    rows = []
    for shape, ranks_a_line in SHAPES.items():
        for latency in LATENCIES:
            setting = Setting(world_size, ranks_a_line, latency=latency)
            slow, dead = simulated(replace(setting, slow=0.01), costs), simulated(replace(setting, dead=0.001), costs)
            assert dead.told is not None
            line = lifeline(costs, world_size, ranks_a_line, latency=latency)
            rows.append([
                shape,
                f"{latency * 1e3:g} ms",
                _time(slow.roster, slow),
                f"{dead.told - setting.join_timeout:.2f} s, {len(dead.text)} characters",
                f"{dead.unanswered:,}",
                f"{line.told:.2f} s",
            ])  # fmt: skip
    head = (
        "shape", "latency", "roster, after the last slow starter", "missing named, after the join timeout",
        "ranks that have given up by then", "a death known to all, after",
    )  # fmt: skip
    return table(head, rows)


def lifeline_table(costs: Costs) -> str:
    """What the lifeline costs while nothing happens, and how soon it notices that a host has vanished."""
    rows = []
    for world_size in SIZES:
        for shape, ranks_a_line in SHAPES.items():
            found = lifeline(costs, world_size, ranks_a_line)
            rows.append([
                f"{world_size:,}",
                shape,
                f"{found.interval:g} s",
                f"{found.share:.2%}",
                f"{found.told:.2f} s",
                f"{found.silent[0]:.0f} to {found.silent[1]:.0f} s",
                f"{found.end_cpu:.2f} s",
            ])  # fmt: skip
    head = (
        "ranks", "shape", "between two beats", "of a core of rank 0", "a death known to all, after",
        "a vanished host noticed, after", "CPU for the end of all",
    )  # fmt: skip
    return table(head, rows)


def first(sizes: Iterable[int], is_too_much: Callable[[int], bool]) -> int | None:
    """The smallest job for which it is so, to 3 %; None: no job up to the largest."""
    low = 1
    for high in sizes:
        if is_too_much(high):
            while high - low > high * 0.03:
                middle = (low + high) // 2
                low, high = (low, middle) if is_too_much(middle) else (middle, high)  # noqa: PLW2901
            return high
        low = high
    return None


def limits_table(costs: Costs, known: dict[tuple[str, int], Outcome]) -> str:
    """Where rank 0 is the bottleneck, and with what."""
    rows = []
    for shape, ranks_a_line in SHAPES.items():
        for question, is_too_much in _limits(costs, shape, known).items():
            size = first(SIZES, is_too_much)
            rows.append((shape, question, f"{size:,} ranks" if size else "not up to 100,000"))
        rows += [
            (shape, f"{files:,} open files", f"{(files - 128) * ranks_a_line:,} ranks") for files in (1024, 65_536)
        ]
    return table(("shape", "what is reached", "at"), rows)


def _limits(costs: Costs, shape: str, known: dict[tuple[str, int], Outcome]) -> dict[str, Callable[[int], bool]]:
    """What to find the smallest job for."""

    def met(size: int) -> Outcome:
        if (shape, size) not in known:
            known[shape, size] = simulated(Setting(size, SHAPES[shape], latency=LATENCIES[1]), costs)
        return known[shape, size]

    def line(size: int) -> Lifeline:
        return lifeline(costs, size, SHAPES[shape])

    return {
        "roll call: 1 s of CPU": lambda size: met(size).cpu > _TOO_MUCH,
        "roll call: 1 s of a link of 10 Gbit/s": lambda size: met(size).on_the_link > _TOO_MUCH,
        "roll call: 1 s of a link of 100 Gbit/s": lambda size: met(size).on_the_link / 10 > _TOO_MUCH,
        "roll call: ranks that get no answer in 10 s": lambda size: met(size).unanswered > 0,
        "lifeline: 0.1 % of a core": lambda size: line(size).share > 0.001,
        "lifeline: 1 % of a core": lambda size: line(size).share > 0.01,
        "lifeline: a death known to all after 1 s": lambda size: line(size).told > _TOO_MUCH,
    }


def pictures(costs: Costs, outcomes: dict[tuple[str, int], Outcome]) -> dict[str, str]:
    """File name -> plot."""
    seconds: dict[str, list[tuple[float, float]]] = {}
    for (shape, size), found in outcomes.items():
        if found.roster is not None:
            seconds.setdefault(f"{shape}: until all have the roster", []).append((size, found.roster))
        seconds.setdefault(f"{shape}: CPU of rank 0", []).append((size, found.cpu))
    share = {
        shape: [(float(size), 100 * lifeline(costs, size, lines).share) for size in SIZES]
        for shape, lines in SHAPES.items()
    }
    return {
        "scale.svg": lines("The roll call, simulated", "ranks, all started at once", "seconds", seconds),
        "scale-lifeline.svg": lines("The lifeline while nothing happens, simulated", "ranks", "% of a core", share),
    }


def written(text: str, parts: dict[str, str]) -> str:
    """The page with these parts between their markers."""
    for name, part in parts.items():
        begin, end = f"<!-- simulate: {name} -->", f"<!-- end: {name} -->"
        head, found, rest = text.partition(begin)
        _, closed, tail = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"{PAGE.name} has no place for {name}: {begin} and {end}")
        text = f"{head}{begin}\n\n{part}\n\n{end}{tail}"
    return text


def main() -> int:
    """Measure, simulate, print and write."""
    costs, roll_calls = measured(VALIDATED)
    outcomes = {
        (shape, size): simulated(Setting(size, ranks_a_line, latency=LATENCIES[1]), costs)
        for size in SIZES
        for shape, ranks_a_line in SHAPES.items()
    }
    parts = {
        "costs": costs_table(costs),
        "validation": validation(costs, roll_calls),
        "limits": limits_table(costs, dict(outcomes)),
        "sizes": sizes_table(outcomes),
        "latencies": latencies_table(costs, SIZES[-1]),
        "lifeline": lifeline_table(costs),
    }
    for name, part in parts.items():
        print(f"\n{name}\n\n{part}", flush=True)
    for name, picture in pictures(costs, outcomes).items():
        (ROOT / "bench" / name).write_text(picture)
    PAGE.write_text(written(PAGE.read_text(), parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
