"""The CPUs of ranks: how `--bind` divides them, and when ranks that a launcher has bound are said to share some."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
from conftest import Run
from inside import (
    Membership,
    ProtocolError,
    WorkerInfo,
    cpus_of_ranks,
    decode,
    encode,
    replace,
    shared_cpus,
)
from launched import MPI_ENV, TWO_OF_MPIRUN, needs_mpirun
from recorded import lay_out
from rendezvous_peers import record

from distboot import DistbootError

_ALL = sorted(os.sched_getaffinity(0))
needs_2_cpus = pytest.mark.skipif(len(_ALL) < 2, reason="one CPU for two ranks")


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host with two NUMA nodes, of four cores with two threads each, and a GPU beside each node."""
    files = {
        "sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
        "sys/devices/system/node/node1/cpulist": "4-7,12-15\n",
        "sys/devices/system/node/node2/cpulist": "\n",  # memory alone
    }
    for cpu in range(16):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{topology}/core_id"] = f"{cpu % 4}\n"
        files[f"{topology}/physical_package_id"] = f"{cpu % 8 // 4}\n"
    for number in range(2):
        bus = f"0000:{number + 3:02x}:00.0"
        # The first one is beside the second node
        files[f"sys/bus/pci/devices/{bus}/numa_node"] = f"{1 - number}\n"
        files[f"proc/driver/nvidia/gpus/{bus}/information"] = (
            f"GPU UUID: \t GPU-{number}\nDevice Minor: \t {number}\n"
        )
        files[f"dev/nvidia{number}"] = ""
    lay_out(files, tmp_path)
    return tmp_path


def _cpus(kind: str, ranks: int, root: Path, allowed: range = range(16)) -> list[tuple[int, ...]]:
    return cpus_of_ranks(kind, ranks, {}, root, allowed)


def test_numa_gives_each_rank_whole_cores(host: Path) -> None:
    assert _cpus("numa", 2, host) == [(0, 8, 1, 9, 2, 10, 3, 11), (4, 12, 5, 13, 6, 14, 7, 15)]
    assert _cpus("numa", 4, host)[1] == (2, 10, 3, 11)
    assert _cpus("numa", 3, host) == [(0, 8, 1, 9), (2, 10, 3, 11, 4, 12), (5, 13, 6, 14, 7, 15)]


def test_threads_are_divided_where_ranks_outnumber_cores(host: Path) -> None:
    found = _cpus("numa", 16, host)
    assert sorted(cpu for cpus in found for cpu in cpus) == list(range(16))
    assert found[:8] == [(cpu,) for cpu in range(8)]  # the first thread of each core
    assert _cpus("numa", 3, host, range(3)) == [(0,), (1,), (2,)]


@pytest.mark.parametrize("kind", ["auto", "accelerator"])
def test_rank_gets_the_cpus_beside_its_accelerator(host: Path, kind: str) -> None:
    assert _cpus(kind, 2, host) == [(4, 12, 5, 13, 6, 14, 7, 15), (0, 8, 1, 9, 2, 10, 3, 11)]
    shown = {"CUDA_VISIBLE_DEVICES": "1,0"}
    assert cpus_of_ranks(kind, 2, shown, host, range(16))[0] == (0, 8, 1, 9, 2, 10, 3, 11)


def test_auto_divides_all_where_an_accelerator_is_missing(host: Path) -> None:
    assert _cpus("auto", 4, host) == _cpus("numa", 4, host)
    with pytest.raises(DistbootError, match="which CPUs are beside its accelerator"):
        _cpus("accelerator", 4, host)
    # The node of an accelerator is not in the cgroup
    assert _cpus("auto", 2, host, range(4)) == [(0, 1), (2, 3)]


def test_fewer_cpus_than_ranks_are_refused(host: Path) -> None:
    with pytest.raises(DistbootError, match="for 3 ranks, and this process may use only 2 CPUs"):
        _cpus("auto", 3, host, range(2))


def test_host_without_topology_is_divided(tmp_path: Path) -> None:
    assert _cpus("auto", 2, tmp_path, range(5)) == [(0, 1), (2, 3, 4)]


_SHOW = """
import os
print("cpus", os.environ["LOCAL_RANK"], sorted(os.sched_getaffinity(0)), os.environ["OMP_NUM_THREADS"])
import distboot
distboot.init("none")
assert os.environ["OMP_NUM_THREADS"] == str(len(os.sched_getaffinity(0)))
"""


@needs_2_cpus
@pytest.mark.parametrize("option", ["--bind=auto", "variable"])
def test_ranks_of_the_wrapper_share_no_cpu(
    run: Run, tmp_path: Path, clean_env: dict[str, str], option: str
) -> None:
    del clean_env["OMP_NUM_THREADS"]
    report = tmp_path / "job.json"
    options = [option] if option != "variable" else []
    env = {"DISTBOOT_BIND": "numa"} if not options else {}
    command = ["distboot", "--nproc-per-node", "2", *options, "--report", str(report), "train.py"]
    done = run(*command, train=_SHOW, env=env)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^cpus (\d) \[([\d, ]+)\] (\d+)$", done.stdout, re.MULTILINE)
    cpus = {int(rank): listed.split(", ") for rank, listed, _ in found}
    assert not {*cpus[0]} & {*cpus[1]}
    assert sorted(map(int, cpus[0] + cpus[1])) == _ALL
    for rank, _, threads in found:
        assert int(threads) == len(cpus[int(rank)])
    ranks = json.loads(report.read_text())["ranks"]
    if len(_ALL) == 2:
        assert [rank["cpus"] for rank in ranks] == ["0", "1"]


@needs_2_cpus
@needs_mpirun
def test_ranks_that_mpirun_has_not_bound_are_bound(run: Run) -> None:
    command = [*TWO_OF_MPIRUN, "--bind-to", "none", "distboot", "--bind", "auto", "train.py"]
    script = "import os; print(len(os.sched_getaffinity(0)))"
    done = run(*command, train=script, env=MPI_ENV)
    assert sum(map(int, done.stdout.split())) == len(_ALL), done.stderr


@needs_2_cpus
@needs_mpirun
def test_ranks_bound_to_one_cpu_are_named(run: Run, tmp_path: Path) -> None:
    cpu = str(_ALL[0])
    command = [*TWO_OF_MPIRUN, "taskset", "-c", cpu, "distboot", "--bind", "auto", "train.py"]
    script = "import os; print(len(os.sched_getaffinity(0)))"
    report = tmp_path / "job.json"
    done = run(*command, train=script, env={**MPI_ENV, "DISTBOOT_REPORT": str(report)})
    assert done.stdout.split() == ["1", "1"]  # as the launcher has bound them
    finding = f"ranks 0-1 (node 0): all bound to the same 1 CPU ({cpu}): mpirun --bind-to none"
    assert f"warning: {finding}" in done.stderr
    assert json.loads(report.read_text())["findings"][0].startswith(finding)


def test_bind_is_refused_where_others_start_ranks(distboot: Run) -> None:
    done = distboot("run", "--bind", "auto", "--", "torchrun", "train.py")
    assert done.returncode == 2
    assert "binds this process's rank to CPUs, and torchrun starts others" in done.stderr
    done = distboot("run", "--bind", "cores", "--", "true")
    assert done.returncode == 2
    assert "--bind='cores' is neither auto, numa, accelerator nor none" in done.stderr


def test_variable_without_the_wrapper_is_told(run: Run) -> None:
    script = "import distboot; distboot.init('none')"
    done = run(sys.executable, "train.py", train=script, env={"DISTBOOT_BIND": "auto"})
    assert "warning: DISTBOOT_BIND has no effect" in done.stderr


@pytest.mark.parametrize(
    ("cpus", "finding"),
    [
        (["0", "1"], ""),
        (["", ""], ""),  # bound to none
        (["", "0"], ""),
        (["0-3", "0-3", "4-7", "4-7"], ""),  # mpirun --bind-to numa
        (["0", "0"], "ranks 0-1 (node 0): all bound to the same 1 CPU (0): remedy"),
        (
            ["0-1", "2", "0-1", "0-1"],
            "ranks 0, 2-3 (node 0): all bound to the same 2 CPUs (0-1): remedy",
        ),
        (["0-2", "2-4"], "ranks 0-1 (node 0): bound to CPUs that overlap (2): remedy"),
    ],
)
def test_ranks_that_share_cpus(cpus: list[str], finding: str) -> None:
    ranks = range(len(cpus))
    records = [replace(record(rank, len(cpus)), cpus=cpus[rank]) for rank in ranks]
    membership = Membership(("a",), (tuple(ranks),))
    assert shared_cpus(records, membership, "remedy") == [finding] * bool(finding)


def test_many_nodes_that_share_cpus_are_counted() -> None:
    records = [replace(record(rank, 20), cpus="0") for rank in range(20)]
    nodes = tuple((rank, rank + 1) for rank in range(0, 20, 2))
    found = shared_cpus(records, Membership(("a",) * 10, nodes), "")
    assert len(found) == 4
    assert found[3] == "bound to the same CPUs: ranks of 7 more nodes"


@pytest.mark.parametrize("cpus", ["0-99999", "x", "0-", "0," * 3000, 7, "0-9999,0-9999"])
def test_list_of_cpus_of_a_stranger_is_bounded(cpus: object) -> None:
    damaged = json.loads(encode(record(0, 1)))
    damaged["cpus"] = cpus
    with pytest.raises(ProtocolError):
        decode(json.dumps(damaged).encode(), WorkerInfo)
