"""Train a small classifier on scikit-learn's digits with the Trainer of Transformers. Not a word of distboot in it.

    mpirun -n 2 python -m distboot transformers_trainer.py
    torchrun --nproc-per-node 2 transformers_trainer.py

The Trainer takes any module that returns its loss with its logits. The batch size is that of the whole job.
"""

import argparse
import json
import os
import tempfile

import torch
from digits import CLASSES, PIXELS, SEED, load
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalPrediction

BATCH_SIZE = 96


class Classifier(nn.Module):
    """Two layers, and the loss that the Trainer looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(PIXELS, 128), nn.ReLU(), nn.Linear(128, CLASSES))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return loss and logits."""
        logits = self.layers(images)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Return the share of right answers."""
    return {
        "accuracy": float((prediction.predictions.argmax(axis=1) == prediction.label_ids).mean())
    }


def main() -> None:
    """Train, and print the result on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    train_x, train_y, test_x, test_y = map(torch.from_numpy, load())
    train = [
        {"images": images, "labels": label} for images, label in zip(train_x, train_y, strict=True)
    ]
    test = [
        {"images": images, "labels": label} for images, label in zip(test_x, test_y, strict=True)
    ]
    training = TrainingArguments(
        output_dir=os.path.join(tempfile.gettempdir(), "digits"),
        # Without this the Trainer lets every rank be alone where there is no accelerator.
        use_cpu=not torch.accelerator.is_available(),
        num_train_epochs=args.epochs, learning_rate=0.01, seed=SEED, remove_unused_columns=False,
        ddp_find_unused_parameters=False, save_strategy="no", logging_strategy="no", report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    training.per_device_train_batch_size = BATCH_SIZE // training.world_size
    trainer = Trainer(
        Classifier(), training, train_dataset=train, eval_dataset=test, compute_metrics=accuracy
    )
    trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        result = {"ranks": training.world_size, "accuracy": round(metrics["eval_accuracy"], 4)}
        print("result", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
