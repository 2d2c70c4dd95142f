"""The script of the ranks in the fault matrix: trains until it is told to stop, or until its fault.

    worker.py init|wrapper FOLDER FAULT RANK[,RANK…]

`FOLDER` is where the ranks and the test speak: `ready.3` says that rank 3 trains, `go` starts the fault of the ranks
named last, `fault.3` says when it began, and `stop` ends the training.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import time
from collections.abc import Callable

WAY, FOLDER, FAULT = sys.argv[1:4]
CULPRITS = [int(rank) for rank in sys.argv[4].split(",")]
MIB = 1 << 20


def write(name: str, text: str) -> None:
    path = os.path.join(FOLDER, name)
    with open(f"{path}.part", "w") as file:
        file.write(text)
    os.replace(f"{path}.part", path)


def told(name: str) -> bool:
    return os.path.exists(os.path.join(FOLDER, name))


def fail() -> None:
    raise RuntimeError("the loss is nan")


def end() -> None:
    raise SystemExit(3)


def eat(*, limited: bool) -> None:
    if limited:  # ulimit -v
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + 256 * MIB, resource.RLIM_INFINITY))
    eaten = []
    while True:
        eaten.append(bytes(bytearray(b"x") * (16 * MIB)))


def hold_the_lock(seconds: int) -> None:
    ctypes.PyDLL(None).sleep(seconds)  # a call into C that does not let go of Python's lock


ACTS: dict[str, Callable[[], object]] = {
    "exception": fail,
    "exit": lambda: sys.exit(3),
    "system-exit": end,
    "os-exit": lambda: os._exit(4),
    "segv": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "ulimit": lambda: eat(limited=True),
    "cgroup": lambda: eat(limited=False),
    "hog": lambda: hold_the_lock(6),
    "hog-for-ever": lambda: hold_the_lock(600),
}

if WAY == "init":
    import distboot

    RANK = distboot.init().rank
    import torch
    import torch.distributed as dist
else:
    RANK = int(os.environ["RANK"])


def step() -> bool:
    """One step of the training; whether there is another one."""
    time.sleep(0.02)
    go_on = not told("stop")
    if WAY == "init":
        all_go_on = torch.tensor([float(go_on)])
        dist.all_reduce(all_go_on, op=dist.ReduceOp.MIN)
        go_on = bool(all_go_on.item())
    return go_on


def main() -> None:
    ready = went = False
    while step():
        if not ready:
            write(f"ready.{RANK}", str(os.getpid()))
            ready = True
        if RANK in CULPRITS and not went and told("go"):
            write(f"fault.{RANK}", repr(time.monotonic()))
            went = True
            ACTS[FAULT]()
    if FAULT == "apart" and RANK not in CULPRITS:
        time.sleep(3)


main()
