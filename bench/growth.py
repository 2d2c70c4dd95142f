"""A job that goes on for long: whether the memory or the open files of a script or of an agent grow.

    python bench/growth.py --ranks 64 --minutes 60

Each rank calls `init("none")`, and then, every five seconds, `barrier()`, `main_first()` and `ctx.preempted`. There is
a report, and so a journal. What a process has after a tenth of the time, when all that is done once is done, is
compared with what it has at the end. The exit code is 1 where something has grown.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests/lib")]

from measure import clean_environ  # noqa: E402 - beside this file, and so is the next
from supervised import Job, job  # noqa: E402 - shared with the tests
from supervision import guard_of, resident  # noqa: E402 - beside this file

from distboot.host import free_port  # noqa: E402

TRAINS = """
ready()
while not Path("end").exists():
    ctx.barrier()
    with ctx.main_first():
        pass
    stop = ctx.preempted
    time.sleep(5)
ctx.barrier()
"""
# A page more or less is the allocator's; a message kept for each barrier would be 5 MB in an hour
_MOST_KIB = 512


class Held(NamedTuple):
    """What a process has."""

    kib: int  # resident
    files: int


def held(pids: dict[str, int]) -> dict[str, Held]:
    """Of each process, by its name."""
    return {
        name: Held(resident(pid), len(list(Path(f"/proc/{pid}/fd").iterdir())))
        for name, pid in pids.items()
    }


def growth(running: Job, minutes: float) -> bool:
    """Print what was held, every tenth of the time; whether some process holds more than at the first look."""
    scripts = running.all_ready()
    pids = {f"script {rank}": pid for rank, pid in enumerate(scripts)}
    pids |= {f"agent {rank}": guard_of(pid) for rank, pid in enumerate(scripts)}
    looks = []
    for number in range(1, 11):
        time.sleep(minutes * 6)
        looks.append(held(pids))
        journal = running.folder / "report.jsonl"
        print(
            f"{number * minutes / 10:5.1f} min:",
            *(_said(looks[-1], who) for who in ("agent 0", "agent", "script")),
            f"journal {journal.stat().st_size / 1e3:.0f} kB",
            sep="  ",
            flush=True,
        )
    grown = {
        name: (first, looks[-1][name])
        for name, first in looks[0].items()
        if looks[-1][name].files > first.files or looks[-1][name].kib > first.kib + _MOST_KIB
    }
    for name, (first, last) in grown.items():
        print(f"{name} has grown: {first} -> {last}")
    return bool(grown)


def _said(look: dict[str, Held], who: str) -> str:
    """The most of all processes whose names begin so."""
    those = [one for name, one in look.items() if name == who or name.startswith(f"{who} ")]
    kib = max(one.kib for one in those)
    return f"{who}: {kib * 1.024 / 1e3:.2f} MB, {max(one.files for one in those)} files"


def main() -> int:
    """1: something has grown, or a rank has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=60)
    options = parser.parse_args()
    environ = clean_environ(DISTBOOT_JOIN_TIMEOUT="300")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        job(environ, free_port(), Path(folder), TRAINS, options.ranks, init=True) as running,
    ):
        has_grown = growth(running, options.minutes)
        running.touch("end")
        codes = running.codes(120)
        print(f"exit codes: {sorted(set(codes))}")
        print(running.output(0)[-1500:])
        return int(has_grown or any(codes))


if __name__ == "__main__":
    sys.exit(main())
