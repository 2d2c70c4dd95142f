"""The port of rank 0 on its host: who listens there, and what keeps other jobs away from it."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

from .membership import LOOPBACK, JoinPlan


class PortInUse(Exception):  # noqa: N818 - an answer, not an error
    """Another process has a port; the text tells how that was found out."""


class PortInUseByThisJob(PortInUse):
    """A process of this very job has the port: two processes are rank 0."""


class PortLease:
    """Keeps other jobs that use distboot from a port of this host until it is closed.

    Between the rendezvous of the wrapper and the moment when its script listens, no process does.
    A socket that is bound without listening would not keep others away. So names in the abstract
    namespace of Unix sockets are bound, which is as wide as that of the ports and ends with the
    process (unix(7)). Without such names nothing is reserved.

    Raises:
        PortInUse: another job has it; `PortInUseByThisJob`: this one has, which only jobs without a
            secret can tell.
    """

    def __init__(self, port: int, plan: JoinPlan) -> None:
        self._names: list[socket.socket] = []
        if sys.platform != "linux":
            return
        for name, in_use in _names(port, plan):
            taken = socket.socket(socket.AF_UNIX)
            self._names.append(taken)
            try:
                taken.bind(name)
            except OSError as error:
                self.close()
                raise in_use(f"another job holds it: {error.strerror}") from None
        # It ends with this process, not with its last data loader.
        os.register_at_fork(after_in_child=self.close)

    def close(self) -> None:
        for name in self._names:
            name.close()


def _names(port: int, plan: JoinPlan) -> Iterator[tuple[str, type[PortInUse]]]:
    """The names to bind, and what it means if one is taken."""
    name = f"\0distboot-port-{port}"
    if not plan.secret:
        yield f"{name}-{plan.job}", PortInUseByThisJob
    yield name, PortInUse


def listening(port: int) -> socket.socket:
    """A socket that listens at a port, for IPv4 and IPv6; `PortInUse`: it cannot."""
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET
    if is_dual:
        family = socket.AF_INET6
    try:
        return socket.create_server(
            ("", port),
            family=family,
            backlog=socket.SOMAXCONN,
            dualstack_ipv6=is_dual,
        )
    except OSError as error:
        why = str(error)
        if error.errno:
            # Its own text has the port once more: "Address already in use (while attempting to
            # bind on address …)".
            why = os.strerror(error.errno)
        raise PortInUse(why) from None


def describe_holder(port: int) -> str:
    """The process that has a port: `" by process 4711: redis-server *:29500"`; empty: not known."""
    from ..host import sockets  # here, as few jobs need these
    from . import foreign

    process = sockets.listener(port)
    if process:
        return f" by {process}"
    found = foreign.probe((socket.AF_INET, (LOOPBACK, port)))
    if found is not None:
        return f": the process that listens there {found.description}"
    return ""
