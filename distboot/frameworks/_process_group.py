"""torch's default process group: NCCL on CUDA, Gloo on the CPU; for torch itself and for what is built on it.

The ranks have met already. Each imports torch and sets its device, and only when all of them could, the process group
starts, on a store that rank 0 serves at the very socket where they met.
"""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from ..agent.session import Session
from ..base.errors import DistbootError
from ..base.text import escape_control, format_address, short_repr
from ..base.threads import result_within
from ..context import Context
from ..detection.export import EnvTransaction, variables
from ..host import network
from ..rendezvous.messages import Arrive, Ready
from . import Options, _torch
from ._base import (
    at_end,
    context,
    export,
    imported,
    in_our_words,
    limited,
)
from ._torch import device_and_backend, device_id, set_device

_MOMENT = 0.1  # seconds for Gloo's threads to let go of their tensors
_OLDEST = (2, 2)
_FIRST = "the first rank"


def start(
    job: Session,
    exported: EnvTransaction,
    options: Options,
    *,
    prepare: Callable[[], Any] = lambda: None,
    adopt: Callable[[Any, str], Callable[[], None] | None] = lambda _, __: None,
    others: Mapping[str, str] = {},
) -> Context:
    """Start the default process group, for torch or for what is built on it.

    `prepare` imports that, before any rank starts the group; `adopt` lets it use the group on this backend, and returns
    what ends the group, if not torch's own function; `others` is what it reads from the environment.
    """
    placement, before = job.placement, exported.environ_before()
    wanted = options.backend and options.backend.lower()
    exported.write({**variables(placement, before), **network.variables(job.interface, before)})

    def step() -> tuple[tuple[Any, Any, str, Any], Ready]:
        torch, user = _import(), prepare()
        device_type, name = device_and_backend(torch, wanted)
        device = set_device(torch, device_type, placement, before)
        return (torch, user, name, device), Ready(device_id(torch, device))

    torch, user, backend, device = job.ready(step)
    others = {**others, **_torch.torchelastic_variables(placement, before)}
    if device.type == "xpu":
        others |= _torch.oneccl_variables(placement, before)
    export(job, exported, others)
    _start_group(torch, job, backend, options.timeout)
    dist, destroy = torch.distributed, torch.distributed.destroy_process_group
    world = weakref.ref(dist.group.WORLD)  # a reference proper would keep Gloo's threads alive

    def is_up() -> bool:  # the script may end the group, and start another one
        return bool(dist.is_initialized() and world() is dist.group.WORLD)

    def leave() -> None:
        job.arrive = None  # which has the store
        if is_up():
            end_group(dist, destroy)

    barrier = partial(dist.barrier, device_ids=[device.index] if backend == "nccl" else None)
    try:
        destroy = adopt(user, backend) or destroy
        fields = {"barrier": barrier, "leave": leave, "is_up": is_up, "device": device}
        result = context(job, exported, options, **fields)
    except BaseException:
        leave()
        raise
    if backend == "gloo":
        # Without close() Gloo is not to abort a script either, see `end_group`. After an exception peers may be gone,
        # but an abort would change the exit code.
        at_end(well=result.close, exited=result.close, failed=partial(time.sleep, _MOMENT))
    return result


def _start_group(torch: Any, job: Session, backend: str, timeout: float | None) -> None:
    """Start the default process group where the ranks have met, or leave nothing behind.

    It does not return the store: torch 2.2 keeps the frames in which it was imported, the caller's is below them, and
    the port would be the store's until the end.
    """
    limit = None if timeout is None else timedelta(seconds=timeout)
    placement = job.placement
    store = _store(torch, job)
    store.set_timeout(limit or torch.distributed.constants.default_pg_timeout)
    problem = f"torch could not start {short_repr(backend)}"
    hint = "if it speaks of an interface or an address, look at GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
    known = in_our_words("process-group-failed", problem, hint, RuntimeError)
    try:
        with known, limited(job, "torch's process group did not start"):
            torch.distributed.init_process_group(
                backend,
                store=torch.distributed.PrefixStore("default_pg", store),
                rank=placement.rank,
                world_size=placement.world_size,
                timeout=limit,
            )
    except BaseException:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        raise
    if job.membership is None:
        job.arrive = _at_store(store, placement.who)


def _at_store(store: Any, who: str | None) -> Callable[[Arrive], None]:
    """How a rank waits without a roll call: for a key of the store that the group began with.

    Rank 0 must not end before the others have seen it.
    """
    # Here, as with a roll call the agent has them
    from ..job.keys import leader_failed, not_opened

    def arrive(message: Arrive) -> None:
        key, said = (
            f"distboot/{message.key.text}/{message.key.count}",
            f"{message.key.text}: {_FIRST}",
        )
        if message.leads:
            store.set(key, message.failure or "")
            return
        # Asking again and again, as waiting would hold the store's lock, which the group needs.
        waiting = network.Backoff(who, message.limit, f"{said} has not finished its block yet")
        while not store.check([key]):
            if not waiting.sleep_or_expire("its block still runs"):
                raise not_opened(message.key, _FIRST, message.limit)
        why = escape_control(store.get(key).decode(errors="replace"))
        if why:
            raise leader_failed(message.key, _FIRST, why)

    return arrive


def _store(torch: Any, job: Session) -> Any:
    """The store of the process group: at the socket where the ranks have met, else the one of env://."""
    limit = timedelta(seconds=job.join_timeout)

    def connect() -> Any:
        if job.store_address is None:
            from torch.distributed.rendezvous import rendezvous

            return next(rendezvous("env://", timeout=limit))[0]
        listener = job.take_listener()
        # The socket is the store's from here on, without a moment in which another process could take the port.
        served: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener}
        if served and _version(torch) < (2, 8):
            # Which takes no open socket before pytorch pull request 150215
            served["use_libuv"] = False
        is_master = listener is not None
        return torch.distributed.TCPStore(
            *job.store_address, is_master=is_master, timeout=limit, wait_for_workers=False, **served
        )

    placement = job.placement
    where = format_address(
        *(job.store_address or (str(placement.master_addr), placement.master_port or 0))
    )
    problem = f"could not connect to torch's TCPStore at {where}"
    hint = "look for a rank that ended early or never started (its own output says why), or for a firewall"
    # torch's DistError and all of its kinds are RuntimeErrors.
    with in_our_words("join-timeout", problem, hint, RuntimeError, TimeoutError):
        # torch waits for ever for a listener that never answers, whatever its timeout; its own message is better, where
        # it has one.
        late = "what listens there does not answer as torch's TCPStore"
        return result_within(job.join_timeout + 2.0, "distboot-store", connect, late)


def _version(torch: Any) -> tuple[int, int]:
    major, minor, *_ = re.findall(r"\d+", torch.__version__)
    return int(major), int(minor)


def _import() -> Any:
    torch = imported("torch")
    imported("torch.distributed")
    if not torch.distributed.is_available():
        raise DistbootError(
            "backend-not-available",
            "this build of torch has no torch.distributed",
            "install an official build",
        )
    if _version(torch) < _OLDEST:
        least = ".".join(map(str, _OLDEST))
        problem = f"torch {torch.__version__} is older than {least}, with which distboot was tried"
        raise DistbootError("framework-not-installed", problem, f"pip install 'torch>={least}'")
    if torch.distributed.is_initialized():
        hint = (
            "make distboot.init() the first line of the script, and remove its init_process_group()"
        )
        raise DistbootError(
            "already-initialized", "torch.distributed has a process group already", hint
        )
    return torch


def end_group(dist: Any, destroy: Callable[[], None]) -> None:
    """Destroy the default process group, and let Gloo's threads end before Python does."""
    group = dist.group.WORLD  # noqa: F841 - held until they had their moment
    destroy()
    # A script that still holds the group (DistributedDataParallel does) keeps Gloo's threads from being joined, and one
    # that lets go of its last tensor only while Python shuts down aborts the process: "terminate called without an
    # active exception", in 1 of 5 runs of a short script (torch 2.13, pytorch issue 190489). If none does, letting go
    # of the group joins them, in torch 2.2 with Python's lock held, for which the thread with the tensor waits: 1 of 10
    # such scripts hung. A moment lets them finish.
    time.sleep(_MOMENT)
