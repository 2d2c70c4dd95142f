"""Horovod with torch, started by `init("horovod.torch")` under any launcher: on MPI if it started that, else on Gloo.

    mpirun -n 2 python horovod_torch.py                   # MPI
    torchrun --nproc-per-node 2 horovod_torch.py          # Gloo, and no horovodrun

The batch size is that of the whole job, so every number of ranks trains on the same batches.
"""

import argparse
import json

import digits
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import distboot

BATCH = 96  # of the whole job


def main() -> None:
    """Train, and print the result on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    epochs = parser.parse_args().epochs
    with distboot.init("horovod.torch") as ctx:
        hvd = ctx.hvd
        train_x, train_y, test_x, test_y = (
            torch.from_numpy(part).to(ctx.device) for part in digits.load()
        )
        torch.manual_seed(digits.SEED)
        model = nn.Sequential(
            nn.Linear(digits.PIXELS, 128), nn.ReLU(), nn.Linear(128, digits.CLASSES)
        ).to(ctx.device)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

        shuffle = torch.Generator().manual_seed(digits.SEED)  # the same order on every rank
        for _ in range(epochs):
            for batch in torch.randperm(len(train_x), generator=shuffle).split(BATCH):
                own = batch[ctx.rank :: ctx.world_size]
                optimizer.zero_grad()
                cross_entropy(model(train_x[own]), train_y[own]).backward()
                optimizer.step()

        with torch.no_grad():
            own = slice(ctx.rank, None, ctx.world_size)
            right = (model(test_x[own]).argmax(dim=1) == test_y[own]).sum()
        right = hvd.allreduce(right, op=hvd.Sum, name="right")
        if ctx.is_main:
            result = {"ranks": hvd.size(), "accuracy": round(right.item() / len(test_x), 4)}
            print("result", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
