"""The platforms that number nodes or pods and have more to read than an index and a count.

Kubeflow, Volcano, SageMaker, AWS Batch and Vertex AI.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ...errors import DistbootError
from ...text import digits, short_repr
from ..env_reader import EnvReader, variable
from ..node_platform import NodePlatform
from ..parse import is_loopback, json_hosts, parse_address, parse_number, parse_port
from . import has_any

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
    low, colon, high = environ.get("PET_NNODES", "").partition(":")
    if colon and low != high:
        raise DistbootError(
            "node-level-launch",
            f"{variable(environ, 'PET_NNODES')} is a range: an elastic job, whose ranks torchrun starts and numbers",
            "start the script with torchrun in every pod; it reads the PET_* variables",
        ).of("node ?")
    # Flyte's 2:2 is no range
    nodes = reader.parsed(
        "PET_NNODES", lambda text: parse_number(text.partition(":")[0]), required=True
    )
    reader.put("PET_NNODES", world_size=nodes)
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


KUBEFLOW = NodePlatform(
    name="kubeflow",
    title="Kubeflow PyTorchJob and TrainJob, several processes per pod (PET_*)",
    page="https://github.com/kubeflow/trainer/blob/master/pkg/runtime/framework/plugins/torch/torch.go",
    index_variable="PET_NODE_RANK",
    count_variable="PET_NNODES",
    marks=_KUBEFLOW,
    address="PET_MASTER_ADDR",
    port="PET_MASTER_PORT",
    per_node=("PET_NPROC_PER_NODE",),
    also=("RANK", "WORLD_SIZE"),
    read=_read_kubeflow,
    claim=_claim_kubeflow,
    owns_torch_vars=True,
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
    sample=(
        "PET_NNODES=2 PET_NPROC_PER_NODE=8 PET_NODE_RANK=1 PET_MASTER_ADDR=digits-node-0-0.digits "
        "PET_MASTER_PORT=29500 KUBERNETES_SERVICE_HOST=10.96.0.1"
    ),
    note="With one process per pod and `RANK` and `WORLD_SIZE`, these two are ranks.",
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


VOLCANO = NodePlatform(
    name="volcano",
    title="Volcano jobs (plugins pytorch and env)",
    page="https://github.com/volcano-sh/volcano/tree/master/pkg/controllers/job/plugins/distributed-framework/pytorch",
    index_variable="RANK",
    count_variable="WORLD_SIZE",
    marks=_VOLCANO,
    also=(*_VOLCANO, "VC_*_NUM"),
    read=_read_volcano,
    claim=_claim_volcano,
    owns_torch_vars=True,
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
    sample=(
        "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0.job MASTER_PORT=23456 VC_TASK_INDEX=0 VK_TASK_INDEX=0 "
        "VC_MASTER_HOSTS=job-master-0.job VC_WORKER_HOSTS=job-worker-0.job"
    ),
)


# SageMaker without a distribution: the script starts once on each host of the cluster. With the distribution MPI or
# torch_distributed `mpirun` or torchrun starts the processes, and owns the rank.
# Second host of two:
#   SM_HOSTS=["algo-1","algo-2"]   SM_CURRENT_HOST=algo-2   SM_NUM_GPUS=8   TRAINING_JOB_NAME=digits-2026-11-21-09-12-41
# Under mpirun SM_CURRENT_HOST is the first host's on every rank: it comes with the variables of mpirun's own host.
def _claim_sagemaker(environ: Mapping[str, str]) -> bool:
    return has_any(environ, ("SM_HOSTS", "SM_CURRENT_HOST"))


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


SAGEMAKER = NodePlatform(
    name="sagemaker",
    title="SageMaker training jobs without a distribution, one process per host",
    page="https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md",
    index_variable="SM_CURRENT_HOST",
    count_variable="SM_HOSTS",
    hosts="SM_HOSTS",
    per_node=("SM_NUM_GPUS",),
    job_id=("TRAINING_JOB_NAME",),
    read=_read_sagemaker,
    claim=_claim_sagemaker,
    nodes_are_hosts=True,
    env_forwarding_hint="an entry NAME: VALUE in the estimator's environment",
    sample=(
        'SM_HOSTS=["algo-1","algo-2"] SM_CURRENT_HOST=algo-2 SM_NUM_GPUS=8 '
        "TRAINING_JOB_NAME=digits-2026-11-21-09-12-41-001"
    ),
    note="The number of a node is the place of its host in the list.",
)


# AWS Batch multi-node parallel jobs: one container per node, and nothing says how many processes each is to run.
# Node 2 of 3:
#   AWS_BATCH_JOB_NODE_INDEX=2   AWS_BATCH_JOB_NUM_NODES=3   AWS_BATCH_JOB_MAIN_NODE_INDEX=0
#   AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS=10.0.0.4 (not on the main node)
#   AWS_BATCH_JOB_ID=a7182d0e-7e9e-44a1-8417-3b7d8dac9a42#2 (the part before # is the job)
_MAIN_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"


def _claim_awsbatch(environ: Mapping[str, str]) -> bool:
    return has_any(environ, ("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"))


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


AWSBATCH = NodePlatform(
    name="awsbatch",
    title="AWS Batch multi-node parallel jobs",
    page="https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html",
    index_variable="AWS_BATCH_JOB_NODE_INDEX",
    count_variable="AWS_BATCH_JOB_NUM_NODES",
    address=_MAIN_ADDRESS,
    also=("AWS_BATCH_JOB_MAIN_NODE_INDEX", "AWS_BATCH_JOB_ID", "HOSTNAME"),
    read=_read_awsbatch,
    claim=_claim_awsbatch,
    nodes_are_hosts=True,
    env_forwarding_hint="an environment entry NAME=VALUE in the container properties",
    sample=(
        "AWS_BATCH_JOB_NODE_INDEX=1 AWS_BATCH_JOB_NUM_NODES=2 AWS_BATCH_JOB_MAIN_NODE_INDEX=0 "
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS=10.0.0.4 "
        "AWS_BATCH_JOB_ID=a7182d0e-7e9e-44a1-8417-3b7d8dac9a42#1"
    ),
    note="The main node is node 0, whatever its index; it is not told its own address, and takes its host name.",
)


# Vertex AI custom training, the first worker of two:
#   CLUSTER_SPEC={"cluster": {"workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
#                             "workerpool1": ["cmle-training-workerpool1-ab-0:2222", "…-1:2222"]},
#                 "environment": "cloud", "task": {"type": "workerpool1", "index": 0}}
# The one replica of workerpool0 is node 0, those of workerpool1 follow. Pools 2 and 3 are parameter servers,
# reductions and evaluators, which are no nodes of the job.
_SPEC = "CLUSTER_SPEC"
_NODES = ("workerpool0", "workerpool1")
_LONGEST = 1_000_000  # characters; the whole job may be in it


def _claim_vertex(environ: Mapping[str, str]) -> bool:
    text = environ.get(_SPEC)
    if text is None or has_any(environ, ("RANK", "LOCAL_RANK", "TF_CONFIG")):
        return False
    try:
        nodes, _ = _nodes_of(text)
    except ValueError:
        return True  # `_read_vertex` says what is wrong
    return len(nodes) != 1


def _read_vertex(reader: EnvReader) -> None:
    found = reader.parsed(_SPEC, _nodes_of, required=True)
    if found is None:
        return
    nodes, own = found
    reader.put(f"task of {_SPEC}", rank=own)
    reader.put(f"replicas of {_SPEC}", world_size=len(nodes), num_nodes=len(nodes))
    reader.own_address = (nodes[0], f"workerpool0 of {_SPEC}")
    reader.port_seed = reader.own_address
    reader.node_level = (
        f"{_SPEC} counts replicas, and nothing says how many processes each is to run"
    )


def _nodes_of(text: str) -> tuple[list[str], int]:
    """The hosts of all nodes, and the number of this one; ValueError: the text does not say it."""
    spec = _json_object(text)
    cluster, task = spec.get("cluster"), spec.get("task")
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise ValueError("has no 'cluster' and 'task' objects")  # noqa: TRY004 - of a text
    pools = [cluster.get(name, []) for name in _NODES]
    if not all(isinstance(pool, list) for pool in pools) or not pools[0]:
        raise ValueError("has no list of hosts in 'workerpool0'")
    kind, index = task.get("type"), task.get("index")
    if kind not in _NODES:
        raise ValueError(f"has the task {short_repr(kind)}, which is no node of the training job")
    if type(index) is not int or not 0 <= index < len(pools[_NODES.index(kind)]):
        raise ValueError(f"has the task index {short_repr(index)}, which is not in its pool")
    hosts = [parse_address(str(address))[0] for pool in pools for address in pool]
    if len(set(hosts)) != len(hosts):
        raise ValueError("names a host twice")
    return hosts, index if kind == _NODES[0] else len(pools[0]) + index


def _json_object(text: str) -> dict[str, object]:
    import json  # only here, so that other launchers do not pay for it

    if len(text) > _LONGEST:
        raise ValueError(f"has {len(text)} characters; the longest that is read has {_LONGEST}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")  # noqa: TRY004 - of a text
    return found


VERTEX = NodePlatform(
    name="vertex",
    title="Vertex AI custom training",
    page="https://docs.cloud.google.com/vertex-ai/docs/training/distributed-training",
    index_variable=_SPEC,
    count_variable="",
    job_id=("CLOUD_ML_JOB_ID",),
    read=_read_vertex,
    claim=_claim_vertex,
    env_forwarding_hint="an env entry in the containerSpec",
    sample=(
        'CLUSTER_SPEC={"cluster":{"workerpool0":["pool0-0:2222"],"workerpool1":["pool1-0:2222"]},'
        '"task":{"type":"workerpool1","index":0}} CLOUD_ML_JOB_ID=123'
    ),
    note="`TF_CONFIG`, or `RANK` and `WORLD_SIZE`, come before it where they are set.",
)
