"""Kubeflow's PyTorchJob and TrainJob with several processes a pod: `PET_*`, which torchrun is to read in every pod.

The process that finds them stands for its pod. With one process a pod, RANK and WORLD_SIZE mean what they say.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..address import parse_address, parse_port
from ..errors import DistbootError
from ..placement import Placement
from ..reading import Reading, variable
from ._launcher import Launcher, claims

# Training operator v1, PyTorchJob, nprocPerNode: "4", 3 pods, the last one:
#   PET_NNODES=3   PET_NPROC_PER_NODE=4   PET_NODE_RANK=2   RANK=2 (the pod)   WORLD_SIZE=12   MASTER_ADDR=job-master-0
# nprocPerNode: auto, its default, gives WORLD_SIZE=3, as early versions do for any number.
# Trainer v2: PET_NNODES, PET_NPROC_PER_NODE, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT only.
_MARKERS = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK")


def _read(environ: Mapping[str, str]) -> Placement | None:
    # LOCAL_RANK: somebody has started processes in the pod, and numbered them.
    if not claims(environ, _MARKERS) or "LOCAL_RANK" in environ:
        return None
    per_node = environ.get("PET_NPROC_PER_NODE", "auto")
    plain = "RANK" in environ or "WORLD_SIZE" in environ
    if plain and per_node in ("1", "auto") and environ.get("PET_NNODES") == environ.get("WORLD_SIZE"):
        return None  # the numbers of pods are those of processes
    if ":" in environ.get("PET_NNODES", ""):
        raise DistbootError(
            "node-level-launch",
            f"{variable(environ, 'PET_NNODES')} is a range: an elastic job, whose ranks torchrun starts and numbers",
            "start the script with torchrun in every pod; it reads the PET_* variables",
        ).of("node ?")
    reading = Reading(environ, "kubeflow")
    nodes = reading.integer("PET_NNODES", "world_size")
    node = reading.integer("PET_NODE_RANK", "rank", required="RANK" not in environ)
    if node is None:
        node = reading.integer("RANK", "rank", required=False)
    reading.agree("RANK", node, "PET_NODE_RANK")
    count = None if per_node in ("auto", "cpu", "gpu", "xpu") else reading.integer("PET_NPROC_PER_NODE")
    if nodes is not None and environ.get("WORLD_SIZE", str(nodes)) not in (str(nodes), str(nodes * (count or 1))):
        reading.problems.append(
            f"{variable(environ, 'WORLD_SIZE')} is neither PET_NNODES={nodes} "
            f"nor that times {variable(environ, 'PET_NPROC_PER_NODE')}"
        )
    reading.put("num_nodes", nodes, "PET_NNODES")
    if count != 1:
        reading.node_level = f"PET_NPROC_PER_NODE={per_node} asks for {count or 'several'} processes in each pod"
    if "PET_MASTER_ADDR" not in environ or "MASTER_ADDR" in environ:
        return reading.placement()
    address, port = reading.parsed("PET_MASTER_ADDR", parse_address), reading.parsed("PET_MASTER_PORT", parse_port)
    if port is not None and "MASTER_PORT" not in environ:
        reading.put("master_port", port, "PET_MASTER_PORT")
    return reading.placement(own_address=address and (address[0], "PET_MASTER_ADDR"))


KUBEFLOW = Launcher(
    name="kubeflow",
    title="Kubeflow PyTorchJob and TrainJob, several processes a pod (PET_*)",
    markers=_MARKERS,
    read=_read,
    source="documentation: Kubeflow training operator v1, pkg/controller.v1/pytorch/envvar.go; Kubeflow Trainer v2, "
    "pkg/runtime/framework/plugins/torch/torch.go",
    reads_plain=True,
    passing="an env entry NAME=VALUE in the pod template",
)
