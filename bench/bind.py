"""Seconds of training on ranks that share one core, on ranks that nobody binds, and with `--bind auto`.

python bench/bind.py --rounds 5       two ranks that train with torch on Gloo, in three ways, interleaved
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
_TRAIN = """
import time, distboot
ctx = distboot.init(backend="gloo")
import torch
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024))
batch = torch.ones(256, 1024)
for step in range(45):
    if step == 5:  # buckets are laid out, and buffers are there
        begin = time.monotonic()
    model(batch).sum().backward()
if ctx.is_main:
    print("seconds", time.monotonic() - begin)
"""
_CPU = str(min(os.sched_getaffinity(0)))
_WRAPPER = (sys.executable, "-m", "distboot", "--nproc-per-node", "2")
_WAYS = {
    "both on one core": ("taskset", "-c", _CPU, *_WRAPPER),
    "not bound": _WRAPPER,
    "--bind auto": (*_WRAPPER, "--bind", "auto"),
}


def seconds(command: tuple[str, ...], folder: Path) -> float:
    """Those of 40 steps, by the clock of rank 0."""
    done = subprocess.run(
        [*command, "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("seconds "))
    return float(line.removeprefix("seconds "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    found: dict[str, list[float]] = {way: [] for way in _WAYS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(_TRAIN)
        for _ in range(rounds):
            for way in random.sample([*_WAYS], len(_WAYS)):
                found[way].append(seconds(_WAYS[way], folder))
    for way, times in found.items():
        low, high = min(times), max(times)
        print(f"{way:<17} {statistics.median(times):6.2f} s  ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
