"""Train on scikit-learn's digits with DistributedDataParallel, and log to MLflow from rank 0 only.

    mpirun -n 2 python mlflow_rank0.py --store runs   # a folder on the host of rank 0
    torchrun --nproc-per-node 2 mlflow_rank0.py       # where MLFLOW_TRACKING_URI says, which Azure ML sets

If all ranks logged, each would have a run of its own, or a value be there many times. The others do not import MLflow.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import digits
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import distboot


@contextmanager
def tracking(
    ctx: distboot.Context, store: str | None, params: dict[str, object]
) -> Iterator[Callable[..., None]]:
    """A run of MLflow: a function that logs metrics on rank 0, and does nothing on the others."""
    if not ctx.is_main:
        yield lambda *_, **__: None
        return
    import mlflow

    if store is not None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 prefers a database
        mlflow.set_tracking_uri(Path(store).resolve().as_uri())
    with mlflow.start_run():  # ends as FAILED if the training does
        mlflow.log_params(params)
        yield mlflow.log_metrics


def main() -> None:
    """Train, log every epoch, and print the result on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--batch-size", type=int, default=96, help="of the whole job, split over the ranks"
    )
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument(
        "--store", metavar="DIR", help="folder for the runs (default: MLFLOW_TRACKING_URI)"
    )
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")
    if args.store is None and "MLFLOW_TRACKING_URI" not in os.environ:
        parser.error("name a folder for the runs (--store), or set MLFLOW_TRACKING_URI")

    ctx = distboot.init()
    torch.manual_seed(0)
    train_x, train_y, test_x, test_y = (
        torch.from_numpy(part).to(ctx.device) for part in digits.load()
    )
    model = nn.Sequential(
        nn.Linear(digits.PIXELS, 128), nn.ReLU(), nn.Linear(128, digits.CLASSES)
    ).to(ctx.device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    params = {
        "epochs": args.epochs,
        "batch_size": args.batch_size,
        "lr": args.lr,
        "ranks": ctx.world_size,
    }
    with tracking(ctx, args.store, params) as log:
        for epoch in range(args.epochs):
            losses = torch.zeros(1, device=ctx.device)
            # The same order on every rank
            for batch in torch.randperm(len(train_x)).split(args.batch_size):
                mine = batch[ctx.rank :: ctx.world_size]
                loss = cross_entropy(model(train_x[mine]), train_y[mine])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses += loss.detach() * len(mine)
            dist.all_reduce(losses)  # which all ranks take part in, and one logs
            with torch.no_grad():
                accuracy = (model(test_x).argmax(dim=1) == test_y).double().mean().item()
            log({"loss": losses.item() / len(train_x), "accuracy": accuracy}, step=epoch)

    if ctx.is_main:
        print(
            "result",
            json.dumps({"ranks": ctx.world_size, "accuracy": round(accuracy, 4)}),
            flush=True,
        )
    ctx.close()


if __name__ == "__main__":
    main()
