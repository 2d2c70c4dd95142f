"""`init("jax")`: `jax.distributed.initialize` with the numbers of the membership, at a port that rank 0 has found free.

JAX's coordinator lives in rank 0, and JAX aborts every rank that is still there when it goes. So rank 0 stays until
all others have left, and the others may leave when they like. A rank that fails does not wait: failure detection ends
the others, sooner than JAX would (100 s).
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ..agent.session import Session
from ..base.errors import DistbootError, rendezvous_needed
from ..base.text import format_address, log_line
from ..context import Context
from ..detection import inherited
from ..detection.export import EnvTransaction
from ..detection.placement import Placement
from ..host import accelerators, free_port
from ..rendezvous.messages import Ready
from . import Options
from ._base import (
    at_end,
    context,
    export,
    imported,
    in_our_words,
    keep_given,
    limited,
    past_proxies,
)
from ._torch import own_device

_INSTALL = "pip install 'jax>=0.9'"
_HERE = "127.0.0.1"  # for a job on one node, where no other host is to reach the coordinator
_FIRST_LINE = 10.0  # seconds until it says so
# Seconds that rank 0 stays for the others; failure detection ends it if one of them fails
_STAYS = 3600.0
_LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
_ADDRESS = "JAX_COORDINATOR_ADDRESS"


def on_cpu(_: Options) -> bool:
    """Whether JAX was told to use the CPU only."""
    jax = sys.modules.get("jax")
    platforms = os.environ.get("JAX_PLATFORMS", "") if jax is None else jax.config.jax_platforms
    return platforms == "cpu"


def exports(job: Session, environ: Mapping[str, str]) -> dict[str, str]:
    """What scripts read, and `jax.distributed.initialize()` without arguments.

    Nothing for a process that is alone: JAX itself may find in its environment that there are others.
    """
    placement, bare = job.placement, inherited.strip(environ)[0]
    if placement.world_size == 1:
        return {}
    numbers = {
        "JAX_NUM_PROCESSES": str(placement.world_size),
        "JAX_PROCESS_ID": str(placement.rank),
    }

    def step() -> tuple[list[int] | None, Ready]:
        keep_given("JAX", numbers, bare)
        return _devices(placement, environ), Ready()

    address = format_address(str(placement.master_addr), _port(job))
    devices = job.ready(step)
    found = {
        _ADDRESS: bare.get(_ADDRESS, address),
        **numbers,
        **past_proxies(environ, [str(placement.master_addr)]),
    }
    if devices is not None:
        found[_LOCAL_DEVICES] = ",".join(map(str, devices))
    if placement.launcher == "slurm":
        # Whose numbers JAX knows, too; it has no names of its own for them, and asks for Open MPI 4 first
        return found
    return found | _as_openmpi(placement, environ)


def _as_openmpi(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of Open MPI 4 that JAX reads for the numbers (0.10, jax/_src/clusters/ompi_cluster.py)."""
    numbers = {
        "OMPI_COMM_WORLD_SIZE": str(placement.world_size),
        "OMPI_COMM_WORLD_RANK": str(placement.rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(placement.local_rank),
        # JAX only looks whether the URI is there.
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{placement.master_addr}:{placement.master_port}",
    }
    if placement.launcher != "openmpi":
        return numbers
    return {name: value for name, value in numbers.items() if name not in environ}


def start(job: Session, exported: EnvTransaction, options: Options) -> Context:
    """Start JAX's coordinator in rank 0, and connect all ranks to it."""
    placement, before = job.placement, exported.environ_before()

    def step() -> tuple[tuple[Any, list[int] | None], Ready]:
        jax = _import(options)
        devices = None if on_cpu(options) else _devices(placement, before)
        device = (
            accelerators.own(accelerators.visible(before), before, placement.local_rank)
            if devices
            else None
        )
        return (jax, devices), Ready(device, str(free_port()) if placement.rank == 0 else None)

    jax, devices = job.ready(step)
    if job.store_address is None:
        host, port = str(placement.master_addr), _port(job)
    else:
        host, port = job.store_address[0], int(job.offers[0])
    host = _HERE if placement.num_nodes == 1 else host  # whatever MASTER_ADDR is
    export(job, exported, past_proxies(before, [host]))
    _initialize(jax, job, format_address(host, port), devices)
    shutdown, is_up = jax.distributed.shutdown, jax.distributed.is_initialized

    def shut_down() -> None:
        # While an exception is on its way the others may wait for us in vain; whether it is the end will be seen.
        if not (placement.rank == 0 and sys.exc_info()[0]):
            _see_off(jax, placement)
            shutdown()

    at_once = partial(_leave_at_once, jax)
    jax.distributed.shutdown = shut_down  # a script may call it, too
    at_end(well=partial(_see_off, jax, placement), exited=at_once, failed=at_once)

    def leave() -> None:
        jax.distributed.shutdown = shutdown
        if is_up():
            shut_down()

    return context(job, exported, options, leave=leave, is_up=is_up)


def _import(options: Options) -> Any:
    jax = imported("jax", _INSTALL)
    from jax._src import xla_bridge

    if options.backend is not None:
        hint = "leave backend out; on the CPU jax_cpu_collectives_implementation is JAX's own setting for it"
        raise DistbootError("usage", f"backend={options.backend!r}, but JAX chooses its own", hint)
    if "shutdown_timeout_seconds" not in inspect.signature(jax.distributed.initialize).parameters:
        raise DistbootError(
            "framework-not-installed", f"JAX {jax.__version__} is older than 0.9", _INSTALL
        )
    is_up = jax.distributed.is_initialized()
    if is_up or xla_bridge.backends_are_initialized():
        problem = f"JAX has {'been started' if is_up else 'taken its devices'} already"
        hint = (
            "make distboot.init('jax') the first line of the script, "
            "before anything asks JAX for devices or computes"
        )
        raise DistbootError("already-initialized", problem, hint)
    return jax


def _initialize(jax: Any, job: Session, address: str, devices: list[int] | None) -> None:
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        # It would take SIGTERM for a notice that the script may ask for, and no rank would end by it.
        jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)  # the proxies are out of the way
    placement, problem = job.placement, f"JAX could not start at {address}"
    hint = "look at the output of the other ranks; or for a firewall between the hosts"
    late = f"JAX did not find all ranks at {address}"
    with in_our_words("process-group-failed", problem, hint, RuntimeError), limited(job, late):
        jax.distributed.initialize(
            address,
            placement.world_size,
            placement.rank,
            devices,
            cluster_detection_method="deactivate",
            # Ours comes first, and names the rank
            initialization_timeout=max(round(job.join_timeout), 1) + 5,
            coordinator_bind_address=address if placement.num_nodes == 1 else None,
            # Else ranks wait for each other when they leave, and abort after 300 s
            shutdown_timeout_seconds=0,
        )


def _port(job: Session) -> int:
    """Where rank 0 can serve without having told the other ranks."""
    placement = job.placement
    if job.store_address is not None:
        return job.store_address[1]  # which the wrapper leaves to its script
    if placement.launcher != "torchrun":
        return int(placement.master_port or 0)
    if placement.world_size == 1:
        return free_port()  # MASTER_PORT is that of torchrun's own store
    raise rendezvous_needed("so no rank can learn where rank 0 runs JAX's coordinator")


def _devices(placement: Placement, environ: Mapping[str, str]) -> list[int] | None:
    """The indexes of this rank's own devices; None where there are none, or the user has said which."""
    ids = accelerators.visible(environ)
    if not ids or _LOCAL_DEVICES in environ or environ.get("JAX_PLATFORMS") == "cpu":
        return None
    if placement.local_world_size == 1:
        return list(range(len(ids)))
    return [own_device(placement, environ, len(ids), "accelerator", "set JAX_PLATFORMS=cpu")]


def _see_off(jax: Any, placement: Placement) -> None:
    """Wait, in rank 0, until all others have left."""
    if placement.rank != 0 or placement.world_size == 1 or not jax.distributed.is_initialized():
        return
    client = _state(jax).client

    def wait() -> None:
        with suppress(RuntimeError):
            # Returns when all that are still there ask
            client.get_live_nodes(list(range(placement.world_size)))

    thread = threading.Thread(target=wait, name="distboot-jax", daemon=True)
    thread.start()
    left, pause = _STAYS, _FIRST_LINE
    while left > 0:
        thread.join(min(left, pause))
        if not thread.is_alive():
            return
        left, pause = left - min(left, pause), pause * 2
        said = (
            "the script has ended, but this rank waits for the others: JAX would end them with it"
        )
        log_line(placement.who, f"{said}; giving up in {left:.0f} s", event="waiting")


def _leave_at_once(jax: Any) -> None:
    """After a failure. JAX waits when it ends, for ranks that wait for this one: its parts are never to end."""
    import ctypes

    state = _state(jax)
    for each in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    state.client = state.service = state.preemption_sync_manager = None


def _state(jax: Any) -> Any:
    """What JAX's own `initialize` has made."""
    return jax._src.distributed.global_state  # noqa: SLF001 - nothing public knows who is still there
