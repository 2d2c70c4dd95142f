"""Train a small classifier on scikit-learn's digits with DistributedDataParallel.

    python train_digits.py                                 # one process, no launcher
    torchrun --nproc-per-node 2 train_digits.py            # any launcher that sets RANK, WORLD_SIZE, ...

The batch size is that of the whole job, so every number of ranks trains on the same batches.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

SEED = 0


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small classifier on scikit-learn's digits."
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument(
        "--batch-size", type=int, default=96, help="of the whole job, split over the ranks"
    )
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    if args.epochs < 1 or args.batch_size < 1:
        parser.error("--epochs and --batch-size must be at least 1")
    return args


def load_datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test images, split the same way on every rank."""
    images, labels = load_digits(return_X_y=True)
    # 357 of the 1797 images leave 1440 for training: no remainder on 2, 3, 4, 5, 6 or 8 ranks.
    train_x, test_x, train_y, test_y = train_test_split(
        images / 16, labels, test_size=357, random_state=SEED, stratify=labels
    )
    train = TensorDataset(torch.tensor(train_x, dtype=torch.float32), torch.tensor(train_y))
    test = TensorDataset(torch.tensor(test_x, dtype=torch.float32), torch.tensor(test_y))
    return train, test


def make_loaders(batch_size: int, rank: int, world_size: int) -> tuple[DataLoader, DataLoader]:
    """Return the loaders of this rank's part of the training and of the test images."""
    if batch_size % world_size:
        raise SystemExit(
            f"--batch-size {batch_size} cannot be split evenly over {world_size} ranks"
        )
    train, test = load_datasets()
    sampler = DistributedSampler(
        train, num_replicas=world_size, rank=rank, seed=SEED, drop_last=True
    )
    train_loader = DataLoader(train, batch_size // world_size, sampler=sampler, drop_last=True)
    # Not a DistributedSampler, which makes all parts equally long: some images would count twice or never.
    test_loader = DataLoader(Subset(test, range(rank, len(test), world_size)), batch_size=256)
    return train_loader, test_loader


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: SGD, device: torch.device) -> None:
    """Go once over the training images."""
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    """Return the mean loss and the accuracy over the test images of all ranks."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64, device=device)  # loss, right answers, images
    for images, labels in loader:
        logits, target = model(images.to(device)), labels.to(device)
        totals[0] += cross_entropy(logits, target, reduction="sum")
        totals[1] += (logits.argmax(dim=1) == target).sum()
        totals[2] += len(target)
    if dist.is_initialized():
        dist.all_reduce(totals)
    loss, right, count = totals.tolist()
    return loss / count, right / count


def main() -> None:
    """Train, and print the result on rank 0."""
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    distributed = "WORLD_SIZE" in os.environ
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    args = parse_args()
    # One write a line: the ranks share a terminal.
    print(f"rank {rank} of {world_size}, local {local_rank}, on {device}\n", end="", flush=True)

    torch.manual_seed(SEED)
    train_loader, test_loader = make_loaders(args.batch_size, rank, world_size)
    model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    if distributed:
        model = DistributedDataParallel(model)
    optimizer = SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        train_loader.sampler.set_epoch(epoch)
        train_epoch(model, train_loader, optimizer, device)
        loss, accuracy = evaluate(model, test_loader, device)
        if rank == 0:
            print(
                f"epoch {epoch + 1}/{args.epochs}: loss {loss:.4f}, accuracy {accuracy:.4f}",
                flush=True,
            )

    if rank == 0:
        result = {"ranks": world_size, "loss": round(loss, 6), "accuracy": round(accuracy, 6)}
        print("result", json.dumps(result), flush=True)
    if distributed:
        dist.destroy_process_group()
        # DDP keeps the threads of Gloo alive, and one that lets go of its last tensor only while Python shuts
        # down aborts the process (torch 2.13, pytorch issue 190489): give them time.
        time.sleep(0.1)


if __name__ == "__main__":
    main()
