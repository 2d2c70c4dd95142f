"""Real launchers over two hosts (network namespaces, see cluster/README.md), uneven, cyclic and in each other.

What each of them tells its processes, Slurm in all of its forms and every pair that occurs in life, is in the captures.
"""

import os
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from hosts import Hosts, Slurm
from launched import (
    AZUREML,
    CYCLIC,
    MPI_ENV,
    MPICH,
    MPIRUN,
    OPENMPI4,
    UNEVEN,
    all_with,
    json_lines,
    mpirun_on,
    needs_hosts,
    needs_mpich,
    needs_mpirun,
    needs_openmpi4,
    needs_slurm,
    needs_torch,
    places_of,
)

pytestmark = needs_hosts

# Free of charge, but not of a licence that the project could depend on: it is tested where somebody has installed it.
INTEL_ROOT = Path(os.environ.get("I_MPI_ROOT", Path(sys.prefix) / "intelmpi"))
INTEL = shutil.which("mpiexec.hydra", path=str(INTEL_ROOT / "bin"))
needs_intel = pytest.mark.skipif(
    INTEL is None, reason="no Intel MPI (pip install --prefix .venv/intelmpi impi-rt)"
)
MPIS = [
    pytest.param("mpich", marks=needs_mpich),
    pytest.param("openmpi4", marks=needs_openmpi4),
    pytest.param("openmpi5", marks=needs_mpirun),
    pytest.param("intelmpi", marks=needs_intel),
]

REVERSED = [("nodeb", 0, 0, 1), ("nodea", 1, 0, 2), ("nodea", 1, 1, 2)]
TWO_BY_TWO = [("nodea", 0, 0, 2), ("nodea", 0, 1, 2), ("nodeb", 1, 0, 2), ("nodeb", 1, 1, 2)]


@needs_mpirun
@needs_torch
@pytest.mark.parametrize(
    ("script", "options", "places", "total"),
    [
        pytest.param(
            "who.py",
            (),
            UNEVEN,
            6.0,
            id="uneven",
            marks=pytest.mark.all,
        ),
        pytest.param("where.py", ("--map-by", "node"), CYCLIC, None, id="uneven-cyclic"),
    ],
)
def test_azureml_mpi_job_on_two_hosts_is_exact(
    hosts: Hosts,
    script: str,
    options: tuple[str, ...],
    places: list[tuple[object, ...]],
    total: float | None,
) -> None:
    done = mpirun_on(
        hosts,
        "nodea:2,nodeb:1",
        sys.executable,
        script,
        options=options,
        **AZUREML,
    )
    lines = json_lines(done)
    assert places_of(lines) == places
    assert {(line["launcher"], line["total"]) for line in lines} == {("openmpi", total)}
    assert lines[2]["hosts"] == ["nodea", "nodeb"]


@needs_mpirun
@pytest.mark.parametrize(
    "script",
    ["environment.py", pytest.param("plain.py", marks=[pytest.mark.all, needs_torch])],
)
def test_unmodified_script_on_two_hosts_through_the_wrapper(hosts: Hosts, script: str) -> None:
    wrapper = (sys.executable, "-m", "distboot")
    places = [(host, str(node), local_rank, size) for host, node, local_rank, size in UNEVEN]
    done = mpirun_on(hosts, "nodea:2,nodeb:1", *wrapper, script, MASTER_ADDR="nodea")
    assert places_of(json_lines(done)) == places
    command = (*wrapper, "environment.py")
    lines = json_lines(
        mpirun_on(hosts, "nodea:2,nodeb:1", *command, MASTER_ADDR="nodea", DISTBOOT_RENDEZVOUS="0")
    )
    # Without it the node rank is not known from one process alone: no number is better than a wrong one.
    assert places_of(lines) == [
        (host, None, local_rank, size) for host, _, local_rank, size in places
    ]


@needs_slurm
@pytest.mark.parametrize(
    ("script", "total"),
    [("where.py", None), pytest.param("who.py", 6.0, marks=[pytest.mark.all, needs_torch])],
)
def test_init_in_a_slurm_step(slurm: Slurm, script: str, total: float | None) -> None:
    command = ["-N2", "-n3", "-m", "plane=2", sys.executable, script]
    lines = json_lines(slurm.srun(command, {"OMP_NUM_THREADS": "1"}, 120))
    assert places_of(lines) == UNEVEN
    assert {(line["launcher"], line["total"]) for line in lines} == {("slurm", total)}


@all_with("torch")
@pytest.mark.parametrize(
    ("mpi", "layout", "script", "places"),
    [
        pytest.param("mpich", "nodea:2,nodeb:1", "where.py", UNEVEN, marks=needs_mpich),
        pytest.param("mpich", "nodeb:1,nodea:2", "where.py", REVERSED, marks=needs_mpich),
        # The launcher tells both processes on nodea that they are alone there.
        pytest.param("mpich", "nodea:1,nodeb:1,nodea:1", "who.py", CYCLIC, marks=needs_mpich),
        pytest.param("openmpi", "nodea:2,nodeb:1", "who.py", UNEVEN, marks=needs_openmpi4),
        pytest.param(
            "openmpi", "nodea:2,nodeb:1 --map-by node", "where.py", CYCLIC, marks=needs_openmpi4
        ),
    ],
)
def test_mpi_on_two_hosts(
    hosts: Hosts, mpi: str, layout: str, script: str, places: list[tuple[object, ...]]
) -> None:
    master = {"MASTER_ADDR": layout[:5], "MASTER_PORT": "29507"}
    if mpi == "mpich":
        passed = [word for name, value in master.items() for word in ("-genv", name, value)]
        launch = [str(MPICH), "-n", "3", "-hosts", layout, *passed, sys.executable, script]
    else:
        exports = [word for name in ("PATH", "OMP_NUM_THREADS", *master) for word in ("-x", name)]
        launch = [
            str(OPENMPI4),
            "--bind-to",
            "none",
            "-H",
            *layout.split(),
            *exports,
            sys.executable,
            script,
        ]
    lines = json_lines(hosts.run("nodea", launch, {**MPI_ENV, **master}, 120))
    assert places_of(lines) == places
    assert {(line["launcher"], line["total"]) for line in lines} == {
        (mpi, 6.0 if script == "who.py" else None)
    }


def _agent(rank_variable: str) -> list[str]:
    """torchrun on each node, numbered by the launcher around it, as people write it."""
    agent = (
        "-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --master-addr "
        "nodea --master-port 29508"
    )
    return [
        "sh",
        "-c",
        f"exec {shlex.quote(sys.executable)} {agent} --node-rank ${rank_variable} where.py",
    ]


@all_with("torch")
@pytest.mark.parametrize("outer", MPIS)
def test_torchrun_inside_an_mpi_launcher(hosts: Hosts, outer: str) -> None:
    exports = ["-x", "PATH", "-x", "OMP_NUM_THREADS"]
    commands = {
        "mpich": [str(MPICH), "-n", "2", "-hosts", "nodea:1,nodeb:1", *_agent("PMI_RANK")],
        "openmpi4": [
            str(OPENMPI4),
            "-H",
            "nodea:1,nodeb:1",
            *exports,
            *_agent("OMPI_COMM_WORLD_RANK"),
        ],
        "openmpi5": [
            str(MPIRUN),
            "-H",
            "nodea:1,nodeb:1",
            *exports,
            *_agent("OMPI_COMM_WORLD_RANK"),
        ],
        "intelmpi": [
            str(INTEL),
            "-n",
            "2",
            "-ppn",
            "1",
            "-hosts",
            "nodea,nodeb",
            *_agent("PMI_RANK"),
        ],
    }
    lines = json_lines(
        hosts.run("nodea", commands[outer], {**MPI_ENV, "I_MPI_ROOT": str(INTEL_ROOT)}, 120)
    )
    assert places_of(lines) == TWO_BY_TWO
    assert {line["launcher"] for line in lines} == {"torchrun"}
