"""Horovod with TensorFlow in a loop of one's own, started by `init("horovod.tensorflow")` under any launcher.

    mpirun -n 2 python horovod_tensorflow.py              # MPI
    srun -n 2 python horovod_tensorflow.py                # Gloo, and no horovodrun

The batch size is that of the whole job, so every number of ranks trains on the same batches.
"""

import argparse
import json

import distboot

BATCH = 96  # of the whole job


def main() -> None:
    """Train, and print the result on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    epochs = parser.parse_args().epochs
    with distboot.init("horovod.tensorflow") as ctx:
        train(ctx, epochs)


def train(ctx: distboot.Context, epochs: int) -> None:
    """Train on this rank's part of every batch."""
    import digits
    import numpy as np
    import tensorflow as tf

    hvd = ctx.hvd
    train_x, train_y, test_x, test_y = digits.load()
    tf.keras.utils.set_random_seed(digits.SEED)
    model = tf.keras.Sequential(
        [tf.keras.layers.Dense(128, activation="relu"), tf.keras.layers.Dense(digits.CLASSES)]
    )
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.build((None, digits.PIXELS))
    # TensorFlow's: Horovod knows none of Keras 3
    weights = [variable.value for variable in model.trainable_variables]
    hvd.broadcast_variables(weights, root_rank=0)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)  # averages the gradients over the ranks
        optimizer.apply(tape.gradient(loss, weights), model.trainable_variables)

    shuffle = np.random.default_rng(digits.SEED)  # the same order on every rank
    for _ in range(epochs):
        order = shuffle.permutation(len(train_x))
        for start in range(0, len(order), BATCH):
            own = order[start : start + BATCH][ctx.rank :: ctx.world_size]
            step(tf.constant(train_x[own]), tf.constant(train_y[own]))

    own = slice(ctx.rank, None, ctx.world_size)
    right = tf.reduce_sum(tf.cast(tf.argmax(model(test_x[own]), axis=1) == test_y[own], tf.int32))
    right = hvd.allreduce(right, op=hvd.Sum)
    if ctx.is_main:
        result = {"ranks": hvd.size(), "accuracy": round(int(right) / len(test_x), 4)}
        print("result", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
