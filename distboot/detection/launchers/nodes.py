"""Operators and platforms that number nodes or pods, of which each is to run one process or several."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ...errors import DistbootError
from ...text import digits, short_repr
from ..env_reader import EnvReader, variable
from ..parse import is_loopback, json_hosts, parse_address, parse_port
from . import Launcher, has_any

# Kubeflow's PyTorchJob and TrainJob with several processes per pod: `PET_*`, which torchrun is to read in each. The
# process that finds them stands for its pod. With one process per pod, RANK and WORLD_SIZE mean what they say.
# Training operator v1, PyTorchJob, nprocPerNode: "4", 3 pods, the last one:
#   PET_NNODES=3   PET_NPROC_PER_NODE=4   PET_NODE_RANK=2   RANK=2 (the pod)   WORLD_SIZE=12   MASTER_ADDR=job-master-0
# nprocPerNode: auto, its default, gives WORLD_SIZE=3, as early versions do for any number.
# Trainer v2: PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT only.
_KUBEFLOW = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK")


def _claim_kubeflow(environ: Mapping[str, str]) -> bool:
    # LOCAL_RANK: something has started processes in the pod, and numbered them.
    if not has_any(environ, _KUBEFLOW) or "LOCAL_RANK" in environ:
        return False
    one_a_pod = environ.get("PET_NPROC_PER_NODE", "auto") in ("1", "auto")
    plain = has_any(environ, ("RANK", "WORLD_SIZE"))
    # Then the numbers of pods are those of processes.
    return not (plain and one_a_pod and environ.get("PET_NNODES") == environ.get("WORLD_SIZE"))


def _read_kubeflow(reader: EnvReader) -> None:
    environ = reader.environ
    if ":" in environ.get("PET_NNODES", ""):
        raise DistbootError(
            "node-level-launch",
            f"{variable(environ, 'PET_NNODES')} is a range: an elastic job, whose ranks torchrun starts and numbers",
            "start the script with torchrun in every pod; it reads the PET_* variables",
        ).of("node ?")
    nodes = reader.integer("PET_NNODES", "world_size")
    node = reader.integer(reader.first("PET_NODE_RANK", "RANK"), "rank")
    reader.agree("RANK", node, "PET_NODE_RANK")
    per_node = environ.get("PET_NPROC_PER_NODE", "auto")
    count = (
        None if per_node in ("auto", "cpu", "gpu", "xpu") else reader.integer("PET_NPROC_PER_NODE")
    )
    if nodes is not None and environ.get("WORLD_SIZE", str(nodes)) not in (
        str(nodes),
        str(nodes * (count or 1)),
    ):
        why = f"is neither PET_NNODES={nodes} nor that times PET_NPROC_PER_NODE={short_repr(per_node)}"
        reader.reject("WORLD_SIZE", why)
    reader.put("PET_NNODES", num_nodes=nodes)
    if count != 1:
        reader.node_level = (
            f"PET_NPROC_PER_NODE={per_node} asks for {count or 'several'} processes in each pod"
        )
    if "PET_MASTER_ADDR" in environ and "MASTER_ADDR" not in environ:
        address, port = (
            reader.parsed("PET_MASTER_ADDR", parse_address),
            reader.parsed("PET_MASTER_PORT", parse_port),
        )
        if "MASTER_PORT" not in environ:
            reader.put("PET_MASTER_PORT", master_port=port)
        reader.own_address = address and (address[0], "PET_MASTER_ADDR")


KUBEFLOW = Launcher(
    name="kubeflow",
    title="Kubeflow PyTorchJob and TrainJob, several processes per pod (PET_*)",
    markers=_KUBEFLOW,
    more=_read_kubeflow,
    source="documentation: Kubeflow training operator v1, pkg/controller.v1/pytorch/envvar.go; Kubeflow Trainer v2, "
    "pkg/runtime/framework/plugins/torch/torch.go",
    claim=_claim_kubeflow,
    owns_torch_vars=True,
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
)


# Volcano on Kubernetes: its `pytorch` plugin numbers pods, and nothing says how many processes each is to run.
# Plugins pytorch, svc and env, 1 master and 2 workers, the last worker:
#   RANK=2   WORLD_SIZE=3   MASTER_ADDR=job-master-0.job   MASTER_PORT=23456
#   VC_TASK_INDEX=1 (within its kind of task)   VC_WORKER_HOSTS=job-worker-0.job,job-worker-1.job   VC_WORKER_NUM=2
_VOLCANO = ("VC_TASK_INDEX", "VK_TASK_INDEX")


def _claim_volcano(environ: Mapping[str, str]) -> bool:
    # LOCAL_RANK: something has started processes in the pod, and numbered them. TF_CONFIG: the tensorflow plugin.
    if not has_any(environ, _VOLCANO) or has_any(environ, ("LOCAL_RANK", "TF_CONFIG")):
        return False
    # VC_WORKER_NUM and its like, by which the svc plugin counts pods, if it is there.
    counts = (
        digits(text) or 0
        for name, text in environ.items()
        if name.startswith("VC_") and name.endswith("_NUM")
    )
    return has_any(environ, ("RANK", "WORLD_SIZE")) or sum(counts) != 1


def _read_volcano(reader: EnvReader) -> None:
    if not has_any(reader.environ, ("RANK", "WORLD_SIZE")):
        index = reader.first(*_VOLCANO)
        reader.problems.append(
            f"RANK and WORLD_SIZE are missing, and {index} only counts the pods of one kind"
        )
        reader.remedy = (
            "give the job Volcano's pytorch plugin (or its tensorflow or mpi plugin), or set DISTBOOT_LAUNCHER=none if "
            "each pod works alone"
        )
        return
    if "RANK" not in reader.environ:
        reader.remedy = (
            "Volcano's pytorch plugin gives RANK to the pods of its master and worker tasks only; set "
            "DISTBOOT_LAUNCHER=none in the pods of another task, such as TensorBoard's, which work alone"
        )
    reader.integers("RANK", "WORLD_SIZE")
    reader.put("WORLD_SIZE: Volcano counts pods", num_nodes=reader.number("world_size"))
    if reader.number("world_size") != 1:
        reader.node_level = (
            "Volcano's RANK counts pods, and nothing says how many processes each is to run"
        )


VOLCANO = Launcher(
    name="volcano",
    title="Volcano jobs (plugins pytorch and env)",
    markers=_VOLCANO,
    more=_read_volcano,
    source="documentation: Volcano, pkg/controllers/job/plugins/distributed-framework/pytorch and plugins/env",
    claim=_claim_volcano,
    owns_torch_vars=True,
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
)


# SageMaker without a distribution: the script starts once on each host of the cluster. With the distribution MPI or
# torch_distributed `mpirun` or torchrun starts the processes, and owns the rank.
# Second host of two:
#   SM_HOSTS=["algo-1","algo-2"]   SM_CURRENT_HOST=algo-2   SM_NUM_GPUS=8   TRAINING_JOB_NAME=digits-2026-11-21-09-12-41
# Under mpirun SM_CURRENT_HOST is the first host's on every rank: it comes with the variables of mpirun's own host.
def _read_sagemaker(reader: EnvReader) -> None:
    hosts = reader.parsed("SM_HOSTS", json_hosts, required=True)
    current = reader.text("SM_CURRENT_HOST", required=True)
    if hosts and current is not None and current not in hosts:
        reader.reject("SM_CURRENT_HOST", f"is not in {variable(reader.environ, 'SM_HOSTS')}")
    elif hosts and current is not None:
        reader.put("SM_CURRENT_HOST in SM_HOSTS", rank=hosts.index(current))
        reader.put("SM_HOSTS", world_size=len(hosts), num_nodes=len(hosts))
    gpus = reader.integer("SM_NUM_GPUS") if "SM_NUM_GPUS" in reader.environ else None
    if hosts and len(hosts) > 1 and gpus is not None and gpus > 1:
        reader.node_level = (
            f"{variable(reader.environ, 'SM_NUM_GPUS')}, and one process was started on each host"
        )
    if hosts:
        reader.own_address = (hosts[0], "first host of SM_HOSTS")


SAGEMAKER = Launcher(
    name="sagemaker",
    title="SageMaker training jobs without a distribution, one process per host",
    markers=("SM_HOSTS", "SM_CURRENT_HOST"),
    more=_read_sagemaker,
    job_id=("TRAINING_JOB_NAME",),
    nodes_are_hosts=True,
    source="documentation: SageMaker Training Toolkit, 'Environment variables'",
    env_forwarding_hint="an entry NAME: VALUE in the estimator's environment",
)


# AWS Batch multi-node parallel jobs: one container per node, and nothing says how many processes each is to run.
# Node 2 of 3:
#   AWS_BATCH_JOB_NODE_INDEX=2   AWS_BATCH_JOB_NUM_NODES=3   AWS_BATCH_JOB_MAIN_NODE_INDEX=0
#   AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS=10.0.0.4 (not on the main node)
#   AWS_BATCH_JOB_ID=a7182d0e-7e9e-44a1-8417-3b7d8dac9a42#2 (the part before # is the job)
_MAIN_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"


def _read_awsbatch(reader: EnvReader) -> None:
    node = reader.integer("AWS_BATCH_JOB_NODE_INDEX", required=True)
    nodes = reader.integer("AWS_BATCH_JOB_NUM_NODES", "world_size")
    main = reader.integer("AWS_BATCH_JOB_MAIN_NODE_INDEX", required=True)
    reader.put("AWS_BATCH_JOB_NUM_NODES", num_nodes=nodes)
    if nodes is not None and main is not None and main >= nodes:
        reader.reject(
            "AWS_BATCH_JOB_MAIN_NODE_INDEX", f"is not below AWS_BATCH_JOB_NUM_NODES={nodes}"
        )
    elif node is not None and main is not None:
        # Only the main node's address is known to all, so it is rank 0; the others keep their order.
        rank = 0 if node == main else node + 1 if node < main else node
        reader.put(
            "AWS_BATCH_JOB_NODE_INDEX" + ("" if main == 0 else ", the main node first"), rank=rank
        )
    reader.put(
        "AWS_BATCH_JOB_ID",
        job_id=reader.environ.get("AWS_BATCH_JOB_ID", "").partition("#")[0] or None,
    )
    if nodes != 1:
        reader.node_level = (
            "AWS Batch counts nodes, and nothing says how many processes each is to run"
        )
    if _MAIN_ADDRESS in reader.environ:
        address = reader.parsed(_MAIN_ADDRESS, parse_address)
        reader.own_address = address and (address[0], _MAIN_ADDRESS)
    elif node == main:  # which is not told its address
        with suppress(ValueError):
            host, _ = parse_address(reader.environ.get("HOSTNAME", ""))
            reader.own_address = None if is_loopback(host) else (host, "HOSTNAME of the main node")


AWSBATCH = Launcher(
    name="awsbatch",
    title="AWS Batch multi-node parallel jobs",
    markers=("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
    more=_read_awsbatch,
    nodes_are_hosts=True,
    source="documentation: AWS Batch, 'Environment variables' of multi-node parallel jobs",
    env_forwarding_hint="an environment entry NAME=VALUE in the container properties",
)
