"""Horovod under every kind of launcher: real Horovod on real MPI and real Gloo, and always one world or an error."""

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Run
from horovods import (
    BOTH,
    INIT,
    SAY,
    SCRIPTS,
    UNDER_4,
    WRAPPED,
    are_one_world,
    in_two,
    launched,
    lines_of,
)
from hosts import Hosts, Slurm
from launched import (
    MPI_ENV,
    TWO_OF_MPIRUN,
    needs,
    needs_hosts,
    needs_mpich,
    needs_mpirun,
    needs_openmpi4,
    needs_slurm,
)

pytestmark = [pytest.mark.all, needs("horovod"), pytest.mark.usefixtures("horovod_scripts")]
needs_tensorflow = needs("tensorflow")


GLOO_ONLY = Path(sys.prefix, "horovod-gloo")
needs_gloo_only = pytest.mark.skipif(
    not GLOO_ONLY.is_dir(), reason="no Horovod on Gloo alone (see the Makefile)"
)
UNDER_5 = tuple(TWO_OF_MPIRUN)
# What Horovod finds on a host that has Debian's Open MPI 4 only: here the dynamic linker prefers the 5 of the wheel.
LIBRARY_4 = Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40")
needs_library_4 = pytest.mark.skipif(
    not LIBRARY_4.exists(), reason="no Open MPI 4 (see tests/cluster/packages.txt)"
)


# Launcher, None for by hand; script, variables; whether on MPI, what each rank says besides, what is said of it.
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python")
_WITH_LIBRARY_4 = (*UNDER_5, "env", f"LD_PRELOAD={LIBRARY_4}")
_OF_USER = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_GLOO_TIMEOUT_SECONDS": "45"}
_NOT_MPI_5 = (
    "Horovod's MPI is Open MPI v4.* does not work under the mpirun of Open "
    "MPI 5; so Horovod uses Gloo"
)
_NOT_MPICH = "does not work under the mpirun of mpich; so Horovod uses Gloo"
_ON_GLOO_ONLY = {"PYTHONPATH": f"{GLOO_ONLY}:{ROOT}"}
_TWO_OF_MPICH = ("mpiexec.mpich", "-n", "2")
_needs_mpirun_on_4 = (needs_mpirun, needs_library_4)
_ONE_WORLD: dict[str, tuple[Any, ...]] = {
    "torchrun": (_TORCHRUN, INIT, {}, False, {"device": "cpu", "launcher": "torchrun"}, "", ()),
    "wrapper-by-hand": (None, WRAPPED, {}, False, {}, "", ()),
    "wrapper-Open MPI 4": (UNDER_4, WRAPPED, {}, True, {}, "", needs_openmpi4),
    "wrapper-of-init": (
        UNDER_4,
        (*WRAPPED[:-1], *INIT),
        _OF_USER,
        False,
        {"limit": "45"},
        "",
        needs_openmpi4,
    ),
    "gloo-Open MPI 4": (UNDER_4, INIT, {"BACKEND": "gloo"}, False, {}, "", needs_openmpi4),
    "Open MPI 5 and 4": (_WITH_LIBRARY_4, INIT, {}, False, {}, _NOT_MPI_5, _needs_mpirun_on_4),
    "wrapper-Open MPI 5 and 4": (
        _WITH_LIBRARY_4,
        WRAPPED,
        {},
        False,
        {},
        _NOT_MPI_5,
        _needs_mpirun_on_4,
    ),
    "MPICH and Open MPI": (
        _TWO_OF_MPICH,
        INIT,
        {"MASTER_PORT": "PORT"},
        False,
        {},
        _NOT_MPICH,
        needs_mpich,
    ),
    "Gloo alone-Open MPI 4": (
        UNDER_4,
        INIT,
        _ON_GLOO_ONLY,
        False,
        {},
        "",
        (needs_gloo_only, needs_openmpi4),
    ),
    "Gloo alone-Open MPI 5": (
        UNDER_5,
        INIT,
        _ON_GLOO_ONLY,
        False,
        {},
        "",
        (needs_gloo_only, needs_mpirun),
    ),
    "TensorFlow": (None, ("tf_sum.py",), {}, False, {}, "", needs_tensorflow),
    # Which learns alike on all ranks
    "Keras": (None, ("keras_fit.py",), {}, False, {}, "", needs_tensorflow),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=row[-1]) for name, row in _ONE_WORLD.items()]
)
def test_one_world(run: Run, port: int, name: str) -> None:
    launcher, script, env, mpi, more, said, _ = _ONE_WORLD[name]
    if launcher is None:
        lines = lines_of(*in_two(run, port, *script, **env))
        err = ""
    else:
        env = {name: value.replace("PORT", str(port)) for name, value in env.items()}
        lines, err = launched(run, launcher, *script, **env)
    assert are_one_world(lines, mpi=mpi)
    assert [line | more for line in lines] == lines
    assert lines[0].get("learned") == lines[1].get("learned")
    assert re.search(said, err), err


_OFF = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "0",
}
_OFF |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "DISTBOOT_RENDEZVOUS": "0"}
_KERAS_3 = {"WHICH": "horovod.keras", "TF_USE_LEGACY_KERAS": "0"}
_LACKS = "this Horovod was built without"
_NO_MPI = {**_ON_GLOO_ONLY, "BACKEND": "mpi"}
_REFUSED: dict[str, tuple[Any, ...]] = {
    "rendezvous off": (_OFF, "rendezvous-needed", "", ()),
    "Keras 3": (
        _KERAS_3,
        "framework-not-installed",
        "needs legacy Keras, and tf.keras is Keras 3.",
        needs_tensorflow,
    ),
    "no TensorFlow": (
        {**_ON_GLOO_ONLY, "WHICH": "horovod.tensorflow"},
        "framework-not-installed",
        f"{_LACKS} its part for tensorflow (HOROVOD_WITH_TENSORFLOW=1)",
        needs_gloo_only,
    ),
    "no MPI": (
        _NO_MPI,
        "backend-not-available",
        f"{_LACKS} MPI (HOROVOD_WITH_MPI=1)",
        needs_gloo_only,
    ),
}


@pytest.mark.parametrize(
    ("env", "code", "said"),
    [pytest.param(*row[:3], marks=row[3], id=name) for name, row in _REFUSED.items()],
)
def test_refused(run: Run, env: dict[str, str], code: str, said: str) -> None:
    ((line,), _) = launched(run, (), *INIT, **env)
    assert line["code"] == code
    assert line["unchanged"] or env == _KERAS_3  # its import sets a variable of its own
    assert said in line["text"]


def test_gloo_without_horovodrun_and_then_once_more(run: Run, port: int) -> None:
    done = in_two(run, port, "twice.py")
    assert [each.returncode for each in done] == [0, 0], done
    lines = lines_of(*done)
    assert [(line["numbers"], line["total"]) for line in lines] == [
        (own, 3.0) for own in BOTH for _ in range(2)
    ]
    exported = lines[-1]["exported"]
    assert (exported["HOROVOD_CONTROLLER"], exported["HOROVOD_CPU_OPERATIONS"]) == ("gloo", "gloo")
    assert exported["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1"
    assert exported["HOROVOD_GLOO_TIMEOUT_SECONDS"] == "60"


def test_horovodrun_keeps_its_own_server_and_numbers(run: Run) -> None:
    horovodrun = (
        str(Path(sys.executable).parent / "horovodrun"),
        "--gloo",
        "--disable-cache",
        "-np",
        "2",
    )
    done = run(*horovodrun, sys.executable, *INIT)
    said = [line.partition(">:")[2] for line in done.stdout.splitlines()]  # [1]<stdout>:{…
    lines = sorted(
        (json.loads(line) for line in said if line.startswith("{")),
        key=lambda line: str(line["numbers"]),
    )
    assert are_one_world(lines, mpi=False), done.stdout + done.stderr


def test_alone(run: Run) -> None:
    ((line,), _) = launched(run, (), *INIT)
    assert (line["numbers"], line["total"], line["gloo"]) == ([0, 1, 0, 1, 0, 1], 1.0, True)


def test_variable_of_the_user_is_not_overridden(run: Run, port: int) -> None:
    lines = lines_of(*in_two(run, port, *INIT, HOROVOD_CONTROLLER="MPI"))
    assert [(line["code"], line["unchanged"]) for line in lines] == [
        ("broken-environment", True)
    ] * 2
    assert (
        "HOROVOD_CONTROLLER='MPI' asks for MPI, and launcher 'torch' does not start it"
        in lines[0]["text"]
    )


def test_wrapper_serving_the_rendezvous_gets_its_signals(
    run: Run, port: int, tmp_path: Path
) -> None:
    script = """
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
    (tmp_path / "stops.py").write_text(SAY + script)
    done = in_two(run, port, *WRAPPED[:-1], "stops.py")
    # And not -15: both wrappers have waited
    assert [each.returncode for each in done] == [143, 143], done


def test_start_of_horovod_has_a_limit(run: Run, port: int, tmp_path: Path) -> None:
    script = """
import distboot, horovod.torch as hvd, time
if os.environ["RANK"] == "1":
    hvd.init = lambda: time.sleep(100)
distboot.init("horovod.torch", join_timeout=5)
"""
    (tmp_path / "late.py").write_text(SAY + script)
    done = in_two(run, port, "late.py")
    assert 75 in [each.returncode for each in done]
    assert "error[join-timeout]: rank " in "".join(each.stderr for each in done)


def test_started_already(run: Run) -> None:
    done = run(
        sys.executable, "-c", "import horovod.torch as hvd; hvd.init()\n" + SAY + SCRIPTS["init.py"]
    )
    assert [line["code"] for line in lines_of(done)] == ["already-initialized"], done.stderr


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_rank_ended_by_a_signal_ends_the_others(
    run: Run, port: int, name: str, tmp_path: Path
) -> None:
    script = """
import distboot, signal
ctx = distboot.init("horovod.torch", join_timeout=60)
import torch
for times in range(100000):
    ctx.hvd.allreduce(torch.ones(1), name="again")
    if times == 3 and ctx.rank == 1:
        os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
"""
    (tmp_path / "ends.py").write_text(SAY + script)
    survivor, culprit = in_two(run, port, "ends.py", SIGNAL=name)
    assert culprit.returncode == -getattr(signal, name)
    assert survivor.returncode != 0
    if name == "SIGKILL":
        first = survivor.stderr.partition(": rank 1 failed first: ")[2]
        # The latter where the kernel is older than 6.15, and the parent was quicker than the sidecar.
        assert first.startswith(("killed by SIGKILL", "exited without reporting a status")), (
            survivor.stderr
        )


# Horovod's cross rank is no node rank: the second process of the larger node is the only one of its kind.
UNEVEN = [[0, 3, 0, 2, 0, 2], [1, 3, 1, 2, 0, 1], [2, 3, 0, 1, 1, 2]]
LARGER_LAST = [[0, 3, 0, 1, 0, 2], [1, 3, 0, 2, 1, 2], [2, 3, 1, 2, 0, 1]]
CYCLIC = [[0, 3, 0, 2, 0, 2], [1, 3, 0, 1, 1, 2], [2, 3, 1, 2, 0, 1]]


@needs_hosts
@needs_mpirun
@pytest.mark.parametrize(
    ("backend", "layout", "numbers"),
    [
        ("mpi", ("-H", "nodea:2,nodeb:1", "--map-by", "node"), CYCLIC),
        ("gloo", ("-H", "nodea:1,nodeb:2"), LARGER_LAST),
    ],
    ids=["mpi-cyclic", "gloo-larger-last"],
)
def test_mpirun_on_two_hosts(
    hosts: Hosts, backend: str, layout: tuple[str, ...], numbers: list[list[int]]
) -> None:
    (hosts.shared / "init.py").write_text(SAY + SCRIPTS["init.py"])
    env = {**MPI_ENV, "BACKEND": backend, "MASTER_ADDR": "nodea"}
    exports = [word for name in (*env, "PATH", "PYTHONPATH") for word in ("-x", name)]
    launch = [UNDER_5[0], "--bind-to", "none", *layout, *exports, sys.executable, *INIT]
    done = hosts.run("nodea", launch, env, timeout=120)
    found = [(line["numbers"], line["total"], line["mpi"]) for line in lines_of(done)]
    assert found == [(own, 6.0, backend == "mpi") for own in numbers], done.stdout + done.stderr


@needs_slurm
@pytest.mark.parametrize("script", [INIT, WRAPPED], ids=["init", "wrapper"])
def test_slurm_step_on_two_hosts(slurm: Slurm, script: tuple[str, ...]) -> None:
    for name in (INIT[-1], WRAPPED[-1]):
        (slurm.hosts.shared / name).write_text(SAY + SCRIPTS[name])
    step = ["-N2", "-n3", "-m", "plane=2", sys.executable, *script]
    done = slurm.srun(step, {"OMP_NUM_THREADS": "1"}, 120)
    found = [(line["numbers"], line["total"], line["mpi"]) for line in lines_of(done)]
    assert found == [(own, 6.0, False) for own in UNEVEN], done.stdout + done.stderr


@needs_openmpi4
def test_mpi_starts_once_under_open_mpi_4(run: Run) -> None:
    lines, _ = launched(run, UNDER_4, "again.py")
    assert are_one_world([line for line in lines if "code" not in line], mpi=True)
    assert [line["code"] for line in lines if "code" in line] == ["already-initialized"] * 2


@needs_openmpi4
def test_mpi_without_its_peers_is_an_error(run: Run) -> None:
    # As sudo would
    launcher = (*UNDER_4, "env", "-u", "PMIX_RANK", "-u", "PMIX_NAMESPACE", "-u", "OMPI_MCA_ess")
    bare = "import horovod.torch as hvd; hvd.init()"
    if run(*launcher, sys.executable, "-c", bare, env=MPI_ENV).returncode:
        pytest.skip(
            "this MPI ends a process that does not find its peers, before Horovod could say so"
        )
    lines, _ = launched(run, launcher, *INIT)
    assert {(line["code"], line["unchanged"]) for line in lines} == {("rank-mismatch", True)}
    assert any(
        "this is rank 1 of 2, and Horovod that it is rank 0 of 1" in line["text"] for line in lines
    )
    assert "backend='gloo'" in lines[0]["text"]


@needs_gloo_only
@needs_openmpi4
def test_ranks_with_different_builds_all_say_so(run: Run) -> None:
    command = [sys.executable, *INIT]
    done = run(
        *UNDER_4[:2],
        "-n",
        "1",
        *command,
        ":",
        "-n",
        "1",
        "env",
        f"PYTHONPATH={GLOO_ONLY}:{ROOT}",
        *command,
    )
    lines = lines_of(done)
    assert [(line["code"], line["unchanged"]) for line in lines] == [("rank-mismatch", True)] * 2, (
        done.stderr
    )
    texts = sorted(
        line["text"].partition(": Horovod is about ")[2].partition("\n")[0] for line in lines
    )
    assert texts == [
        ("to use gloo on rank 1, and something else on rank 0"),
        "to use mpi on rank 0, and something else on rank 1",
    ]
