"""The platforms that number nodes, one record each; what is odd about one is a small function beside it.

Each starts one process on each node, which is to run one rank or several. The page of the reference about platforms is
made from these records and from those of `nodes`, which have more to read than an index and a count.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..env_reader import EnvReader
from ..node_platform import (
    NODES_OF_WORLD_SIZE,
    NodePlatform,
    check_world_size,
    claims,
    locate,
    node_level,
    read,
)
from ..parse import parse_address, parse_number
from . import has_any

SKYPILOT = NodePlatform(
    name="skypilot",
    title="SkyPilot",
    page="https://docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html",
    index_variable="SKYPILOT_NODE_RANK",
    count_variable="SKYPILOT_NUM_NODES",
    hosts="SKYPILOT_NODE_IPS",
    per_node=("SKYPILOT_NUM_GPUS_PER_NODE",),
    job_id=("SKYPILOT_TASK_ID",),
    sample=(
        "SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=2 SKYPILOT_NUM_GPUS_PER_NODE=8 "
        "SKYPILOT_NODE_IPS=10.0.0.4,10.0.0.5 SKYPILOT_TASK_ID=sky-2026-07-06-21-18-31-563597_demo_1"
    ),
    note="The list has one address a line. Before 0.6.1 it alone says how many nodes there are.",
)

DSTACK = NodePlatform(
    name="dstack",
    title="dstack",
    page="https://dstack.ai/docs/concepts/tasks",
    index_variable="DSTACK_NODE_RANK",
    count_variable="DSTACK_NODES_NUM",
    address="DSTACK_MASTER_NODE_IP",
    hosts="DSTACK_NODES_IPS",
    per_node=("DSTACK_GPUS_PER_NODE",),
    job_id=("DSTACK_RUN_ID", "DSTACK_RUN_NAME"),
    sample=(
        "DSTACK_NODE_RANK=1 DSTACK_NODES_NUM=2 DSTACK_GPUS_PER_NODE=8 DSTACK_GPUS_NUM=16 "
        "DSTACK_MASTER_NODE_IP=192.168.0.94 DSTACK_NODES_IPS=192.168.0.94,192.168.0.95 DSTACK_RUN_NAME=demo"
    ),
)


# LEPTON_JOB_WORKER_PREFIX=worker   LEPTON_SUBDOMAIN=env-job-98bw-job-svc: worker-0.env-job-98bw-job-svc is node 0
def _read_lepton(reader: EnvReader) -> None:
    names = ("LEPTON_JOB_WORKER_PREFIX", "LEPTON_SUBDOMAIN")
    prefix, subdomain = (reader.environ.get(name) for name in names)
    if prefix and subdomain and "MASTER_ADDR" not in reader.environ:
        try:
            host, _ = parse_address(f"{prefix}-0.{subdomain}")
        except ValueError as cause:
            reader.reject("LEPTON_JOB_WORKER_PREFIX", f"with LEPTON_SUBDOMAIN, {cause}")
        else:
            reader.own_address = (host, " and ".join(names))
    read(LEPTON, reader)


LEPTON = NodePlatform(
    name="lepton",
    title="NVIDIA DGX Cloud Lepton",
    page="https://docs.nvidia.com/dgx-cloud/lepton/features/batch-jobs/predefined-env-vars",
    index_variable="LEPTON_JOB_WORKER_INDEX",
    count_variable="LEPTON_JOB_TOTAL_WORKERS",
    per_node=("LEPTON_RESOURCE_ACCELERATOR_NUM",),
    job_id=("LEPTON_JOB_NAME",),
    also=("LEPTON_JOB_WORKER_PREFIX", "LEPTON_SUBDOMAIN"),
    read=_read_lepton,
    sample=(
        "LEPTON_JOB_WORKER_INDEX=1 LEPTON_JOB_TOTAL_WORKERS=2 LEPTON_RESOURCE_ACCELERATOR_NUM=8 "
        "LEPTON_JOB_WORKER_PREFIX=worker LEPTON_SUBDOMAIN=env-job-98bw-job-svc LEPTON_JOB_NAME=env-job-98bw"
    ),
    note="Node 0 is `$LEPTON_JOB_WORKER_PREFIX-0.$LEPTON_SUBDOMAIN`.",
)

METAFLOW = NodePlatform(
    name="metaflow",
    title="Metaflow @parallel",
    page="https://github.com/Netflix/metaflow/blob/master/metaflow/plugins/parallel_decorator.py",
    index_variable="MF_PARALLEL_NODE_INDEX",
    count_variable="MF_PARALLEL_NUM_NODES",
    address="MF_PARALLEL_MAIN_IP",
    port="MF_MASTER_PORT",
    sample="MF_PARALLEL_NODE_INDEX=1 MF_PARALLEL_NUM_NODES=2 MF_PARALLEL_MAIN_IP=10.0.0.4",
)

LWS = NodePlatform(
    name="lws",
    title="LeaderWorkerSet on Kubernetes",
    page="https://github.com/kubernetes-sigs/lws/blob/main/pkg/utils/pod/pod_utils.go",
    index_variable="LWS_WORKER_INDEX",
    count_variable="LWS_GROUP_SIZE",
    address="LWS_LEADER_ADDRESS",
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
    sample="LWS_WORKER_INDEX=1 LWS_GROUP_SIZE=2 LWS_LEADER_ADDRESS=lws-0.lws.default",
)

VOLCENGINE = NodePlatform(
    name="volcengine",
    title="Volcengine machine learning platform",
    page="https://www.volcengine.com/docs/6459/75329",
    index_variable="MLP_ROLE_INDEX",
    count_variable="MLP_WORKER_NUM",
    address="MLP_WORKER_0_HOST",
    hosts="MLP_WORKER_ALL_HOSTS",
    port="MLP_WORKER_0_PORT",
    per_node=("MLP_WORKER_GPU",),
    job_id=("MLP_TASK_ID",),
    sample=(
        "MLP_ROLE=WORKER MLP_ROLE_INDEX=1 MLP_WORKER_NUM=2 MLP_WORKER_GPU=8 MLP_WORKER_0_HOST=10.128.0.4 "
        "MLP_WORKER_0_PORT=9006 MLP_WORKER_ALL_HOSTS=10.128.0.4,10.128.0.5 MLP_TASK_ID=t-20260924211641-nznsh"
    ),
)

BASETEN = NodePlatform(
    name="baseten",
    title="Baseten Training",
    page="https://docs.baseten.co/training/concepts/multinode",
    index_variable="BT_NODE_RANK",
    count_variable="BT_GROUP_SIZE",
    address="BT_LEADER_ADDR",
    per_node=("BT_NUM_GPUS",),
    job_id=("BT_TRAINING_JOB_ID",),
    sample="BT_NODE_RANK=1 BT_GROUP_SIZE=2 BT_LEADER_ADDR=10.0.0.4 BT_NUM_GPUS=8 BT_TRAINING_JOB_ID=7qk9d3r",
)

NGC = NodePlatform(
    name="ngc",
    title="NVIDIA Base Command Platform",
    page="https://docs.nvidia.com/base-command-platform/",
    index_variable="NGC_ARRAY_INDEX",
    count_variable="NGC_ARRAY_SIZE",
    address="NGC_MASTER_ADDR",
    per_node=("NGC_GPUS_PER_NODE",),
    job_id=("NGC_JOB_ID",),
    sample=(
        "NGC_ARRAY_INDEX=1 NGC_ARRAY_SIZE=2 NGC_MASTER_ADDR=launcher-svc-1234567 NGC_GPUS_PER_NODE=8 "
        "NGC_ARRAY_TYPE=PYTORCH NGC_JOB_ID=1234567"
    ),
    note="The names are from public job scripts.",
)

NSML = NodePlatform(
    name="nsml",
    title="NAVER CLOVA NSML",
    page="https://guide.ncloud-docs.com/docs/ai-clova-nsml-high-3-3",
    index_variable="NSML_RANK",
    count_variable="NSML_WORLD_SIZE",
    address="NSML_HOST_RANK0",
    sample="NSML_RANK=1 NSML_WORLD_SIZE=2 NSML_HOST_RANK0=run-1-0 NSML_HOST_RANK1=run-1-1",
)


# With leaderSelection only; without it the replicas are a sweep, or nobody knows.
def _claim_beaker(environ: Mapping[str, str]) -> bool:
    return "BEAKER_LEADER_REPLICA_HOSTNAME" in environ and claims(BEAKER, environ)


BEAKER = NodePlatform(
    name="beaker",
    title="AI2 Beaker, with leaderSelection",
    page="https://beaker-docs.apps.allenai.org/",
    index_variable="BEAKER_REPLICA_RANK",
    count_variable="BEAKER_REPLICA_COUNT",
    address="BEAKER_LEADER_REPLICA_HOSTNAME",
    per_node=("BEAKER_ASSIGNED_GPU_COUNT",),
    job_id=("BEAKER_EXPERIMENT_ID",),
    claim=_claim_beaker,
    sample=(
        "BEAKER_REPLICA_RANK=1 BEAKER_REPLICA_COUNT=2 BEAKER_LEADER_REPLICA_HOSTNAME=jupiter-101.example.com "
        "BEAKER_ASSIGNED_GPU_COUNT=8 BEAKER_EXPERIMENT_ID=01J"
    ),
    note="The names are from public job scripts. Replicas without a leader are refused: they may be a sweep.",
)

# The parallel universe only: a job of the vanilla universe has neither. No variable has an address.
HTCONDOR = NodePlatform(
    name="htcondor",
    title="HTCondor, parallel universe",
    page="https://htcondor.readthedocs.io/en/latest/users-manual/parallel-applications.html",
    index_variable="_CONDOR_PROCNO",
    count_variable="_CONDOR_NPROCS",
    sample="_CONDOR_PROCNO=1 _CONDOR_NPROCS=2 _CONDOR_SLOT=slot1_1",
    note="Nothing says where node 0 is: set `MASTER_ADDR` and `MASTER_PORT`.",
)


# Built on Volcano, and asked before it.
def _claim_modelarts(environ: Mapping[str, str]) -> bool:
    return "MA_NUM_HOSTS" in environ and claims(MODELARTS, environ)


MODELARTS = NodePlatform(
    name="modelarts",
    title="Huawei Cloud ModelArts",
    page="https://support.huaweicloud.com/intl/en-us/modelarts/",
    index_variable="VC_TASK_INDEX",
    count_variable="MA_NUM_HOSTS",
    hosts="VC_WORKER_HOSTS",
    per_node=("MA_NUM_GPUS",),
    job_id=("MA_VJ_NAME",),
    claim=_claim_modelarts,
    sample=(
        "VC_TASK_INDEX=1 MA_NUM_HOSTS=2 MA_NUM_GPUS=8 VC_WORKER_NUM=2 "
        "VC_WORKER_HOSTS=job-worker-0.job,job-worker-1.job MA_VJ_NAME=job"
    ),
    note="The names are from public job scripts.",
)


# PAI DLC and AIHC: RANK and WORLD_SIZE count pods, as those of a PyTorchJob do, and NPROC_PER_NODE shows it.
def _claim_pods(environ: Mapping[str, str]) -> bool:
    if "LOCAL_RANK" in environ or "KUBERNETES_SERVICE_HOST" not in environ:
        return False
    several = environ.get("NPROC_PER_NODE", "1") != "1"
    return several and has_any(environ, ("RANK", "WORLD_SIZE"))


PODS = NodePlatform(
    name="pods",
    title="Alibaba Cloud PAI DLC, Baidu AIHC (PyTorch jobs, several processes per pod)",
    page="https://www.alibabacloud.com/help/en/pai/general-environment-variables",
    index_variable="RANK",
    count_variable="WORLD_SIZE",
    per_node=("NPROC_PER_NODE",),
    job_id=("AIHC_JOB_NAME",),
    marks=("NPROC_PER_NODE",),
    claim=_claim_pods,
    owns_torch_vars=True,
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
    sample=(
        "RANK=1 WORLD_SIZE=2 NPROC_PER_NODE=8 MASTER_ADDR=demo-master-0 MASTER_PORT=23456 "
        "KUBERNETES_SERVICE_HOST=10.96.0.1"
    ),
    note="On Kubernetes, and if `NPROC_PER_NODE` is above 1; with one process per pod these are ranks.",
)


# TPU_WORKER_ID=1   TPU_WORKER_HOSTNAMES=js-0-0.js,js-0-1.js   and with several slices
# MEGASCALE_NUM_SLICES=2   MEGASCALE_SLICE_ID=1   MEGASCALE_COORDINATOR_ADDRESS=js-slice-0-0.js
# JAX's own order of processes (jax/_src/clusters/cloud_tpu_cluster.py): slice by slice.
def _claim_tpu(environ: Mapping[str, str]) -> bool:
    if has_any(environ, ("RANK", "LOCAL_RANK")):
        return False
    hosts = {
        host for host in _words(environ.get("TPU_WORKER_HOSTNAMES", "")) if host != "localhost"
    }
    several_slices = environ.get("MEGASCALE_NUM_SLICES", "1") not in ("", "1")
    is_second = environ.get("TPU_WORKER_ID", "") not in ("", "0")
    return len(hosts) > 1 or several_slices or is_second


def _words(text: str) -> list[str]:
    return text[:100_000].replace(",", " ").split()


def _read_tpu(reader: EnvReader) -> None:
    worker = reader.integer("TPU_WORKER_ID", required=True)
    hosts = list(dict.fromkeys(_words(reader.text("TPU_WORKER_HOSTNAMES", required=True) or "")))
    slices, own = 1, 0
    if "MEGASCALE_NUM_SLICES" in reader.environ:
        slices = reader.integer("MEGASCALE_NUM_SLICES", required=True) or 0
        own = reader.integer("MEGASCALE_SLICE_ID", required=True) or 0
        _check_below(reader, "MEGASCALE_SLICE_ID", own, slices)
    if worker is None or not hosts:
        return
    _check_below(reader, "TPU_WORKER_ID", worker, len(hosts))
    count = len(hosts) * slices
    reader.put("TPU_WORKER_ID", rank=own * len(hosts) + worker)
    reader.put("TPU_WORKER_HOSTNAMES", world_size=count, num_nodes=count)
    _locate_tpu(reader, hosts[0], is_first_slice=slices == 1)


def _check_below(reader: EnvReader, name: str, index: int, count: int) -> None:
    if index >= count and name in reader.environ:
        reader.reject(name, f"is not below the {count} there are")


def _locate_tpu(reader: EnvReader, first: str, *, is_first_slice: bool) -> None:
    name = "MEGASCALE_COORDINATOR_ADDRESS"
    if not is_first_slice:
        address = reader.parsed(name, parse_address)
        reader.own_address = address and (address[0], name)
    else:
        try:
            reader.own_address = (parse_address(first)[0], "first host of TPU_WORKER_HOSTNAMES")
        except ValueError as cause:
            reader.reject("TPU_WORKER_HOSTNAMES", f"is not a list of hosts: one of them {cause}")
    reader.port_seed = reader.own_address


TPU = NodePlatform(
    name="tpu",
    title="Cloud TPU slices of several hosts (GKE)",
    page="https://github.com/jax-ml/jax/blob/main/jax/_src/clusters/cloud_tpu_cluster.py",
    index_variable="TPU_WORKER_ID",
    count_variable="",
    marks=("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"),
    triggers=("MEGASCALE_NUM_SLICES",),
    hosts="TPU_WORKER_HOSTNAMES",
    also=("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"),
    one_rank=True,
    claim=_claim_tpu,
    read=_read_tpu,
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
    sample="TPU_WORKER_ID=1 TPU_WORKER_HOSTNAMES=job-slice-0-0.svc,job-slice-0-1.svc",
    note="One process uses all chips of a host. With several slices, the hosts of slice 0 come first.",
)


# Names without a prefix, as RunPod, MosaicML, OCI Data Science, Azure ML's commands and people set them.
# RunPod, node 1 of 2 with 8 GPUs each: WORLD_SIZE counts GPUs
#   NODE_RANK=1   NUM_NODES=2   NUM_TRAINERS=8   WORLD_SIZE=16   PRIMARY_ADDR=10.65.0.2   MASTER_ADDR=10.65.0.2
# MosaicML, the same: NODE_RANK=1   WORLD_SIZE=16   LOCAL_WORLD_SIZE=8 (0 on nodes without GPUs)   MASTER_ADDR=10.0.0.4
# A command that Azure ML starts once on each of two nodes: NODE_RANK=1   WORLD_SIZE=2   MASTER_ADDR=10.0.0.4
# An Indexed Job of Kubernetes: JOB_COMPLETION_INDEX=1   NNODES=2   NPROC_PER_NODE=8   MASTER_ADDR=job-0.svc
_COUNTS = ("NUM_NODES", "NNODES", "NODE_COUNT")
_SIZES_OF_A_NODE = ("NUM_TRAINERS", "LOCAL_WORLD_SIZE")
_PER_NODE = (*_SIZES_OF_A_NODE, "NPROC_PER_NODE", "GPUS_PER_NODE")
_COMPLETION = "JOB_COMPLETION_INDEX"


def _claim_by_hand(environ: Mapping[str, str]) -> bool:
    if has_any(environ, ("RANK", "LOCAL_RANK")):
        return False
    if "NODE_RANK" in environ:
        return True
    return _COMPLETION in environ and any(environ.get(name, "1") != "1" for name in _COUNTS)


def _read_by_hand(reader: EnvReader) -> None:
    reader.remedy = (
        "without RANK a process stands for its node: set NUM_NODES to the number of nodes, and let the wrapper start "
        "the ranks (NUM_NODES=2 python -m distboot run --nproc-per-node auto -- python train.py); or set RANK and "
        "WORLD_SIZE for every process"
    )
    node = reader.integer(reader.first("NODE_RANK", _COMPLETION), "rank")
    nodes = _nodes_by_hand(reader)
    locate(NODES, reader, nodes)
    ranks = reader.environ.get("WORLD_SIZE", "1")
    if nodes != 1 or ranks != "1":
        level = node_level(NODES, reader)
        if level is not None and not has_any(reader.environ, _PER_NODE):
            level = f"{reader.first('NODE_RANK', _COMPLETION)}={node} is set, and RANK is not"
        reader.node_level = level


def _nodes_by_hand(reader: EnvReader) -> int | None:
    """Record the number of nodes; WORLD_SIZE may count nodes, processes or GPUs."""
    counts = [name for name in _COUNTS if name in reader.environ]
    if counts:
        nodes = reader.integer(counts[0], "world_size")
        for name in counts[1:]:
            reader.agree(name, nodes, counts[0])
        check_world_size(reader, nodes)
        reader.put(counts[0], num_nodes=nodes)
        return nodes
    per_node = _size_of_a_node(reader)
    if per_node is None:
        return _nodes_of_world_size(reader)
    name, size = per_node
    ranks = reader.parsed("WORLD_SIZE", parse_number, required=True)
    if ranks is None:
        return None
    if ranks % size != 0:
        reader.reject("WORLD_SIZE", f"is not a multiple of {name}={size}, the ranks of a node")
        return None
    nodes = ranks // size
    reader.put(f"WORLD_SIZE / {name}", world_size=nodes, num_nodes=nodes)
    return nodes


def _size_of_a_node(reader: EnvReader) -> tuple[str, int] | None:
    for name in _SIZES_OF_A_NODE:
        size = reader.integer(name) if name in reader.environ else None
        if size:
            return name, size
    return None


def _nodes_of_world_size(reader: EnvReader) -> int | None:
    if "WORLD_SIZE" not in reader.environ:
        reader.problems.append("NUM_NODES is missing")
        return None
    nodes = reader.integer("WORLD_SIZE", "world_size")
    reader.put(NODES_OF_WORLD_SIZE, num_nodes=nodes)
    reader.notes.append(
        f"WORLD_SIZE={nodes} is taken for the number of nodes, as nothing else says it: "
        "set NUM_NODES if it counts processes or GPUs"
    )
    return nodes


NODES = NodePlatform(
    name="nodes",
    title="plain NODE_RANK and NUM_NODES (RunPod, MosaicML, OCI, Azure ML commands, Indexed Jobs, by hand)",
    page="https://docs.runpod.io/instant-clusters/configuration",
    index_variable="NODE_RANK",
    count_variable="NUM_NODES",
    marks=("NODE_RANK",),
    triggers=(_COMPLETION,),
    per_node=_PER_NODE,
    also=(*_COUNTS[1:], "WORLD_SIZE", _COMPLETION),
    claim=_claim_by_hand,
    read=_read_by_hand,
    owns_torch_vars=True,
    sample=(
        "NODE_RANK=1 NUM_NODES=2 NUM_TRAINERS=8 WORLD_SIZE=16 MASTER_ADDR=10.65.0.2 MASTER_PORT=29400 "
        "PRIMARY_ADDR=10.65.0.2 PRIMARY_PORT=29400 NODE_ADDR=10.65.0.3"
    ),
    note=(
        "Without a number of nodes it is `WORLD_SIZE` / `LOCAL_WORLD_SIZE`, or `WORLD_SIZE` itself where nothing "
        "says how many ranks a node has."
    ),
)

PLAIN_PLATFORMS = (
    SKYPILOT,
    DSTACK,
    LEPTON,
    METAFLOW,
    LWS,
    VOLCENGINE,
    BASETEN,
    NGC,
    NSML,
    BEAKER,
    HTCONDOR,
    TPU,
)
