"""The script of the ranks in the fault matrix: trains until it is told to stop, or until its fault.

    worker.py init|wrapper|restarts FOLDER FAULT RANK[,RANK…]

`FOLDER` is where the ranks and the test speak: `ready.3` says that rank 3 trains, `go` starts the fault of the ranks
named last, `fault.3` says when it began, and `stop` ends the training. With `restarts` it is an unmodified script of
torch that goes on from its checkpoint: in round 0 to the middle of the training, where it waits for the fault, and in
later ones to the end, where it leaves its loss in `loss`.
"""

import ctypes
import operator
import os
import resource
import signal
import sys
import time
from collections.abc import Callable

WAY, FOLDER, FAULT = sys.argv[1:4]
CULPRITS = [int(rank) for rank in sys.argv[4].split(",")]
# DistributedDataParallel, as any optimizer of torch, imports torch._dynamo: as long as torch itself takes
USES_DDP = "FAULTS_DDP" in os.environ
MIB = 1 << 20
# steps
MIDDLE = 10
END = 20


def write(name: str, text: str) -> None:
    path = os.path.join(FOLDER, name)
    with open(f"{path}.part", "w") as file:
        file.write(text)
    os.replace(f"{path}.part", path)


def told(name: str) -> bool:
    return os.path.exists(os.path.join(FOLDER, name))


def fail(error: BaseException) -> None:
    raise error


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
    "exception": lambda: fail(RuntimeError("the loss is nan")),
    "exit": lambda: sys.exit(3),
    "system-exit": lambda: fail(SystemExit(3)),
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

    CTX = distboot.init()
    RANK = CTX.rank
    import torch
    import torch.distributed as dist
else:
    RANK = int(os.environ["RANK"])
if FAULT in ("key", "stop") and WAY == "wrapper":
    import distboot

    CTX = distboot.init("none")


# Not `CTX.preempted`: `init` holds SIGTERM back in a script whose code names it, and this script is
# that of all faults.
is_preempted = operator.attrgetter("preempted")


def step_with_keys() -> bool:
    """One step of a training whose ranks wait for each other at a key; whether there is another one."""
    if RANK == 0 and told("stop"):
        write("last", "")  # before any rank can go past this key
    CTX.barrier()
    if FAULT == "stop":
        return not is_preempted(CTX)
    return not told("last")


def step() -> bool:
    """One step of the training; whether there is another one."""
    time.sleep(0.02)
    if FAULT in ("key", "stop"):
        return step_with_keys()
    go_on = not told("stop")
    if WAY == "init":
        all_go_on = torch.tensor([float(go_on)])
        dist.all_reduce(all_go_on, op=dist.ReduceOp.MIN)
        go_on = bool(all_go_on.item())
    return go_on


def train() -> None:
    """The same numbers in every run, wherever it was interrupted."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    linear = torch.nn.Linear(4, 1)
    model: torch.nn.Module = linear
    if USES_DDP:
        model = torch.nn.parallel.DistributedDataParallel(linear)
    path = os.path.join(FOLDER, "checkpoint")
    begin = 0
    is_first = os.environ["DISTBOOT_RESTART_COUNT"] == "0" and FAULT != "unbroken"
    if os.path.exists(path):
        begin, state = torch.load(path)
        linear.load_state_dict(state)
    loss = torch.zeros(())
    for number in range(begin, MIDDLE if is_first else END):
        torch.manual_seed(1000 * number + RANK)
        x = torch.randn(8, 4)
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
        linear.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in linear.parameters():
                assert parameter.grad is not None
                if not USES_DDP:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
                parameter.sub_(0.1 * parameter.grad)
        if RANK == 0:
            torch.save((number + 1, linear.state_dict()), f"{path}.part")
            os.replace(f"{path}.part", path)
        dist.barrier()

    def together() -> bool:
        time.sleep(0.02)
        dist.barrier()
        return True

    if is_first:
        wait_for_the_fault(together)
    dist.all_reduce(loss.detach())
    if RANK == 0:
        write("loss", f"{begin} {loss.item()!r}")
    dist.destroy_process_group()
    # Of jobs with DistributedDataParallel on Gloo torch 2.13 aborts some when Python ends, also under torchrun alone.
    os._exit(0)


def wait_for_the_fault(step: Callable[[], bool]) -> None:
    ready = went = False
    while step():
        if not ready:
            write(f"ready.{RANK}", str(os.getpid()))
            ready = True
        if RANK in CULPRITS and not went and told("go"):
            write(f"fault.{RANK}", repr(time.monotonic()))
            went = True
            ACTS[FAULT]()


def main() -> None:
    wait_for_the_fault(step)
    if FAULT == "apart" and RANK not in CULPRITS:
        time.sleep(3)


if "FAULTS_OUTLIVES" in os.environ:  # the wrapper passes these on
    outlive = signal.SIG_IGN if os.environ["FAULTS_OUTLIVES"] == "ignored" else lambda *_: None
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, outlive)
train() if WAY == "restarts" else main()
