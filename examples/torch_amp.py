"""Train a small classifier on scikit-learn's digits with torch.amp, and gradients accumulated over two batches.

    mpirun -n 2 python torch_amp.py
    srun --ntasks=2 python torch_amp.py

bfloat16 needs no gradient scaler. Only the last of the batches of one step exchanges gradients between the ranks.
"""

import argparse
import json
from contextlib import nullcontext

import torch
import torch.distributed as dist
from digits import CLASSES, PIXELS, SEED, load
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import distboot

BATCH_SIZE = 48  # of the whole job
ACCUMULATED = 2  # batches a step


def main() -> None:
    """Train, and print the result on rank 0."""
    ctx = distboot.init()
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    args = parser.parse_args()

    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, CLASSES)).to(ctx.device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_x, train_y, test_x, test_y = (torch.from_numpy(part).to(ctx.device) for part in load())

    for _ in range(args.epochs):
        batches = torch.randperm(len(train_x)).split(BATCH_SIZE)  # the same on all ranks
        for number, batch in enumerate(batches, start=1):
            is_step = number % ACCUMULATED == 0
            own = batch[ctx.rank :: ctx.world_size]
            with nullcontext() if is_step else model.no_sync():
                with torch.autocast(ctx.device.type, dtype=torch.bfloat16):
                    loss = cross_entropy(model(train_x[own]), train_y[own])
                (loss / ACCUMULATED).backward()
            if is_step:
                optimizer.step()
                optimizer.zero_grad()

    own = slice(ctx.rank, None, ctx.world_size)
    with torch.no_grad():
        right = (model(test_x[own]).argmax(dim=1) == test_y[own]).sum()
    dist.all_reduce(right)
    if ctx.is_main:
        result = {"ranks": ctx.world_size, "accuracy": round(right.item() / len(test_y), 4)}
        print("result", json.dumps(result), flush=True)
    ctx.close()


if __name__ == "__main__":
    main()
