"""Train on scikit-learn's digits with TensorFlow's MultiWorkerMirroredStrategy and a training loop on Keras 3.

    python tensorflow_multi_worker.py                        # one process: TensorFlow's default strategy
    mpirun -n 2 python tensorflow_multi_worker.py            # any launcher: no TF_CONFIG is needed
    srun -n 2 python tensorflow_multi_worker.py

The batch size is that of the whole job, so every number of ranks trains on the same batches. `model.fit` is for legacy
Keras under this strategy: TF_USE_LEGACY_KERAS=1, with tf-keras installed.
"""

import argparse
import json

import digits
import tensorflow as tf

import distboot

BATCH_SIZE = 96


def main() -> None:
    """Train, and print the result on rank 0."""
    parser = argparse.ArgumentParser(description="Train with MultiWorkerMirroredStrategy.")
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    # Before the first tensor: TensorFlow takes a cluster only before anything has used its runtime.
    ctx = distboot.init("tensorflow")

    tf.keras.utils.set_random_seed(digits.SEED)
    train_x, train_y, test_x, test_y = digits.load()

    def own_part(where: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices((train_x, train_y)).shuffle(
            len(train_x), seed=digits.SEED
        )
        # Every n-th of each global batch
        dataset = dataset.shard(where.num_input_pipelines, where.input_pipeline_id)
        return dataset.batch(where.get_per_replica_batch_size(BATCH_SIZE))

    dataset = ctx.strategy.distribute_datasets_from_function(own_part)
    with ctx.strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.Input((digits.PIXELS,)),
                tf.keras.layers.Dense(128, activation="relu"),
                tf.keras.layers.Dense(digits.CLASSES),
            ]
        )
        optimizer = tf.keras.optimizers.Adam(0.005)
        optimizer.build(model.trainable_variables)

    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH_SIZE)
        gradients = tape.gradient(loss, model.trainable_variables)
        # Sums over the ranks
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        losses = ctx.strategy.run(step, args=(images, labels))
        return ctx.strategy.reduce("sum", losses, axis=None)

    for epoch in range(args.epochs):
        losses = [train_step(images, labels) for images, labels in dataset]
        if ctx.is_main:
            print(
                f"epoch {epoch + 1}/{args.epochs}: loss {float(sum(losses)) / len(losses):.4f}",
                flush=True,
            )

    if ctx.is_main:
        accuracy = (tf.argmax(model(test_x), axis=1).numpy() == test_y).mean().item()
        print(
            "result",
            json.dumps({"ranks": ctx.world_size, "accuracy": round(accuracy, 4)}),
            flush=True,
        )
    ctx.close()


if __name__ == "__main__":
    main()
