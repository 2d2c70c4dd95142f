"""The roll call of one job, from this process's side: rank 0 holds it, all others report."""

from __future__ import annotations

import os
import socket

from ..address import derived_port
from ..errors import DistbootError
from ..handoff import digest
from ..placement import Placement
from ..roster import Roster, own_record, roster_of
from .caller import call
from .desk import Desk
from .wire import Membership


def attend(placement: Placement, join_timeout: float) -> Roster:
    """Meet all other ranks once: the roster.

    Args:
        placement: with an address that resolves and a port, if there are several ranks.
        join_timeout: seconds for all of them to be there.

    Raises:
        DistbootError: `missing-rank`, `duplicate-rank`, `roster-mismatch` or `port-taken`.
    """
    own = own_record(placement)
    if placement.world_size == 1:
        return roster_of([own])
    membership = Membership(digest(placement.job_id), os.environ.get("DISTBOOT_SECRET", ""))
    port = _port(placement)
    if placement.rank > 0:
        roster, connection = call(str(placement.master_addr), port, own, membership, join_timeout)
        connection.close()
        return roster
    with _listening(port) as listener:
        roster, connections = Desk(listener, own, membership).hold(join_timeout)
        for connection in connections.values():
            connection.close()
    return roster


def _port(placement: Placement) -> int:
    if placement.launcher == "torchrun":  # whose agent listens at MASTER_PORT itself
        return derived_port(f"{placement.job_id}:{placement.master_port}")
    return placement.master_port or 0


def _listening(port: int) -> socket.socket:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        raise DistbootError(
            "port-taken",
            f"rank 0 cannot listen on port {port}: {error.strerror}",
            "set MASTER_PORT to a free port for all processes, end the program that has it, or look for a second "
            "process with RANK=0",
        ) from None
