"""`init("horovod.torch")`, `.tensorflow`, `.keras`: Horovod on MPI under an MPI launcher, and everywhere else on Gloo.

On Gloo rank 0 runs Horovod's own rendezvous server, so that horovodrun is not needed. With either, Horovod's numbers
are compared with those of the roll call, as a process that finds no peers is a world of its own for Horovod.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from ..agent.session import Session
from ..base.errors import DistbootError, rendezvous_needed
from ..base.text import ranks_said, without_mapping
from ..base.threads import start_without_signals
from ..context import Context
from ..detection import inherited
from ..detection.export import EnvTransaction
from ..detection.launchers.records import MPI_LAUNCHERS
from ..host import network
from ..rendezvous.messages import Ready
from . import Options
from . import _horovod_build as _build
from ._base import (
    context,
    export,
    imported,
    in_our_words,
    limited,
)
from ._horovod_build import SAME_MPI, Build, controller

# The launcher that runs a rendezvous server, and sets all of Horovod's variables
_SERVES = "horovodrun"
_BACKLOG = 1024  # connections: the server's own 5 are few for ranks that all come at once
_LEAST_TIMEOUT = 30.0  # seconds; Horovod's own


def on_cpu(_: Options) -> bool:
    """Both of Horovod's backends serve accelerators, too."""
    return False


def exports(job: Session, environ: Mapping[str, str]) -> dict[str, str]:
    """What `hvd.init()` of an unmodified script reads. On Gloo, rank 0's wrapper serves the rendezvous."""
    if job.placement.world_size == 1:
        return {}
    placement, bare = job.placement, inherited.strip(environ)[0]

    def step() -> tuple[str, Ready]:
        kind = controller(
            _build.of_files(ask_mpi=placement.launcher in MPI_LAUNCHERS), placement, bare
        )
        return kind, Ready(offer=_offer(kind, job, ExitStack()))  # the server ends with the wrapper

    return _exports(job.ready(step), job, bare)


def start(job: Session, exported: EnvTransaction, options: Options) -> Context:
    """Start Horovod, and see that it has the numbers of the roll call."""
    placement, before = job.placement, exported.environ_before()
    bare = inherited.strip(before)[0]
    exported.write(network.variables(job.interface, before))
    exported.write(_build.keras_variables(options.framework, before))
    with ExitStack() as undo:

        def step() -> tuple[tuple[Any, Build, str, Any], Ready]:
            hvd = _build.load(options.framework)
            build = _build.of_module(hvd)
            kind = controller(build, placement, bare, options.backend)
            if _build.mpi_has_ended() and (kind == "mpi" or hvd.mpi_enabled()):
                problem = "Horovod has used MPI in this process and ended it, and MPI cannot be started a second time"
                raise DistbootError(
                    "already-initialized", problem, "keep the context open until the script ends"
                )
            where = (
                "MPI has none for its operations" if kind == "mpi" else "horovodrun has set its own"
            )
            if options.timeout is not None and (kind == "mpi" or placement.launcher == _SERVES):
                raise DistbootError(
                    "usage", f"timeout={options.timeout:g}, and {where}", "leave timeout= out"
                )
            is_torch = options.framework == "horovod.torch"
            device, device_id = (
                _build.set_own_device(hvd, placement, before) if is_torch else (None, None)
            )
            return (hvd, build, kind, device), Ready(device_id, _offer(kind, job, undo))

        hvd, build, kind, device = job.ready(step)
        others = _exports(kind, job, bare, options.timeout)
        # What is over is not to be joined
        undo.callback(exported.write, {name: before.get(name) for name in others})
        export(job, exported, others)
        undo.callback(hvd.shutdown)
        says = ("process-group-failed", "Horovod could not start", "look at what it has printed")
        # On MPI it has no limit, and on Gloo it aborts without a name.
        with limited(job, "Horovod did not start"), in_our_words(*says, ValueError, RuntimeError):
            hvd.init()
        _compare(hvd, build, kind, job)
        leave = undo.pop_all().close
    return context(
        job, exported, options, leave=leave, is_up=hvd.is_initialized, hvd=hvd, device=device
    )


def _offer(kind: str, job: Session, undo: ExitStack) -> str:
    """What the others hear of this rank: "mpi", "gloo", or "gloo 10.0.0.1:61234" with a server, until `undo`."""
    placement = job.placement
    if kind == "gloo" and placement.world_size > 1 and placement.launcher != _SERVES:
        if job.membership is None:
            raise rendezvous_needed(
                "so no rank can learn where rank 0 runs Horovod's rendezvous server"
            )
        if placement.rank == 0:
            return f"{kind} {serve_rendezvous(job, undo)}"
    return kind


def _exports(
    kind: str, job: Session, bare: Mapping[str, str], timeout: float | None = None
) -> dict[str, str]:
    """What Horovod reads, now that every rank has said what it is about to use."""
    others = [rank for rank, offer in sorted(job.offers.items()) if offer.partition(" ")[0] != kind]
    if others:
        same = [rank for rank in sorted(job.offers) if rank not in others]
        problem = f"Horovod is about to use {kind} on {ranks_said(same)}, and something else on {ranks_said(others)}"
        hint = "use the same Horovod and the same HOROVOD_CONTROLLER on all hosts, or backend='gloo' for all"
        raise DistbootError("rank-mismatch", problem, hint)
    if job.placement.launcher == _SERVES:
        return {}
    if kind == "mpi":
        return {} if bare.get("HOROVOD_CONTROLLER") else {"HOROVOD_CONTROLLER": "mpi"}
    return _gloo_variables(job, bare, timeout)


def _compare(hvd: Any, build: Build, kind: str, job: Session) -> None:
    """Refuse a Horovod that has other numbers than the job: a world of its own, most likely."""
    expected = _numbers(job)
    # There it has local ranks in the order of ranks, whatever those of the launcher are
    if kind == "mpi":
        expected = {name: expected[name] for name in ("rank", "size", "local_size")}
    found = {name: getattr(hvd, name)() for name in expected}
    if found == expected:
        return
    why, hint = "", "use Gloo: init(…, backend='gloo')"
    if kind == "mpi" and found["size"] == 1:
        why, hint = (
            f": its MPI ({build.library}) does not find the other ranks",
            f"{SAME_MPI}; or {hint}",
        )
    elif job.placement.launcher == _SERVES:
        why, hint = ", as horovodrun has told it", "name each host once in horovodrun's -H"
    raise DistbootError(
        "rank-mismatch",
        f"launcher {job.placement.launcher!r} says that this is {_describe(expected)}, and Horovod that it is "
        f"{_describe(found)}{why}",
        hint,
    )


def _describe(found: Mapping[str, int]) -> str:
    """`"rank 1 of 4, local rank 1 of 2, cross rank 0 of 2"`."""
    names = [name for name in ("rank", "local_rank", "cross_rank") if name in found]
    return ", ".join(
        f"{name.replace('_', ' ')} {found[name]} of {found[name.replace('rank', 'size')]}"
        for name in names
    )


def _numbers(job: Session) -> dict[str, int]:
    """What Horovod's functions of these names must say on this rank; as far as it is known without the roll call."""
    own, local_rank = job.placement, job.placement.local_rank
    assert local_rank is not None
    assert own.local_world_size is not None
    found = {
        "rank": own.rank,
        "size": own.world_size,
        "local_rank": local_rank,
        "local_size": own.local_world_size,
    }
    if job.membership is not None:
        # Horovod counts across the nodes, in the order of ranks, those that have the same local rank there.
        across = sorted(here[local_rank] for here in job.membership.nodes if len(here) > local_rank)
        found |= {"cross_rank": across.index(own.rank), "cross_size": len(across)}
    return found


def _gloo_variables(
    job: Session, environ: Mapping[str, str], timeout: float | None
) -> dict[str, str]:
    """What Horovod reads to start on Gloo, with the rendezvous server of rank 0, if it has one."""
    ours = _own_place(job, environ)
    address, _, port = job.offers.get(0, "").partition(" ")[2].rpartition(":")
    if port:
        ours |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": port}
    if timeout is not None:
        ours["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(math.ceil(timeout))
    choices = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        # One for coming together and for each operation. The ranks have met, so that it need not be tight.
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(max(_LEAST_TIMEOUT, job.join_timeout))),
    }
    if job.interface is not None:
        # Torch's Gloo can use several
        given = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        choices["HOROVOD_GLOO_IFACE"] = given or job.interface
    return {**{name: value for name, value in choices.items() if not environ.get(name)}, **ours}


def _own_place(job: Session, environ: Mapping[str, str]) -> dict[str, str]:
    """This rank's numbers as Horovod reads them.

    Without them Horovod runs one process, so that one that is alone needs them only where others are left over.
    """
    numbers = {f"HOROVOD_{name.upper()}": str(value) for name, value in _numbers(job).items()}
    if job.placement.world_size == 1 and numbers.keys().isdisjoint(environ):
        return {}
    # It keeps the ranks of the nodes apart, and two nodes may have the same name.
    numbers["HOROVOD_HOSTNAME"] = f"{os.uname().nodename}-{job.placement.node_rank}"
    return numbers


def serve_rendezvous(job: Session, undo: ExitStack) -> str:
    """Run Horovod's own rendezvous server in a daemon thread, until `undo`; its address."""
    host = _ipv4(job)
    module = imported("horovod.runner.http.http_server")
    everywhere = "" if job.placement.num_nodes != 1 else host
    # Without init(plan), where the server knows the sizes: it then forgets what a rank has left there when that rank is
    # through, and not, when the last is, also what the first may have left for starting once more.
    server = module.RendezvousHTTPServer((everywhere, 0), module.RendezvousHandler, 0)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # a closed connection is no news
    server.socket.listen(_BACKLOG)
    os.register_at_fork(after_in_child=server.socket.close)  # the port ends with rank 0
    start_without_signals("distboot-horovod", server.serve_forever)

    def stop() -> None:
        server.shutdown()
        server.server_close()

    # In a thread, as the server's loop takes half a second to see it.
    undo.callback(threading.Thread(target=stop, name="distboot-horovod", daemon=True).start)
    return f"{host}:{server.server_address[1]}"


def _ipv4(job: Session) -> str:
    """The address of this host for the other ranks; Horovod's client speaks IPv4 only (0.28.1, http_store.cc)."""
    own = without_mapping(job.own_address)
    if ":" not in own:
        return own
    name = network.interface_of(own)
    found = next(
        (its for other, its in network.addresses() if other == name and ":" not in its), None
    )
    if found is None:
        problem = f"Horovod on Gloo needs IPv4, and rank 0 was reached at {own}, on interface {name}, which has none"
        hint = "give the interface an IPv4 address, or start the job with mpirun and a Horovod that has its MPI"
        raise DistbootError("backend-not-available", problem, hint)
    return found
