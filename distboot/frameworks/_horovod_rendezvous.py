"""Horovod on Gloo without horovodrun: the numbers that each rank must have, and the rendezvous server of rank 0."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping

from .. import interfaces
from ..address import without_mapping
from ..errors import DistbootError
from ..rollcall.meeting import Meeting
from ..threads import start_without_signals
from ._joined import imported

_BACKLOG = 1024  # connections: the server's own 5 are few for ranks that all come at once
_LEAST_TIMEOUT = 30.0  # seconds; Horovod's own


def numbers(meeting: Meeting) -> dict[str, int]:
    """What Horovod's functions of these names must say on this rank; as far as it is known without the roll call."""
    own = meeting.placement
    assert own.local_rank is not None
    assert own.local_world_size is not None
    found = {"rank": own.rank, "size": own.world_size, "local_rank": own.local_rank, "local_size": own.local_world_size}
    if meeting.roster is not None:
        # Horovod counts across the nodes, in the order of ranks, those that have the same local rank there.
        across = sorted(here[own.local_rank] for here in meeting.roster.nodes if len(here) > own.local_rank)
        found |= {"cross_rank": across.index(own.rank), "cross_size": len(across)}
    return found


def variables(
    meeting: Meeting, server: str | None, environ: Mapping[str, str], timeout: float | None = None
) -> dict[str, str]:
    """What Horovod reads to start on Gloo.

    Args:
        meeting: of all ranks.
        server: address and port of the rendezvous server; None: the rank is alone.
        environ: this process's environment, without what distboot exported. What the user has chosen there stays.
        timeout: seconds for an operation of Gloo.
    """
    ours = {f"HOROVOD_{name.upper()}": str(value) for name, value in numbers(meeting).items()}
    # It keeps the ranks of the nodes apart, and two nodes may have the same name.
    ours["HOROVOD_HOSTNAME"] = f"{os.uname().nodename}-{meeting.placement.node_rank}"
    if server is not None:
        address, _, port = server.rpartition(":")
        ours |= {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": port}
    if timeout is not None:
        ours["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(math.ceil(timeout))
    # Which is one for coming together and for each operation. The ranks have met, so that it need not be tight.
    limit = max(_LEAST_TIMEOUT, meeting.join_timeout)
    choices = {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(math.ceil(limit)),
    }
    if meeting.interface is not None:
        given = environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]  # torch's Gloo can use several
        choices["HOROVOD_GLOO_IFACE"] = given or meeting.interface
    return {**{name: value for name, value in choices.items() if not environ.get(name)}, **ours}


class Rendezvous:
    """Horovod's own rendezvous server, in a thread of this process, which does not keep the process alive.

    Args:
        meeting: of all ranks.

    Attributes:
        address: address and port for the ranks.

    Raises:
        DistbootError: `backend-not-available`, Horovod cannot reach this host.
    """

    def __init__(self, meeting: Meeting) -> None:
        host = _ipv4(meeting)
        module = imported("horovod.runner.http.http_server", "horovod", "pip install horovod")
        everywhere = "" if meeting.placement.num_nodes != 1 else host
        # Without init(plan), where the server knows the sizes: it then forgets what a rank has left there when that
        # rank is through, and not, when the last is, also what the first may have left for starting once more.
        self._server = module.RendezvousHTTPServer((everywhere, 0), module.RendezvousHandler, 0)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # who hangs up is no news
        self._server.socket.listen(_BACKLOG)
        self.address = f"{host}:{self._server.server_address[1]}"
        os.register_at_fork(after_in_child=self._server.socket.close)  # the port ends with rank 0
        start_without_signals("distboot-horovod", self._server.serve_forever)

    def close(self) -> None:
        """End the server. In a thread, as its loop takes half a second to see it."""

        def stop() -> None:
            self._server.shutdown()
            self._server.server_close()

        threading.Thread(target=stop, name="distboot-horovod", daemon=True).start()


def _ipv4(meeting: Meeting) -> str:
    """The address of this host for the other ranks; Horovod's client speaks IPv4 only (0.28.1, http_store.cc)."""
    own = without_mapping(meeting.own_address)
    if ":" not in own:
        return own
    name = interfaces.interface_of(own)
    found = next((its for other, its in interfaces.addresses() if other == name and ":" not in its), None)
    if found is None:
        raise DistbootError(
            "backend-not-available",
            f"Horovod on Gloo needs IPv4, and rank 0 was reached at {own}, on interface {name}, which has none",
            "give the interface an IPv4 address, or start the job with mpirun and a Horovod that has its MPI",
        )
    return found
