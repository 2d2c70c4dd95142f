"""Softmax regression in NumPy, its gradients summed with mpi4py's communicator: `init("mpi")` under an MPI launcher.

    mpirun -n 2 python mpi_reduce.py
    srun --mpi=pmix -n 2 python mpi_reduce.py

The batch size is that of the whole job, so every number of ranks trains on the same batches.
"""

import argparse
import json

import digits
import numpy as np

import distboot

BATCH = 96  # of the whole job
RATE = 0.5


def main() -> None:
    """Train, and print the result on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    epochs = parser.parse_args().epochs
    with distboot.init("mpi") as ctx:
        train_x, train_y, test_x, test_y = digits.load()
        # The last row is the bias
        weights = np.zeros((digits.PIXELS + 1, digits.CLASSES), "float32")
        train_x, test_x = (
            np.pad(x, ((0, 0), (0, 1)), constant_values=1) for x in (train_x, test_x)
        )

        shuffle = np.random.default_rng(digits.SEED)  # the same order on every rank
        for _ in range(epochs):
            for batch in np.split(shuffle.permutation(len(train_x)), len(train_x) // BATCH):
                own = batch[ctx.rank :: ctx.world_size]
                logits = train_x[own] @ weights
                chances = np.exp(logits - logits.max(axis=1, keepdims=True))
                chances /= chances.sum(axis=1, keepdims=True)
                gradient = train_x[own].T @ (
                    chances - np.eye(digits.CLASSES, dtype="float32")[train_y[own]]
                )
                total = np.empty_like(gradient)
                ctx.comm.Allreduce(gradient, total)
                weights -= RATE / BATCH * total

        own = slice(ctx.rank, None, ctx.world_size)
        right = ctx.comm.allreduce(
            int((np.argmax(test_x[own] @ weights, axis=1) == test_y[own]).sum())
        )
        if ctx.is_main:
            result = {"ranks": ctx.world_size, "accuracy": round(right / len(test_x), 4)}
            print("result", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
