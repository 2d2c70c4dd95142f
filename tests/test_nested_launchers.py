"""MPICH, Intel MPI and Open MPI 4 on several hosts, and launchers inside launchers: every pair that occurs in life."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from hosts import Hosts, Slurm
from launched import (
    CYCLIC,
    MPI_ENV,
    MPICH,
    MPIRUN,
    OPENMPI4,
    SHOW,
    UNEVEN,
    json_lines,
    needs_hosts,
    needs_mpich,
    needs_mpirun,
    needs_openmpi4,
    needs_slurm,
    needs_torch,
    places_of,
)

pytestmark = [pytest.mark.all, needs_hosts]

# Free of charge, but not of a licence that the project could depend on: it is tested where somebody has installed it.
INTEL_ROOT = Path(os.environ.get("I_MPI_ROOT", Path(sys.prefix) / "intelmpi"))
INTEL = shutil.which("mpiexec.hydra", path=str(INTEL_ROOT / "bin"))
needs_intel = pytest.mark.skipif(INTEL is None, reason="no Intel MPI (pip install --prefix .venv/intelmpi impi-rt)")
MPIS = [
    pytest.param("mpich", marks=needs_mpich),
    pytest.param("openmpi4", marks=needs_openmpi4),
    pytest.param("openmpi5", marks=needs_mpirun),
    pytest.param("intelmpi", marks=needs_intel),
]

PYTHON = sys.executable
REVERSED = [("nodeb", 0, 0, 1), ("nodea", 1, 0, 2), ("nodea", 1, 1, 2)]
TWO_BY_TWO = [("nodea", 0, 0, 2), ("nodea", 0, 1, 2), ("nodeb", 1, 0, 2), ("nodeb", 1, 1, 2)]


def _numbers(lines: list[dict[str, object]]) -> list[tuple[object, ...]]:
    return [(line["launcher"], line["rank"], line["world_size"]) for line in lines]


def _openmpi4(*options: str, command: list[str], **variables: str) -> list[str]:
    exports = [word for name in ("PATH", *variables) for word in ("-x", name)]
    return [str(OPENMPI4), "--bind-to", "none", *options, *exports, *command]


@needs_torch
@pytest.mark.parametrize(
    ("mpi", "layout", "script", "places"),
    [
        pytest.param("mpich", "nodea:2,nodeb:1", "where.py", UNEVEN, marks=needs_mpich),
        pytest.param("mpich", "nodeb:1,nodea:2", "where.py", REVERSED, marks=needs_mpich),
        # The launcher tells both processes on nodea that they are alone there.
        pytest.param("mpich", "nodea:1,nodeb:1,nodea:1", "who.py", CYCLIC, marks=needs_mpich),
        pytest.param("openmpi", "nodea:2,nodeb:1", "who.py", UNEVEN, marks=needs_openmpi4),
        pytest.param("openmpi", "nodea:2,nodeb:1 --map-by node", "where.py", CYCLIC, marks=needs_openmpi4),
    ],
)
def test_mpi_on_two_hosts(hosts: Hosts, mpi: str, layout: str, script: str, places: list[tuple[object, ...]]) -> None:
    master = {"MASTER_ADDR": layout[:5], "MASTER_PORT": "29507"}
    if mpi == "mpich":
        passed = [word for name, value in master.items() for word in ("-genv", name, value)]
        launch = [str(MPICH), "-n", "3", "-hosts", layout, *passed, PYTHON, script]
    else:
        launch = _openmpi4("-H", *layout.split(), command=[PYTHON, script], OMP_NUM_THREADS="1", **master)
    lines = json_lines(hosts.run("nodea", launch, {**MPI_ENV, **master}, 120))
    assert places_of(lines) == places
    assert {(line["launcher"], line["total"]) for line in lines} == {(mpi, 6.0 if script == "who.py" else None)}


@needs_intel
@pytest.mark.parametrize(
    ("machines", "nodes"),
    [("nodea:2\nnodeb:1\n", [0, 0, 1]), ("nodea:1\nnodeb:1\nnodea:1\n", [0, 1, 0]), ("nodeb:2\nnodea:1\n", [0, 0, 1])],
    ids=["uneven", "cyclic", "reversed"],
)
def test_intel_mpi_on_two_hosts(hosts: Hosts, machines: str, nodes: list[int]) -> None:
    machinefile = hosts.shared / "machines"
    machinefile.write_text(machines)
    command = [str(INTEL), "-n", "3", "-machinefile", str(machinefile), *SHOW]
    lines = json_lines(hosts.run("nodea", command, {"I_MPI_ROOT": str(INTEL_ROOT)}))
    assert _numbers(lines) == [("intelmpi", rank, 3) for rank in range(3)]
    assert [line["node_rank"] for line in lines] == nodes
    assert len({(line["job_id"], line["master_port"]) for line in lines}) == 1


def _agent(rank_variable: str) -> list[str]:
    """torchrun on each node, numbered by the launcher around it, as people write it."""
    agent = "-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --master-addr nodea --master-port 29508"
    return ["sh", "-c", f"exec {shlex.quote(PYTHON)} {agent} --node-rank ${rank_variable} where.py"]


@needs_torch
@pytest.mark.parametrize("outer", MPIS)
def test_torchrun_inside_an_mpi_launcher(hosts: Hosts, outer: str) -> None:
    exports = ["-x", "PATH", "-x", "OMP_NUM_THREADS"]
    commands = {
        "mpich": [str(MPICH), "-n", "2", "-hosts", "nodea:1,nodeb:1", *_agent("PMI_RANK")],
        "openmpi4": [str(OPENMPI4), "-H", "nodea:1,nodeb:1", *exports, *_agent("OMPI_COMM_WORLD_RANK")],
        "openmpi5": [str(MPIRUN), "-H", "nodea:1,nodeb:1", *exports, *_agent("OMPI_COMM_WORLD_RANK")],
        "intelmpi": [str(INTEL), "-n", "2", "-ppn", "1", "-hosts", "nodea,nodeb", *_agent("PMI_RANK")],
    }
    lines = json_lines(hosts.run("nodea", commands[outer], {**MPI_ENV, "I_MPI_ROOT": str(INTEL_ROOT)}, 120))
    assert places_of(lines) == TWO_BY_TWO
    assert {line["launcher"] for line in lines} == {"torchrun"}


@needs_slurm
@pytest.mark.parametrize("how", ["salloc", "sbatch"])
@pytest.mark.parametrize("spawner", ["srun", "ssh"])
@pytest.mark.parametrize("mpi", MPIS)
def test_mpi_inside_an_allocation(slurm: Slurm, mpi: str, spawner: str, how: str) -> None:
    remote = "slurm" if spawner == "srun" else "ssh"
    commands = {
        "mpich": [str(MPICH), "-launcher", remote, "-n", "4", *SHOW],
        "openmpi4": _openmpi4("--mca", "plm", "slurm" if spawner == "srun" else "rsh", command=SHOW),
        "openmpi5": [str(MPIRUN), "--prtemca", "plm", remote, "--bind-to", "none", "-x", "PATH", *SHOW],
        "intelmpi": [str(INTEL), "-bootstrap", remote, "-n", "4", *SHOW],
    }
    allocation = ["-N2", "--ntasks-per-node=2"]
    env = {**MPI_ENV, "I_MPI_ROOT": str(INTEL_ROOT)}
    if how == "salloc":
        done = slurm.run(["salloc", "-Q", *allocation, *commands[mpi]], env, 120)
    else:
        output = slurm.hosts.shared / f"{mpi}-{spawner}.out"
        body = ["sbatch", "-Q", "--wait", *allocation, "-o", str(output), "--wrap", shlex.join(commands[mpi])]
        done = slurm.run(body, env, 120)
        done.stdout += output.read_text()
    launcher = "openmpi" if mpi.startswith("openmpi") else mpi
    assert _numbers(json_lines(done)) == [(launcher, rank, 4) for rank in range(4)]


def _sbatch(slurm: Slurm, script: str, *options: str, env: dict[str, str] | None = None) -> list[dict[str, object]]:
    """What a batch script prints on all its tasks; `$SHOW` in it is our own command."""
    folder = slurm.hosts.shared / "batch"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    body = slurm.hosts.shared / "job.sh"
    body.write_text(f"#!/bin/sh\nSHOW={shlex.quote(shlex.join(SHOW))}\n{script}\n")
    done = slurm.run(["sbatch", "-Q", "--wait", "-o", f"{folder}/%A_%a", *options, str(body)], env, 120)
    texts = [path.read_text() for path in sorted(folder.iterdir())]
    assert done.returncode == 0, done.stderr + "".join(texts)
    return [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]


@needs_slurm
def test_batch_script_is_one_process_and_its_steps_are_not(slurm: Slurm) -> None:
    body, *step = _sbatch(slurm, "$SHOW; srun $SHOW", "-N2", "-n3")
    assert (body["launcher"], body["world_size"]) == ("single", 1)
    assert "not a step" in str(body["notes"])
    assert sorted(_numbers(step)) == [("slurm", rank, 3) for rank in range(3)]


@needs_slurm
def test_two_steps_at_once_and_the_elements_of_an_array_are_worlds_of_their_own(slurm: Slurm) -> None:
    steps = _sbatch(slurm, "srun --exact -n2 -c1 $SHOW & srun --exact -n2 -c1 $SHOW & wait", "-N2", "-n4")
    assert sorted(_numbers(steps)) == sorted([("slurm", rank, 2) for rank in range(2)] * 2)
    assert len({line["job_id"] for line in steps}) == 2
    elements = _sbatch(slurm, "srun $SHOW", "-n2", "--array=0-1")
    assert sorted(_numbers(elements)) == sorted([("slurm", rank, 2) for rank in range(2)] * 2)
    assert len({line["job_id"] for line in elements}) == 2
    assert len({line["master_port"] for line in elements}) == 2


@needs_slurm
@pytest.mark.parametrize("order", [("nodea", "nodeb"), ("nodeb", "nodea")], ids=["in order", "reversed"])
def test_heterogeneous_step_is_one_world(slurm: Slurm, order: tuple[str, str]) -> None:
    one, two = (["-w", host, f"-n{count}", *SHOW] for host, count in zip(order, (1, 2), strict=True))
    lines = json_lines(slurm.srun([*one, ":", *two]))
    assert _numbers(lines) == [("slurm", rank, 3) for rank in range(3)]
    assert [(line["node_rank"], line["local_rank"], line["local_world_size"]) for line in lines] == [
        (0, 0, 1), (1, 0, 2), (1, 1, 2),
    ]  # fmt: skip
    assert {line["master_addr"] for line in lines} == {None}, "the list of hosts is sorted by name, the ranks are not"


@needs_slurm
def test_step_in_a_heterogeneous_job_without_others_is_its_own_world(slurm: Slurm) -> None:
    command = ["salloc", "-Q", "-n2", ":", "-n1", "srun", *SHOW]
    assert _numbers(json_lines(slurm.run(command))) == [("slurm", rank, 2) for rank in range(2)]


@needs_slurm
@pytest.mark.parametrize("plugin", ["none", "pmi2", "pmix"])
def test_interactive_shell_is_single_whatever_the_mpi_plugin_leaves_in_it(slurm: Slurm, plugin: str) -> None:
    shell = ["srun", "-Q", f"--mpi={plugin}", "-N1", "-n1", "--pty", "bash", "-c", shlex.join(SHOW)]
    (line,) = json_lines(slurm.run(["script", "-qec", shlex.join(shell), "/dev/null"]))
    assert (line["launcher"], line["world_size"]) == ("single", 1)


@needs_slurm
def test_step_inside_an_interactive_shell(slurm: Slurm) -> None:
    inner = ["srun", "-Q", "--overlap", "-n2", *SHOW]
    shell = ["srun", "-Q", "-N1", "-n1", "--pty", "bash", "-c", shlex.join(inner)]
    done = slurm.run(["script", "-qec", shlex.join(["salloc", "-Q", "-N1", "-n2", *shell]), "/dev/null"])
    assert _numbers(json_lines(done)) == [("slurm", rank, 2) for rank in range(2)]
