"""Train a small classifier on scikit-learn's digits with Hugging Face Accelerate. Not a word of distboot in it.

    mpirun -n 2 python -m distboot accelerate_loop.py
    torchrun --nproc-per-node 2 accelerate_loop.py

The batch size is that of the whole job, so every number of ranks trains on the same batches.
"""

import argparse
import json

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from digits import CLASSES, PIXELS, SEED, load
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 96


def main() -> None:
    """Train, and print the result on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    # Without cpu=True Accelerate lets every rank be alone where there is no accelerator.
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())
    set_seed(SEED)
    train_x, train_y, test_x, test_y = map(torch.from_numpy, load())
    own = BATCH_SIZE // accelerator.num_processes
    train_loader = DataLoader(TensorDataset(train_x, train_y), own, shuffle=True)
    test_loader = DataLoader(TensorDataset(test_x, test_y), batch_size=256)
    model = nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, train_loader, test_loader = accelerator.prepare(
        model, optimizer, train_loader, test_loader
    )

    for _ in range(args.epochs):
        for images, labels in train_loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()

    right = count = 0
    with torch.no_grad():
        for images, labels in test_loader:
            # Without the images that some ranks have seen twice, so that all have the same number.
            answers, truth = accelerator.gather_for_metrics((model(images).argmax(dim=1), labels))
            right += (answers == truth).sum().item()
            count += len(truth)
    if accelerator.is_main_process:
        result = {"ranks": accelerator.num_processes, "accuracy": round(right / count, 4)}
        print("result", json.dumps(result), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
