"""Plain RANK and WORLD_SIZE, set by a person, by Azure ML's PyTorch jobs, or by an operator.

Kubeflow's PyTorchJob with one process per pod has RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
only. LOCAL_RANK without the rest is half of a launcher.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..env_reader import EnvReader
from . import Launcher

_RANK_AND_SIZE = ("RANK", "WORLD_SIZE")
_PLACE = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
_MARKERS = (*_RANK_AND_SIZE, *_PLACE)


def _claim(environ: Mapping[str, str]) -> bool:
    """False for WORLD_SIZE=1 alone: an image may set it, and the process has no peers."""
    there = [name for name in _MARKERS if name in environ]
    is_one = there == ["WORLD_SIZE"] and environ["WORLD_SIZE"].strip() == "1"
    return not is_one


def _read(reader: EnvReader) -> None:
    there = [name for name in _MARKERS if name in reader.environ]
    reader.remedy = (
        "set RANK (0 to WORLD_SIZE - 1) and WORLD_SIZE for every process that is started, or unset "
        f"{', '.join(there)} if left over"
    )
    reader.integers(*_RANK_AND_SIZE, *_PLACE, optional=_PLACE)


TORCH = Launcher(
    name="torch",
    title="plain RANK and WORLD_SIZE (Azure ML PyTorch jobs, Kubernetes operators, by hand)",
    source=(
        "PyTorch documentation, 'torch.distributed: environment variable initialization'; "
        "Azure Machine Learning, 'Distributed training: PyTorch'"
    ),
    # Azure ML, distribution type PyTorch
    sample=(
        "RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local} NODE_RANK={node} "
        "MASTER_ADDR=10.0.0.4 MASTER_PORT=6105"
    ),
    markers=_MARKERS,
    claim=_claim,
    read=_read,
    in_order=(),  # a user may have numbered them as they like
    generic_names=True,
    compared_with_nodes=True,
    compared_with_signs=True,
)
