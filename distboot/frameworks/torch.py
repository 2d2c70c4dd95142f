"""`init("torch")`: torch.distributed with NCCL on CUDA and Gloo on CPU."""

from __future__ import annotations

from collections.abc import Mapping

from ..accelerators import has_intel_gpu
from ..placement import Placement
from ..rollcall.meeting import Meeting
from . import _oneccl
from ._process_group import on_cpu, start

__all__ = ["exports", "on_cpu", "start"]


def exports(meeting: Meeting, environ: Mapping[str, str]) -> dict[str, str]:
    """What PyTorch Lightning reads, and oneCCL, which is Intel's alone."""
    return _of_torchrun(meeting.placement, environ) | (
        _oneccl.variables(meeting.placement, environ) if has_intel_gpu() else {}
    )


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
