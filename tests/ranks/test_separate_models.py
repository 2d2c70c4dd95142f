"""Ranks of an unmodified script that train a model each are named: with torch, Horovod and Keras."""

from pathlib import Path

import pytest
from conftest import Run
from launched import needs, needs_torch

TWO = ("--nproc-per-node", "2")
# Nearly all of the time in the backward pass, and without a processor
TRAIN = """
import sys, time
import torch
{start}
model = torch.nn.Linear(2, 1)
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    output = model(torch.ones(2)).sum()
    output.register_hook(lambda _: time.sleep(0.5))
    output.backward()
"""
START = "torch.distributed.init_process_group('gloo'); torch.distributed.barrier()"


@needs_torch
def test_script_without_a_group_is_named(distboot: Run) -> None:
    done = distboot(*TWO, "train.py", train=TRAIN.format(start="", seconds=25))
    assert done.returncode == 0, done.stderr
    assert (
        "warning: ranks 0-1 train separately: no process group of torch connects them; start one"
        in done.stderr
    )
    assert done.stderr.count("train separately") == 1
    assert "s: all ended, but ranks 0-1 trained separately; exit codes: 0" in done.stderr


@needs_torch
@pytest.mark.all
@pytest.mark.parametrize("init", ["", "import distboot; distboot.init()"], ids=["script", "init"])
def test_group_that_nobody_uses_is_named(distboot: Run, init: str) -> None:
    script = TRAIN.format(start=init or START, seconds=70)
    done = distboot(*TWO, "train.py", train=script)
    assert done.returncode == 0, done.stderr
    assert (
        "warning: ranks 0-1 may train separately: they have process groups of torch, and called no "
        "collective operation for a minute"
    ) in done.stderr
    assert "s: all ended, but ranks 0-1 may have trained separately; exit codes" in done.stderr


@needs_torch
@needs("horovod")
@pytest.mark.all
def test_horovod_in_a_module_is_named(distboot: Run, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("import horovod.torch as hvd\nhvd.init()\n")
    script = TRAIN.format(start="import helper", seconds=25)
    done = distboot(*TWO, "train.py", train=script)
    assert done.returncode == 0, done.stderr
    assert (
        "warning: ranks 0-1 train separately: Horovod was started on each as in a job of one "
        "process; python -m distboot run --framework horovod sets its variables"
    ) in done.stderr


KERAS = """
import time
import helper
import numpy as np
from tensorflow import keras

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.5)

with helper.strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((34, 2)), np.ones((34, 1)), batch_size=1, verbose=0, callbacks=[Slow()])
"""


@needs("tensorflow")
@pytest.mark.all
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_strategy_in_a_module_is_named(distboot: Run, tmp_path: Path, framework: str) -> None:
    helper = "import tensorflow as tf\nstrategy = tf.distribute.MultiWorkerMirroredStrategy()\n"
    (tmp_path / "helper.py").write_text(helper)
    command = ("run", "--framework", framework, *TWO, "train.py")
    done = distboot(*command, train=KERAS, env={"TF_USE_LEGACY_KERAS": "1"}, timeout=200)
    assert done.returncode == 0, done.stderr
    is_named = "train separately: no strategy of TensorFlow connects them" in done.stderr
    assert is_named == (framework == "torch"), done.stderr
