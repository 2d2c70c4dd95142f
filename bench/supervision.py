"""What failure detection promises, measured on one machine: how fast all stop, its cost, and that it does not cry wolf.

    python bench/supervision.py death 2 4 8 16 32 64    a rank is killed: until the last survivor has stopped
    python bench/supervision.py cost --seconds 60       CPU and wake-ups while nothing happens
    python bench/supervision.py soak --seconds 3600     load 50, ranks that are stopped for a while, locks that are held

Every rank is a wrapper around a Python that only sleeps, or with `--init` a script with torch.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/lib")]

from measure import Contender, Effort, UnmeasuredError, clean_environ, interleaved  # noqa: E402
from page import Limit, Section, Table, promise  # noqa: E402
from simulate_real import real  # noqa: E402
from supervised import Job, job  # noqa: E402 - shared with the tests

from distboot.host import free_port  # noqa: E402

BOUND = 15  # seconds, the default
_MOST_AGENTS = 10_000
SLEEPS = """
ready()
while not Path("end").exists():
    time.sleep(0.2)
"""
BUSY = """
import ctypes
ready()
while not Path("end").exists():
    if Path(f"hold-{rank}").exists():  # a C extension that keeps Python's lock for a minute
        Path(f"hold-{rank}").unlink()
        ctypes.PyDLL(None).sleep(60)
    time.sleep(0.2)
"""


@contextmanager
def started(script: str, ranks: int, *, init: bool) -> Iterator[Job]:
    """A job whose ranks are all there."""
    environ = clean_environ(DISTBOOT_JOIN_TIMEOUT="300")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        job(environ, free_port(), Path(folder), script, ranks, init=init) as running,
    ):
        running.all_ready()
        yield running


_DEATHS = (("wrapper", 4), ("wrapper", 16), ("wrapper", 64), ("init", 4))


def section(effort: Effort) -> Section:
    """How fast all stop, and what it costs while nothing happens."""
    sides = [
        Contender(f"{way}, {ranks} ranks", partial(death, ranks, init=way == "init"))
        for way, ranks in _DEATHS
    ]
    found = interleaved(sides, effort.rounds(3), warm=False)
    limits = [
        promise(f"a rank is killed, all others have stopped: {name}", series, 0.3, "≤ 0.3 s")
        for name, series in found.items()
    ]
    rows = []
    for way in ("wrapper", "init"):
        cpu, wakes = cost(4, 5 if effort.quick else 20, init=way == "init")
        rows.append((f"{way}, rank 0", f"{100 * cpu[0]:.3f} %", f"{wakes[0]:.1f}"))
        rows.append(
            (
                f"{way}, the most of the others",
                f"{100 * max(cpu[1:]):.3f} %",
                f"{max(wakes[1:]):.1f}",
            )
        )
    head = ("process beside a rank, of 4", "of a core", "wake-ups a second")
    meaning = "This is what failure detection takes from a training job, in a process of its own beside each rank."
    limits += [*_at_scale(), _memory()]
    return Section([Table("Failure detection while nothing happens", head, rows, meaning)], limits)


def _at_scale() -> list[Limit]:
    """Rank 0's agent with 10,000 others, which are sockets of one other process."""
    found = real(_MOST_AGENTS)
    of_a_core = 100 * found.beat / BOUND
    others = f"{_MOST_AGENTS:,} agents (simulated, real sockets)"
    return [
        Limit(
            f"a death is told to {others}",
            f"{found.told:.2f} s",
            "≤ 0.3 s",
            found.told <= 0.3,
        ),
        Limit(
            f"rank 0's agent with {others}, while nothing happens",
            f"{of_a_core:.2f} % of a core",
            "≤ 1 %",
            of_a_core <= 1,
        ),
    ]


def _memory() -> Limit:
    """Resident memory of the agent beside a script that calls `init`; the most of two ranks."""
    with started(SLEEPS, 2, init=True) as running:
        kib = max(resident(guard_of(pid)) for pid in running.all_ready())
        running.touch("end")
        running.codes(60)
    megabytes = kib * 1024 / 1e6
    what = "the agent's resident memory, a rank of `init`"
    return Limit(what, f"{megabytes:.1f} MB", "≤ 13 MB", megabytes <= 13)


def resident(pid: int) -> int:
    """Kilobytes of 1,024 bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nVmRSS:")[2].split()[0])


def death(ranks: int, *, init: bool) -> float:
    """Seconds from the SIGKILL of one rank until the scripts of all others have ended."""
    with started(SLEEPS, ranks, init=init) as running:
        culprit = ranks // 2
        pids = running.all_ready()
        files = [os.pidfd_open(pid) for pid in pids]
        start = time.perf_counter()
        os.kill(pids[culprit], signal.SIGKILL)
        for file in files:
            _wait(file)
        seconds = time.perf_counter() - start
        for file in files:
            os.close(file)
        running.codes(60)
        said = f"rank {culprit} failed first: killed by SIGKILL"
        assert all(said in running.output(rank) for rank in range(ranks) if rank != culprit), (
            running.output(0)
        )
        return seconds


def _wait(file: int) -> None:
    import select

    if not select.select([file], [], [], 60)[0]:
        raise UnmeasuredError("a survivor did not stop within 60 s")


def cost(ranks: int, seconds: float, *, init: bool) -> tuple[list[float], list[float]]:
    """By rank: the part of a core that its wrapper or guard uses, and how often a second it wakes up."""
    with started(SLEEPS, ranks, init=init) as running:
        watching = [
            guard_of(pid) if init else running.processes[rank].pid
            for rank, pid in enumerate(running.all_ready())
        ]
        time.sleep(3)  # what the start itself costs is over
        before = [_used(pid) for pid in watching]
        time.sleep(seconds)
        after = [_used(pid) for pid in watching]
        running.touch("end")
        running.codes(60)
    pairs = list(zip(before, after, strict=True))
    return [(new[0] - old[0]) / seconds for old, new in pairs], [
        (new[1] - old[1]) / seconds for old, new in pairs
    ]


def _used(pid: int) -> tuple[float, int]:
    """Seconds of CPU, and how often it has slept, all of its threads together."""
    cpu, slept = 0.0, 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        cpu += int((task / "schedstat").read_text().split()[0]) / 1e9
        status = (task / "status").read_text()
        slept += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return cpu, slept


def guard_of(script: int) -> int:
    """The guard that watches a script: it has a file descriptor that stands for it."""
    for path in Path("/proc").glob("[0-9]*/fdinfo/*"):
        with suppress(OSError):
            if f"\nPid:\t{script}\n" in path.read_text():
                return int(path.parts[2])
    raise UnmeasuredError(f"process {script} has no guard")


def soak(ranks: int, seconds: float, load: int, shares: int | None) -> dict[str, float]:
    """What was done to two jobs, one of wrappers and one of `init`, and how often they raised the alarm."""
    done: dict[str, float] = {"stopped": 0, "longest stop": 0, "held": 0, "alarms": 0}
    with (
        _group(shares),
        started(BUSY, ranks, init=False) as wrapped,
        started(BUSY, ranks, init=True) as bare,
    ):
        with _load(load), suppress(PermissionError):
            # So that a stop is as long as it is meant to be
            os.setpriority(os.PRIO_PROCESS, 0, -15)
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0 and not done["alarms"]:
                running = random.choice([wrapped, bare])
                _disturb(running, random.randrange(ranks), left, done)
                done["alarms"] = sum(
                    "first: " in each.output(n) for each in (wrapped, bare) for n in range(ranks)
                )
        os.setpriority(os.PRIO_PROCESS, 0, 0)
        for running in (wrapped, bare):
            if not done["alarms"]:
                running.touch("end")
                done["alarms"] = sum(code != 0 for code in running.codes(180))
            if done["alarms"]:
                print(*(running.output(each)[-2000:] for each in range(ranks)), sep="\n")
    return done


def _disturb(running: Job, rank: int, left: float, done: dict[str, float]) -> None:
    if random.random() < 0.3:
        running.touch(f"hold-{rank}")
        done["held"] += 1
        _sleep_watching(running, min(left, random.uniform(1, 20)))
        return
    # A script, its wrapper, or both; always shorter than the bound.
    pair = (running.pid(rank), running.processes[rank].pid)
    chosen = set(random.choice([pair[:1], pair[1:], pair]))
    start = time.monotonic()
    for pid in chosen:
        os.kill(pid, signal.SIGSTOP)
    _sleep_watching(running, min(left, random.uniform(1, BOUND - 1.5)))
    for pid in chosen:
        os.kill(pid, signal.SIGCONT)
    done["stopped"] += 1
    done["longest stop"] = max(done["longest stop"], round(time.monotonic() - start, 2))
    _sleep_watching(running, min(left, random.uniform(0, 4)))


def _sleep_watching(running: Job, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and all(process.poll() is None for process in running.processes):
        time.sleep(0.05)


@contextmanager
def _load(count: int) -> Iterator[None]:
    """So many processes that do nothing but count."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextmanager
def _group(shares: int | None) -> Iterator[None]:
    """Put this process, and what it starts, in a cgroup (v1) with so many CPU shares, of the usual 1024."""
    if shares is None:
        yield
        return
    group, home = (
        Path(f"/sys/fs/cgroup/cpu/distboot-soak-{os.getpid()}"),
        Path("/sys/fs/cgroup/cpu/cgroup.procs"),
    )
    group.mkdir()
    (group / "cpu.shares").write_text(str(shares))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        yield
    finally:
        home.write_text(str(os.getpid()))
        with suppress(OSError):
            group.rmdir()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["death", "cost", "soak"])
    parser.add_argument("ranks", nargs="*", type=int, default=[4])
    parser.add_argument(
        "--init", action="store_true", help="a bare init with torch, in place of the wrapper"
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--load", type=int, default=50, help="of soak: processes that compute")
    parser.add_argument(
        "--shares", type=int, help="of soak: CPU shares of all that together (cgroup v1, as root)"
    )
    options = parser.parse_args()
    way = "init" if options.init else "wrapper"
    for ranks in options.ranks:
        if options.what == "death":
            values = [death(ranks, init=options.init) for _ in range(options.runs)]
            spread = f"{min(values):.2f} to {max(values):.2f}"
            print(f"{way}, {ranks} ranks: {statistics.median(values):.2f} s ({spread})", flush=True)
        elif options.what == "cost":
            cpu, wakes = cost(ranks, options.seconds, init=options.init)
            others = f"{100 * max(cpu[1:]):.3f} % of a core, {max(wakes[1:]):.2f} wake-ups/s"
            print(
                f"{way}, {ranks} ranks: rank 0 {100 * cpu[0]:.3f} %, {wakes[0]:.2f}/s; the most of the others {others}"
            )
        else:
            found = soak(ranks, options.seconds, options.load, options.shares)
            print(
                f"{ranks} ranks each way, {options.seconds:g} s, load {options.load}: {found}",
                flush=True,
            )
            if found["alarms"]:
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
