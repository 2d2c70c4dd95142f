"""Real mpirun, torchrun and Slurm over two hosts (network namespaces, see cluster/README.md), uneven and cyclic."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hosts import Hosts, Slurm
from launched import (
    AZUREML,
    CYCLIC,
    SHOW,
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
def test_first_of_hosts_need_not_be_the_first_in_the_alphabet(hosts: Hosts) -> None:
    lines = json_lines(mpirun_on(hosts, "nodeb:1,nodea:1", sys.executable, "where.py", MASTER_ADDR="nodeb"))
    assert places_of(lines) == [("nodeb", 0, 0, 1), ("nodea", 1, 0, 1)]


@needs_mpirun
def test_bare_mpirun_on_two_hosts_says_what_to_pass_to_the_wrapper(hosts: Hosts) -> None:
    done = mpirun_on(hosts, "nodea:1,nodeb:1", sys.executable, "-m", "distboot", "plain.py")
    assert done.returncode != 0
    assert "error[no-master-addr]" in done.stderr
    assert "mpirun -x MASTER_ADDR=" in done.stderr


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


@needs_mpirun
def test_two_mpiruns_with_one_port_on_the_same_hosts_both_come_up(hosts: Hosts) -> None:
    def job(_: int) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "where.py")
        return mpirun_on(hosts, "nodea:2,nodeb:1", *command, MASTER_ADDR="nodea", MASTER_PORT="29533")

    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(job, range(2)):
            assert places_of(json_lines(done)) == UNEVEN


@needs_slurm
@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        (["-N2", "-n2"], [(0, 0, 1), (1, 0, 1)]),
        (["-N2", "-n4", "--ntasks-per-node=2"], [(0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 1, 2)]),
        (["-N2", "-n4", "--ntasks-per-node=2", "-m", "cyclic"], [(0, 0, 2), (1, 0, 2), (0, 1, 2), (1, 1, 2)]),
        (["-N2", "-n3", "-m", "plane=2"], [(0, 0, 2), (0, 1, 2), (1, 0, 1)]),
        (["-N1", "-n2", "-w", "nodea"], [(0, 0, 2), (0, 1, 2)]),
    ],
    ids=lambda value: " ".join(value) if value and isinstance(value[0], str) else "",
)
def test_slurm_step(slurm: Slurm, options: list[str], numbers: list[tuple[int, int, int]]) -> None:
    lines = json_lines(slurm.srun([*options, *SHOW]))
    seen = [(line["node_rank"], line["local_rank"], line["local_world_size"]) for line in lines]
    assert seen == numbers
    assert {(line["launcher"], line["platform"], line["master_addr"]) for line in lines} == {
        ("slurm", "slurm", "nodea")
    }
    assert len({line["master_port"] for line in lines}) == 1


@needs_slurm
def test_slurm_step_in_an_arbitrary_order(slurm: Slurm) -> None:
    hostfile = slurm.hosts.shared / "order"
    hostfile.write_text("nodeb\nnodea\nnodeb\n")
    done = slurm.srun(["-n3", "-m", "arbitrary", *SHOW], {"SLURM_HOSTFILE": str(hostfile)})
    lines = json_lines(done)
    assert [line["local_rank"] for line in lines] == [0, 0, 1]
    assert {(line["node_rank"], line["master_addr"]) for line in lines} == {(None, None)}, "not first in the list"


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
def test_unmodified_script_in_a_slurm_step_through_the_wrapper(slurm: Slurm) -> None:
    command = ["-N2", "-n2", sys.executable, "-m", "distboot", "plain.py"]
    lines = json_lines(slurm.srun(command, {"OMP_NUM_THREADS": "1"}, 120))
    assert places_of(lines) == [("nodea", "0", 0, 1), ("nodeb", "1", 0, 1)]


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


@needs_slurm
def test_allocation_is_single(slurm: Slurm) -> None:
    (line,) = json_lines(slurm.run(["salloc", "-Q", "-N2", *SHOW]))
    assert (line["launcher"], line["rank"], line["world_size"]) == ("single", 0, 1)
    assert any("not a step" in note for note in list(line["notes"]))  # type: ignore[call-overload]
