"""Ranks of an unmodified script that train a model each are named, with each framework."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from conftest import Run
from launched import needs, needs_torch

TWO = ("--nproc-per-node", "2")
# Until when the scripts below train: until they are named, which a busy machine may be late with
UNTIL = """
import time

end = time.monotonic() + {seconds}

def goes_on():
    time.sleep(0.2)
    with open("said") as file:
        return "train separately" not in file.read() and time.monotonic() < end
"""
# Nearly all of the time in the backward pass, and without a processor
TRAIN = """
{start}
import random, time
import torch
from until import goes_on

model = torch.nn.Linear(2, 1)
while goes_on():
    output = model(torch.ones(2)).sum()
    output.register_hook(lambda _: time.sleep(random.uniform(0.5, 1.5)))
    output.backward()
    {reduce}
"""
# A group of this rank alone
OWN_WORLD = """
import os, torch
store = f"file://{os.getcwd()}/{os.getpid()}"
torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
torch.distributed.all_reduce(torch.ones(1))
"""
BARRIER = """
import torch
torch.distributed.init_process_group('gloo')
torch.distributed.barrier()
"""
INIT = "import distboot; distboot.init()"
OWN_GROUPS = f"""
{BARRIER}
rank = torch.distributed.get_rank()
group = [torch.distributed.new_group([each]) for each in range(2)][rank]
"""
# More groups than the ranks are compared by
MANY_GROUPS = """
import time
import torch
from torch.distributed import all_reduce, init_process_group, new_group

init_process_group("gloo")
groups = [new_group([0, 1]) for _ in range(34)]
weights = torch.ones(2, requires_grad=True)
for _ in range(24):
    output = weights.sum()
    output.register_hook(lambda _: time.sleep(3))
    output.backward()
    all_reduce(weights.grad, group=groups[-1])
"""
KERAS = """
import helper
import numpy as np
from tensorflow import keras
from until import goes_on

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = not goes_on()

with helper.strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((2, 2)), np.ones((2, 1)), epochs={epochs}, batch_size=1, verbose=0, callbacks=[Slow()])
"""
STRATEGY = """
import os

os.environ["TF_USE_LEGACY_KERAS"] = "1"
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
"""
TAPE = """
import time
import tensorflow as tf
from until import goes_on

@tf.custom_gradient
def slow(value):
    def gradient(upstream):
        time.sleep(4)  # the gradient of a real model is compiled for as long
        return upstream
    return tf.identity(value), gradient

@tf.function
def train(weight):
    with tf.GradientTape() as tape:
        loss = slow(weight * weight)
    weight.assign_sub(0.01 * tape.gradient(loss, weight))
    tf.py_function(lambda: time.sleep(0.5), (), ())

weight = tf.Variable(1.0)
while goes_on():
    train(weight)
"""
JAX = """
{start}
import jax
from until import goes_on

train = jax.jit(jax.grad(jax.jit(lambda weight: weight * weight)))
while goes_on():
    train(1.0)
"""
TOGETHER = "import jax; jax.distributed.initialize()"
Train = Callable[..., str]


@pytest.fixture
def trained(run: Run, tmp_path: Path) -> Train:
    """What the wrapper of two ranks says of a script, which trains for so many seconds at most."""

    def train(script: str, *options: str, seconds: int = 150, env: Mapping[str, str] = {}) -> str:
        (tmp_path / "until.py").write_text(UNTIL.format(seconds=seconds))
        wrapper = (sys.executable, "-m", "distboot", *options, *TWO, "train.py")
        done = run("bash", "-c", '"$@" 2> said', "-", *wrapper, train=script, env=env, timeout=300)
        said = (tmp_path / "said").read_text()
        assert done.returncode == 0, said
        return said

    return train


@needs_torch
def test_script_without_a_group_is_named(trained: Train) -> None:
    said = trained(TRAIN.format(start="", reduce=""))
    assert (
        "warning: ranks 0-1 train separately: no process group of torch connects them; start one"
        in said
    )
    assert said.count("train separately") == 1
    assert "s: all ended, but ranks 0-1 trained separately; exit codes: 0" in said


@needs_torch
@pytest.mark.all
def test_group_of_one_rank_connects_nothing(trained: Train) -> None:
    reduce = "torch.distributed.all_reduce(model.weight.grad)"
    said = trained(TRAIN.format(start=OWN_WORLD, reduce=reduce))
    assert "ranks 0-1 train separately: no process group of torch connects them" in said


@needs_torch
@pytest.mark.all
def test_each_group_counts(trained: Train) -> None:
    said = trained(MANY_GROUPS, env={"DISTBOOT_LATE_AFTER": "10"})
    assert "train separately" not in said
    assert "waiting for" not in said
    assert "s: all ended well; exit codes: 0" in said


@needs_torch
@pytest.mark.all
@pytest.mark.parametrize(
    ("start", "reduce"),
    [
        (BARRIER, ""),
        (INIT, ""),
        (OWN_GROUPS, "torch.distributed.all_reduce(model.weight.grad, group=group)"),
    ],
    ids=["script", "init", "groups of one"],
)
def test_group_that_nobody_uses_is_named(trained: Train, start: str, reduce: str) -> None:
    said = trained(TRAIN.format(start=start, reduce=reduce))
    assert (
        "warning: ranks 0-1 may train separately: they have process groups of torch, and called no "
        "collective operation for a minute"
    ) in said
    assert "s: all ended, but ranks 0-1 may have trained separately; exit codes" in said


@needs_torch
@needs("horovod")
@pytest.mark.all
def test_horovod_in_a_module_is_named(trained: Train, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import horovod.torch as hvd\nhvd.init()\n")
    assert (
        "warning: ranks 0-1 train separately: Horovod was started on each as in a job of one "
        "process; python -m distboot run --framework horovod sets its variables"
    ) in trained(TRAIN.format(start="import helper", reduce=""))


@needs("tensorflow")
@pytest.mark.all
@pytest.mark.parametrize(
    ("framework", "epochs", "is_named"), [("torch", 600, True), ("tensorflow", 100, False)]
)
def test_strategy_in_a_module_is_named(
    trained: Train, tmp_path: Path, framework: str, epochs: int, is_named: bool
) -> None:
    (tmp_path / "helper.py").write_text(STRATEGY)
    # Where the ranks are connected they have to end after the same batch, not at some time
    said = trained(KERAS.format(epochs=epochs), "--framework", framework, seconds=1000)
    warning = "train separately: no strategy of TensorFlow connects them"
    assert (warning in said) == is_named, said


@needs("tensorflow")
@pytest.mark.all
def test_compiled_gradient_tape_is_named(trained: Train) -> None:
    warning = (
        "warning: ranks 0-1 may train separately: no strategy of TensorFlow connects them; use"
    )
    assert warning in trained(TAPE)


@needs("jax")
@pytest.mark.all
@pytest.mark.parametrize(
    ("start", "seconds", "is_named"),
    [("", 150, True), (TOGETHER, 30, False)],
    ids=["alone", "together"],
)
def test_gradients_of_jax_are_named(
    trained: Train, start: str, seconds: int, is_named: bool
) -> None:
    said = trained(JAX.format(start=start), "--framework", "jax", seconds=seconds)
    warning = "warning: ranks 0-1 may train separately: JAX was started on each as in a job of one"
    assert (warning in said) == is_named, said
    ended = "all ended, but ranks 0-1 may have trained separately; exit codes"
    assert (ended in said) == is_named
