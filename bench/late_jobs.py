"""Long jobs and their notices: rank 0 evaluates alone, and a training whose steps differ while no rank is late.

`late.py` starts them. Everything that distboot says is printed with its time, and held against what it has to say.
"""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from measure import PYTHON, clean_environ

_AFTER, _SOAK_AFTER = 60.0, 2.0  # seconds: DISTBOOT_LATE_AFTER
# Seconds: looks are a second apart, stacks take some; and it is twice what that has become
_DELAY, _LATER = 6.0, 0.03
_BEGIN = """
import os, random, sys, time
import torch, torch.distributed as dist
os.nice(10)
dist.init_process_group("gloo")
rank, seconds = dist.get_rank(), float(sys.argv[1])
def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(number * number for number in range(1000))
def begin():
    dist.barrier()
    if rank == 0:
        print("begin", flush=True)
"""
_EVALUATION = f"""{_BEGIN}
begin()
def evaluate():
    compute(seconds)
if rank == 0:
    evaluate()
dist.barrier()
if rank == 0:
    print("end", flush=True)
for _ in range(20):
    dist.all_reduce(torch.ones(1))
    time.sleep(0.5)
"""
_SOAK = f"""{_BEGIN}
pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
same, own = random.Random(0), random.Random(rank)  # in all ranks, and in this one
def loaded():
    while True:
        yield from torch.utils.data.DataLoader(torch.rand(320, 64), batch_size=8, num_workers=2)
batches, done, pauses = loaded(), torch.zeros(1), 0
def pause():
    global pauses
    pauses += 1
    compute(6)
def evaluate():
    if rank == 0:
        torch.save([model.state_dict(), optimizer.state_dict()], "checkpoint.pt")
        optimizer.load_state_dict(torch.load("checkpoint.pt")[1])
        compute(own.random() * 0.9)
    dist.barrier()
def in_pairs():
    time.sleep(own.random())
    dist.all_reduce(torch.ones(1), group=pair)
def differ():
    length = own.random() * 1.2
    compute(length / 5)
    time.sleep(length * 4 / 5)
for step in range(10**9):
    if step < 20:  # torch imports what it imports late
        time.sleep(0.2)
    elif step == 20:
        begin()
        end = time.monotonic() + seconds
    else:
        (what,) = same.choices([pause, evaluate, in_pairs, differ], [2, 15, 15, 68])
        what()
    optimizer.zero_grad()
    model(next(batches)).square().mean().backward()
    optimizer.step()
    done[0] = step >= 20 and time.monotonic() > end
    dist.all_reduce(done)
    if done:
        break
if rank == 0:
    print(f"end: {{step}} steps, {{pauses}} pauses", flush=True)
"""


def evaluation(seconds: float) -> bool:
    """Whether exactly the notices come that have to, while rank 0 of 4 evaluates alone for so long."""
    expected = [
        *((at, "waiting for rank 0 ") for at in _doubled(_AFTER) if at < seconds - _DELAY),
        (seconds, "rank 0 continues"),
    ]
    found = list(_notices(_EVALUATION, seconds, _AFTER))
    return len(found) == len(expected) and all(
        when - 1 <= at <= when * (1 + _LATER) + _DELAY and said.startswith(begin)
        for (at, said), (when, begin) in zip(found, expected, strict=True)
    )


def soak(minutes: float) -> bool:
    """Whether nothing is said of an irregular training."""
    return not list(_notices(_SOAK, 60 * minutes, _SOAK_AFTER))


def _doubled(first: float) -> Iterator[float]:
    """At which second a notice comes: 60, 120, 240, 480."""
    return itertools.takewhile(
        lambda at: at < 1e6, (first * 2**number for number in itertools.count())
    )


def _notices(script: str, seconds: float, after: float) -> Iterator[tuple[float, str]]:
    """What distboot says of a job, and when, in seconds since that has begun; all that is printed is shown."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script)
        command = [PYTHON, "-m", "distboot", "--nproc-per-node=4", "train.py", str(seconds)]
        environ = clean_environ(DISTBOOT_LATE_AFTER=f"{after:g}")
        with subprocess.Popen(
            command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        ) as job:  # fmt: skip
            assert job.stdout is not None
            start, begin = time.monotonic(), math.inf
            for line in job.stdout:
                begin = time.monotonic() if line == "begin\n" else begin
                at = time.monotonic() - begin
                print(f"{max(at, start - time.monotonic()):8.1f} s  {line}", end="", flush=True)
                said = re.match(r"distboot: \w+ \d+ on \S+: (?!summary: )(.*)", line)
                # Before, torch imports, with more time on one rank than on another
                if said is not None and at >= 0:
                    yield at, said[1]
        if job.returncode or begin == math.inf:
            yield math.inf, f"exit code {job.returncode}"
