"""Train on scikit-learn's digits with TensorFlow's ParameterServerStrategy: rank 0 tells the workers what to do.

    python tensorflow_parameter_server.py   # one process: the same step, without servers

With servers it needs a `TF_CONFIG` with the tasks chief, worker and ps in every process, as TFJob and Azure ML set it.

Only the chief gets past `init`: workers and parameter servers serve it there, and end with it. The workers are not
synchronous: each takes the weights as they are, and its next batch.
"""

import argparse
import json

import digits
import tensorflow as tf

import distboot

BATCH_SIZE = 96


def main() -> None:
    """Train, and print the result on rank 0."""
    parser = argparse.ArgumentParser(description="Train with ParameterServerStrategy.")
    parser.add_argument("--epochs", type=int, default=8)
    args = parser.parse_args()

    if distboot.detect().world_size > 1:
        ctx = distboot.init("tensorflow", strategy="parameter_server")
    else:
        ctx = distboot.init("tensorflow")

    tf.keras.utils.set_random_seed(digits.SEED)
    train_x, train_y, test_x, test_y = digits.load()

    def batches() -> tf.data.Dataset:
        dataset = tf.data.Dataset.from_tensor_slices((train_x, train_y))
        return dataset.shuffle(len(train_x), seed=digits.SEED).repeat().batch(BATCH_SIZE)

    with ctx.strategy.scope():  # on the parameter servers
        model = tf.keras.Sequential(
            [
                tf.keras.Input((digits.PIXELS,)),
                tf.keras.layers.Dense(128, activation="relu"),
                tf.keras.layers.Dense(digits.CLASSES),
            ]
        )
        optimizer = tf.keras.optimizers.Adam(0.005)
        optimizer.build(model.trainable_variables)

    def update(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))
            )
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(iterator: tf.data.Iterator) -> tf.Tensor:
        return ctx.strategy.run(update, args=next(iterator))

    steps = len(train_x) // BATCH_SIZE
    if ctx.world_size > 1:
        coordinator = tf.distribute.coordinator.ClusterCoordinator(ctx.strategy)
        iterator = iter(coordinator.create_per_worker_dataset(batches))
    else:
        iterator = iter(batches())
    for epoch in range(args.epochs):
        if ctx.world_size > 1:
            # Whoever is free takes one
            remote = [coordinator.schedule(step, args=(iterator,)) for _ in range(steps)]
            coordinator.join()
            losses = coordinator.fetch(remote)
        else:
            losses = [step(iterator) for _ in range(steps)]
        print(f"epoch {epoch + 1}/{args.epochs}: loss {float(sum(losses)) / steps:.4f}", flush=True)

    accuracy = (tf.argmax(model(test_x), axis=1).numpy() == test_y).mean().item()
    print(
        "result", json.dumps({"ranks": ctx.world_size, "accuracy": round(accuracy, 4)}), flush=True
    )
    ctx.close()


if __name__ == "__main__":
    main()
