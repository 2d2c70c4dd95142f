"""The device of a rank in torch, and the backend that suits it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ..accelerators import own_index
from ..errors import DistbootError, quoted
from ..nodes import refuse_idle_accelerators
from ..placement import Placement

CPU_BACKENDS = ("gloo", "mpi", "ucc")

# Device type -> the backend that PyTorch ships for it; gloo serves the CPU. In order of preference.
_ACCELERATORS = {"cuda": "nccl", "xpu": "xccl", "hpu": "hccl"}


def device_and_backend(torch: Any, wanted: str | None) -> tuple[str, str]:
    """The type of the device, for example "cuda", and the backend that is wanted, or suits it.

    Raises:
        DistbootError: `backend-not-available`.
    """
    if wanted in CPU_BACKENDS:
        device_type, backend = "cpu", wanted
    else:
        device_type = next((kind for kind in _ACCELERATORS if _is_visible(torch, kind)), "cpu")
        backend = wanted or _ACCELERATORS.get(device_type, "gloo")
        if wanted is None and not torch.distributed.is_backend_available(backend):
            backend = "gloo"
    for part in backend.split(","):  # "cpu:gloo,cuda:nccl" is torch's way to name several
        name = part.rpartition(":")[2]
        if not name or not torch.distributed.is_backend_available(name):
            raise DistbootError(
                "backend-not-available",
                f"this build of torch has no backend {quoted(name)}",
                "leave backend out to get the right one for the device, or install a build that has it",
            )
        needs = [kind for kind, its_backend in _ACCELERATORS.items() if its_backend == name]
        if needs and not _is_visible(torch, needs[0]):
            raise DistbootError(
                "backend-not-available",
                f"backend {quoted(name)} needs a {needs[0]} device, and torch sees none in this process",
                "`python -m distboot doctor` looks for the reason; leave backend out to train on what is there",
            )
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
    """The device of this rank, which is the current one from now on.

    Args:
        torch: the module.
        device_type: for example "cuda".
        placement: of this rank, exact.
        environ: the environment as the launcher or the user gave it.
        on_cpu: what a user does to train on the CPU instead.

    Raises:
        DistbootError: `too-few-accelerators` or `node-level-launch`.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    module = getattr(torch, device_type)
    count, local_rank = module.device_count(), placement.local_rank
    refuse_idle_accelerators(placement, device_type, count)
    index = own_index(count, environ, local_rank)
    if index is None:
        raise DistbootError(
            "too-few-accelerators",
            f"local rank {local_rank} of {placement.local_world_size} has no {device_type} device of its own: "
            f"{count} visible",
            f"start fewer processes a node, show them more devices, or {on_cpu} to train on the CPU",
        )
    module.set_device(index)
    return torch.device(device_type, index)


def device_id(torch: Any, device: Any) -> str | None:
    """What two ranks must not both have; None on the CPU, or if this torch does not tell."""
    if device.type != "cuda" or "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return None  # two instances on one device may have the device's id
    uuid = getattr(torch.cuda.get_device_properties(device.index), "uuid", None)  # since torch 2.6
    return None if uuid is None else f"GPU-{uuid}"
