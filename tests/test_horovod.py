"""Horovod under every kind of launcher: real Horovod on real MPI and real Gloo, and always one world or an error."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Run
from hosts import Hosts, Slurm
from launched import MPI_ENV, MPIRUN, needs_hosts, needs_mpirun, needs_slurm

pytestmark = pytest.mark.skipif(
    find_spec("horovod") is None, reason="Horovod is not installed (tests/frameworks/wheels.sh builds it)"
)
OPENMPI4, MPICH = shutil.which("mpirun.openmpi"), shutil.which("mpiexec.mpich")
needs_openmpi4 = pytest.mark.skipif(OPENMPI4 is None, reason="no mpirun.openmpi (see tests/cluster/packages.txt)")
needs_mpich = pytest.mark.skipif(MPICH is None, reason="no mpiexec.mpich (see tests/cluster/packages.txt)")
GLOO_ONLY = Path(sys.prefix, "horovod-gloo")
needs_gloo_only = pytest.mark.skipif(not GLOO_ONLY.is_dir(), reason="no Horovod on Gloo alone (see the Makefile)")
needs_tensorflow = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")

UNDER_4 = (str(OPENMPI4), "--oversubscribe", "-n", "2")
UNDER_5 = (str(MPIRUN), "--map-by", ":OVERSUBSCRIBE", "-n", "2")
# What Horovod finds on a host that has Debian's Open MPI 4 only: here the dynamic linker prefers the 5 of the wheel.
LIBRARY_4 = Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40")
needs_library_4 = pytest.mark.skipif(not LIBRARY_4.exists(), reason="no Open MPI 4 (see tests/cluster/packages.txt)")

# One line a rank, written in one piece: what Horovod says of itself, and the sum of rank + 1 over all ranks.
_SAY = """
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
    "init.py": _INIT, "unmodified.py": _UNMODIFIED, "twice.py": _TWICE, "again.py": _AGAIN,
    "keras_fit.py": _KERAS, "tf_sum.py": _TENSORFLOW,
}  # fmt: skip
INIT, WRAPPED = ("init.py",), ("-m", "distboot", "run", "--framework", "horovod", "unmodified.py")
BOTH = [[0, 2, 0, 2, 0, 1], [1, 2, 1, 2, 0, 1]]

UNSEEN = "ended without a word"  # where the kernel is older than 6.15, and the parent was quicker than the guard

Line = dict[str, Any]


@pytest.fixture(autouse=True)
def _scripts(tmp_path: Path) -> None:
    """All scripts, in the folder where `run` runs."""
    for name, script in SCRIPTS.items():
        (tmp_path / name).write_text(_SAY + script)


def _lines(*done: subprocess.CompletedProcess[str]) -> list[Line]:
    """What the ranks say, by rank where they have one."""
    found = [json.loads(line) for each in done for line in each.stdout.splitlines() if line.startswith('{"')]
    return sorted(found, key=lambda line: line.get("numbers", [0])[0])


def _launched(run: Run, launcher: tuple[str, ...], *script: str, **env: str) -> tuple[list[Line], str]:
    """What the ranks of a job say, and all that was written to stderr."""
    done = run(*launcher, sys.executable, *script, env={**MPI_ENV, **env})
    assert _lines(done), done.stdout + done.stderr
    return _lines(done), done.stderr


def _by_hand(run: Run, port: int, *script: str, **env: str) -> list[subprocess.CompletedProcess[str]]:
    """Two ranks that were given nothing but RANK, WORLD_SIZE and the address."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **env}
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: run(sys.executable, *script, env={**job, "RANK": str(rank)}), range(2)))


def _are_one_world(lines: list[Line], *, mpi: bool) -> bool:
    return [(line["numbers"], line["total"], line["mpi"]) for line in lines] == [(own, 3.0, mpi) for own in BOTH]


def test_gloo_without_horovodrun_and_then_once_more(run: Run, port: int) -> None:
    done = _by_hand(run, port, "twice.py")
    assert [each.returncode for each in done] == [0, 0], done
    lines = _lines(*done)
    assert [(line["numbers"], line["total"]) for line in lines] == [(own, 3.0) for own in BOTH for _ in range(2)]
    exported = lines[-1]["exported"]
    assert (exported["HOROVOD_CONTROLLER"], exported["HOROVOD_CPU_OPERATIONS"]) == ("gloo", "gloo")
    assert exported["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
    assert exported["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "60"


def test_torchrun(run: Run) -> None:
    lines, _ = _launched(
        run, (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"), *INIT
    )
    assert _are_one_world(lines, mpi=False)
    assert {(line["device"], line["launcher"]) for line in lines} == {("cpu", "torchrun")}


def test_horovodrun_keeps_its_own_server_and_numbers(run: Run) -> None:
    horovodrun = (str(Path(sys.executable).parent / "horovodrun"), "--gloo", "--disable-cache", "-np", "2")
    done = run(*horovodrun, sys.executable, *INIT)
    said = [line.partition(">:")[2] for line in done.stdout.splitlines()]  # [1]<stdout>:{…
    lines = sorted((json.loads(line) for line in said if line.startswith("{")), key=lambda line: str(line["numbers"]))
    assert _are_one_world(lines, mpi=False), done.stdout + done.stderr


def test_alone(run: Run) -> None:
    ((line,), _) = _launched(run, (), *INIT)
    assert (line["numbers"], line["total"], line["gloo"]) == ([0, 1, 0, 1, 0, 1], 1.0, True)


@needs_openmpi4
def test_mpi_under_open_mpi_4_and_only_once_a_process(run: Run) -> None:
    lines, _ = _launched(run, UNDER_4, "again.py")
    assert _are_one_world([line for line in lines if "code" not in line], mpi=True)
    assert [line["code"] for line in lines if "code" in line] == ["already-initialized"] * 2


@needs_openmpi4
def test_gloo_under_open_mpi_4_for_who_asks(run: Run) -> None:
    lines, _ = _launched(run, UNDER_4, *INIT, BACKEND="gloo")
    assert _are_one_world(lines, mpi=False)


@needs_mpirun
@needs_library_4
@pytest.mark.parametrize("script", [INIT, WRAPPED], ids=["init", "wrapper"])
def test_open_mpi_5_and_a_horovod_on_open_mpi_4_are_no_two_worlds(run: Run, script: tuple[str, ...]) -> None:
    lines, said = _launched(run, (*UNDER_5, "env", f"LD_PRELOAD={LIBRARY_4}"), *script)
    assert _are_one_world(lines, mpi=False)
    assert "Horovod's MPI is Open MPI v4" in said
    assert "does not work under the mpirun of Open MPI 5; so Horovod uses Gloo" in said


@needs_mpich
def test_mpich_and_a_horovod_on_open_mpi_are_no_two_worlds(run: Run, port: int) -> None:
    lines, said = _launched(run, (str(MPICH), "-n", "2"), *INIT, MASTER_PORT=str(port))
    assert _are_one_world(lines, mpi=False)
    assert "does not work under the mpirun of mpich; so Horovod uses Gloo" in said


@needs_openmpi4
def test_mpi_that_does_not_find_its_peers_is_an_error(run: Run) -> None:
    launcher = (*UNDER_4, "env", "-u", "PMIX_RANK", "-u", "PMIX_NAMESPACE", "-u", "OMPI_MCA_ess")  # as sudo would
    lines, _ = _launched(run, launcher, *INIT)
    assert {(line["code"], line["unchanged"]) for line in lines} == {("rank-mismatch", True)}
    assert any("this is rank 1 of 2, local rank 1 of 2, cross rank 0 of 1, and Horovod that it is rank 0 of 1, "
               in line["text"] for line in lines)  # fmt: skip
    assert "backend='gloo'" in lines[0]["text"]


@needs_gloo_only
@pytest.mark.parametrize(
    "launcher", [pytest.param(UNDER_4, marks=needs_openmpi4), pytest.param(UNDER_5, marks=needs_mpirun)], ids=["4", "5"]
)
def test_gloo_alone_under_mpirun_is_one_world(run: Run, launcher: tuple[str, ...]) -> None:
    lines, _ = _launched(run, launcher, *INIT, PYTHONPATH=f"{GLOO_ONLY}:{ROOT}")
    assert _are_one_world(lines, mpi=False)


@needs_gloo_only
@needs_openmpi4
def test_ranks_with_different_builds_all_say_so(run: Run) -> None:
    command = [sys.executable, *INIT]
    done = run(*UNDER_4[:2], "-n", "1", *command, ":", "-n", "1", "env", f"PYTHONPATH={GLOO_ONLY}:{ROOT}", *command)
    lines = _lines(done)
    assert [(line["code"], line["unchanged"]) for line in lines] == [("rank-mismatch", True)] * 2, done.stderr
    texts = sorted(line["text"].partition(": Horovod is about ")[2].partition("\n")[0] for line in lines)
    assert texts == [
        "to use gloo on rank 1, and something else on rank 0", "to use mpi on rank 0, and something else on rank 1"
    ]  # fmt: skip


@needs_gloo_only
@pytest.mark.parametrize(
    ("env", "code", "flag"),
    [
        ({"WHICH": "horovod.tensorflow"}, "framework-not-installed", "HOROVOD_WITH_TENSORFLOW=1"),
        ({"BACKEND": "mpi"}, "backend-not-available", "HOROVOD_WITH_MPI=1"),
    ],
)
def test_what_the_build_lacks_is_named(run: Run, env: dict[str, str], code: str, flag: str) -> None:
    ((line,), _) = _launched(run, (), *INIT, PYTHONPATH=f"{GLOO_ONLY}:{ROOT}", **env)
    assert (line["code"], line["unchanged"]) == (code, True)
    assert (
        f"this Horovod was built without {'MPI' if 'BACKEND' in env else 'its part for tensorflow'} ({flag})"
        in line["text"]
    )


def test_variable_of_the_user_is_not_overridden(run: Run, port: int) -> None:
    lines = _lines(*_by_hand(run, port, *INIT, HOROVOD_CONTROLLER="MPI"))
    assert [(line["code"], line["unchanged"]) for line in lines] == [("broken-environment", True)] * 2
    assert "HOROVOD_CONTROLLER='MPI' asks for MPI, and launcher 'torch' does not start it" in lines[0]["text"]


@pytest.mark.parametrize("launcher", [(), pytest.param(UNDER_4, marks=needs_openmpi4)], ids=["by-hand", "Open MPI 4"])
def test_unmodified_script_through_the_wrapper(run: Run, port: int, launcher: tuple[str, ...]) -> None:
    if launcher:
        lines, _ = _launched(run, launcher, *WRAPPED)
    else:
        lines = _lines(*_by_hand(run, port, *WRAPPED))
    assert _are_one_world(lines, mpi=bool(launcher))


_STOPS = """
import signal, time
from pathlib import Path
import horovod.torch as hvd
hvd.init()
if hvd.rank() == 0:
    wrapper = os.getppid()
    threads = [task for task in Path(f"/proc/{wrapper}/task").iterdir() if task.name != str(wrapper)]
    status = [line.split() for task in threads for line in (task / "status").read_text().splitlines()]
    masks = [int(words[1], 16) for words in status if words[0] == "SigBlk:"]
    assert all(mask >> signal.SIGTERM - 1 & 1 for mask in masks), masks  # else one may take it
    os.kill(wrapper, signal.SIGTERM)
time.sleep(100)
"""


def test_wrapper_that_serves_the_rendezvous_still_gets_its_signals(run: Run, port: int, tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text(_SAY + _STOPS)
    done = _by_hand(run, port, *WRAPPED[:-1], "stops.py")
    assert [each.returncode for each in done] == [143, 143], done  # and not -15: both wrappers have waited


@needs_openmpi4
def test_choice_of_the_user_reaches_init_through_the_wrapper(run: Run) -> None:
    chosen = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_GLOO_TIMEOUT_SECONDS": "45"}
    lines, _ = _launched(run, UNDER_4, *WRAPPED[:-1], *INIT, **chosen)
    assert _are_one_world(lines, mpi=False)
    assert {line["limit"] for line in lines} == {"45"}


_LATE = """
import distboot, horovod.torch as hvd, time
if os.environ["RANK"] == "1":
    hvd.init = lambda: time.sleep(100)
distboot.init("horovod.torch", join_timeout=5)
"""


def test_start_of_horovod_has_a_limit(run: Run, port: int, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(_SAY + _LATE)
    done = _by_hand(run, port, "late.py")
    assert 75 in [each.returncode for each in done]
    assert "error[join-timeout]: rank " in "".join(each.stderr for each in done)


def test_gloo_needs_the_roll_call(run: Run, port: int) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"}
    job |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DISTBOOT_ROLL_CALL": "0"}
    ((line,), _) = _launched(run, (), *INIT, **job)
    assert (line["code"], line["unchanged"]) == ("roll-call-needed", True)


def test_started_already(run: Run) -> None:
    done = run(sys.executable, "-c", "import horovod.torch as hvd; hvd.init()\n" + _SAY + _INIT)
    assert [line["code"] for line in _lines(done)] == ["already-initialized"], done.stderr


_ENDS = """
import distboot, signal
ctx = distboot.init("horovod.torch", join_timeout=60)
import torch
for times in range(100000):
    ctx.hvd.allreduce(torch.ones(1), name="again")
    if times == 3 and ctx.rank == 1:
        os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
"""


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_rank_that_a_signal_ends_takes_the_others_with_it(run: Run, port: int, name: str, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(_SAY + _ENDS)
    survivor, culprit = _by_hand(run, port, "ends.py", SIGNAL=name)
    assert culprit.returncode == -getattr(signal, name)
    assert survivor.returncode != 0
    if name == "SIGKILL":
        first = survivor.stderr.partition(": rank 1 failed first: ")[2]
        assert first.startswith(("killed by SIGKILL", UNSEEN)), survivor.stderr


@needs_tensorflow
def test_tensorflow(run: Run, port: int) -> None:
    lines = _lines(*_by_hand(run, port, "tf_sum.py"))
    assert _are_one_world(lines, mpi=False)


@needs_tensorflow
def test_keras_trains_alike_on_all_ranks(run: Run, port: int) -> None:
    lines = _lines(*_by_hand(run, port, "keras_fit.py"))
    assert _are_one_world(lines, mpi=False)
    assert lines[0]["learned"] == lines[1]["learned"]


@needs_tensorflow
def test_keras_3_is_refused_by_its_name(run: Run) -> None:
    ((line,), _) = _launched(run, (), *INIT, WHICH="horovod.keras", TF_USE_LEGACY_KERAS="0")
    assert line["code"] == "framework-not-installed"
    assert "horovod.keras needs legacy Keras, and tf.keras is Keras 3." in line["text"]


# Horovod's cross rank is no node rank: the second process of the larger node is the only one of its kind.
UNEVEN = [[0, 3, 0, 2, 0, 2], [1, 3, 1, 2, 0, 1], [2, 3, 0, 1, 1, 2]]
LARGER_LAST = [[0, 3, 0, 1, 0, 2], [1, 3, 0, 2, 1, 2], [2, 3, 1, 2, 0, 1]]
CYCLIC = [[0, 3, 0, 2, 0, 2], [1, 3, 0, 1, 1, 2], [2, 3, 1, 2, 0, 1]]


@needs_hosts
@needs_mpirun
@pytest.mark.parametrize(
    ("backend", "layout", "numbers"),
    [("mpi", ("-H", "nodea:2,nodeb:1", "--map-by", "node"), CYCLIC), ("gloo", ("-H", "nodea:1,nodeb:2"), LARGER_LAST)],
    ids=["mpi-cyclic", "gloo-larger-last"],
)
def test_mpirun_on_two_hosts(hosts: Hosts, backend: str, layout: tuple[str, ...], numbers: list[list[int]]) -> None:
    (hosts.shared / "init.py").write_text(_SAY + _INIT)
    env = {**MPI_ENV, "BACKEND": backend, "MASTER_ADDR": "nodea"}
    exports = [word for name in (*env, "PATH", "PYTHONPATH") for word in ("-x", name)]
    launch = [str(MPIRUN), "--bind-to", "none", *layout, *exports, sys.executable, *INIT]
    done = hosts.run("nodea", launch, env, timeout=120)
    found = [(line["numbers"], line["total"], line["mpi"]) for line in _lines(done)]
    assert found == [(own, 6.0, backend == "mpi") for own in numbers], done.stdout + done.stderr


@needs_slurm
@pytest.mark.parametrize("script", [INIT, WRAPPED], ids=["init", "wrapper"])
def test_slurm_step_on_two_hosts(slurm: Slurm, script: tuple[str, ...]) -> None:
    for name in (INIT[-1], WRAPPED[-1]):
        (slurm.hosts.shared / name).write_text(_SAY + SCRIPTS[name])
    step = ["-N2", "-n3", "-m", "plane=2", sys.executable, *script]
    done = slurm.srun(step, {"OMP_NUM_THREADS": "1"}, 120)
    found = [(line["numbers"], line["total"], line["mpi"]) for line in _lines(done)]
    assert found == [(own, 6.0, False) for own in UNEVEN], done.stdout + done.stderr
