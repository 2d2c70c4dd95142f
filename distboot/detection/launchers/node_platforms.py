"""The platforms that number nodes: one record each, and a function for special variables.

Each starts one process on each node, which is to run one rank or several. The page of the reference
about platforms is made from these records, and from those of the platforms that have a file of
their own, as they have more to read than an index and a count.
"""

from __future__ import annotations

from ...base.text import digits
from ..env_reader import EnvReader
from ..node_platform import NodePlatform, read
from ..parse import parse_address

SKYPILOT = NodePlatform(
    name="skypilot",
    title="SkyPilot",
    source="https://docs.skypilot.co/en/stable/running-jobs/distributed-jobs.html",
    index_variable="SKYPILOT_NODE_RANK",
    count_variable="SKYPILOT_NUM_NODES",
    hosts="SKYPILOT_NODE_IPS",
    per_node=("SKYPILOT_NUM_GPUS_PER_NODE",),
    job_id_variables=("SKYPILOT_TASK_ID",),
    sample=(
        "SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=2 SKYPILOT_NUM_GPUS_PER_NODE=8 "
        "SKYPILOT_NODE_IPS=10.0.0.4,10.0.0.5 SKYPILOT_TASK_ID=sky-2026-07-06-21-18-31-563597_demo_1"
    ),
    note="The list has one address a line. Before 0.6.1 it alone says how many nodes there are.",
)

DSTACK = NodePlatform(
    name="dstack",
    title="dstack",
    source="https://dstack.ai/docs/concepts/tasks",
    index_variable="DSTACK_NODE_RANK",
    count_variable="DSTACK_NODES_NUM",
    address="DSTACK_MASTER_NODE_IP",
    hosts="DSTACK_NODES_IPS",
    per_node=("DSTACK_GPUS_PER_NODE",),
    job_id_variables=("DSTACK_RUN_ID", "DSTACK_RUN_NAME"),
    sample=(
        "DSTACK_NODE_RANK=1 DSTACK_NODES_NUM=2 DSTACK_GPUS_PER_NODE=8 DSTACK_GPUS_NUM=16 "
        "DSTACK_MASTER_NODE_IP=192.168.0.94 DSTACK_NODES_IPS=192.168.0.94,192.168.0.95 "
        "DSTACK_RUN_NAME=demo"
    ),
)


# LEPTON_JOB_WORKER_PREFIX=worker   LEPTON_SUBDOMAIN=env-job-98bw-job-svc:
# worker-0.env-job-98bw-job-svc is node 0
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
    source="https://docs.nvidia.com/dgx-cloud/lepton/features/batch-jobs/predefined-env-vars",
    index_variable="LEPTON_JOB_WORKER_INDEX",
    count_variable="LEPTON_JOB_TOTAL_WORKERS",
    per_node=("LEPTON_RESOURCE_ACCELERATOR_NUM",),
    job_id_variables=("LEPTON_JOB_NAME",),
    also_reads=("LEPTON_JOB_WORKER_PREFIX", "LEPTON_SUBDOMAIN"),
    read=_read_lepton,
    sample=(
        "LEPTON_JOB_WORKER_INDEX=1 LEPTON_JOB_TOTAL_WORKERS=2 LEPTON_RESOURCE_ACCELERATOR_NUM=8 "
        "LEPTON_JOB_WORKER_PREFIX=worker LEPTON_SUBDOMAIN=env-job-98bw-job-svc "
        "LEPTON_JOB_NAME=env-job-98bw"
    ),
    note="Node 0 is `$LEPTON_JOB_WORKER_PREFIX-0.$LEPTON_SUBDOMAIN`.",
)

METAFLOW = NodePlatform(
    name="metaflow",
    title="Metaflow @parallel",
    source="https://github.com/Netflix/metaflow/blob/master/metaflow/plugins/parallel_decorator.py",
    index_variable="MF_PARALLEL_NODE_INDEX",
    count_variable="MF_PARALLEL_NUM_NODES",
    address="MF_PARALLEL_MAIN_IP",
    port="MF_MASTER_PORT",
    sample="MF_PARALLEL_NODE_INDEX=1 MF_PARALLEL_NUM_NODES=2 MF_PARALLEL_MAIN_IP=10.0.0.4",
)


# In pods that ask for google.com/tpu the controller sets TPU_WORKER_ID=1 and
# TPU_WORKER_HOSTNAMES=lws-0.lws,lws-0-1.lws, too (pkg/utils/accelerators/tpu.go). Their numbers
# differ from those of LWS_* where the leader has no chips, and in subgroups.
def _read_lws(reader: EnvReader) -> None:
    read(LWS, reader)
    worker = digits(reader.environ.get("TPU_WORKER_ID", ""))
    hosts = {*reader.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")}
    own = (reader.number("rank"), reader.number("world_size"))
    if (worker, len(hosts)) == own:
        reader.node_level = None  # one process uses all chips of a host


LWS = NodePlatform(
    name="lws",
    title="LeaderWorkerSet on Kubernetes",
    source="https://github.com/kubernetes-sigs/lws/blob/main/pkg/utils/pod/pod_utils.go",
    index_variable="LWS_WORKER_INDEX",
    count_variable="LWS_GROUP_SIZE",
    address="LWS_LEADER_ADDRESS",
    also_reads=("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"),
    read=_read_lws,
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
    sample="LWS_WORKER_INDEX=1 LWS_GROUP_SIZE=2 LWS_LEADER_ADDRESS=lws-0.lws.default",
    note=(
        "With `TPU_WORKER_ID` and `TPU_WORKER_HOSTNAMES` of the same numbers, one process uses all "
        "chips of a host."
    ),
)

VOLCENGINE = NodePlatform(
    name="volcengine",
    title="Volcengine machine learning platform",
    source="https://www.volcengine.com/docs/6459/75329",
    index_variable="MLP_ROLE_INDEX",
    count_variable="MLP_WORKER_NUM",
    address="MLP_WORKER_0_HOST",
    hosts="MLP_WORKER_ALL_HOSTS",
    port="MLP_WORKER_0_PORT",
    per_node=("MLP_WORKER_GPU",),
    job_id_variables=("MLP_TASK_ID",),
    sample=(
        "MLP_ROLE=WORKER MLP_ROLE_INDEX=1 MLP_WORKER_NUM=2 MLP_WORKER_GPU=8 "
        "MLP_WORKER_0_HOST=10.128.0.4 "
        "MLP_WORKER_0_PORT=9006 MLP_WORKER_ALL_HOSTS=10.128.0.4,10.128.0.5 "
        "MLP_TASK_ID=t-20260924211641-nznsh"
    ),
)

BASETEN = NodePlatform(
    name="baseten",
    title="Baseten Training",
    source="https://docs.baseten.co/training/concepts/multinode",
    index_variable="BT_NODE_RANK",
    count_variable="BT_GROUP_SIZE",
    address="BT_LEADER_ADDR",
    per_node=("BT_NUM_GPUS",),
    job_id_variables=("BT_TRAINING_JOB_ID",),
    sample=(
        "BT_NODE_RANK=1 BT_GROUP_SIZE=2 BT_LEADER_ADDR=10.0.0.4 BT_NUM_GPUS=8 "
        "BT_TRAINING_JOB_ID=7qk9d3r"
    ),
)

NGC = NodePlatform(
    name="ngc",
    title="NVIDIA Base Command Platform",
    source="https://docs.nvidia.com/base-command-platform/",
    index_variable="NGC_ARRAY_INDEX",
    count_variable="NGC_ARRAY_SIZE",
    address="NGC_MASTER_ADDR",
    per_node=("NGC_GPUS_PER_NODE",),
    job_id_variables=("NGC_JOB_ID",),
    sample=(
        "NGC_ARRAY_INDEX=1 NGC_ARRAY_SIZE=2 NGC_MASTER_ADDR=launcher-svc-1234567 "
        "NGC_GPUS_PER_NODE=8 "
        "NGC_ARRAY_TYPE=PYTORCH NGC_JOB_ID=1234567"
    ),
    note="The names are from public job scripts.",
)

NSML = NodePlatform(
    name="nsml",
    title="NAVER CLOVA NSML",
    source="https://guide.ncloud-docs.com/docs/ai-clova-nsml-high-3-3",
    index_variable="NSML_RANK",
    count_variable="NSML_WORLD_SIZE",
    address="NSML_HOST_RANK0",
    sample="NSML_RANK=1 NSML_WORLD_SIZE=2 NSML_HOST_RANK0=run-1-0 NSML_HOST_RANK1=run-1-1",
)


# With leaderSelection only; without it the replicas are a sweep, or nobody knows.
BEAKER = NodePlatform(
    name="beaker",
    title="AI2 Beaker, with leaderSelection",
    source="https://beaker-docs.apps.allenai.org/",
    index_variable="BEAKER_REPLICA_RANK",
    count_variable="BEAKER_REPLICA_COUNT",
    address="BEAKER_LEADER_REPLICA_HOSTNAME",
    per_node=("BEAKER_ASSIGNED_GPU_COUNT",),
    job_id_variables=("BEAKER_EXPERIMENT_ID",),
    needed={"BEAKER_LEADER_REPLICA_HOSTNAME"},
    sample=(
        "BEAKER_REPLICA_RANK=1 BEAKER_REPLICA_COUNT=2 "
        "BEAKER_LEADER_REPLICA_HOSTNAME=jupiter-101.example.com "
        "BEAKER_ASSIGNED_GPU_COUNT=8 BEAKER_EXPERIMENT_ID=01J"
    ),
    note=(
        "The names are from public job scripts. Replicas without a leader are refused: they "
        "may be a sweep."
    ),
)

# The parallel universe only: a job of the vanilla universe has neither. No variable has an address.
HTCONDOR = NodePlatform(
    name="htcondor",
    title="HTCondor, parallel universe",
    source="https://htcondor.readthedocs.io/en/latest/users-manual/parallel-applications.html",
    index_variable="_CONDOR_PROCNO",
    count_variable="_CONDOR_NPROCS",
    sample="_CONDOR_PROCNO=1 _CONDOR_NPROCS=2 _CONDOR_SLOT=slot1_1",
    note="Nothing says where node 0 is: set `MASTER_ADDR` and `MASTER_PORT`.",
)


# Built on Volcano, and asked before it.
MODELARTS = NodePlatform(
    name="modelarts",
    title="Huawei Cloud ModelArts",
    source="https://support.huaweicloud.com/intl/en-us/modelarts/",
    index_variable="VC_TASK_INDEX",
    count_variable="MA_NUM_HOSTS",
    hosts="VC_WORKER_HOSTS",
    per_node=("MA_NUM_GPUS",),
    job_id_variables=("MA_VJ_NAME",),
    needed={"MA_NUM_HOSTS"},
    sample=(
        "VC_TASK_INDEX=1 MA_NUM_HOSTS=2 MA_NUM_GPUS=8 VC_WORKER_NUM=2 "
        "VC_WORKER_HOSTS=job-worker-0.job,job-worker-1.job MA_VJ_NAME=job"
    ),
    note="The names are from public job scripts.",
)
