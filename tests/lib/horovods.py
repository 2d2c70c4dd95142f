"""What the tests of Horovod share: the scripts of the ranks, what they say, and launchers of two of them."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launched import MPI_ENV, OPENMPI4, needs

if TYPE_CHECKING:
    from conftest import Run  # which imports this

needs_horovod = needs("horovod")  # tests/frameworks/wheels.sh builds it

UNDER_4 = (str(OPENMPI4), "--oversubscribe", "-n", "2")

# One line per rank, written in one piece: what Horovod says of itself, and the sum of rank + 1 over all ranks.
SAY = """
import json, os, sys
def say(hvd, total, **more):
    numbers = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()]
    line = {"numbers": numbers, "total": float(total), "mpi": hvd.mpi_enabled(), "gloo": hvd.gloo_enabled(), **more}
    sys.stdout.write(json.dumps(line) + "\\n")
    sys.stdout.flush()
def summed(hvd):
    import torch
    return hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum, name="total")
"""
_INIT = """
import distboot
before = dict(os.environ)
def init():
    which, backend = os.environ.get("WHICH", "horovod.torch"), os.environ.get("BACKEND")
    try:
        return distboot.init(which, backend=backend, join_timeout=60)
    except distboot.DistbootError as error:
        line = {"code": error.code, "text": str(error), "unchanged": dict(os.environ) == before}
        sys.stdout.write(json.dumps(line) + "\\n")
        sys.stdout.flush()
        sys.exit(error.exit_code)
ctx = init()
limit = os.environ.get("HOROVOD_GLOO_TIMEOUT_SECONDS")
say(ctx.hvd, summed(ctx.hvd), device=str(ctx.device), launcher=ctx.launcher, limit=limit)
ctx.close()
"""
_AGAIN = _INIT + "init()\n"
# A script that has never heard of distboot.
_UNMODIFIED = """
import horovod.torch as hvd
hvd.init()
say(hvd, summed(hvd))
"""
_TWICE = """
import distboot
for _ in range(2):
    with distboot.init("horovod.torch", join_timeout=60) as ctx:
        with ctx.main_first():
            pass
        ctx.barrier()
        exported = {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}
        ctx.hvd.shutdown()
        assert ctx.closed
        ctx.hvd.init()  # as after an error: the rendezvous server is still there
        say(ctx.hvd, summed(ctx.hvd), exported=exported)
    assert not ctx.hvd.is_initialized()
    assert not [name for name in os.environ if name.startswith("HOROVOD_")]
"""
_KERAS = """
import distboot
ctx = distboot.init("horovod.keras", join_timeout=90)
hvd = ctx.hvd
import numpy as np, tensorflow as tf
model = tf.keras.Sequential([tf.keras.layers.Dense(2, input_shape=(3,))])
model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)), loss="mse")
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
own = np.full((8, 3), ctx.rank + 1.0, "f"), np.full((8, 2), ctx.rank + 1.0, "f")
losses = model.fit(*own, epochs=2, verbose=0, callbacks=callbacks).history["loss"]
weights = [float(each) for each in model.get_weights()[0].ravel()]
say(hvd, hvd.allreduce(ctx.rank + 1.0, name="total", op=hvd.Sum), learned=[*map(float, losses), *weights])
ctx.close()
"""
_TENSORFLOW = """
import distboot
ctx = distboot.init("horovod.tensorflow", join_timeout=90)
import tensorflow as tf
say(ctx.hvd, ctx.hvd.allreduce(tf.constant(ctx.rank + 1.0), op=ctx.hvd.Sum), device=ctx.device)
ctx.close()
"""
SCRIPTS = {
    "init.py": _INIT,
    "unmodified.py": _UNMODIFIED,
    "twice.py": _TWICE,
    "again.py": _AGAIN,
    "keras_fit.py": _KERAS,
    "tf_sum.py": _TENSORFLOW,
}
INIT = ("init.py",)
WRAPPED = ("-m", "distboot", "run", "--framework", "horovod", "unmodified.py")
BOTH = [[0, 2, 0, 2, 0, 1], [1, 2, 1, 2, 0, 1]]

Line = dict[str, Any]


def write_scripts(folder: Path) -> None:
    for name, script in SCRIPTS.items():
        (folder / name).write_text(SAY + script)


def lines_of(*done: subprocess.CompletedProcess[str]) -> list[Line]:
    found = [
        json.loads(line)
        for each in done
        for line in each.stdout.splitlines()
        if line.startswith('{"')
    ]
    return sorted(found, key=lambda line: line.get("numbers", [0])[0])


def launched(
    run: Run, launcher: tuple[str, ...], *script: str, **env: str
) -> tuple[list[Line], str]:
    """What the ranks of a job say, and all that was written to stderr."""
    done = run(*launcher, sys.executable, *script, env={**MPI_ENV, **env})
    assert lines_of(done), done.stdout + done.stderr
    return lines_of(done), done.stderr


def in_two(run: Run, port: int, *script: str, **env: str) -> list[subprocess.CompletedProcess[str]]:
    """Two ranks that were given nothing but RANK, WORLD_SIZE and the address."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **env}
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(
                lambda rank: run(sys.executable, *script, env={**job, "RANK": str(rank)}), range(2)
            )
        )


def are_one_world(lines: list[Line], *, mpi: bool) -> bool:
    return [(line["numbers"], line["total"], line["mpi"]) for line in lines] == [
        (own, 3.0, mpi) for own in BOTH
    ]
