"""How far one rank 0 goes: the roll call and the lifeline simulated up to 100,000 ranks, fed with costs measured first.

    python bench/simulate.py

measures what each message costs the real code (`simulate_costs`), lets real jobs of up to 100,000 ranks meet, whose
ranks or relays are sockets (`simulate_real`), holds the simulation (`simulate_rollcall`, `simulate_lifeline`) against
them, and writes bench/scale.svg, bench/scale-lifeline.svg and the figures of docs/explanation/scale.md.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / each) for each in ("bench", "tests"))]

import simulate_tables as tables  # noqa: E402 - beside this file, and so are the next
from plot import lines  # noqa: E402
from simulate_costs import measured  # noqa: E402
from simulate_job import Setting  # noqa: E402
from simulate_messages import SHAPES  # noqa: E402
from simulate_real import real  # noqa: E402
from simulate_rollcall import simulated  # noqa: E402
from simulate_tables import LATENCY, Outcomes  # noqa: E402

PAGE = ROOT / "docs" / "explanation" / "scale.md"
SIZES = {
    "flat": (64, 256, 1024, 4096, 10_000, 20_000, 40_000, 100_000),
    "relays": (4096, 10_000, 20_000, 40_000, 100_000),
}
VALIDATED = {"flat": (1024, 4000, 10_000), "relays": (4096, 10_000, 32_768, 100_000)}


def pictures(costs: tables.ShapeCosts, outcomes: Outcomes) -> dict[str, str]:
    """File name -> plot."""
    seconds: dict[str, list[tuple[float, float]]] = {}
    for shape in reversed(SHAPES):
        for size, found in outcomes[shape].items():
            if found.roster is not None:
                seconds.setdefault(f"{shape}: until all have the roster", []).append((size, found.roster))
            seconds.setdefault(f"{shape}: CPU of rank 0", []).append((size, found.cpu))
    share = {
        shape: [(float(size), 100 * tables.lifeline_of(costs, shape, size).share) for size in SIZES[shape]]
        for shape in reversed(SHAPES)
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
    start = time.monotonic()

    def say(what: str) -> None:
        print(f"{time.monotonic() - start:.0f} s: {what}", flush=True)

    costs = {shape: measured(ranks_a_line) for shape, ranks_a_line in SHAPES.items()}
    say("measured what messages cost")
    jobs = {shape: {size: real(size, SHAPES[shape]) for size in sizes} for shape, sizes in VALIDATED.items()}
    say("let real jobs meet")
    outcomes = {
        shape: {size: simulated(Setting(size, SHAPES[shape], latency=LATENCY), costs[shape]) for size in sizes}
        for shape, sizes in SIZES.items()
    }
    parts = {
        "limits": tables.limits(costs, outcomes),
        "sizes": tables.sizes(outcomes),
        "latencies": tables.latencies(costs["relays"], max(SIZES["relays"])),
        "lifeline": tables.lifelines(costs, SIZES),
        "costs": tables.costs_table(costs),
        "validation": tables.validation(costs, jobs),
        "validation-lifeline": tables.lifeline_validation(costs, jobs),
    }
    say("simulated")
    for name, part in parts.items():
        print(f"\n{name}\n\n{part}", flush=True)
    for name, picture in pictures(costs, outcomes).items():
        (ROOT / "bench" / name).write_text(picture)
    PAGE.write_text(written(PAGE.read_text(), parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
