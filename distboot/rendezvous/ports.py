"""How rank 0 comes to have a port at which the ranks meet, and keeps other jobs away from it."""

from __future__ import annotations

import os
import socket
import sys

from .protocol import JobCredentials


class PortInUse(Exception):  # noqa: N818 - an answer, not an error
    """Another process has a port; the text says how that was found out."""


class PortInUseByThisJob(PortInUse):
    """A process of this very job has the port: there are two rank 0."""


class PortLease:
    """Keeps other jobs that use distboot from a port of this host until it is closed.

    Between the rendezvous of the wrapper and the moment when its script listens, no process does. A socket that is
    bound without listening would not keep others away, so what is bound are names in the abstract namespace of Unix
    sockets, which is as wide as that of the ports and ends with the process (unix(7)). Elsewhere nothing is reserved.

    Raises:
        PortInUse: another job has it; `PortInUseByThisJob`: this one has, which only jobs without a secret can tell.
    """

    def __init__(self, port: int, credentials: JobCredentials) -> None:
        self._names: list[socket.socket] = []
        if sys.platform != "linux":
            return
        try:
            if not credentials.secret:
                self._reserve(f"\0distboot-port-{port}-{credentials.job}")
        except OSError as error:
            self.close()
            raise PortInUseByThisJob(str(error.strerror)) from None
        try:
            self._reserve(f"\0distboot-port-{port}")
        except OSError as error:
            self.close()
            raise PortInUse(f"another job holds it: {error.strerror}") from None
        os.register_at_fork(after_in_child=self.close)  # it ends with this process, not with its last data loader

    def close(self) -> None:
        """Let others have the port."""
        for name in self._names:
            name.close()

    def _reserve(self, name: str) -> None:
        self._names.append(socket.socket(socket.AF_UNIX))
        self._names[-1].bind(name)


def listening(port: int) -> socket.socket:
    """A socket that listens at a port, for IPv4 and IPv6; `PortInUse`: it cannot."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        raise PortInUse(str(error.strerror or error)) from None
