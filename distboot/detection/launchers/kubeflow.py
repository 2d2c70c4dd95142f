"""Kubeflow's PyTorchJob and TrainJob with several processes per pod: `PET_*` for torchrun.

The process that finds them stands for its pod. With one process per pod, RANK and WORLD_SIZE mean
what they say. Training operator v1, PyTorchJob, nprocPerNode: "4", 3 pods, the last one:
  PET_NNODES=3   PET_NPROC_PER_NODE=4   PET_NODE_RANK=2   RANK=2 (the pod)   WORLD_SIZE=12
nprocPerNode: auto, its default, gives WORLD_SIZE=3, as early versions do for any number. Trainer v2
sets PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT only.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...base.errors import DistbootError
from ...base.text import short_repr
from ..env_reader import EnvReader, variable
from ..node_platform import NodePlatform
from ..parse import parse_number, parse_port
from . import has_any

_MARKERS = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK")


def _claim(environ: Mapping[str, str]) -> bool:
    if not has_any(environ, ("RANK", "WORLD_SIZE")):
        return True
    has_several = environ.get("PET_NPROC_PER_NODE", "auto") not in ("1", "auto")
    # Else the numbers of pods are those of processes.
    return has_several or environ.get("WORLD_SIZE") != environ.get("PET_NNODES")


def _read(reader: EnvReader) -> None:
    _refuse_elastic(reader.environ)
    # Flyte's 2:2 is no range
    nodes = reader.parsed("PET_NNODES", _first_number, required=True)
    reader.record("PET_NNODES", world_size=nodes)
    node = reader.integer(reader.first("PET_NODE_RANK", "RANK"), "rank")
    reader.agree("RANK", node, "PET_NODE_RANK")
    per_node = reader.environ.get("PET_NPROC_PER_NODE", "auto")
    count = None
    if per_node not in ("auto", "cpu", "gpu", "xpu"):
        count = reader.integer("PET_NPROC_PER_NODE")
    _check_pods_or_ranks(reader, nodes, count or 1)
    reader.record("PET_NNODES", num_nodes=nodes)
    if count != 1:
        reader.node_level = (
            f"PET_NPROC_PER_NODE={per_node} asks for {count or 'several'} processes in each pod"
        )
    _locate_pod_0(reader)


def _first_number(text: str) -> int:
    first, _, _ = text.partition(":")
    return parse_number(first)


def _refuse_elastic(environ: Mapping[str, str]) -> None:
    ends = environ.get("PET_NNODES", "").split(":", 1)
    if len({*ends}) > 1:
        shown = variable(environ, "PET_NNODES")
        raise DistbootError(
            "node-level-launch",
            f"{shown} is a range: an elastic job, whose ranks torchrun starts and numbers",
            "start the script with torchrun in every pod; it reads the PET_* variables",
        ).of("node ?")


def _check_pods_or_ranks(reader: EnvReader, nodes: int | None, count: int) -> None:
    """Refuse a WORLD_SIZE that counts neither the pods nor the ranks."""
    size = reader.environ.get("WORLD_SIZE")
    if nodes is None or size is None:
        return
    possible = (str(nodes), str(nodes * count))
    if size not in possible:
        per_node = short_repr(reader.environ.get("PET_NPROC_PER_NODE", "auto"))
        reader.reject(
            "WORLD_SIZE",
            f"is neither PET_NNODES={nodes} nor that times PET_NPROC_PER_NODE={per_node}",
        )


def _locate_pod_0(reader: EnvReader) -> None:
    address = "PET_MASTER_ADDR"
    port = "PET_MASTER_PORT"
    is_given = "MASTER_ADDR" in reader.environ
    if is_given or address not in reader.environ:
        return
    reader.take_own_address(address)
    number = reader.parsed(port, parse_port)
    reader.record_own_port(port, number)


KUBEFLOW = NodePlatform(
    name="kubeflow",
    title="Kubeflow PyTorchJob and TrainJob, several processes per pod (PET_*)",
    source=(
        "https://github.com/kubeflow/trainer/blob/master/"
        "pkg/runtime/framework/plugins/torch/torch.go"
    ),
    index_variable="PET_NODE_RANK",
    count_variable="PET_NNODES",
    own_markers=_MARKERS,
    address="PET_MASTER_ADDR",
    port="PET_MASTER_PORT",
    per_node=("PET_NPROC_PER_NODE",),
    also_reads=("RANK", "WORLD_SIZE"),
    read=_read,
    # Something has started processes in the pod, and numbered them
    unless=("LOCAL_RANK",),
    claim=_claim,
    owns_torch_vars=True,
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
    sample=(
        "PET_NNODES=2 PET_NPROC_PER_NODE=8 PET_NODE_RANK=1 PET_MASTER_ADDR=digits-node-0-0.digits "
        "PET_MASTER_PORT=29500 KUBERNETES_SERVICE_HOST=10.96.0.1"
    ),
    note="With one process per pod and `RANK` and `WORLD_SIZE`, these two are ranks.",
)
