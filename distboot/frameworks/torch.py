"""`init("torch")`: torch.distributed with NCCL on CUDA and Gloo on CPU.

The ranks meet at torch's own store (env://, so that torchrun's agent store is used where there is one), rank 0
completes the roster there, the device is set, and only then the process group starts on the same store.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from ..context import Context
from ..errors import DistbootError
from ..exports import Exported, variables
from ..placement import Placement
from ..roster import Record, Seat, own_record, seats

# Device type -> the backend that PyTorch ships for it; gloo serves the CPU. In order of preference.
_ACCELERATORS = {"cuda": "nccl", "xpu": "xccl", "hpu": "hccl"}
# With any of these, the launcher or the user chose what each process sees.
_VISIBILITY = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "HABANA_VISIBLE_MODULES",
)
_CPU_BACKENDS = ("gloo", "mpi", "ucc")


def start(
    placement: Placement, exported: Exported, backend: str | None, join_timeout: float, timeout: float | None
) -> Context:
    """Start the default process group. `placement` has an address and a port; all times are seconds."""
    torch = _import()
    device_type, backend = _device_and_backend(torch, backend)
    before = exported.environ_before()
    exported.write(variables(placement, before))
    with _joining(placement, join_timeout):
        store = _meet(torch, join_timeout)
        placement, hosts = _complete(placement, store)
    exported.write(variables(placement, before))
    device = _set_device(torch, device_type, placement, isolated=any(name in before for name in _VISIBILITY))
    limit = None if timeout is None else timedelta(seconds=timeout)
    store.set_timeout(limit or torch.distributed.constants.default_pg_timeout)
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.PrefixStore("default_pg", store),
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=limit,
    )
    device_ids = [device.index] if backend == "nccl" else None
    context = _context(placement, hosts, device, torch.distributed, device_ids)
    if backend == "gloo":
        atexit.register(_close_at_exit, context, os.getpid())
    return context


def _import() -> Any:
    try:
        import torch
        import torch.distributed
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise DistbootError(
            "framework-not-installed",
            "torch is not installed in this Python",
            'pip install "distboot[torch]"',
        ) from None
    if not torch.distributed.is_available():
        raise DistbootError(
            "backend-not-available",
            "this build of torch has no torch.distributed",
            "install an official build",
        )
    if torch.distributed.is_initialized():
        raise DistbootError(
            "already-initialized",
            "torch.distributed has a process group already",
            "make distboot.init() the first line of the script, and remove its init_process_group()",
        )
    return torch


def _device_and_backend(torch: Any, wanted: str | None) -> tuple[str, str]:
    """Device type and backend. Asking for a CPU backend means training on the CPU."""
    if wanted in _CPU_BACKENDS:
        device_type, backend = "cpu", wanted
    else:
        present = (t for t in _ACCELERATORS if hasattr(torch, t) and getattr(torch, t).is_available())
        device_type = next(present, "cpu")
        backend = wanted or _ACCELERATORS.get(device_type, "gloo")
        if wanted is None and not torch.distributed.is_backend_available(backend):
            backend = "gloo"
    if ":" not in backend and not torch.distributed.is_backend_available(backend):
        raise DistbootError(
            "backend-not-available",
            f"this build of torch has no backend {backend!r}",
            "leave backend out to get the right one for the device, or install a build that has it",
        )
    return device_type, backend


@contextmanager
def _joining(placement: Placement, join_timeout: float) -> Iterator[None]:
    """Turns torch's errors while the ranks meet into ours."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError and all of its kinds are RuntimeErrors
        where = f"{placement.master_addr}:{placement.master_port}"
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "EADDRINUSE" in str(error) or "already in use" in str(error):
            raise DistbootError(
                "port-taken",
                f"rank 0 cannot listen on {where}, another program has that port: {text}",
                "set MASTER_PORT to a free port for all processes, or end the program that has it",
            ) from error
        raise DistbootError(
            "join-timeout",
            f"rank {placement.rank} of {placement.world_size}: not all ranks met at {where} "
            f"(from {placement.sources.get('master_addr')}) within {join_timeout:g} s; torch says: {text}",
            "look for a rank that did not start, a firewall between the hosts, or a wrong MASTER_ADDR",
        ) from error


def _meet(torch: Any, join_timeout: float) -> Any:
    """The store of torch, with all ranks connected to it."""
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=join_timeout)))
    return torch.distributed.PrefixStore("distboot", store)


def _complete(placement: Placement, store: Any) -> tuple[Placement, tuple[str, ...]]:
    """The exact placement and the host of each node, worked out by rank 0 from the records of all ranks."""
    rank, others = placement.rank, range(1, placement.world_size)
    store.set(f"record/{rank}", json.dumps(own_record(placement).as_dict()))
    if rank == 0:
        texts = store.multi_get([f"record/{each}" for each in (0, *others)])
        store.set("roster", json.dumps(_roster([Record(**json.loads(text)) for text in texts])))
    roster = json.loads(store.get("roster"))
    store.set(f"seen/{rank}", "")
    if "error" in roster:
        if rank == 0:  # the store ends with this process: not before everybody has read why
            with suppress(RuntimeError):
                store.wait([f"seen/{other}" for other in others], timedelta(seconds=5))
        raise DistbootError(*roster["error"])
    seat = Seat(**roster["seats"][rank])
    learned = {name: value for name, value in asdict(seat).items() if getattr(placement, name) != value}
    sources = {**placement.sources, **dict.fromkeys(learned, "roster: all ranks together")}
    return replace(placement, **learned, sources=MappingProxyType(sources)), tuple(roster["hosts"])


def _roster(records: list[Record]) -> dict[str, Any]:
    try:
        placed = seats(records)
    except DistbootError as error:
        return {"error": (error.code, error.message, error.hint)}
    hosts = {seat.node_rank: record.host for record, seat in zip(records, placed, strict=True)}
    return {"seats": [asdict(seat) for seat in placed], "hosts": [hosts[node] for node in sorted(hosts)]}


def _set_device(torch: Any, device_type: str, placement: Placement, *, isolated: bool) -> Any:
    if device_type == "cpu":
        return torch.device("cpu")
    module = getattr(torch, device_type)
    count, local_rank = module.device_count(), placement.local_rank
    # A launcher that shows each process only its own accelerator (srun --gpus-per-task, say) numbers it 0 for all.
    index = 0 if count == 1 and isolated else local_rank
    if index >= count:
        raise DistbootError(
            "too-few-accelerators",
            f"local rank {local_rank} of {placement.local_world_size} has no {device_type} device of its own: "
            f"{count} visible",
            "start fewer processes a node, show them more devices, or ask for backend='gloo' to train on the CPU",
        )
    module.set_device(index)
    return torch.device(device_type, index)


def _context(placement: Placement, hosts: tuple[str, ...], device: Any, dist: Any, device_ids: Any) -> Context:
    fields: dict[str, Any] = {
        name: value for name, value in placement.as_dict().items() if name not in ("sources", "notes")
    }
    return Context(
        framework="torch",
        **fields,
        hosts=hosts,
        device=device,
        _barrier=lambda: dist.barrier(device_ids=device_ids),
        _stop=lambda: _leave(dist),
    )


def _close_at_exit(context: Context, pid: int) -> None:
    """A script that ends well without close() is not to be aborted by Gloo either; see `_leave`."""
    # Not after an uncaught exception, when peers may be gone and their answers awaited; nor in a forked child.
    if not hasattr(sys, "last_type") and os.getpid() == pid:
        context.close()


def _leave(dist: Any) -> None:
    group = dist.group.WORLD
    dist.destroy_process_group()
    # Whoever still holds the group (DistributedDataParallel does) keeps Gloo's threads from being joined, and one that
    # lets go of its last tensor only while Python shuts down aborts the process: "terminate called without an active
    # exception", in 1 of 5 runs of a short script (torch 2.13, pytorch issue 190489). A moment lets them finish.
    if sys.getrefcount(group) > 2:  # more than our own name for it and the argument
        time.sleep(0.1)
