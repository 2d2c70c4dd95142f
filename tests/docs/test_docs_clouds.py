"""The jobs of docs/how-to/another-cloud.md, and of platforms with pages of their own, are started here.

The command of each is started twice, as on two nodes.

Each of the two gets the variables that the platform sets on a node, after its documentation or its sources. There are
two CPUs and no network, so that a node has two ranks instead of eight, and both are at 127.0.0.1.
"""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hosts import side_by_side
from pages import Block, blocks

from distboot import DistbootError, detect

PAGE = "docs/how-to/another-cloud.md"
ON_PAGE = [block for block in blocks() if block.page == PAGE]
# Those that have a page of their own
PAGES = {
    "SkyPilot": "docs/how-to/skypilot.md",
    "LeaderWorkerSet": "docs/how-to/leaderworkerset.md",
    "JobSet": "docs/how-to/jobset.md",
}
TRAIN = """
import json, os
names = ("RANK", "WORLD_SIZE", "GROUP_RANK", "JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS",
         "NEURON_RT_ROOT_COMM_ID", "NEURON_PJRT_PROCESS_INDEX", "NEURON_PJRT_PROCESSES_NUM_DEVICES")
print("found", json.dumps({name: os.environ[name] for name in names if name in os.environ}), flush=True)
"""
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
Environs = Callable[[int, int], dict[str, str]]  # of a node, with a port that is free


def _skypilot(node: int, _: int) -> dict[str, str]:
    return {
        "SKYPILOT_NODE_RANK": str(node),
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_NUM_GPUS_PER_NODE": "2",
        "SKYPILOT_TASK_ID": "sky-2026-11-06-21-18-31-563597_train_1",
    }


def _runpod(node: int, port: int) -> dict[str, str]:
    return {
        "NODE_RANK": str(node),
        "NUM_NODES": "2",
        "NUM_TRAINERS": "2",
        "WORLD_SIZE": "4",
        **dict.fromkeys(("PRIMARY_ADDR", "MASTER_ADDR"), "127.0.0.1"),
        **dict.fromkeys(("PRIMARY_PORT", "MASTER_PORT"), str(port)),
        "NODE_ADDR": f"127.0.0.{node + 1}",
        "HOST_NODE_ADDR": f"127.0.0.1:{port}",
    }


def _dstack(node: int, _: int) -> dict[str, str]:
    return {
        "DSTACK_RUN_ID": "5f6a5f4e-5e17-4a4e-a3a1-51c26a2d9f64",
        "DSTACK_RUN_NAME": "train",
        "DSTACK_NODES_IPS": "127.0.0.1\n127.0.0.2",
        "DSTACK_MASTER_NODE_IP": "127.0.0.1",
        "DSTACK_NODE_RANK": str(node),
        "DSTACK_NODES_NUM": "2",
        "DSTACK_GPUS_PER_NODE": "2",
        "DSTACK_GPUS_NUM": "4",
    }


def _lepton(node: int, port: int) -> dict[str, str]:
    return {
        "LEPTON_JOB_NAME": "train",
        "LEPTON_JOB_TOTAL_WORKERS": "2",
        "LEPTON_JOB_WORKER_INDEX": str(node),
        "LEPTON_JOB_WORKER_PREFIX": "worker",
        "LEPTON_SUBDOMAIN": "train-job-svc",
        "LEPTON_RESOURCE_ACCELERATOR_NUM": "2",
        # worker-0.train-job-svc is no name here: what lepton_env_to_pytorch.sh sets
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NODE_RANK": str(node),
        "NNODES": "2",
        **KUBERNETES,
    }


def _vertex(node: int, port: int) -> dict[str, str]:
    pools = {"workerpool0": ["127.0.0.1:2222"], "workerpool1": ["127.0.0.2:2222"]}
    task = {"type": f"workerpool{node}", "index": 0}
    return {
        "CLUSTER_SPEC": json.dumps({"cluster": pools, "environment": "cloud", "task": task}),
        "CLOUD_ML_JOB_ID": "1234567890123456789",
        "MASTER_PORT": str(port),
    }


def _lws(node: int, port: int) -> dict[str, str]:
    return {
        "LWS_LEADER_ADDRESS": "127.0.0.1",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": str(node),
        "MASTER_PORT": str(port),
        **KUBERNETES,
    }


def _jobset(node: int, port: int) -> dict[str, str]:
    (container,) = _jobset_pod()["containers"]
    given = {each["name"]: each["value"] for each in container["env"]}
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**given, **here, "JOB_COMPLETION_INDEX": str(node), **KUBERNETES}


def _acme(node: int, _: int) -> dict[str, str]:
    return {"ACME_NODE_INDEX": str(node), "ACME_NODE_COUNT": "2", "ACME_NODE_0": "127.0.0.1"}


def _trainjob(node: int, port: int) -> dict[str, str]:
    return {
        "JAX_PROCESS_ID": str(node),
        "JAX_NUM_PROCESSES": "2",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JOB_COMPLETION_INDEX": str(node),
        **KUBERNETES,
    }


def _block(section: str, language: str) -> Block:
    on_page = ON_PAGE
    if section in PAGES:
        on_page = [each for each in blocks() if each.page == PAGES[section]]
    (block,) = [each for each in on_page if (each.section, each.language) == (section, language)]
    return block


def _yaml(section: str) -> Any:
    return yaml.safe_load(_block(section, "yaml").text)


def _jobset_pod() -> Any:
    (jobs,) = _yaml("JobSet")["spec"]["replicatedJobs"]
    return jobs["template"]["spec"]["template"]["spec"]


def _of_container(container: dict[str, Any]) -> str:
    return shlex.join([*container["command"], *container["args"]])


def _typed(section: str) -> str:
    """What a session types, without its prompts."""
    text = _block(section, "console").text.replace("\\\n", " ")
    return "\n".join(line.removeprefix("$ ") for line in text.splitlines())


def _lepton_command() -> str:
    words = shlex.split(_typed("NVIDIA DGX Cloud Lepton"))
    assert words[words.index("--num-workers") + 1] == "2"
    return words[words.index("--command") + 1]


def _pools() -> list[dict[str, Any]]:
    pools: list[dict[str, Any]] = _yaml("Vertex AI")["workerPoolSpecs"]
    assert [pool["replicaCount"] for pool in pools] == [1, 1]
    return pools


JOBS: dict[str, tuple[Callable[[], str], Environs]] = {
    "SkyPilot": (lambda: _yaml("SkyPilot")["run"], _skypilot),
    "RunPod": (lambda: _typed("RunPod"), _runpod),
    "dstack": (lambda: "\n".join(_yaml("dstack")["commands"]), _dstack),
    "NVIDIA DGX Cloud Lepton": (_lepton_command, _lepton),
    "Vertex AI": (lambda: _of_container(_pools()[1]["containerSpec"]), _vertex),
    "LeaderWorkerSet": (
        lambda: _of_container(
            _yaml("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"][
                "containers"
            ][0]
        ),
        _lws,
    ),
    "JobSet": (lambda: _of_container(_jobset_pod()["containers"][0]), _jobset),
    "A platform that is not here": (lambda: _typed("A platform that is not here"), _acme),
}


def _run(
    command: str, environs: Environs, clean_env: dict[str, str], folder: Path, port: int
) -> list[dict[str, str]]:
    """What the ranks of a command on two nodes have found, in the order of ranks."""
    (folder / "train.py").write_text(TRAIN)
    command = command.replace("--nproc-per-node=8", "--nproc-per-node=2")
    command = command.replace("29500", str(port))
    env = {**clean_env, "PATH": f"{Path(sys.executable).parent}:{clean_env['PATH']}"}
    env["DISTBOOT_JOIN_TIMEOUT"] = "60"
    ended = side_by_side(
        [
            (["bash", "-c", f"cd {folder} && {command}"], {**env, **environs(node, port)})
            for node in range(2)
        ],
        120,
    )
    output = "\n".join(text for _, text in ended)
    assert [code for code, _ in ended] == [0, 0], output
    found = [eval(text) for text in re.findall(r"^found (\{.*\})$", output, re.MULTILINE)]
    return sorted(found, key=lambda each: int(each.get("RANK", each.get("JAX_PROCESS_ID", 0))))


@pytest.mark.all
@pytest.mark.parametrize("section", JOBS)
def test_job_of_two_nodes_is_one(
    section: str, clean_env: dict[str, str], tmp_path: Path, port: int
) -> None:
    command, environs = JOBS[section]
    found = _run(command(), environs, clean_env, tmp_path, port)
    numbers = [(each["RANK"], each["WORLD_SIZE"], each["GROUP_RANK"]) for each in found]
    assert numbers == [("0", "4", "0"), ("1", "4", "0"), ("2", "4", "1"), ("3", "4", "1")]


def test_jax_processes_of_a_trainjob_are_kept(
    clean_env: dict[str, str], tmp_path: Path, port: int
) -> None:
    page = "docs/how-to/kubeflow-trainer.md"
    (block,) = [each for each in blocks("yaml") if (each.page, each.section) == (page, "JAX")]
    trainer = yaml.safe_load(block.text)["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    found = _run(_of_container(trainer), _trainjob, clean_env, tmp_path, port)
    seen = [(each["JAX_PROCESS_ID"], each["JAX_NUM_PROCESSES"]) for each in found]
    assert seen == [("0", "2"), ("1", "2")]


def test_script_for_trainium_numbers_its_processes(
    clean_env: dict[str, str], tmp_path: Path, port: int
) -> None:
    (tmp_path / "neuron.sh").write_text(_block("JAX on Trainium", "bash").text)
    found = _run(_typed("JAX on Trainium"), _runpod, clean_env, tmp_path, port)
    assert [each["NEURON_PJRT_PROCESS_INDEX"] for each in found] == ["0", "1"]
    for each in found:
        assert each["NEURON_RT_ROOT_COMM_ID"] == "127.0.0.1:41000"
        assert each["NEURON_PJRT_PROCESSES_NUM_DEVICES"] == "64,64"


def test_unknown_platform_is_refused_as_the_page_says(
    clean_env: dict[str, str], tmp_path: Path
) -> None:
    words = [sys.executable, "-m", "distboot", "show"]
    env = {**clean_env, **_acme(1, 0)}
    done = subprocess.run(
        words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 78
    assert "error[not-alone]" in done.stderr
    assert "ACME_NODE_INDEX='1'" in done.stderr


def test_count_per_node_is_that_of_the_gpus() -> None:
    """What a command starts is how many GPUs a node of the job has."""
    containers = [_jobset_pod()["containers"][0]]
    template = _yaml("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    containers += template["workerTemplate"]["spec"]["containers"]
    gpus = [each["resources"]["limits"]["nvidia.com/gpu"] for each in containers]
    machines = [pool["machineSpec"]["acceleratorCount"] for pool in _pools()]
    assert template["size"] == _yaml("SkyPilot")["num_nodes"] == _yaml("dstack")["nodes"] == 2
    for container in (*containers, *(pool["containerSpec"] for pool in _pools())):
        assert "--nproc-per-node=8" in container["command"]
    assert {*gpus, *machines} == {8}


def test_jobset_of_single_pods_needs_an_index() -> None:
    environ = {**_jobset(0, 29500), "MASTER_ADDR": "train-node-0-0.train"}
    assert detect(environ).rank == 0  # as in every pod
    assert (detect({**environ, "NODE_RANK": "1"}).rank, detect(environ).world_size) == (1, 2)
    del environ["NNODES"], environ["MASTER_ADDR"]
    assert detect({**environ, "JOB_COMPLETION_INDEX": "1"}).world_size == 1


def test_setup_of_skypilot_is_refused() -> None:
    """What `setup` has, by sky/backends/cloud_vm_ray_backend.py of skypilot 0.14.1."""
    environ = {
        "SKYPILOT_SETUP_NODE_RANK": "1",
        "SKYPILOT_SETUP_NODE_IPS": "10.0.0.4\n10.0.0.5",
        "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": "8",
        "SKYPILOT_TASK_ID": "sky-2026-11-06-21-18-31-563597_train_1",
    }
    with pytest.raises(DistbootError, match="not-alone"):
        detect(environ)
