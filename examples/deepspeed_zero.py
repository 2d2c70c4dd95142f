"""DeepSpeed's ZeRO in stage 1, 2 or 3, started by `init("deepspeed")` under any launcher: no hostfile, no mpi4py.

    mpirun -n 2 python deepspeed_zero.py --stage 2
    torchrun --nproc-per-node 2 deepspeed_zero.py --stage 3

DeepSpeed's own launcher passes --local_rank, which this script need not know: init removes it.
"""

import argparse
import json

import deepspeed
import digits
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import distboot

BATCH = 96  # of the whole job


def main() -> None:
    """Train, and print the result on rank 0."""
    ctx = distboot.init("deepspeed", pass_local_rank=False)
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3))
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    torch.manual_seed(digits.SEED)
    model = nn.Sequential(nn.Linear(digits.PIXELS, 128), nn.ReLU(), nn.Linear(128, digits.CLASSES))
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        config={
            "train_batch_size": BATCH,
            "zero_optimization": {"stage": args.stage},
            # Torch's own, for which nothing has to be compiled
            "zero_allow_untested_optimizer": True,
        },
    )

    train_x, train_y, test_x, test_y = (
        torch.from_numpy(part).to(ctx.device) for part in digits.load()
    )
    shuffle = torch.Generator().manual_seed(digits.SEED)  # the same order on every rank
    for _ in range(args.epochs):
        for batch in torch.randperm(len(train_x), generator=shuffle).split(BATCH):
            own = batch[ctx.rank :: ctx.world_size]
            engine.backward(cross_entropy(engine(train_x[own]), train_y[own]))
            engine.step()

    with torch.no_grad():
        own = slice(ctx.rank, None, ctx.world_size)
        right = (engine(test_x[own]).argmax(dim=1) == test_y[own]).sum()
    deepspeed.comm.all_reduce(right)
    if ctx.is_main:
        result = {"ranks": ctx.world_size, "accuracy": round(right.item() / len(test_x), 4)}
        print("result", json.dumps(result), flush=True)
    ctx.close()


if __name__ == "__main__":
    main()
