"""Real mpirun, torchrun and Slurm over two hosts (network namespaces, see cluster/README.md), uneven and cyclic."""

from __future__ import annotations

import sys

import pytest
from hosts import Hosts, Slurm
from launched import (
    AZUREML,
    CYCLIC,
    UNEVEN,
    json_lines,
    mpirun_on,
    needs_hosts,
    needs_mpirun,
    needs_slurm,
    needs_torch,
    places_of,
)

pytestmark = needs_hosts


@needs_mpirun
@needs_torch
@pytest.mark.parametrize(
    ("script", "options", "places", "total"),
    [
        pytest.param("who.py", (), UNEVEN, 6.0, id="uneven", marks=pytest.mark.all),
        pytest.param("where.py", ("--map-by", "node"), CYCLIC, None, id="uneven-cyclic"),
    ],
)
def test_azureml_mpi_job_on_two_hosts_is_exact(
    hosts: Hosts, script: str, options: tuple[str, ...], places: list[tuple[object, ...]], total: float | None
) -> None:
    done = mpirun_on(hosts, "nodea:2,nodeb:1", sys.executable, script, options=options, **AZUREML)
    lines = json_lines(done)
    assert places_of(lines) == places
    assert {(line["launcher"], line["total"]) for line in lines} == {("openmpi", total)}
    assert lines[2]["hosts"] == ["nodea", "nodeb"]


@needs_mpirun
@needs_torch
def test_unmodified_script_on_two_hosts_through_the_wrapper(hosts: Hosts) -> None:
    wrapper = (sys.executable, "-m", "distboot")
    places = [(host, str(node), local_rank, size) for host, node, local_rank, size in UNEVEN]
    done = mpirun_on(hosts, "nodea:2,nodeb:1", *wrapper, "plain.py", MASTER_ADDR="nodea")
    assert places_of(json_lines(done)) == places
    command = (*wrapper, "environment.py")
    lines = json_lines(mpirun_on(hosts, "nodea:2,nodeb:1", *command, MASTER_ADDR="nodea", DISTBOOT_RENDEZVOUS="0"))
    # Without it the node rank is not known from one process alone: no number is better than a wrong one.
    assert places_of(lines) == [(host, None, local_rank, size) for host, _, local_rank, size in places]


@needs_mpirun
@pytest.mark.parametrize(
    ("options", "places"), [((), UNEVEN), (("--map-by", "node"), CYCLIC)], ids=["uneven", "uneven-cyclic"]
)
def test_bare_mpirun_on_two_hosts_comes_up_with_mpi4py(
    hosts: Hosts, options: tuple[str, ...], places: list[tuple[object, ...]]
) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    lines = json_lines(mpirun_on(hosts, "nodea:2,nodeb:1", sys.executable, "where.py", options=options))
    assert places_of(lines) == places
    assert {line["launcher"] for line in lines} == {"openmpi"}


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


@pytest.mark.all
@needs_slurm
@needs_torch
def test_torchrun_inside_a_slurm_step(slurm: Slurm) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "7", "--rdzv-endpoint", "nodea:29400"]
    done = slurm.srun(["-N2", "-n2", *torchrun, *rendezvous, "where.py"], {"OMP_NUM_THREADS": "1"}, 120)
    lines = json_lines(done)
    assert {line["launcher"] for line in lines} == {"torchrun"}
    assert {(line["host"], line["NODE_RANK"]) for line in lines} in (
        {("nodea", 0), ("nodeb", 1)},
        {("nodea", 1), ("nodeb", 0)},  # the agents are numbered as they come
    )
