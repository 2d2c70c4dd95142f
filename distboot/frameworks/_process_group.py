"""torch's default process group: NCCL on CUDA, Gloo on the CPU; for torch itself and for what is built on it.

The ranks have met already. Each imports torch and sets its device, and only when all of them could, the process group
starts, on a store that rank 0 serves at the very socket where they met.
"""

from __future__ import annotations

import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

from .. import interfaces
from ..address import socket_said
from ..context import Context
from ..errors import DistbootError, first_line, printable, quoted
from ..exports import Exported, variables
from ..rendezvous import Wait
from ..rollcall.doors import Door
from ..rollcall.meeting import Meeting
from ..rollcall.ports import listening
from ..rollcall.ready import Ready
from . import _oneccl
from ._joined import Gated, Meets, at_end, context, export, imported, limited
from ._options import Options
from ._torch_device import CPU_BACKENDS, device_and_backend, device_id, set_device

_MOMENT = 0.1  # seconds for Gloo's threads to let go of their tensors
_OLDEST = (2, 2)
_FIRST = "the first rank"


def on_cpu(options: Options) -> bool:
    """Asking for a CPU backend means training on the CPU."""
    return (options.backend or "").lower() in CPU_BACKENDS


def start(
    meeting: Meeting,
    exported: Exported,
    options: Options,
    *,
    prepare: Callable[[], Any] = lambda: None,
    adopt: Callable[[Any, str], Callable[[], None] | None] = lambda _, __: None,
    others: Mapping[str, str] = {},
) -> Context:
    """Start the default process group.

    Args:
        meeting: of all ranks.
        exported: where to export.
        options: of the caller of `init`.
        prepare: imports what is to use the group, before any rank starts it.
        adopt: lets what was imported use the group on this backend; what ends the group, if not torch's own function.
        others: what that reads from the environment besides the variables of torch.
    """
    placement, before = meeting.placement, exported.environ_before()
    wanted = options.backend and options.backend.lower()
    exported.write({**variables(placement, before), **interfaces.variables(meeting.interface, before)})

    with ExitStack() as undo:
        # Our own, as the other socket is the store's; and the store ends with rank 0's part in the group.
        needed = placement.rank == 0 and placement.world_size > 1 and meeting.link is not None
        listener = listening(0) if needed else None
        if listener is not None:
            undo.callback(listener.close)
        port = None if listener is None else str(listener.getsockname()[1])

        def step() -> tuple[tuple[Any, Any, str, Any], Ready]:
            torch = _import()
            user = prepare()
            device_type, name = device_and_backend(torch, wanted)
            device = set_device(torch, device_type, placement, before)
            return (torch, user, name, device), Ready(device_id(torch, device), port)

        torch, user, backend, device = meeting.ready(step)
        export(meeting, exported, {**others, **(_oneccl.variables(placement, before) if device.type == "xpu" else {})})
        device_ids = [device.index] if backend == "nccl" else None
        barrier = partial(torch.distributed.barrier, device_ids=device_ids)
        # The store has no name here: torch 2.2 keeps the frames in which it was imported, this one is below them, and
        # the port would be the store's until the process ends.
        meets: Meets = _AtStore(_start_group(torch, meeting, backend, options.timeout), placement.who, barrier)
        group = _Group(torch.distributed)
        undo.callback(group.leave)
        group.destroy = adopt(user, backend) or group.destroy
        if 0 in meeting.offers:
            meets = Gated(meeting, options, barrier=barrier, listener=listener, port=int(meeting.offers[0]))
        undo.pop_all()
    result = context(meeting, exported, options, meets, leave=group.leave, is_up=group.is_up, device=device)
    if backend == "gloo":
        # Without close() Gloo is not to abort a script either, see `end_group`. After an exception peers may be gone,
        # but an abort would change the exit code.
        at_end(well=result.close, exited=result.close, failed=partial(time.sleep, _MOMENT))
    return result


class _Group:
    """The default process group that has just been started. The script may end it, and start another one."""

    def __init__(self, dist: Any) -> None:
        self._dist = dist
        self._world = weakref.ref(dist.group.WORLD)  # a reference proper would keep Gloo's threads alive
        self.destroy: Callable[[], None] = dist.destroy_process_group

    def is_up(self) -> bool:
        return self._dist.is_initialized() and self._world() is self._dist.group.WORLD

    def leave(self) -> None:
        if self.is_up():
            end_group(self._dist, self.destroy)


class _AtStore:
    """How the ranks wait for each other without a roll call: for a key of the store that the group began with.

    Rank 0 must not end before the others have seen it.
    """

    def __init__(self, store: Any, who: str | None, barrier: Callable[[], None]) -> None:
        self._store, self._who = store, who
        self.barrier = barrier
        self._times: dict[tuple[str, int | None], int] = {}

    def wait_for(
        self, what: str, limit: float, *, opens: bool, node: int | None = None, failure: str | None = None
    ) -> None:
        self._times[what, node] = self._times.get((what, node), 0) + 1
        door = Door(what, node, self._times[what, node])
        key = f"distboot/{door.said}/{door.times}"
        if opens:
            self._store.set(key, failure or "")
            return
        # Asking again and again, as waiting would hold the store's lock, which the group needs.
        waiting = Wait(self._who, limit, f"{door.said}: {_FIRST} is not through yet")
        while not self._store.check([key]):
            if not waiting.once_more("its block still runs"):
                raise door.not_opened(_FIRST, limit)
        why = printable(self._store.get(key).decode(errors="replace"))
        if why:
            raise door.failed(_FIRST, why)

    def close(self) -> None:
        self._store = None


def _start_group(torch: Any, meeting: Meeting, backend: str, timeout: float | None) -> Any:
    """Start the default process group where the ranks have met, or leave nothing behind; its store."""
    limit = None if timeout is None else timedelta(seconds=timeout)
    placement = meeting.placement
    store = _store(torch, meeting)
    store.set_timeout(limit or torch.distributed.constants.default_pg_timeout)
    try:
        with limited(meeting, "torch's process group did not start"):
            torch.distributed.init_process_group(
                backend,
                store=torch.distributed.PrefixStore("default_pg", store),
                rank=placement.rank,
                world_size=placement.world_size,
                timeout=limit,
            )
    except BaseException as error:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        if not isinstance(error, RuntimeError):
            raise
        raise DistbootError(
            "process-group-failed",
            f"torch could not start {quoted(backend)}: {first_line(error)}",
            "if it speaks of an interface or an address, look at GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME",
        ) from None
    return store


def _store(torch: Any, meeting: Meeting) -> Any:
    """The store of the process group: at the socket where the ranks have met, else the one of env://."""
    limit = timedelta(seconds=meeting.join_timeout)

    def connect() -> Any:
        if meeting.store_address is None:
            from torch.distributed.rendezvous import rendezvous

            return next(rendezvous("env://", timeout=limit))[0]
        listener = meeting.take_listener()
        # The socket is the store's from here on, without a moment in which somebody else could take the port.
        served: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener}
        if served and _version(torch) < (2, 8):
            served["use_libuv"] = False  # which takes no open socket before pytorch pull request 150215
        is_master = listener is not None
        return torch.distributed.TCPStore(
            *meeting.store_address, is_master=is_master, timeout=limit, wait_for_workers=False, **served
        )

    try:
        return _bounded(connect, meeting.join_timeout + 2.0)  # torch's own message is better, where it has one
    except RuntimeError as error:  # torch's DistError and all of its kinds are RuntimeErrors
        placement = meeting.placement
        where = socket_said(*(meeting.store_address or (str(placement.master_addr), placement.master_port or 0)))
        raise DistbootError(
            "join-timeout",
            f"torch's store at {where} was not to be had: {first_line(error)}",
            "look for a rank that ended early or never started (its own output says why), or for a firewall",
        ) from None


def _version(torch: Any) -> tuple[int, int]:
    major, minor, *_ = re.findall(r"\d+", torch.__version__)
    return int(major), int(minor)


def _bounded(connect: Callable[[], Any], limit: float) -> Any:
    """What `connect` returns. torch waits for ever when somebody listens who never answers, whatever its timeout."""
    done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((connect(), None))
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread of the caller
            done.put((None, error))

    threading.Thread(target=work, name="distboot-store", daemon=True).start()
    try:
        store, error = done.get(timeout=limit)
    except queue.Empty:
        raise RuntimeError("somebody listens there, and does not answer as torch's store") from None
    if error is not None:
        raise error
    return store


def _import() -> Any:
    torch = imported("torch", "torch", "pip install torch")
    imported("torch.distributed", "torch", "pip install torch")
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
        raise DistbootError(
            "already-initialized",
            "torch.distributed has a process group already",
            "make distboot.init() the first line of the script, and remove its init_process_group()",
        )
    return torch


def end_group(dist: Any, destroy: Callable[[], None]) -> None:
    """Destroy the default process group, and let Gloo's threads end before Python does."""
    group = dist.group.WORLD  # noqa: F841 - held until they had their moment
    destroy()
    # Whoever still holds the group (DistributedDataParallel does) keeps Gloo's threads from being joined, and one that
    # lets go of its last tensor only while Python shuts down aborts the process: "terminate called without an active
    # exception", in 1 of 5 runs of a short script (torch 2.13, pytorch issue 190489). If nobody does, letting go of the
    # group joins them, in torch 2.2 with Python's lock held, for which the thread with the tensor waits: 1 of 10 such
    # scripts hung. A moment lets them finish.
    time.sleep(_MOMENT)
