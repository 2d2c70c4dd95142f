"""Plain `RANK` and `WORLD_SIZE`, set for every process by a person, by Azure ML's PyTorch jobs, or by an operator."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import DistbootError
from ..placement import Placement
from ..reading import Reading, variable
from ._launcher import Launcher, claims

# Azure ML, distribution type PyTorch, two nodes of two, rank 3:
#   RANK=3   WORLD_SIZE=4   LOCAL_RANK=1   NODE_RANK=1   MASTER_ADDR=10.0.0.4   MASTER_PORT=6105
# Kubeflow's PyTorchJob with one process a pod: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT only.
# LOCAL_RANK without the rest is half of a launcher (Lightning's subprocess launcher sets no RANK, say).
_MARKERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS):
        return None
    _refuse_node_level(environ)
    reading = Reading(environ, "torch")
    reading.integer("RANK", "rank")
    reading.integer("WORLD_SIZE", "world_size")
    reading.integer("LOCAL_RANK", "local_rank", required=False)
    reading.integer("LOCAL_WORLD_SIZE", "local_world_size", required=False)
    reading.integer("NODE_RANK", "node_rank", required=False)
    return reading.placement()


def _refuse_node_level(environ: Mapping[str, str]) -> None:
    # Kubeflow's PyTorchJob v1 with nprocPerNode: 4 sets PET_NPROC_PER_NODE=4 for torchrun, which is not running
    # here, RANK to the pod's index and WORLD_SIZE to pods x 4. With 'auto' WORLD_SIZE counts pods, which is
    # right for one process a pod.
    per_node = environ.get("PET_NPROC_PER_NODE", "1")
    if per_node not in ("1", "auto"):
        raise DistbootError(
            "node-level-launch",
            f"{variable(environ, 'PET_NPROC_PER_NODE')} asks for several processes in each pod, so RANK numbers pods, "
            "not processes",
            "start the script with torchrun, which reads the PET_* variables",
        )


TORCH = Launcher(
    name="torch",
    title="plain RANK and WORLD_SIZE (Azure ML PyTorch jobs, Kubernetes operators, by hand)",
    markers=_MARKERS,
    read=_read,
    source="PyTorch documentation, 'torch.distributed: environment variable initialization'; "
    "Azure Machine Learning, 'Distributed training: PyTorch'",
    plain=True,
)
