"""The ports at which the ranks may meet, in the order in which all of them try, and how rank 0 comes to have one."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from ..address import derived_port
from ..errors import DistbootError
from ..placement import Placement
from .wire import Membership

_CANDIDATES = 5


class Taken(Exception):  # noqa: N818 - an answer, not an error
    """Somebody else has a port; the text says how that was found out."""


class TakenByThisJob(Taken):
    """A process of this very job has the port: there are two rank 0."""


class Reservation:
    """Keeps other jobs that use distboot from a port of this host until it is closed.

    Between the roll call of the wrapper and the moment when its script listens, nobody does. A socket that is bound
    without listening would not keep others away, so what is bound are names in the abstract namespace of Unix sockets,
    which is as wide as that of the ports and ends with the process (unix(7)). Elsewhere nothing is reserved.

    Raises:
        Taken: another job has it; `TakenByThisJob`: this one has, which only jobs without a secret can tell.
    """

    def __init__(self, port: int, membership: Membership) -> None:
        self._names: list[socket.socket] = []
        if sys.platform != "linux":
            return
        try:
            if not membership.secret:
                self._reserve(f"\0distboot-port-{port}-{membership.job}")
        except OSError as error:
            self.close()
            raise TakenByThisJob(str(error.strerror)) from None
        try:
            self._reserve(f"\0distboot-port-{port}")
        except OSError as error:
            self.close()
            raise Taken(f"another job holds it: {error.strerror}") from None
        os.register_at_fork(after_in_child=self.close)  # it ends with this process, not with its last data loader

    def close(self) -> None:
        """Let others have the port."""
        for name in self._names:
            name.close()

    def _reserve(self, name: str) -> None:
        self._names.append(socket.socket(socket.AF_UNIX))
        self._names[-1].bind(name)


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
