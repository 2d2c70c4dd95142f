"""One process a node becomes its ranks: on two hosts, with uneven counts, whatever started the one process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import Run
from documented import AWSBATCH, SAGEMAKER, TRAINJOB, VOLCANO
from hosts import Hosts, Slurm
from launched import (
    MPI_ENV,
    MPIRUN,
    UNEVEN,
    json_lines,
    mpirun_on,
    needs_hosts,
    needs_mpirun,
    needs_slurm,
    needs_torch,
    places_of,
)

# Two ranks on nodea, one on nodeb.
_UNEVENLY = f"""
processes=1; [ "$(hostname)" = nodea ] && processes=2
exec {sys.executable} -m distboot --nproc-per-node $processes who.py
"""
UNEVENLY = ("sh", "-c", _UNEVENLY)

_TWO = {"WORLD_SIZE": "2", "MASTER_ADDR": "nodea", "MASTER_PORT": "29500"}
_TRAINJOB = {**TRAINJOB, "PET_NNODES": "2", "PET_MASTER_ADDR": "nodea"}
_VOLCANO = {**VOLCANO, **_TWO, "VC_MASTER_HOSTS": "nodea", "VC_WORKER_HOSTS": "nodeb"}
_BATCH = {**AWSBATCH, "AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "nodea"}
_SAGEMAKER = {**SAGEMAKER, "SM_HOSTS": '["nodea","nodeb"]', "SM_NUM_GPUS": "4"}

# What each platform says to its one process on each host.
PLATFORMS: dict[str, list[Mapping[str, str]]] = {
    "Kubernetes Indexed Job": [{**_TWO, "RANK": str(node), "JOB_COMPLETION_INDEX": str(node)} for node in (0, 1)],
    "TrainJob": [{**_TRAINJOB, "PET_NODE_RANK": str(node)} for node in (0, 1)],
    "Volcano": [{**_VOLCANO, "RANK": str(node), "VC_TASK_INDEX": "0", "VK_TASK_INDEX": "0"} for node in (0, 1)],
    "AWS Batch": [{**_BATCH, "AWS_BATCH_JOB_NODE_INDEX": str(node)} for node in (0, 1)],
    "SageMaker": [{**_SAGEMAKER, "SM_CURRENT_HOST": host} for host in ("nodea", "nodeb")],
}


@needs_hosts
@needs_torch
@pytest.mark.parametrize("platform", PLATFORMS)
def test_ranks_of_two_hosts(hosts: Hosts, platform: str) -> None:
    def node(host: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return hosts.run(host, UNEVENLY, env=environ)

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(node, ("nodea", "nodeb"), PLATFORMS[platform]))
    lines = sorted((line for each in done for line in json_lines(each)), key=lambda line: int(str(line["RANK"])))
    assert places_of(lines) == UNEVEN
    assert {(line["launcher"], line["WORLD_SIZE"], line["total"]) for line in lines} == {("torchrun", 3, 6.0)}


@needs_hosts
@needs_mpirun
@needs_torch
def test_ranks_of_one_mpi_process_a_node(hosts: Hosts) -> None:
    lines = json_lines(mpirun_on(hosts, "nodea:1,nodeb:1", *UNEVENLY, MASTER_ADDR="nodea"))
    assert places_of(lines) == UNEVEN
    assert {(line["launcher"], line["total"]) for line in lines} == {("torchrun", 6.0)}


@needs_slurm
@needs_torch
def test_ranks_of_one_slurm_task_a_node(slurm: Slurm) -> None:
    lines = json_lines(slurm.srun(["-N2", "--ntasks-per-node=1", *UNEVENLY]))
    assert places_of(lines) == UNEVEN


@needs_hosts
@needs_torch
def test_killed_rank_is_named_on_the_other_host(hosts: Hosts) -> None:
    (hosts.shared / "die.py").write_text("""
import os, signal, time
import distboot
ctx = distboot.init("none", join_timeout=60)
ctx.barrier()
if ctx.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(100)
""")

    def node(host: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return hosts.run(host, [*UNEVENLY[:2], UNEVENLY[2].replace("who.py", "die.py")], env=environ)

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(node, ("nodea", "nodeb"), PLATFORMS["Kubernetes Indexed Job"]))
    assert [each.returncode for each in done] == [1, 1]  # torchrun's own
    assert "rank 0 on nodea: rank 2 failed first" in done[0].stderr


@needs_torch
def test_torchrun_starts_failed_ranks_anew(distboot: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import os, sys
name = "tried-" + os.environ["RANK"]
if not os.path.exists(name):
    open(name, "w").close()
    sys.exit(3)
""")
    options = ["--nproc-per-node", "2", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=digits"]
    done = distboot("run", *options, "train.py")
    assert done.returncode == 0, done.stderr


_WITHOUT_TORCH = """
import sys
from distboot import nodes
nodes.has_torchrun = lambda: False  # stands in for a Python that has no torch
from distboot.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@needs_mpirun
@pytest.mark.parametrize("pod", [{}, {**_TWO, "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}], ids=str)
def test_mpirun_starts_the_ranks_where_there_is_no_torch(run: Run, tmp_path: Path, pod: dict[str, str]) -> None:
    assert MPIRUN is not None
    (tmp_path / "without.py").write_text(_WITHOUT_TORCH)
    (tmp_path / "train.py").write_text("""
import json, os, sys, time
names = "RANK", "WORLD_SIZE", "LOCAL_RANK"
sys.stdout.write(json.dumps({name: int(os.environ[name]) for name in names}) + chr(10))
sys.stdout.flush()
open("said-" + os.environ["RANK"], "w").close()
if os.environ["RANK"] == "2":
    while not all(os.path.exists(f"said-{rank}") for rank in range(3)):
        time.sleep(0.02)
    sys.exit(5)
""")
    path = f"{Path(MPIRUN).parent}:/usr/bin:/bin"
    command = [sys.executable, "without.py", "run", "--nproc-per-node", "3", "train.py"]
    done = run(*command, env={**pod, "PATH": path})
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = sorted((line["RANK"], line["WORLD_SIZE"], line["LOCAL_RANK"]) for line in lines)
    assert found == [(rank, 3, rank) for rank in range(3)], done.stderr
    assert done.returncode in (5, 143)  # of several that end Open MPI keeps one
    assert "rank 2 failed first: exit code 5" in done.stderr


@pytest.mark.parametrize(
    ("options", "env", "said"),
    [
        (["--max-restarts=2"], {}, "torch, whose torchrun starts them, is not installed in this Python"),
        ([], {**_TWO, "RANK": "1", "MASTER_ADDR": "localhost"}, "torch, whose torchrun starts them"),
        ([], {"PATH": "/nowhere"}, "on a single node an mpirun will do"),
    ],
)
def test_neither_torch_nor_what_mpirun_can_do(
    run: Run, tmp_path: Path, options: list[str], env: dict[str, str], said: str
) -> None:
    (tmp_path / "without.py").write_text(_WITHOUT_TORCH)
    (tmp_path / "train.py").touch()
    command = [sys.executable, "without.py", "run", "--nproc-per-node", "2", *options, "train.py"]
    done = run(*command, env={**MPI_ENV, **env})
    assert (done.returncode, said in done.stderr) == (78, True), done.stderr
