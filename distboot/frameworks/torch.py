"""`init("torch")`: torch.distributed with NCCL on CUDA and Gloo on CPU."""

from __future__ import annotations

from collections.abc import Mapping

from ..placement import Placement
from ..rollcall.meeting import Meeting
from . import _oneccl
from ._options import Options

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..context import Context
    from ..exports import Exported

# `_process_group` is imported where it is needed, as the wrapper asks for `exports` only, at every start.


def on_cpu(options: Options) -> bool:
    """Asking for a CPU backend means training on the CPU."""
    from ._process_group import on_cpu as asked

    return asked(options)


def start(meeting: Meeting, exported: Exported, options: Options) -> Context:
    """Start the default process group."""
    from ._process_group import start as start_group

    return start_group(meeting, exported, options)


def exports(meeting: Meeting, environ: Mapping[str, str]) -> dict[str, str]:
    """What PyTorch Lightning reads, and oneCCL, which is Intel's alone."""
    return _of_torchrun(meeting.placement, environ) | _oneccl.exports(meeting.placement, environ)


def _of_torchrun(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """By what Lightning knows that somebody has started all ranks, and numbered them as RANK and its like say.

    It asks for torchrun first (lightning.fabric.plugins.environments, 2.6), for mpi4py later, and for nobody else.
    """
    if placement.world_size == 1 or placement.launcher == "torchrun":
        return {}
    numbers_of_slurm = "SLURM_NTASKS_PER_NODE" in environ and environ.get("SLURM_NTASKS") == str(placement.world_size)
    if placement.launcher == "slurm" and numbers_of_slurm:
        return {}  # Lightning's own plugin for Slurm works with these, and can requeue the job
    return {
        "TORCHELASTIC_RUN_ID": placement.job_id or "none",  # which is torchrun's default, too
        "GROUP_RANK": str(placement.node_rank),
        "GROUP_WORLD_SIZE": str(placement.num_nodes),
    }
