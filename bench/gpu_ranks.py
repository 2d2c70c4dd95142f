"""What one process of `gpu.py` does: `python gpu_ranks.py NAME` runs the function of that name, which prints JSON.

`plain` is the script that knows nothing of distboot; the others import it where they use it.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

_STEPS = 20
_SHARE = 16  # samples of a batch for each rank
_LARGE = 16 << 20  # numbers in an all-reduce that takes long enough to be killed in


def say(**found: object) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def machine() -> None:
    """What torch sees here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    say(
        gpus=[torch.cuda.get_device_name(index) for index in range(count)],
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if count else None,
    )


def train() -> None:
    """A rank of a job that starts with `init()`: the first collective, timed, and some training."""
    import distboot

    begin = time.perf_counter()
    ctx = distboot.init()
    up = time.perf_counter()
    total = torch.full((1,), ctx.rank + 1.0, device=ctx.device)
    dist.all_reduce(total)
    summed = total.item()  # waits for the GPU
    end = time.perf_counter()
    say(
        device=str(ctx.device),
        current=torch.cuda.current_device(),
        backend=dist.get_backend(),
        sum=summed,
        init=up - begin,
        first=end - begin,
        loss=_loss(ctx.device, ctx.rank, ctx.world_size),
        loss_on_cpu=_loss(torch.device("cpu"), 0, ctx.world_size, shares=ctx.world_size),
    )
    ctx.close()


def plain() -> None:
    """A script as people write it without distboot."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    total = torch.full((1,), dist.get_rank() + 1.0, device=device)
    dist.all_reduce(total)
    say(
        device=str(device),
        current=torch.cuda.current_device(),
        backend=dist.get_backend(),
        sum=total.item(),
    )
    dist.destroy_process_group()


def reduce() -> None:
    """All-reduce until the end; says so when the first one is done."""
    import distboot

    ctx = distboot.init()
    numbers = torch.ones(_LARGE, device=ctx.device)
    for done in range(sys.maxsize):
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        torch.cuda.synchronize()
        if done == 0:
            say(pid=os.getpid())


def visible() -> None:
    """What torch and distboot make of each value of CUDA_VISIBLE_DEVICES, and what `init()` then takes."""
    for choice in sys.argv[2:]:
        # torch is imported once; CUDA, which reads the variable when it starts, starts in the child only.
        child = os.fork()
        if not child:
            os.environ["CUDA_VISIBLE_DEVICES"] = choice
            _visible(choice)
            os._exit(0)
        os.waitpid(child, 0)


def _visible(choice: str) -> None:
    import distboot
    from distboot.host import accelerators

    found = {
        "driver": bool(accelerators.visible({})),
        "told": accelerators.visible(os.environ),
        "seen": [_uuid(index) for index in range(torch.cuda.device_count())],
    }
    ctx = distboot.init()
    say(choice=choice, **found, device=str(ctx.device), backend=dist.get_backend())
    ctx.close()


def _uuid(index: int) -> str | None:
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)  # since torch 2.6
    return None if uuid is None else f"GPU-{uuid}"


def _loss(device: Any, rank: int, world_size: int, shares: int = 1) -> float:
    """The loss of the last step, of the whole batch, after training from the same seed on the same batches.

    Args:
        device: to train on; the CPU: alone, without DistributedDataParallel.
        rank: whose share of each batch this process takes.
        world_size: how many shares a batch has.
        shares: how many of them it takes.
    """
    torch.manual_seed(17)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    ).to(device)
    trained = model if device.type == "cpu" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    own = slice(rank * _SHARE, (rank + shares) * _SHARE)
    for _ in range(_STEPS):
        samples = torch.randn(world_size * _SHARE, 32)  # the same everywhere, after the same seed
        wanted = samples.sum(1, keepdim=True).sin()
        loss = torch.nn.functional.mse_loss(
            trained(samples[own].to(device)), wanted[own].to(device)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = loss.detach()
    if device.type != "cpu":
        dist.all_reduce(total)
        total = total / world_size
    return float(total)


if __name__ == "__main__":
    {each.__name__: each for each in (machine, train, plain, reduce, visible)}[sys.argv[1]]()
