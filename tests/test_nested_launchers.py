"""MPICH, Intel MPI and Open MPI 4 on several hosts, and launchers inside launchers: every pair that occurs in life."""

from __future__ import annotations

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
