"""Random schedules of rank 0's job, each by its number: `make schedules`.

    python tests/schedules.py --first 0 --count 1000000

`tests/lib/job_schedules.py` says what a schedule is, and what has to hold in it. The first one that fails is printed
with its number and as few of its events as still fail, each with its effects, and the command ends with exit code 1.
Such a schedule becomes a row of `tests/unit/test_job_rows.py`. The digest is one of all effects: it is the same for the
same numbers, on every machine and for each PYTHONHASHSEED.
"""

import argparse
import hashlib
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(_ROOT), str(_ROOT / "tests" / "lib")]

from job_rows import SETTINGS, USUAL  # noqa: E402 - where it is
from job_schedules import Plan, follow, plan_of_seed, shrunk  # noqa: E402 - where it is

_BLOCK = 10_000  # schedules from one line of progress to the next


def problem_of(plan: Plan) -> str:
    """How a plan fails; empty: it does not."""
    try:
        follow(plan)
    except Exception as error:  # noqa: BLE001 - whatever it is
        return f"{type(error).__name__}: {error}"
    return ""


def report(seed: int) -> str:
    """What is printed of a schedule that fails."""
    problem = problem_of(plan_of_seed(seed))
    plan = shrunk(plan_of_seed(seed), lambda shorter: problem_of(shorter) == problem)
    lines = [f"schedule {seed} fails: {problem}"]
    lines += _differences(plan.setup, USUAL)
    lines += _differences(plan.setup.settings, SETTINGS)
    if not plan.is_orderly:
        lines.append("  the ranks keep no order")
    with suppress(Exception):
        follow(plan, lambda event, effects: lines.append(f"  {event} -> {effects}"))
    return "\n".join(lines)


def _differences(setup: Any, usual: Any) -> list[str]:
    return [
        f"  {name}: {value}"
        for name, value in setup._asdict().items()
        if name != "settings" and value != getattr(usual, name)
    ]


def run(first: int, count: int) -> bool:
    """Whether all schedules from a number on hold."""
    began = time.monotonic()
    digest = hashlib.sha256()
    events = 0
    for done, seed in enumerate(range(first, first + count), start=1):
        try:
            schedule = follow(plan_of_seed(seed))
        except Exception:  # noqa: BLE001 - it is followed once more
            print(report(seed))
            return False
        events += len(schedule.happened)
        digest.update("\n".join(schedule.lines).encode())
        if done % _BLOCK == 0 or done == count:
            seconds = time.monotonic() - began
            print(
                f"{done:,} schedules from {first:,} on hold: {events / done:.1f} events each, "
                f"{seconds:.0f} s, digest {digest.hexdigest()[:16]}",
                flush=True,
            )
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description="Random schedules of rank 0's job.")
    parser.add_argument("--first", type=int, default=0, help="number of the first (default: 0)")
    parser.add_argument(
        "--count", type=int, default=1_000_000, help="how many (default: 1000000, half an hour)"
    )
    arguments = parser.parse_args()
    return 0 if run(arguments.first, arguments.count) else 1


if __name__ == "__main__":
    sys.exit(main())
