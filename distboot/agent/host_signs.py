"""Signs of the host of a silent peer: what its kernel has confirmed, and whether it answers at all.

Whether it answers is found out at another port, at which nothing listens: a host that is there
refuses at once. A launcher that sees a host die sends SIGTERM to all other ranks, long before a
heartbeat is missed. So a SIGTERM is a *question*: each peer that is unusually silent at that moment
has a tenth of a second to show that its host is there.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable
from contextlib import ExitStack, closing
from math import inf
from operator import attrgetter
from typing import Generic, TypeVar

from .peer_connection import PeerConnection

Asked = TypeVar("Asked", bound=PeerConnection)
# Tcpi_unacked, tcpi_last_data_recv, tcpi_last_ack_recv: linux/tcp.h
_TCP_INFO = struct.Struct("24xI24xII")
_PORT = 1  # tcpmux, at which nothing listens: a host that is there refuses at once
_ANSWERS = (0, errno.EISCONN, errno.ECONNREFUSED, errno.ECONNRESET)
# Not decided yet: on its way, or there was no file left for it
_PENDING = (errno.EINPROGRESS, errno.EALREADY, errno.EMFILE, errno.ENFILE)
# Seconds for the host of a silent peer to answer after a signal: mpirun kills a rank 0.24 s later
_HOST_ANSWERS = 0.1
_end = attrgetter("end")


def silence_of(connection: socket.socket) -> tuple[float, bool]:
    """Seconds without a sign of the peer's kernel, and whether it has confirmed all bytes."""
    try:
        info = connection.getsockopt(
            socket.IPPROTO_TCP,
            socket.TCP_INFO,
            _TCP_INFO.size,
        )
    except (OSError, AttributeError):  # as on other systems than Linux
        return 0.0, True
    unconfirmed, *received = _TCP_INFO.unpack(info)
    seconds = min(received) / 1000
    is_confirmed = unconfirmed == 0
    return seconds, is_confirmed


class Probe:
    """An attempt to connect to the host of a connection at another port."""

    def __init__(self, connection: socket.socket, end: float) -> None:
        self.end = end  # when it has to be answered
        self._connection = connection
        self._socket: socket.socket | None = None
        self._files = ExitStack()
        self._result = self._attempt()

    def is_answered(self) -> bool:
        """Whether the host has accepted or refused by now."""
        if self._result in _PENDING:
            self._result = self._attempt()
        if self._result not in _PENDING:
            self.close()
        return self._result in _ANSWERS

    def close(self) -> None:
        self._files.close()

    def _attempt(self) -> int:
        """Begin to connect, or find out how that has ended: connect(2)."""
        try:
            host, _, *scope = self._connection.getpeername()
            if self._socket is None:
                family = self._connection.family
                self._socket = self._files.enter_context(socket.socket(family))
                self._socket.setblocking(False)
            return self._socket.connect_ex((host, _PORT, *scope))
        except OSError as error:
            return error.errno or errno.EHOSTUNREACH


class Questions(Generic[Asked]):
    """The hosts that were asked when a signal arrived. All times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._probes: dict[Asked, Probe] = {}
        self._files = ExitStack()  # all probes

    def ask(self, connection: Asked, now: float) -> None:
        """Ask the host of a peer, unless it is being asked."""
        if connection in self._probes:
            return
        probe = Probe(connection.socket, now + _HOST_ANSWERS)
        self._probes[connection] = self._files.enter_context(closing(probe))

    def due(self) -> float:
        """When `unanswered` is to be called next."""
        return min(map(_end, self._probes.values()), default=inf)

    def unanswered(self, now: float) -> Iterable[Asked]:
        """The peers whose hosts have not answered in their time, once each."""
        for connection, probe in list(self._probes.items()):
            if now < probe.end:
                continue
            del self._probes[connection]
            is_answered = probe.is_answered()
            probe.close()
            if not is_answered:
                yield connection

    def close(self) -> None:
        self._files.close()
