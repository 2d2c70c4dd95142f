"""Horovod on Gloo without horovodrun: its rendezvous server in rank 0, and its variables."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack

from ..agent.session import Session
from ..base.errors import DistbootError
from ..base.text import without_mapping
from ..base.threads import start_without_signals
from ..host import network
from ._base import imported

_BACKLOG = 1024  # connections: all ranks connect at once, and the server's own is 5
_LEAST_TIMEOUT = 30.0  # seconds; Horovod's own


def numbers(session: Session) -> dict[str, int]:
    """This rank's numbers by the name of Horovod's function for each.

    Without the rendezvous the cross numbers are unknown.
    """
    placement = session.placement
    local_rank = placement.local_rank
    assert local_rank is not None
    assert placement.local_world_size is not None
    found = {
        "rank": placement.rank,
        "size": placement.world_size,
        "local_rank": local_rank,
        "local_size": placement.local_world_size,
    }
    if session.membership is not None:
        # Across the nodes Horovod counts, in the order of ranks, those with the same local rank
        nodes = session.membership.nodes
        across = sorted(ranks[local_rank] for ranks in nodes if len(ranks) > local_rank)
        found["cross_rank"] = across.index(placement.rank)
        found["cross_size"] = len(across)
    return found


def variables(
    session: Session, environ: Mapping[str, str], timeout: float | None
) -> dict[str, str]:
    """The variables for Horovod to start on Gloo, with the server of rank 0, if it has one."""
    needed = _own_place(session, environ)
    address, _, port = session.offers.get(0, "").partition(" ")[2].rpartition(":")
    if port:
        needed["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = address
        needed["HOROVOD_GLOO_RENDEZVOUS_PORT"] = port
    if timeout is not None:
        needed["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(math.ceil(timeout))
    found = _defaults(session, environ)
    for name in list(found):
        if environ.get(name):
            del found[name]
    return found | needed


def _defaults(session: Session, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that the user may set."""
    # One timeout for the start and for each operation. The ranks have met: it need not be short
    timeout = max(_LEAST_TIMEOUT, session.join_timeout)
    found = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(timeout)),
    }
    if session.interface is not None:
        # torch's Gloo can use several, Horovod's one
        given = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        found["HOROVOD_GLOO_IFACE"] = given or session.interface
    return found


def _own_place(session: Session, environ: Mapping[str, str]) -> dict[str, str]:
    """This rank's numbers as Horovod reads them.

    Without them Horovod runs one process. A process that is alone needs them only where an earlier
    shell has set them.
    """
    found = {f"HOROVOD_{name.upper()}": str(value) for name, value in numbers(session).items()}
    if session.placement.world_size == 1 and found.keys().isdisjoint(environ):
        return {}
    # Horovod tells nodes apart by this name, and two nodes may have the same host name
    found["HOROVOD_HOSTNAME"] = f"{os.uname().nodename}-{session.placement.node_rank}"
    return found


def serve_rendezvous(session: Session, undo: ExitStack) -> str:
    """Run Horovod's own rendezvous server in a daemon thread, until `undo`; return its address."""
    host = _ipv4(session)
    module = imported("horovod.runner.http.http_server")
    bind_address = ""
    if session.placement.num_nodes == 1:
        bind_address = host
    # Without init(plan), from which the server learns the sizes. It then deletes what a rank has
    # stored when that rank is done. With the sizes it would wait for the last rank, and then delete
    # also what the first may have stored for starting once more.
    server = module.RendezvousHTTPServer((bind_address, 0), module.RendezvousHandler, 0)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # print no traceback for a closed connection
    server.socket.listen(_BACKLOG)
    os.register_at_fork(after_in_child=server.socket.close)  # the port ends with rank 0
    start_without_signals("distboot-horovod", server.serve_forever)

    def stop() -> None:
        server.shutdown()
        server.server_close()

    # In a thread, as the server's loop notices it after half a second
    undo.callback(threading.Thread(target=stop, name="distboot-horovod", daemon=True).start)
    return f"{host}:{server.server_address[1]}"


def _ipv4(session: Session) -> str:
    """This host's address for the other ranks: Horovod's client needs IPv4 (0.28.1)."""
    own = without_mapping(session.own_address)
    if ":" not in own:
        return own
    interface = network.interface_of(own)
    for name, address in network.addresses():
        if name == interface and ":" not in address:
            return address
    raise DistbootError(
        "backend-not-available",
        f"Horovod on Gloo needs IPv4, and rank 0 was reached at {own}, on interface {interface}, "
        "which has none",
        "give the interface an IPv4 address, or start the job with mpirun and a Horovod that has "
        "its MPI",
    )
