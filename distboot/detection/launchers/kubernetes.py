"""Operators of Kubernetes that number pods: Kubeflow, Volcano, and those that imitate a PyTorchJob."""

from __future__ import annotations

from collections.abc import Mapping

from ...base.errors import DistbootError
from ...base.text import digits, short_repr
from ..env_reader import EnvReader, variable
from ..node_platform import NodePlatform
from ..parse import parse_address, parse_number, parse_port
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
    _refuse_elastic(reader.environ)
    # Flyte's 2:2 is no range
    nodes = reader.parsed("PET_NNODES", _first_number, required=True)
    reader.put("PET_NNODES", world_size=nodes)
    node = reader.integer(reader.first("PET_NODE_RANK", "RANK"), "rank")
    reader.agree("RANK", node, "PET_NODE_RANK")
    per_node = reader.environ.get("PET_NPROC_PER_NODE", "auto")
    count = None
    if per_node not in ("auto", "cpu", "gpu", "xpu"):
        count = reader.integer("PET_NPROC_PER_NODE")
    _check_pods_or_ranks(reader, nodes, count or 1)
    reader.put("PET_NNODES", num_nodes=nodes)
    if count != 1:
        reader.node_level = (
            f"PET_NPROC_PER_NODE={per_node} asks for {count or 'several'} processes in each pod"
        )
    _locate_pod_0(reader)


def _first_number(text: str) -> int:
    return parse_number(text.partition(":")[0])


def _refuse_elastic(environ: Mapping[str, str]) -> None:
    low, colon, high = environ.get("PET_NNODES", "").partition(":")
    if colon and low != high:
        raise DistbootError(
            "node-level-launch",
            f"{variable(environ, 'PET_NNODES')} is a range: an elastic job, whose ranks torchrun "
            "starts and numbers",
            "start the script with torchrun in every pod; it reads the PET_* variables",
        ).of("node ?")


def _check_pods_or_ranks(reader: EnvReader, nodes: int | None, count: int) -> None:
    """Refuse a WORLD_SIZE that counts neither the pods nor the ranks."""
    size = reader.environ.get("WORLD_SIZE")
    if nodes is None or size is None or size in (str(nodes), str(nodes * count)):
        return
    per_node = short_repr(reader.environ.get("PET_NPROC_PER_NODE", "auto"))
    why = f"is neither PET_NNODES={nodes} nor that times PET_NPROC_PER_NODE={per_node}"
    reader.reject("WORLD_SIZE", why)


def _locate_pod_0(reader: EnvReader) -> None:
    if "PET_MASTER_ADDR" not in reader.environ or "MASTER_ADDR" in reader.environ:
        return
    address = reader.parsed("PET_MASTER_ADDR", parse_address)
    port = reader.parsed("PET_MASTER_PORT", parse_port)
    if "MASTER_PORT" not in reader.environ:
        reader.put("PET_MASTER_PORT", master_port=port)
    reader.own_address = address and (address[0], "PET_MASTER_ADDR")


KUBEFLOW = NodePlatform(
    name="kubeflow",
    title="Kubeflow PyTorchJob and TrainJob, several processes per pod (PET_*)",
    page=(
        "https://github.com/kubeflow/trainer/blob/master/"
        "pkg/runtime/framework/plugins/torch/torch.go"
    ),
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
            "give the job Volcano's pytorch plugin (or its tensorflow or mpi plugin), or set "
            "DISTBOOT_LAUNCHER=none if each pod works alone"
        )
        return
    if "RANK" not in reader.environ:
        reader.remedy = (
            "Volcano's pytorch plugin gives RANK to the pods of its master and worker tasks only; "
            "set DISTBOOT_LAUNCHER=none in the pods of another task, such as TensorBoard's, which "
            "work alone"
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
    page=(
        "https://github.com/volcano-sh/volcano/tree/master/"
        "pkg/controllers/job/plugins/distributed-framework/pytorch"
    ),
    index_variable="RANK",
    count_variable="WORLD_SIZE",
    marks=_VOLCANO,
    also=(*_VOLCANO, "VC_*_NUM"),
    read=_read_volcano,
    claim=_claim_volcano,
    owns_torch_vars=True,
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
    sample=(
        "RANK=1 WORLD_SIZE=2 MASTER_ADDR=job-master-0.job MASTER_PORT=23456 VC_TASK_INDEX=0 "
        "VK_TASK_INDEX=0 VC_MASTER_HOSTS=job-master-0.job VC_WORKER_HOSTS=job-worker-0.job"
    ),
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
    note=(
        "On Kubernetes, and if `NPROC_PER_NODE` is above 1; with one process per pod these are "
        "ranks."
    ),
)
