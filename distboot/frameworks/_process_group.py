"""torch's default process group: NCCL on CUDA, Gloo on the CPU; for torch and what is built on it.

The ranks have met already. Each imports torch and sets its device. Once all ranks have done that,
the process group starts on a store that rank 0 serves at the very socket where the ranks met.
"""

from __future__ import annotations

import re
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from ..agent.session import Session
from ..base.errors import DistbootError
from ..base.text import escape_control, format_address, short_repr
from ..base.threads import result_within
from ..context import Context
from ..detection.export import EnvTransaction, variables
from ..host import network
from ..rendezvous.messages import Arrive, Ready
from ..script.sys_exit import at_end
from . import Options, _torch
from ._base import context, export, imported, raised_as, within_join_timeout
from ._torch import device_and_backend, device_id, set_device

_GLOO_THREADS = 0.1  # seconds for Gloo's threads to release their tensors
_OLDEST = (2, 2)
_LEADER = "the first rank"


class _Prepared(NamedTuple):
    """What a rank has when it is ready to start the group."""

    torch: Any
    user: Any  # what is built on torch, as `prepare` imported it
    backend: str
    device: Any


def start(
    session: Session,
    exported: EnvTransaction,
    options: Options,
    *,
    prepare: Callable[[], Any] = lambda: None,
    adopt: Callable[[Any, str], Callable[[], None] | None] = lambda _, __: None,
    others: Mapping[str, str] = {},
) -> Context:
    """Start the default process group, for torch or for what is built on it.

    `prepare` imports what is built on torch, before any rank starts the group. `adopt` lets it use
    the group on this backend, and returns the function that ends the group, if that is not torch's
    own. `others` are the variables that it reads.
    """
    placement = session.placement
    before = exported.environ_before()
    exported.write({**variables(placement, before), **network.variables(session.interface, before)})

    def step() -> tuple[_Prepared, Ready]:
        torch = _import()
        user = prepare()
        asked = options.backend and options.backend.lower()
        device_type, backend = device_and_backend(torch, asked)
        device = set_device(torch, device_type, placement, before)
        return _Prepared(torch, user, backend, device), Ready(device_id(torch, device))

    prepared = session.ready(step)
    others = {**others, **_torch.torchelastic_variables(placement, before)}
    if prepared.device.type == "xpu":
        others |= _torch.oneccl_variables(placement, before)
    export(session, exported, others)
    _start_group(prepared.torch, session, prepared.backend, options.timeout)
    group = _Group(prepared, session)
    try:
        group.destroy = adopt(prepared.user, prepared.backend) or group.destroy
        result = context(
            session,
            exported,
            options,
            barrier=group.barrier,
            leave=group.leave,
            is_up=group.is_up,
            device=prepared.device,
        )
    except BaseException:
        group.leave()
        raise
    if prepared.backend == "gloo":
        # A script without close() must not be aborted by Gloo either, see `end_group`. After an
        # exception the peers may be gone, but an abort would change the exit code.
        pause = partial(time.sleep, _GLOO_THREADS)
        at_end(well=result.close, exited=result.close, failed=pause)
    return result


class _Group:
    """torch's default process group, as this `init` has started it."""

    def __init__(self, prepared: _Prepared, session: Session) -> None:
        self._session = session
        self._dist = prepared.torch.distributed
        # A reference proper would keep Gloo's threads alive
        self._world = weakref.ref(self._dist.group.WORLD)
        self.destroy: Callable[[], None] = self._dist.destroy_process_group
        device_ids = None
        if prepared.backend == "nccl":
            device_ids = [prepared.device.index]
        self.barrier: Callable[[], None] = partial(self._dist.barrier, device_ids=device_ids)

    def is_up(self) -> bool:
        """Whether the group is there: the script may end it, and start a different one."""
        return bool(self._dist.is_initialized() and self._world() is self._dist.group.WORLD)

    def leave(self) -> None:
        self._session.arrive = None  # it has the store
        if self.is_up():
            end_group(self._dist, self.destroy)


def _start_group(torch: Any, session: Session, backend: str, timeout: float | None) -> None:
    """Start the default process group where the ranks have met, or leave nothing behind.

    The store is not returned: torch 2.2 keeps the frames in which it was imported, with the
    caller's among them, and the store would hold the port until the end.
    """
    limit = None
    if timeout is not None:
        limit = timedelta(seconds=timeout)
    store = _store(torch, session)
    store.set_timeout(limit or torch.distributed.constants.default_pg_timeout)
    problem = f"torch could not start {short_repr(backend)}"
    hint = (
        "if it is about an interface or an address, look at GLOO_SOCKET_IFNAME or "
        "NCCL_SOCKET_IFNAME"
    )
    known = raised_as("process-group-failed", problem, hint, RuntimeError)
    try:
        with known, within_join_timeout(session, "torch's process group did not start"):
            torch.distributed.init_process_group(
                backend,
                store=torch.distributed.PrefixStore("default_pg", store),
                rank=session.placement.rank,
                world_size=session.placement.world_size,
                timeout=limit,
            )
    except BaseException:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        raise
    if session.membership is None:
        session.arrive = partial(_arrive, store, session.placement.who)


def _arrive(store: Any, who: str | None, message: Arrive) -> None:
    """Wait at a key of the store that the group began with, where the rendezvous is off.

    Rank 0 must not end before the others have seen the key.
    """
    # Here, as the agent has them where the rendezvous is on
    from ..job.key_texts import leader_failed, not_opened

    key = f"distboot/{message.key.text}/{message.key.count}"
    if message.leads:
        store.set(key, message.failure or "")
        return
    # Poll: a wait would hold the store's lock, which the group needs
    late = f"{message.key.text}: {_LEADER} has not finished its block yet"
    waiting = network.Backoff(who, message.limit, late)
    while not store.check([key]):
        if not waiting.sleep_or_expire("its block still runs"):
            raise not_opened(message.key, _LEADER, message.limit)
    failure = escape_control(store.get(key).decode(errors="replace"))
    if failure:
        raise leader_failed(message.key, _LEADER, failure)


def _store(torch: Any, session: Session) -> Any:
    """The store of the process group: at the socket where the ranks met, else the one of env://."""
    placement = session.placement
    address = (str(placement.master_addr), placement.master_port or 0)
    connect: Callable[[], Any] = partial(_store_of_env, session)
    if session.store_address is not None:
        address = session.store_address
        connect = partial(_store_at, torch, session, address)
    problem = f"could not connect to torch's TCPStore at {format_address(*address)}"
    hint = (
        "look for a rank that ended early or never started (its own output says why), or for a "
        "firewall"
    )
    # All kinds of torch's DistError are RuntimeErrors
    with raised_as("join-timeout", problem, hint, RuntimeError, TimeoutError):
        # torch waits for ever for a listener that never answers, whatever its timeout. Its own
        # timeout, where it has one, has the better message.
        late = "what listens there does not answer as torch's TCPStore"
        return result_within(session.join_timeout + 2.0, "distboot-store", connect, late)


def _store_of_env(session: Session) -> Any:
    from torch.distributed.rendezvous import rendezvous

    return next(rendezvous("env://", timeout=timedelta(seconds=session.join_timeout)))[0]


def _store_at(torch: Any, session: Session, address: tuple[str, int]) -> Any:
    listener = session.take_listener()
    served: dict[str, Any] = {}
    if listener is not None:
        # The store takes over the socket, so no other process can take the port in between
        served["master_listen_fd"] = listener
        if _version(torch) < (2, 8):
            # libuv's store accepts no open socket before pytorch pull request 150215
            served["use_libuv"] = False
    return torch.distributed.TCPStore(
        *address,
        is_master=listener is not None,
        timeout=timedelta(seconds=session.join_timeout),
        wait_for_workers=False,
        **served,
    )


def _version(torch: Any) -> tuple[int, int]:
    major, minor, *_ = re.findall(r"\d+", torch.__version__)
    return int(major), int(minor)


def _import() -> Any:
    """Import torch; refuse a build without torch.distributed, and one that is too old or in use."""
    torch = imported("torch")
    imported("torch.distributed")
    if not torch.distributed.is_available():
        problem = "this build of torch has no torch.distributed"
        raise DistbootError("backend-not-available", problem, "install an official build")
    if _version(torch) < _OLDEST:
        least = ".".join(map(str, _OLDEST))
        problem = f"torch {torch.__version__} is older than {least}, with which distboot was tried"
        raise DistbootError("framework-not-installed", problem, f"pip install 'torch>={least}'")
    if torch.distributed.is_initialized():
        raise DistbootError(
            "already-initialized",
            "torch.distributed has a process group already",
            "make distboot.init() the first line of the script, "
            "and remove its init_process_group()",
        )
    return torch


def end_group(dist: Any, destroy: Callable[[], None]) -> None:
    """Destroy the default process group, and let Gloo's threads end before Python does."""
    group = dist.group.WORLD  # noqa: F841 - held until the threads had their time
    destroy()
    # A script that still holds the group (DistributedDataParallel does) keeps Gloo's threads from
    # being joined. If it releases its last tensor only while Python shuts down, the process aborts:
    # "terminate called without an active exception", in 1 of 5 runs of a short script (torch 2.13,
    # pytorch issue 190489). If it does not hold the group, releasing the group joins the threads,
    # in torch 2.2 with Python's lock held, which the thread with the tensor waits for: 1 of 10 such
    # scripts hung. A short pause lets the threads finish.
    time.sleep(_GLOO_THREADS)


def end_gloo_group() -> None:
    """Destroy a default process group on Gloo that the script has left as it is."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return
    if dist.get_backend() == "gloo":
        end_group(dist, dist.destroy_process_group)
