"""The ports at which the ranks may meet, in the order in which all of them try, and how rank 0 comes to have one."""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence

from ..address import derived_port
from ..errors import DistbootError
from ..placement import Placement

_CANDIDATES = 5


class Taken(Exception):  # noqa: N818 - an answer, not an error
    """Somebody else has a port; the text says how that was found out."""


class Hold:
    """Keeps other jobs that use distboot from a port of this host until it is closed.

    Between the roll call of the wrapper and the moment when its script listens, nobody does. A socket that is bound
    without listening would not keep others away, so what is bound is a name: one in the abstract namespace of Unix
    sockets, which is as wide as that of the ports and ends with the process (unix(7)). Elsewhere nothing is held.
    """

    def __init__(self, port: int) -> None:
        self._name: socket.socket | None = None
        if sys.platform == "linux":
            self._name = socket.socket(socket.AF_UNIX)
            try:
                self._name.bind(f"\0distboot-port-{port}")
            except OSError as error:
                self._name.close()
                raise Taken(f"another job holds it: {error.strerror}") from None

    def close(self) -> None:
        """Let others have the port."""
        if self._name is not None:
            self._name.close()


def candidates(placement: Placement) -> list[int]:
    """The ports to try in this order, the same on all ranks."""
    derived = [
        derived_port(f"{placement.job_id}:{placement.master_port}:{number}") for number in range(1, _CANDIDATES + 1)
    ]
    if placement.launcher == "torchrun":  # whose agent listens at MASTER_PORT itself
        return derived
    return [placement.master_port or 0, *derived[1:]]


def listening(port: int) -> socket.socket:
    """A socket that listens at a port, for IPv4 and IPv6.

    Raises:
        Taken: it cannot.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return socket.create_server(
            ("", port), family=family, backlog=socket.SOMAXCONN, dualstack_ipv6=family == socket.AF_INET6
        )
    except OSError as error:
        raise Taken(str(error.strerror or error)) from None


def all_taken(reasons: Sequence[tuple[int, str]]) -> DistbootError:
    """The error for rank 0 when none of the ports is to be had."""
    said = "; ".join(f"{port}: {why}" for port, why in reasons)
    return DistbootError(
        "port-taken",
        f"rank 0 cannot listen on any of the ports that the ranks try: {said}",
        "set MASTER_PORT to a free port for all processes",
    )
