"""Ranks that are late: what it costs a training job that they would be named, and what it costs rank 0 to name one.

    python bench/late.py evaluation --seconds 600    rank 0 evaluates alone: when which notice comes, and no other one
    python bench/late.py soak --minutes 20           an irregular training, with notices after 2 s: there has to be none

Processor time is that of the kernel (schedstat), in windows of random order: of the thread in the script, and of the
agent beside it, compared with itself while that thread has nothing new to say. The figures: `make bench`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/lib")]

import late_jobs  # noqa: E402 - beside this file, and so are the next
import late_rank0  # noqa: E402
from late_rank0 import Cost  # noqa: E402
from measure import (  # noqa: E402
    Contender,
    Effort,
    Series,
    UnmeasuredError,
    clean_environ,
    interleaved,
    last_line,
)
from page import Limit, Section, Table, promise  # noqa: E402
from supervised import Job, job, until  # noqa: E402 - shared with the tests

from distboot.host import free_port  # noqa: E402

_GROUPS = (2, 32)  # process groups whose operations are looked at; 32 are the most
_AGENTS = (1000, 10_000)
_LIMIT = 300  # seconds for a job
_BEGIN = """
import json, os, random, statistics, sys, threading, time
if os.environ["DISTBOOT_LATE_AFTER"] == "0":  # then the thread is there, too: without it altogether
    sys.meta_path = [finder for finder in sys.meta_path if type(finder).__module__ != "_distboot.script.crash_hooks"]
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
"""
_RANK = f"""{_BEGIN}
progress, value = sys.modules["_distboot.script.progress"], torch.zeros(1)
counts, groups = progress.counts, [dist.new_group([0, 1]) for _ in range(31)]
(thread,) = [thread.native_id for thread in threading.enumerate() if thread.name == "distboot-progress"]
def used(tasks):
    return sum(int(open(f"{{task}}/schedstat").read().split()[0]) for task in tasks) / 1e9
def both():
    agent = f"/proc/{{os.getppid()}}/task"
    return used([f"/proc/self/task/{{thread}}"]), used([f"{{agent}}/{{task}}" for task in os.listdir(agent)])
def train(seconds):
    end = time.monotonic() + seconds
    while True:
        value[0] = rank == 0 and time.monotonic() > end
        dist.all_reduce(value)
        if value:
            break
found, order = [], random.Random(SEED)
for _ in range(ROUNDS):
    for groups in order.sample([0, 2, 32], 3):
        before = counts()  # 0: as if nothing moved since
        progress.MOST_GROUPS, progress.counts = groups, counts if groups else lambda seen=before: seen
        train(1.5)
        start, before = time.monotonic(), both()
        train(5)
        took = time.monotonic() - start
        found.append([groups, *((new - old) / took for new, old in zip(both(), before))])
open(f"found-{{rank}}", "w").write(json.dumps(found))
"""
_STEPS = f"""{_BEGIN}
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters())
def train(steps):
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(64, 256)).square().mean().backward()
        optimizer.step()
    return (time.perf_counter() - start) / steps
train(50)
for number in range(ROUNDS):
    until(f"go-{{number}}")
    dist.barrier()
    took = train(200)
    if rank == 0:
        Path("part").write_text(str(took))
        Path("part").rename(f"took-{{number}}")
"""


def section(effort: Effort) -> Section:
    """At a rank and in a training step, and at rank 0."""
    rows, limits = _at_a_rank(effort)
    found = {
        (agents, alike): _at_rank_0(agents, effort, alike=alike)
        for agents in _AGENTS
        for alike in (True, False)
    }
    rows += [
        (f"rank 0's agent, {agents:,} agents", *_still(found[agents, True])) for agents in _AGENTS
    ]
    rows.append(("a training step, DDP on Gloo, 2 ranks", *_in_a_step(effort)))
    fold = _series(found[_AGENTS[-1], True], lambda cost: cost.fold)
    limits.append(
        promise(
            f"{_AGENTS[-1]:,} stacks folded, alike but for one",
            fold,
            1,
            "≤ 1 s",
            unit="ms",
            digits=0,
        )
    )
    meaning = "Every other second torch's numbers are looked at, and the agent is told. Rank 0 hears nothing of it."
    nobody = Table("Ranks that are late: while none is", ("where", "it costs", "of"), rows, meaning)
    head = (
        "agents, and their stacks",
        "hears that all wait",
        "from the question to the line",
        "of that, folds stacks",
    )
    ways = {True: "alike but for one", False: "all different"}
    episodes = [
        (f"{agents:,}, {ways[alike]}", *_episode(costs)) for (agents, alike), costs in found.items()
    ]
    meaning = "Processor time of rank 0's agent, which asks all twice: how far they are, and then also where."
    return Section(
        [nobody, Table("Ranks that are late: rank 0 names one", head, episodes, meaning)], limits
    )


def _at_a_rank(effort: Effort) -> tuple[list[tuple[str, ...]], list[Limit]]:
    """What the thread in the script costs, and the agent beside it: rows, and promises about both together."""
    found = [window for rank in _seen(_RANK, effort.rounds(6)) for window in _with_more(rank)]
    rows: list[tuple[str, ...]] = []
    limits = []
    for groups in _GROUPS:
        parts = [
            (100 * thread, 100 * more, 100 * agent)
            for number, thread, more, agent in found
            if number == groups
        ]
        thread, more, agent = (Series(values) for values in zip(*parts, strict=True))
        where = f"a rank, {groups} process groups"
        rows.append((f"{where}: the thread in the script", thread.said("% of a core", 4), ""))
        rows.append(
            (f"{where}: its agent", more.said("% of a core", 4, sign=True), agent.said("%", 3))
        )
        both = Series(
            tuple(one + other for one, other in zip(thread.values, more.values, strict=True))
        )
        what = f"noticing that a rank moves, {groups} process groups: the script and its agent"
        limits.append(promise(what, both, 0.05, "≤ 0.05 %", unit="% of a core", digits=3))
    return rows, limits


def _with_more(windows: Any) -> list[tuple[int, float, float, float]]:
    """Of each window: groups, the thread, what the agent needs more than without it, and what it needs."""
    alone = statistics.median(agent for groups, _, agent in windows if not groups)
    return [(groups, thread, agent - alone, agent) for groups, thread, agent in windows]


def _in_a_step(effort: Effort) -> tuple[str, str]:
    """How many times as long it is, and how long."""
    rounds = effort.rounds(25)
    with (
        _started(_STEPS, "0", rounds + 1) as without,
        _started(_STEPS, "60", rounds + 1) as with_it,
    ):
        turns = {"without": count(), "with": count()}

        def step(name: str, running: Job) -> float:
            number = next(turns[name])
            running.touch(f"go-{number}")  # the other job waits meanwhile
            took = running.folder / f"took-{number}"
            until(took.exists, _LIMIT)
            return float(took.read_text())

        sides = {"without": without, "with": with_it}
        found = interleaved(
            [Contender(name, partial(step, name, side)) for name, side in sides.items()], rounds
        )
    pairs = zip(found["with"].values, found["without"].values, strict=True)
    ratios = Series(
        tuple(one / other for one, other in pairs), found["with"].why or found["without"].why
    )
    return ratios.said("× as long", 3), ", ".join(
        f"{series.said('ms')} {name}" for name, series in found.items()
    )


def _seen(script: str, rounds: int) -> list[Any]:
    """What each of two ranks has found."""
    with _started(script, "60", rounds) as running:
        if any(running.codes(_LIMIT)):
            raise UnmeasuredError(last_line(running.output(0)))
        return [json.loads((running.folder / f"found-{rank}").read_text()) for rank in range(2)]


@contextmanager
def _started(script: str, after: str, rounds: int) -> Iterator[Job]:
    """A job of two ranks, each with an agent of its own."""
    script = script.replace("ROUNDS", str(rounds)).replace("SEED", str(random.random()))
    environ = clean_environ(DISTBOOT_LATE_AFTER=after, DISTBOOT_REPORT="")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        job(environ, free_port(), Path(folder), script, 2) as running,
    ):
        yield running


def _at_rank_0(agents: int, effort: Effort, *, alike: bool) -> list[Cost]:
    return [late_rank0.cost(agents, alike=alike) for _ in range(effort.rounds(3))]


def _series(costs: Sequence[Cost], part: Callable[[Cost], float]) -> Series:
    return Series(tuple(map(part, costs)))


def _still(costs: Sequence[Cost]) -> tuple[str, str]:
    more = _series(costs, lambda cost: 100 * (cost.beat - cost.beat_without) / cost.interval)
    beat = _series(costs, lambda cost: 100 * cost.beat / cost.interval)
    sent = max(cost.sent for cost in costs)
    return f"{sent} messages, {more.said('% of a core', sign=True)}", beat.said("%", 1)


def _episode(costs: Sequence[Cost]) -> tuple[str, str, str]:
    stalled, episode = (_series(costs, attrgetter(name)) for name in ("stalled", "episode"))
    return stalled.said(), episode.said(), _series(costs, lambda cost: cost.fold).said("ms", 1)


def main() -> int:
    """Run a long job; 1 when its notices are not those that they have to be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["evaluation", "soak"])
    parser.add_argument("--seconds", type=float, default=600, help="of evaluation")
    parser.add_argument("--minutes", type=float, default=20, help="of soak")
    options = parser.parse_args()
    is_evaluation = options.what == "evaluation"
    is_right = (
        late_jobs.evaluation(options.seconds) if is_evaluation else late_jobs.soak(options.minutes)
    )
    print("as it has to be" if is_right else "NOT as it has to be", flush=True)
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
