"""How far one rank 0 goes: the roll call and failure detection simulated to 40,000 ranks, fed with measured costs.

    python bench/simulate.py

measures what each message costs the real code (`simulate_costs`), lets real jobs of up to 10,000 ranks meet, whose
ranks are sockets (`simulate_real`), holds the simulation (`simulate_rendezvous`, `simulate_supervision`) against
them, and writes bench/scale.svg, bench/scale-supervision.svg and the figures of docs/explanation/scale.md.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / each) for each in ("bench", "tests/lib"))]

import simulate_tables as tables  # noqa: E402 - beside this file, and so are the next
from plot import lines  # noqa: E402
from simulate_costs import Costs, measured  # noqa: E402
from simulate_job import Setting  # noqa: E402
from simulate_real import real  # noqa: E402
from simulate_rendezvous import simulated  # noqa: E402
from simulate_supervision import supervision  # noqa: E402
from simulate_tables import LATENCY, Outcomes  # noqa: E402

PAGE = ROOT / "docs" / "explanation" / "scale.md"
SIZES = (64, 256, 1024, 4096, 10_000, 20_000, 40_000)
LARGE = 10_000
VALIDATED = (1024, 4000, 10_000)


def pictures(costs: Costs, outcomes: Outcomes) -> dict[str, str]:
    """File name -> plot."""
    memberships = [
        (float(size), found.membership)
        for size, found in outcomes.items()
        if found.membership is not None
    ]
    cpu = [(float(size), found.cpu) for size, found in outcomes.items()]
    seconds = {"until all have the membership": memberships, "CPU of rank 0": cpu}
    share = {"rank 0": [(float(size), 100 * supervision(costs, size).share) for size in SIZES]}
    return {
        "scale.svg": lines(
            "The roll call, simulated", "ranks, all started at once", "seconds", seconds
        ),
        "scale-supervision.svg": lines(
            "Failure detection while nothing happens, simulated", "ranks", "% of a core", share
        ),
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

    costs = measured()
    say("measured what messages cost")
    jobs = {size: real(size) for size in VALIDATED}
    say("let real jobs meet")
    outcomes = {size: simulated(Setting(size, latency=LATENCY), costs) for size in SIZES}
    parts = {
        "limits": tables.limits(costs, outcomes),
        "sizes": tables.sizes(outcomes),
        "latencies": tables.latencies(costs, LARGE),
        "supervision": tables.supervised(costs, SIZES),
        "costs": tables.costs_table(costs),
        "validation": tables.validation(costs, jobs),
        "validation-supervision": tables.supervision_validation(costs, jobs),
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
