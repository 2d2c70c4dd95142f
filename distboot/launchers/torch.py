"""Plain `RANK` and `WORLD_SIZE`, set for every process by a person, by Azure ML's PyTorch jobs, or by an operator."""

from __future__ import annotations

from collections.abc import Mapping

from ..placement import Placement
from ..reading import Reading
from ._launcher import Launcher, claims

# Azure ML, distribution type PyTorch, two nodes of two, rank 3:
#   RANK=3   WORLD_SIZE=4   LOCAL_RANK=1   NODE_RANK=1   MASTER_ADDR=10.0.0.4   MASTER_PORT=6105
# Kubeflow's PyTorchJob with one process a pod: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT only.
# LOCAL_RANK or NODE_RANK without the rest is half of a launcher.
_MARKERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS):
        return None
    reading = Reading(environ, "torch")
    reading.remedy = (
        "whoever starts the processes sets RANK (0 to WORLD_SIZE - 1) and WORLD_SIZE for each of them: set both, or "
        "clear these if they are left over"
    )
    reading.integer("RANK", "rank")
    reading.integer("WORLD_SIZE", "world_size")
    reading.integer("LOCAL_RANK", "local_rank", required=False)
    reading.integer("LOCAL_WORLD_SIZE", "local_world_size", required=False)
    reading.integer("NODE_RANK", "node_rank", required=False)
    return reading.placement()


TORCH = Launcher(
    name="torch",
    title="plain RANK and WORLD_SIZE (Azure ML PyTorch jobs, Kubernetes operators, by hand)",
    markers=_MARKERS,
    read=_read,
    source="PyTorch documentation, 'torch.distributed: environment variable initialization'; "
    "Azure Machine Learning, 'Distributed training: PyTorch'",
    plain=True,
)
