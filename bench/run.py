"""`make bench`: what the project promises and what else there is, side by side; writes `RESULTS.md` and its plots.

    make bench                          all of it, some 25 minutes on a quiet machine with two cores
    make bench ARGS="--only start"      one part (may be given again), shown and not written down
    make bench ARGS=--quick             fewer rounds: that every row still works, not figures; not written down

Every comparison takes its sides in random order, in one run, so that what else the machine does falls on all alike. A
side that fails, or whose program is not there, is a row that says so. The exit code is 1 when a limit was missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER.parent / "tests/lib")]

import container  # noqa: E402 - beside this file, and so are the next
import detection  # noqa: E402
import diagnosis  # noqa: E402
import group  # noqa: E402
import join  # noqa: E402
import late  # noqa: E402
import restarts  # noqa: E402
import start  # noqa: E402
import stopping  # noqa: E402
import supervision  # noqa: E402
from measure import Effort  # noqa: E402
from page import Limit, Section, gpu_part, limits_table, page, section_text, with_gpu  # noqa: E402

PARTS: dict[str, Callable[[Effort], Section]] = {
    "start": start.section,
    "detect": detection.section,
    "group": group.section,
    "join": join.section,
    "diagnosis": diagnosis.section,
    "supervision": supervision.section,
    "late": late.section,
    "stopping": stopping.section,
    "restarts": restarts.section,
    "container": container.section,
}


def measured(name: str, effort: Effort) -> Section:
    """One part of it; one that breaks is a limit that could not be measured."""
    begin = time.monotonic()
    try:
        found = PARTS[name](effort)
    except Exception as error:  # noqa: BLE001 - the other parts still have something to say
        traceback.print_exc()
        found = Section(
            limits=[Limit(f"the part `{name}`", f"{type(error).__name__}: {error}"[:200], "", None)]
        )
    took = time.monotonic() - begin
    print(
        f"bench: {name}: {took:.0f} s, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True
    )
    return found


def main() -> int:
    """Measure; 1 when a limit was missed or could not be measured because something broke."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", choices=PARTS, metavar="NAME", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    begin, load = time.time(), os.getloadavg()[0]
    sections = {name: measured(name, Effort(options.quick)) for name in options.only or PARTS}
    if options.only or options.quick:
        for section in sections.values():
            print(limits_table(section.limits), section_text(section), sep="\n\n", end="\n\n")
    else:
        for section in sections.values():
            for plot in (table.plot for table in section.tables if table.plot):
                (FOLDER / plot[0]).write_text(plot[1])
        day = time.strftime("%Y-%m-%d", time.gmtime(begin))
        loads = f"load {load:.1f} at the beginning, {os.getloadavg()[0]:.1f} at the end"
        how = f"Measured on {day} by `make bench` in {(time.time() - begin) / 60:.0f} minutes; {loads}."
        results = FOLDER / "RESULTS.md"
        results.write_text(
            with_gpu(page(list(sections.values()), how), gpu_part(results.read_text()))
        )
    return int(
        any(limit.reached is False for section in sections.values() for limit in section.limits)
    )


if __name__ == "__main__":
    sys.exit(main())
