"""Train a small classifier on scikit-learn's digits with PyTorch Lightning, under any launcher.

    mpirun -n 2 python lightning_trainer.py
    torchrun --nproc-per-node 2 lightning_trainer.py

The batch size is that of the whole job, so every number of ranks trains on the same batches.
"""

import argparse
import json

import torch
from digits import CLASSES, PIXELS, SEED, load
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from distboot.lightning import DistbootEnvironment

BATCH_SIZE = 96


class Classifier(LightningModule):
    """Two layers, and the share of test images that they get right."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, CLASSES))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        return cross_entropy(self.layers(images), labels)

    def on_test_epoch_start(self) -> None:
        """Begin to count."""
        self.right = torch.zeros(2, device=self.device)  # right answers, images

    def test_step(self, batch: list[torch.Tensor]) -> None:
        """Count the right answers of this rank."""
        images, labels = batch
        right = (self.layers(images).argmax(dim=1) == labels).sum()
        self.right += torch.stack([right, torch.tensor(len(labels), device=self.device)])

    def on_test_epoch_end(self) -> None:
        """Add up those of all ranks."""
        right, count = self.trainer.strategy.reduce(self.right, reduce_op="sum")
        self.log("accuracy", right / count)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return what trains the layers."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    """Train, test, and print the result on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    environment = DistbootEnvironment()
    ctx = environment.context
    trainer = Trainer(
        plugins=[environment], devices=ctx.local_world_size, num_nodes=ctx.num_nodes, max_epochs=args.epochs,
        use_distributed_sampler=False, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip

    train_x, train_y, test_x, test_y = map(torch.from_numpy, load())
    train, test = TensorDataset(train_x, train_y), TensorDataset(test_x, test_y)
    sampler = DistributedSampler(train, num_replicas=ctx.world_size, rank=ctx.rank, seed=SEED)
    train_loader = DataLoader(train, BATCH_SIZE // ctx.world_size, sampler=sampler)
    # Not a DistributedSampler, which makes all parts equally long: some images would count twice.
    test_loader = DataLoader(
        Subset(test, range(ctx.rank, len(test), ctx.world_size)), batch_size=len(test)
    )

    torch.manual_seed(SEED)
    model = Classifier()
    trainer.fit(model, train_loader)
    trainer.test(model, test_loader, verbose=False)
    if trainer.is_global_zero:
        accuracy = trainer.callback_metrics["accuracy"].item()
        print(
            "result",
            json.dumps({"ranks": trainer.world_size, "accuracy": round(accuracy, 4)}),
            flush=True,
        )


if __name__ == "__main__":
    main()
