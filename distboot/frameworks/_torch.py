"""`init("torch")`: the device of a rank, the backend that suits it, and what is built on torch reads.

torch.distributed with NCCL on CUDA and Gloo on the CPU; what is built on it uses parts of this.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..base.errors import DistbootError
from ..base.text import short_repr
from ..detection.detect import NODE_LEVEL_HINT
from ..detection.placement import Placement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..agent.session import Session
    from . import Options

_CPU_BACKENDS = ("gloo", "mpi", "ucc")

# Device type -> the backend that PyTorch ships for it; gloo serves the CPU. In order of preference.
_ACCELERATORS = {"cuda": "nccl", "xpu": "xccl", "hpu": "hccl"}

# oneCCL 2021 reads the first two, which Hydra sets, the launcher of Intel MPI and MPICH. Where none of these is set
# torch's ProcessGroupXCCL tells oneCCL itself, from LOCAL_RANK and LOCAL_WORLD_SIZE. With one of the last three, as
# under Open MPI and under srun --mpi=pmi2 or pmix, it believes that Hydra has done so.
_HYDRA = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_MPI = (*_HYDRA, "PMI_RANK", "PMI_SIZE", "PMIX_RANK")


def on_cpu(options: Options) -> bool:
    """Asking for a CPU backend means training on the CPU."""
    return (options.backend or "").lower() in _CPU_BACKENDS


def device_and_backend(torch: Any, wanted: str | None) -> tuple[str, str]:
    """The type of the device, for example "cuda", and the backend that is wanted, or suits it."""
    if wanted in _CPU_BACKENDS:
        device_type, backend = "cpu", wanted
    else:
        device_type = next((kind for kind in _ACCELERATORS if _is_visible(torch, kind)), "cpu")
        backend = wanted or _ACCELERATORS.get(device_type, "gloo")
        if wanted is None and not torch.distributed.is_backend_available(backend):
            backend = "gloo"
    for part in backend.split(","):  # "cpu:gloo,cuda:nccl" is torch's way to name several
        name = part.rpartition(":")[2]
        if not name or not torch.distributed.is_backend_available(name):
            hint = "leave backend out to get the right one for the device, or install a build that has it"
            raise DistbootError(
                "backend-not-available",
                f"this build of torch has no backend {short_repr(name)}",
                hint,
            )
        needs = next(
            (kind for kind, its_backend in _ACCELERATORS.items() if its_backend == name), None
        )
        if needs is not None and not _is_visible(torch, needs):
            problem = f"backend {short_repr(name)} needs a {needs} device, and torch sees none in this process"
            hint = "`python -m distboot doctor` looks for the reason; leave backend out to train on what is there"
            raise DistbootError("backend-not-available", problem, hint)
    return device_type, backend


def _is_visible(torch: Any, kind: str) -> bool:
    return hasattr(torch, kind) and bool(getattr(torch, kind).is_available())


def set_device(
    torch: Any,
    device_type: str,
    placement: Placement,
    environ: Mapping[str, str],
    on_cpu: str = "ask for backend='gloo'",
) -> Any:
    """The device of this rank, which is the current one from now on; `on_cpu` is what to do to train on the CPU."""
    if device_type == "cpu":
        return torch.device("cpu")
    module = getattr(torch, device_type)
    refuse_idle_accelerators(placement, device_type, module.device_count())
    index = own_device(placement, environ, module.device_count(), f"{device_type} device", on_cpu)
    module.set_device(index)
    return torch.device(device_type, index)


def own_device(
    placement: Placement, environ: Mapping[str, str], count: int, kind: str, on_cpu: str
) -> int:
    """The index of this rank's own device among so many visible ones; `on_cpu` as above."""
    # Here and below: pathlib would slow every start of the wrapper
    from ..host.accelerators import own_index

    index = own_index(count, environ, placement.local_rank)
    if index is None:
        where = f"local rank {placement.local_rank} of {placement.local_world_size}"
        problem = f"{where} has no {kind} of its own: {count} visible"
        hint = f"start fewer processes per node, show them more devices, or {on_cpu} to train on the CPU"
        raise DistbootError("too-few-accelerators", problem, hint)
    return index


def refuse_idle_accelerators(placement: Placement, device_type: str, count: int) -> None:
    """Refuse one process per node where the node has several accelerators, `count`, unless the user chose that."""
    one_a_node = placement.num_nodes == placement.world_size > 1
    if one_a_node and count > 1 and placement.launcher != "torchrun":
        raise DistbootError(
            "node-level-launch",
            f"one process was started on each of {placement.num_nodes} nodes, and this one sees {count} {device_type} "
            "devices: all but the first would idle",
            f"{NODE_LEVEL_HINT}; or show each process the one device that it is to use (CUDA_VISIBLE_DEVICES=0)",
        )


def device_id(torch: Any, device: Any) -> str | None:
    """What two ranks must not both have; None on the CPU, or if this torch does not tell."""
    if device.type != "cuda" or "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return None  # two instances on one device may have the device's id
    uuid = getattr(torch.cuda.get_device_properties(device.index), "uuid", None)  # since torch 2.6
    return None if uuid is None else f"GPU-{uuid}"


def torchelastic_variables(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun, by which PyTorch Lightning knows that all ranks are started; if it needs them.

    It asks for torchrun first (lightning.fabric.plugins.environments, 2.6), later for mpi4py. Else LOCAL_RANK alone
    tells it that it need not start any, and it waits for as many as its `devices` and `num_nodes` make; with these it
    compares.
    """
    if placement.launcher == "torchrun" or None in (placement.node_rank, placement.num_nodes):
        return {}
    numbers_of_slurm = "SLURM_NTASKS_PER_NODE" in environ and environ.get("SLURM_NTASKS") == str(
        placement.world_size
    )
    if placement.launcher == "slurm" and numbers_of_slurm:
        return {}  # Lightning's own plugin for Slurm works with these, and can requeue the job
    return {
        "TORCHELASTIC_RUN_ID": placement.job_id or "none",  # which is torchrun's default, too
        "GROUP_RANK": str(placement.node_rank),
        "GROUP_WORLD_SIZE": str(placement.num_nodes),
    }


def exports(job: Session, environ: Mapping[str, str]) -> dict[str, str]:
    """What an unmodified script needs: what PyTorch Lightning reads, and oneCCL on a host where torch may use it."""
    from ..host.accelerators import has_intel_gpu

    ours = oneccl_variables(job.placement, environ) if has_intel_gpu() else {}
    return torchelastic_variables(job.placement, environ) | ours


def oneccl_variables(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """The local rank for oneCCL, the library of torch's backend xccl, unless a launcher or the user tells it."""
    told = all(name in environ for name in _HYDRA) or not any(name in environ for name in _MPI)
    if told or placement.world_size == 1 or "CCL_PROCESS_LAUNCHER" in environ:
        return {}
    return {
        "CCL_PROCESS_LAUNCHER": "none",
        "CCL_LOCAL_RANK": str(placement.local_rank),
        "CCL_LOCAL_SIZE": str(placement.local_world_size),
    }
