"""`init("jax")`: `jax.distributed.initialize` with the exact numbers, at a port free on rank 0.

JAX's coordinator runs in rank 0, and JAX aborts every rank that is still connected when it ends. So
rank 0 stays until all other ranks have left, and they may leave at any time. A rank that fails does
not wait: failure detection ends the others, sooner than JAX would (100 s).
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from ..agent.session import Session
from ..base.errors import DistbootError, rendezvous_needed
from ..base.text import format_address, log_line
from ..context import Context
from ..detection import inherited
from ..detection.env_reader import variable
from ..detection.export import EnvTransaction
from ..detection.order import LAUNCHERS
from ..detection.placement import Placement
from ..host import accelerators, free_port
from ..rendezvous.messages import Ready
from ..script.sys_exit import at_end
from . import Options
from ._base import (
    context,
    export,
    imported,
    past_proxies,
    raised_as,
    within_join_timeout,
)
from ._torch import own_device

_INSTALL = "pip install 'jax>=0.9'"
_LOOPBACK = "127.0.0.1"  # for a job on one node, whose coordinator other hosts do not need
_FIRST_LINE = 10.0  # seconds of waiting until rank 0 says so
# Seconds that rank 0 stays for the others; failure detection ends it if one of them fails
_STAYS = 3600.0
_LOCAL_DEVICES = "JAX_LOCAL_DEVICE_IDS"
_ADDRESS = "JAX_COORDINATOR_ADDRESS"


class _Prepared(NamedTuple):
    """What a rank has when it is ready to start."""

    jax: Any
    devices: list[int] | None  # the indexes of its own ones; None: JAX's default


def on_cpu(_: Options) -> bool:
    """Whether JAX was told to use the CPU only."""
    jax = sys.modules.get("jax")
    if jax is None:
        return os.environ.get("JAX_PLATFORMS") == "cpu"
    return bool(jax.config.jax_platforms == "cpu")


def exports(session: Session, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for scripts and for `jax.distributed.initialize()` without arguments.

    None for a process that is alone: JAX itself may find in its environment that there are others.
    """
    placement = session.placement
    bare, _ = inherited.restored(environ)
    if placement.world_size == 1:
        return {}
    numbers = {
        "JAX_NUM_PROCESSES": str(placement.world_size),
        "JAX_PROCESS_ID": str(placement.rank),
    }

    def step() -> tuple[list[int] | None, Ready]:
        _keep_given(numbers, bare)
        return _devices(placement, environ), Ready()

    address = format_address(str(placement.master_addr), _port(session))
    devices = session.ready(step)
    found = {
        _ADDRESS: bare.get(_ADDRESS, address),
        **numbers,
        **past_proxies(environ, [str(placement.master_addr)]),
    }
    if devices is not None:
        found[_LOCAL_DEVICES] = ",".join(map(str, devices))
    if LAUNCHERS[placement.launcher].jax_needs_nothing:
        # JAX knows Slurm's own variables, but looks for Open MPI 4 first
        return found
    return found | _as_openmpi(placement, environ)


def _keep_given(needed: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Refuse to overwrite variables of JAX that are set to different values."""
    different = [name for name in needed if environ.get(name, needed[name]) != needed[name]]
    if not different:
        return
    given = ", ".join(variable(environ, name) for name in different)
    expected = ", ".join(f"{name}={needed[name]}" for name in different)
    raise DistbootError(
        "conflicting-launchers",
        f"{given}, but for this job JAX needs {expected}",
        f"unset {' and '.join(different)} if an earlier shell or an image set them; otherwise "
        "start the processes that they count, one each",
    )


def _as_openmpi(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """The numbers in Open MPI 4's variables, which JAX reads (0.10, ompi_cluster.py)."""
    numbers = {
        "OMPI_COMM_WORLD_SIZE": str(placement.world_size),
        "OMPI_COMM_WORLD_RANK": str(placement.rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(placement.local_rank),
        # JAX only tests whether the URI exists
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{placement.master_addr}:{placement.master_port}",
    }
    if "OMPI_COMM_WORLD_RANK" not in LAUNCHERS[placement.launcher].numbers:
        return numbers
    return {name: value for name, value in numbers.items() if name not in environ}


def start(session: Session, exported: EnvTransaction, options: Options) -> Context:
    """Start JAX's coordinator in rank 0, and connect all ranks to it."""
    before = exported.environ_before()
    prepared = session.ready(partial(_prepare, session, options, before))
    jax = prepared.jax
    host, port = _coordinator(session)
    export(session, exported, past_proxies(before, [host]))
    _initialize(prepared, session, format_address(host, port))
    shutdown = jax.distributed.shutdown

    def shut_down() -> None:
        # While an exception propagates on rank 0 the others may wait for it in vain. Whether it
        # ends the script is decided at exit.
        is_failing = sys.exc_info()[0] is not None
        if session.placement.rank != 0 or not is_failing:
            _wait_for_others(jax, session.placement)
            shutdown()

    jax.distributed.shutdown = shut_down  # the script may call it, too
    abandon = partial(_abandon, jax)
    well = partial(_wait_for_others, jax, session.placement)
    at_end(well=well, exited=abandon, failed=abandon)

    def leave() -> None:
        jax.distributed.shutdown = shutdown
        if jax.distributed.is_initialized():
            shut_down()

    return context(session, exported, options, leave=leave, is_up=jax.distributed.is_initialized)


def _prepare(
    session: Session, options: Options, environ: Mapping[str, str]
) -> tuple[_Prepared, Ready]:
    """Import JAX and choose this rank's devices. Rank 0 offers a free port."""
    placement = session.placement
    jax = _import(options)
    devices = None
    if not on_cpu(options):
        devices = _devices(placement, environ)
    device = None
    if devices:
        ids = accelerators.visible(environ)
        device = accelerators.own(ids, environ, placement.local_rank)
    offer = None
    if placement.rank == 0:
        offer = str(free_port())
    return _Prepared(jax, devices), Ready(device, offer)


def _coordinator(session: Session) -> tuple[str, int]:
    """Where rank 0 runs JAX's coordinator."""
    if session.store_address is None:
        host = str(session.placement.master_addr)
        port = _port(session)
    else:
        host = session.store_address[0]
        port = int(session.offers[0])
    if session.placement.num_nodes == 1:
        return _LOOPBACK, port  # whatever MASTER_ADDR is
    return host, port


def _import(options: Options) -> Any:
    """Import JAX; refuse a backend, and a JAX that is too old or in use."""
    jax = imported("jax", _INSTALL)
    from jax._src import xla_bridge

    if options.backend is not None:
        raise DistbootError(
            "usage",
            f"backend={options.backend!r}, but JAX chooses its own",
            "leave backend out; on the CPU jax_cpu_collectives_implementation is JAX's own "
            "setting for it",
        )
    if "shutdown_timeout_seconds" not in inspect.signature(jax.distributed.initialize).parameters:
        problem = f"JAX {jax.__version__} is older than 0.9"
        raise DistbootError("framework-not-installed", problem, _INSTALL)
    if jax.distributed.is_initialized():
        raise _used_error("JAX has been started already")
    if xla_bridge.backends_are_initialized():
        raise _used_error("JAX has taken its devices already")
    return jax


def _used_error(problem: str) -> DistbootError:
    return DistbootError(
        "already-initialized",
        problem,
        "make distboot.init('jax') the first line of the script, before anything asks JAX for "
        "devices or computes",
    )


def _initialize(prepared: _Prepared, session: Session, address: str) -> None:
    jax = prepared.jax
    placement = session.placement
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ:
        # It would handle SIGTERM as a notice for the script, and the signal would end no rank
        jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)  # `past_proxies` has set them
    bind_address = None
    if placement.num_nodes == 1:
        bind_address = address
    known = raised_as(
        "process-group-failed",
        f"JAX could not start at {address}",
        "look at the output of the other ranks; or for a firewall between the hosts",
        RuntimeError,
    )
    with known, within_join_timeout(session, f"JAX did not find all ranks at {address}"):
        jax.distributed.initialize(
            address,
            placement.world_size,
            placement.rank,
            prepared.devices,
            cluster_detection_method="deactivate",
            # Longer than the join timeout, whose error names the rank
            initialization_timeout=max(round(session.join_timeout), 1) + 5,
            coordinator_bind_address=bind_address,
            # Otherwise ranks wait for each other when they leave, and abort after 300 s
            shutdown_timeout_seconds=0,
        )


def _port(session: Session) -> int:
    """A port where rank 0 can serve without telling the other ranks."""
    placement = session.placement
    if session.store_address is not None:
        return session.store_address[1]  # the wrapper leaves it to its script
    if not LAUNCHERS[placement.launcher].serves_master_port:
        return int(placement.master_port or 0)
    if placement.world_size == 1:
        return free_port()  # MASTER_PORT is that of torchrun's own store
    raise rendezvous_needed("so no rank can learn where rank 0 runs JAX's coordinator")


def _devices(placement: Placement, environ: Mapping[str, str]) -> list[int] | None:
    """The indexes of this rank's own devices; None without any, or if the user set them."""
    ids = accelerators.visible(environ)
    if not ids or _LOCAL_DEVICES in environ or environ.get("JAX_PLATFORMS") == "cpu":
        return None
    if placement.local_world_size == 1:
        return list(range(len(ids)))
    return [own_device(placement, environ, len(ids), "accelerator", "set JAX_PLATFORMS=cpu")]


def _wait_for_others(jax: Any, placement: Placement) -> None:
    """Wait, in rank 0, until all other ranks have left."""
    if placement.rank != 0 or placement.world_size == 1 or not jax.distributed.is_initialized():
        return
    client = _state(jax).client

    def wait() -> None:
        with suppress(RuntimeError):
            # It returns when all ranks that are still connected have called it
            client.get_live_nodes(list(range(placement.world_size)))

    thread = threading.Thread(target=wait, name="distboot-jax", daemon=True)
    thread.start()
    left = _STAYS
    pause = _FIRST_LINE
    while left > 0:
        pause = min(left, pause)
        thread.join(pause)
        if not thread.is_alive():
            return
        left -= pause
        pause *= 2
        log_line(
            placement.who,
            "the script has ended, but this rank waits for the others: JAX would end them with it; "
            f"giving up in {left:.0f} s",
            event="waiting",
        )


def _abandon(jax: Any) -> None:
    """After a failure: keep JAX's parts from being destroyed.

    When they are, JAX waits for the other ranks, which wait for this one.
    """
    import ctypes

    state = _state(jax)
    for part in (state.client, state.service):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
    state.client = None
    state.service = None
    state.preemption_sync_manager = None


def _state(jax: Any) -> Any:
    """The client and the service that JAX's own `initialize` has made."""
    return jax._src.distributed.global_state  # noqa: SLF001 - not public
