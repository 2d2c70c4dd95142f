"""One process per node becomes its ranks: on two hosts, with uneven counts, whatever started the one process."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import Run
from documented import AWSBATCH, SAGEMAKER, TRAINJOB, VOLCANO
from hosts import Hosts
from launched import (
    UNEVEN,
    json_lines,
    mpirun_on,
    needs_hosts,
    needs_mpirun,
    needs_torch,
    places_of,
)
from ranks import WRAPPER, RunRanks

# Two ranks on nodea, one on nodeb.
_UNEVENLY = f"""
processes=1; [ "$(hostname)" = nodea ] && processes=2
exec {sys.executable} -m distboot --nproc-per-node $processes where.py
"""
UNEVENLY = ("sh", "-c", _UNEVENLY)

_TWO = {"WORLD_SIZE": "2", "MASTER_ADDR": "nodea", "MASTER_PORT": "29500"}
_TRAINJOB = {**TRAINJOB, "PET_NNODES": "2", "PET_MASTER_ADDR": "nodea"}
_VOLCANO = {**VOLCANO, **_TWO, "VC_MASTER_HOSTS": "nodea", "VC_WORKER_HOSTS": "nodeb"}
_BATCH = {
    **AWSBATCH,
    "AWS_BATCH_JOB_NUM_NODES": "2",
    "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "nodea",
}
_SAGEMAKER = {**SAGEMAKER, "SM_HOSTS": '["nodea","nodeb"]', "SM_NUM_GPUS": "4"}

# What each platform says to its one process on each host.
PLATFORMS: dict[str, list[Mapping[str, str]]] = {
    "Kubernetes Indexed Job": [
        {**_TWO, "RANK": str(node), "JOB_COMPLETION_INDEX": str(node)} for node in (0, 1)
    ],
    "TrainJob": [{**_TRAINJOB, "PET_NODE_RANK": str(node)} for node in (0, 1)],
    "Volcano": [
        {**_VOLCANO, "RANK": str(node), "VC_TASK_INDEX": "0", "VK_TASK_INDEX": "0"}
        for node in (0, 1)
    ],
    "AWS Batch": [{**_BATCH, "AWS_BATCH_JOB_NODE_INDEX": str(node)} for node in (0, 1)],
    "Azure ML, one process per node": [{**_TWO, "NODE_RANK": str(node)} for node in (0, 1)],
    "SageMaker": [{**_SAGEMAKER, "SM_CURRENT_HOST": host} for host in ("nodea", "nodeb")],
}


@pytest.mark.all
@needs_hosts
@pytest.mark.parametrize("platform", PLATFORMS)
def test_ranks_of_two_hosts(hosts: Hosts, platform: str) -> None:
    def node(host: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        return hosts.run(host, UNEVENLY, env=environ)

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(node, ("nodea", "nodeb"), PLATFORMS[platform]))
    lines = sorted(
        (line for each in done for line in json_lines(each)),
        key=lambda line: int(str(line["RANK"])),
    )
    assert places_of(lines) == UNEVEN
    assert {(line["launcher"], line["WORLD_SIZE"]) for line in lines} == {("distboot", 3)}


@pytest.mark.all
@needs_hosts
@needs_mpirun
@needs_torch
def test_ranks_of_one_mpi_process_a_node(hosts: Hosts) -> None:
    with_torch = (*UNEVENLY[:2], UNEVENLY[2].replace("where.py", "who.py"))
    lines = json_lines(mpirun_on(hosts, "nodea:1,nodeb:1", *with_torch, MASTER_ADDR="nodea"))
    assert places_of(lines) == UNEVEN
    assert {(line["launcher"], line["total"]) for line in lines} == {("distboot", 6.0)}


Nodes = Callable[..., tuple[list[str], str]]


@pytest.fixture
def two_nodes(run_ranks: RunRanks) -> Nodes:
    """Run a script on two nodes with two ranks and one: the lines that are printed, the exit codes last; and stderr."""

    def start(script: str, *options: str, **env: str) -> tuple[list[str], str]:
        places = [{"DISTBOOT_NPROC_PER_NODE": count} for count in ("2", "1")]
        first, second = run_ranks(script, before=[*WRAPPER, *options], places=places, **env)
        return [
            *(first.out + second.out).splitlines(),
            f"{first.code} {second.code}",
        ], first.err + second.err

    return start


_MEET = """
import distboot, os, sys
with distboot.init("none", join_timeout=60) as ctx:
    print(ctx.rank, ctx.world_size, ctx.local_rank, ctx.local_world_size, ctx.node_rank, ctx.num_nodes, flush=True)
    ctx.barrier()
    with ctx.main_first():
        pass
    with ctx.local_main_first():
        pass
"""


def test_uneven_nodes_meet_once_with_their_agents(two_nodes: Nodes) -> None:
    lines, stderr = two_nodes(_MEET)
    assert sorted(lines) == ["0 0", "0 3 0 2 0 2", "1 3 1 2 0 2", "2 3 0 1 1 2"]
    assert "summary: 3 ranks on 2 nodes" in stderr
    assert stderr.count("distboot:") == 1, "nothing else is said"


def test_exit_code_is_that_of_the_first_failure(two_nodes: Nodes) -> None:
    lines, stderr = two_nodes(
        _MEET + "    sys.exit(7 if ctx.rank == 2 else __import__('time').sleep(100))\n"
    )
    assert lines[-1] == "7 7"
    assert f"node 0 on {os.uname().nodename}: rank 2 failed first: exit code 7" in stderr


def test_unmodified_script_is_watched_too(two_nodes: Nodes, tmp_path: Path) -> None:
    script = "import os, time\nos.environ['RANK'] == '1' and os._exit(4)\ntime.sleep(100)\n"
    lines, stderr = two_nodes(script, DISTBOOT_REPORT="job.json")
    assert lines[-1] == "4 4"
    assert "rank 1 failed first: exit code 4" in stderr
    assert json.loads((tmp_path / "job.json").read_text())["launcher"] == "distboot"


def test_lines_of_ranks_stay_whole_with_prefix(two_nodes: Nodes) -> None:
    script = (
        "import os, sys\nfor _ in range(200):\n    [sys.stdout.write(c) for c "
        "in 'x' * 99 + chr(10)]\n"
    )
    lines, _ = two_nodes(script, "--log-prefix")
    host = os.uname().nodename
    assert sorted(lines[:-1]) == sorted(
        f"[rank {rank} {host}] {'x' * 99}" for rank in range(3) for _ in range(200)
    )


def test_port_that_somebody_else_has_fails_no_job(two_nodes: Nodes) -> None:
    with socket.create_server(("", 0)) as other:
        lines, stderr = two_nodes(_MEET, MASTER_PORT=str(other.getsockname()[1]))
    assert lines[-1] == "0 0", stderr


def test_missing_node_and_misplaced_rank_are_named(distboot: Run, run: Run, port: int) -> None:
    env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = distboot(
        "run", "--nproc-per-node", "2", "--join-timeout", "1", "train.py", train="", env=env
    )
    assert done.returncode == 75
    assert "1 of 2 nodes joined within 1 s; missing: node 1" in done.stderr
    python = f"{sys.executable} -m distboot run"
    mixed = f"RANK=1 {python} train.py & {python} --nproc-per-node 2 train.py; wait"
    done = run("sh", "-c", mixed, env=env)
    assert (
        done.stderr.count("give --nproc-per-node to the process of every node, or to none") == 2
    ), done.stderr


def test_file_limit_is_raised_for_ranks_alone(run: Run, port: int) -> None:
    node = f"{sys.executable} -m distboot run --log-dir logs --nproc-per-node"
    both = (
        f"ulimit -Sn 64; RANK=1 {node} 8 -- sh -c 'ulimit -Sn' & RANK=0 {node} 9 "
        "-- sh -c 'ulimit -Sn'; wait $!"
    )
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    done = run("bash", "-c", both, env=env)
    assert (done.returncode, done.stdout) == (0, "64\n" * 17), done.stderr


def test_variable_equals_option_and_skips_the_ranks(run: Run) -> None:
    env = {"DISTBOOT_NPROC_PER_NODE": "2"}
    for more, ranks in ([], "01"), (["--nproc-per-node", "3"], "012"):
        script = "echo $RANK/$WORLD_SIZE:$DISTBOOT_NPROC_PER_NODE"
        done = run(
            sys.executable, "-m", "distboot", "run", *more, "--", "sh", "-c", script, env=env
        )
        assert sorted(done.stdout.splitlines()) == [f"{rank}/{len(ranks)}:" for rank in ranks], (
            done.stderr
        )
    wrong = run(
        sys.executable,
        "-m",
        "distboot",
        "run",
        "--",
        "true",
        env={"DISTBOOT_NPROC_PER_NODE": "many"},
    )
    assert wrong.returncode == 78
    assert (
        "DISTBOOT_NPROC_PER_NODE='many' is neither a number of processes nor auto, gpu or cpu"
        in wrong.stderr
    )
    too_many = run(sys.executable, "-m", "distboot", "--nproc-per-node", "10000", "--", "true")
    assert too_many.returncode == 2
    assert "--nproc-per-node='10000' is not 1 to 9999 processes" in too_many.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be a user with no other process")
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_low_limit_of_processes_is_an_error(run: Run, limit: int) -> None:
    # The capabilities let that user read this Python, wherever it is.
    reads = "+dac_override,+dac_read_search"
    user = (
        f"--reuid {61000 + os.getpid() % 4000} --clear-groups --inh-caps {reads} "
        f"--ambient-caps {reads}"
    )
    ranks = f"{sys.executable} -m distboot run --nproc-per-node 2 -- sleep 60"
    done = run("setpriv", *user.split(), "bash", "-c", f"ulimit -u {limit}; exec {ranks}")
    assert done.returncode in (78, 126)
    assert "error[too-few-processes]: the system does not let" in done.stderr or (
        "hint: this user may not start more processes (ulimit -u)" in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_low_limit_of_files_is_an_error(run: Run) -> None:
    done = run(
        "bash",
        "-c",
        f"ulimit -n 64; exec {sys.executable} -m distboot run --nproc-per-node 16 -- true",
    )
    assert done.returncode == 78, done.stderr
    assert (
        "289 open files are needed for the 16 ranks of this node, and this process may have 64"
        in done.stderr
    )
    assert "error[too-few-files]: this process may open no more files" in done.stderr
    assert "Traceback" not in done.stderr
