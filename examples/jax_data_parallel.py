"""Train a small classifier on scikit-learn's digits with JAX, every device of the job with its part of each batch.

    mpirun -n 2 python jax_data_parallel.py
    python -m distboot run --nproc-per-node 2 jax_data_parallel.py

The batch size is that of the whole job, so every number of ranks trains on the same batches.
"""

import argparse
import json

import numpy as np
from digits import CLASSES, PIXELS, SEED, load

import distboot

BATCH_SIZE = 96


def main() -> None:
    """Train, and print the result on rank 0."""
    ctx = distboot.init("jax")
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    mesh = Mesh(jax.devices(), ("data",))
    split, same = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    def on_all(part: np.ndarray) -> jax.Array:
        """Return the array of all ranks, of which this one has every `world_size`-th row."""
        return jax.make_array_from_process_local_data(split, part[ctx.rank :: ctx.world_size])

    def logits(weights: list[jax.Array], images: jax.Array) -> jax.Array:
        inner, inner_bias, outer, outer_bias = weights
        return jax.nn.relu(images @ inner + inner_bias) @ outer + outer_bias

    def loss(weights: list[jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
        return -jnp.mean(
            jax.nn.log_softmax(logits(weights, images))[jnp.arange(len(labels)), labels]
        )

    @jax.jit
    def step(weights: list[jax.Array], images: jax.Array, labels: jax.Array) -> list[jax.Array]:
        # The mean over all ranks, as images are of all
        gradients = jax.grad(loss)(weights, images, labels)
        return [
            weight - 0.5 * gradient for weight, gradient in zip(weights, gradients, strict=True)
        ]

    rng = np.random.default_rng(SEED)  # the same on all ranks
    sizes = ((PIXELS, 128), (128,), (128, CLASSES), (CLASSES,))
    weights = [
        jax.device_put((rng.normal(size=size) * 0.1).astype("float32"), same) for size in sizes
    ]
    train_x, train_y, test_x, test_y = load()
    for _ in range(args.epochs):
        for batch in np.split(rng.permutation(len(train_x)), len(train_x) // BATCH_SIZE):
            weights = step(weights, on_all(train_x[batch]), on_all(train_y[batch]))

    own = [weight.addressable_data(0) for weight in weights]
    accuracy = float((logits(own, test_x).argmax(axis=1) == test_y).mean())
    if ctx.is_main:
        print(
            "result",
            json.dumps({"ranks": ctx.world_size, "accuracy": round(accuracy, 4)}),
            flush=True,
        )
    ctx.close()


if __name__ == "__main__":
    main()
