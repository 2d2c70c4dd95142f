"""`init("torch")`: the device of a rank, its backend, and the variables of what is built on torch.

torch.distributed uses NCCL on CUDA and Gloo on the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from ..base.errors import DistbootError
from ..base.text import short_repr
from ..detection.detect import NODE_LEVEL_HINT
from ..detection.order import LAUNCHERS
from ..detection.placement import WRAPPER, Placement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..agent.session import Session
    from . import Options

_CPU_BACKENDS = ("gloo", "mpi", "ucc")

# Device type -> the backend that PyTorch ships for it, in order of preference. The CPU has gloo.
_ACCELERATORS = {"cuda": "nccl", "xpu": "xccl", "hpu": "hccl"}
_DEVICE_OF = {backend: kind for kind, backend in _ACCELERATORS.items()}

# oneCCL 2021 reads the first two, which Hydra sets, the launcher of Intel MPI and MPICH. If none of
# the five is set, torch's ProcessGroupXCCL tells oneCCL the numbers itself, from LOCAL_RANK and
# LOCAL_WORLD_SIZE. If one of the last three is set, as under Open MPI and srun --mpi=pmi2 or pmix,
# it takes the launcher for Hydra and leaves that to it.
_HYDRA = {"MPI_LOCALRANKID", "MPI_LOCALNRANKS"}
_MPI = _HYDRA | {"PMI_RANK", "PMI_SIZE", "PMIX_RANK"}


def on_cpu(options: Options) -> bool:
    """Whether the user asked for a backend of the CPU."""
    return (options.backend or "").lower() in _CPU_BACKENDS


def device_and_backend(torch: Any, asked: str | None) -> tuple[str, str]:
    """The type of the device, for example "cuda", and the backend: the one asked for, if any."""
    device_type = "cpu"
    if asked not in _CPU_BACKENDS:
        device_type = _visible_type(torch)
    backend = asked or _backend_for(torch, device_type)
    for part in backend.split(","):  # torch's syntax for several is "cpu:gloo,cuda:nccl"
        _refuse_backend(torch, part.rpartition(":")[2])
    return device_type, backend


def _visible_type(torch: Any) -> str:
    visible = filter(partial(_is_visible, torch), _ACCELERATORS)
    return next(visible, "cpu")


def _backend_for(torch: Any, device_type: str) -> str:
    backend = _ACCELERATORS.get(device_type, "gloo")
    if torch.distributed.is_backend_available(backend):
        return backend
    return "gloo"


def _refuse_backend(torch: Any, name: str) -> None:
    """Refuse a backend that this build of torch lacks, or that has no device here."""
    if not name or not torch.distributed.is_backend_available(name):
        raise DistbootError(
            "backend-not-available",
            f"this build of torch has no backend {short_repr(name)}",
            "leave backend out to get the right one for the device, or install a build that has it",
        )
    needed = _DEVICE_OF.get(name)
    if needed is not None and not _is_visible(torch, needed):
        raise DistbootError(
            "backend-not-available",
            f"backend {short_repr(name)} needs a {needed} device, "
            "and torch sees none in this process",
            "`python -m distboot doctor` looks for the reason; leave backend out to train on what "
            "is there",
        )


def _is_visible(torch: Any, kind: str) -> bool:
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())


def set_device(
    torch: Any,
    device_type: str,
    placement: Placement,
    environ: Mapping[str, str],
    cpu_hint: str = "ask for backend='gloo'",
) -> Any:
    """Make this rank's device the current one, and return it.

    `cpu_hint` is the remedy of an error: how to train on the CPU.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    module = getattr(torch, device_type)
    count = module.device_count()
    refuse_idle_accelerators(placement, device_type, count)
    index = own_device(
        placement,
        environ,
        count,
        f"{device_type} device",
        cpu_hint,
    )
    module.set_device(index)
    return torch.device(device_type, index)


def own_device(
    placement: Placement, environ: Mapping[str, str], count: int, kind: str, cpu_hint: str
) -> int:
    """The index of this rank's own device among `count` visible ones; `cpu_hint` as above."""
    # Here and below: pathlib would slow every start of the wrapper
    from ..host.accelerators import own_index

    index = own_index(count, environ, placement.local_rank)
    if index is None:
        where = f"local rank {placement.local_rank} of {placement.local_world_size}"
        raise DistbootError(
            "too-few-accelerators",
            f"{where} has no {kind} of its own: {count} visible",
            "start fewer processes per node, show them more devices, or "
            f"{cpu_hint} to train on the CPU",
        )
    return index


def refuse_idle_accelerators(placement: Placement, device_type: str, count: int) -> None:
    """Refuse one process on a node with `count` accelerators, unless the user chose that."""
    one_per_node = placement.num_nodes == placement.world_size > 1
    is_told = LAUNCHERS[placement.launcher].told_ranks_per_node
    is_told |= placement.launcher == WRAPPER  # by --nproc-per-node
    if one_per_node and count > 1 and not is_told:
        raise DistbootError(
            "node-level-launch",
            f"one process was started on each of {placement.num_nodes} nodes, and this one sees "
            f"{count} {device_type} devices: all but the first would idle",
            f"{NODE_LEVEL_HINT}; or show each process the one device that it is to use "
            "(CUDA_VISIBLE_DEVICES=0)",
        )


def device_id(torch: Any, device: Any) -> str | None:
    """An id that two ranks must not share; None on the CPU, or if this torch has none."""
    if device.type != "cuda":
        return None
    if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return None  # two MIG instances of one device may have the device's id
    properties = torch.cuda.get_device_properties(device.index)
    uuid = getattr(properties, "uuid", None)  # since torch 2.6
    if uuid is None:
        return None
    return f"GPU-{uuid}"


def torchelastic_variables(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of torchrun that tell PyTorch Lightning that all ranks are started.

    Lightning looks for torchrun first (lightning.fabric.plugins.environments, 2.6), later for
    mpi4py. With LOCAL_RANK alone it starts no ranks, but waits for `devices` times `num_nodes` of
    them; with these variables it compares the numbers.
    """
    if LAUNCHERS[placement.launcher].serves_lightning(environ, placement.world_size):
        return {}
    if None in (placement.node_rank, placement.num_nodes):
        return {}
    return {
        "TORCHELASTIC_RUN_ID": placement.job_id or "none",  # torchrun's default, too
        "GROUP_RANK": str(placement.node_rank),
        "GROUP_WORLD_SIZE": str(placement.num_nodes),
    }


def exports(session: Session, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank that has met the others."""
    return exports_of(session.placement, environ)


def exports_of(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for PyTorch Lightning, and for oneCCL on a host with a GPU of Intel.

    Those that the placement does not prove are left out.
    """
    found = torchelastic_variables(placement, environ)
    for_oneccl = oneccl_variables(placement, environ)
    if for_oneccl:
        from ..host.accelerators import has_intel_gpu  # here, as few launchers need it

        if has_intel_gpu():
            found |= for_oneccl
    return found


def oneccl_variables(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """The local rank for oneCCL, the library of torch's backend xccl, unless it has one already."""
    if placement.world_size == 1:
        return {}
    if None in (placement.local_rank, placement.local_world_size):
        return {}
    if "CCL_PROCESS_LAUNCHER" in environ or environ.keys() >= _HYDRA:
        return {}
    if _MPI.isdisjoint(environ):  # torch tells oneCCL itself
        return {}
    return {
        "CCL_PROCESS_LAUNCHER": "none",
        "CCL_LOCAL_RANK": str(placement.local_rank),
        "CCL_LOCAL_SIZE": str(placement.local_world_size),
    }
