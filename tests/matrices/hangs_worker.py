"""The script of the ranks in the matrix of hangs: trains until it is told to stop, or until its hang.

    worker.py init|wrapper FOLDER HANG RANK[,RANK…]

`FOLDER` is where the ranks and the test speak, as in faults_worker.py: `ready.3`, `go`, `fault.3`, `stop`.
"""

import os
import re
import sys
import threading
import time
from collections.abc import Callable

WAY, FOLDER, HANG = sys.argv[1:4]
CULPRITS = [int(rank) for rank in sys.argv[4].split(",")]
if WAY == "init":
    import distboot

    distboot.init("torch")

import torch  # noqa: E402 - after `init`, as in users' scripts
import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

if WAY == "wrapper":
    dist.init_process_group("gloo")
RANK = dist.get_rank()


def write(name: str, text: str) -> None:
    path = os.path.join(FOLDER, name)
    with open(f"{path}.part", "w") as file:
        file.write(text)
    os.replace(f"{path}.part", path)


def told(name: str) -> bool:
    return os.path.exists(os.path.join(FOLDER, name))


def begins() -> bool:
    if RANK not in CULPRITS or not told("go") or told(f"fault.{RANK}"):
        return False
    write(f"fault.{RANK}", repr(time.monotonic()))
    return True


def read_slowly() -> None:
    while not told("stop"):
        time.sleep(0.1)


def match() -> None:
    re.match("(a+)+b", "a" * 99)


def take_a_lock() -> None:
    lock = threading.Lock()
    with lock:
        lock.acquire()


def read_a_file() -> None:
    with open("/tmp/stuck/data") as file:
        file.read()


def broadcast() -> None:
    dist.broadcast(torch.ones(1), src=RANK)


# What the main thread of a rank does in its hang; what is not here is in the data loader, or done to it.
ACTS: dict[str, Callable[[], object]] = {
    "other": broadcast,
    "lock-in-c": match,
    "deadlock": take_a_lock,
    "state-d": read_a_file,
    "all": take_a_lock,
}


class Batches(Dataset[torch.Tensor]):  # type: ignore[misc]
    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, _: int) -> torch.Tensor:
        if HANG.startswith("worker"):
            write(f"worker.{RANK}", str(os.getpid()))
        if HANG in ("loader", "worker-sleeps") and begins():
            read_slowly()
        return torch.zeros(1)


def all_reduce() -> None:
    dist.all_reduce(torch.ones(1))


def train(number: int) -> bool:
    """One step; whether there is another one."""
    time.sleep(0.02)
    is_due = torch.tensor([1.0])
    if HANG == "all":  # at the same step: else some wait for the first that has been told
        is_due[0] = told("go")
        dist.all_reduce(is_due, op=dist.ReduceOp.MIN)
    if HANG in ACTS and is_due.item() and begins():
        ACTS[HANG]()
    elif HANG == "stopped-inside" and begins():
        time.sleep(2)
    go_on = torch.tensor([float(not told("stop") and not (HANG == "skip" and told("go")))])
    dist.all_reduce(go_on, op=dist.ReduceOp.MIN)
    if number == 120:  # its agent has heard by then how far it is
        write(f"ready.{RANK}", str(os.getpid()))
    return bool(go_on.item())


def main() -> None:
    loader = DataLoader(Batches(), num_workers=int(HANG.startswith("worker")))
    for number, _ in enumerate(loader):
        if not train(number):
            break
    if HANG == "skip" and not begins():
        all_reduce()
    dist.barrier()


main()
