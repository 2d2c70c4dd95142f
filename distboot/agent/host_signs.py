"""Signs of the host of a silent peer: what its kernel has confirmed, and whether it answers at all.

Whether it answers is found out at another port, at which nothing listens: a host that is there
refuses at once.
"""

from __future__ import annotations

import errno
import socket
import struct
from contextlib import suppress
from typing import Any

# Tcpi_unacked, tcpi_last_data_recv, tcpi_last_ack_recv: linux/tcp.h
_TCP_INFO = struct.Struct("24xI24xII")
_PORT = 1  # tcpmux, at which nothing listens: a host that is there refuses at once
_ANSWERS = (0, errno.EISCONN, errno.ECONNREFUSED, errno.ECONNRESET)
# Not decided yet: on its way, or there was no file left for it
_PENDING = (errno.EINPROGRESS, errno.EALREADY, errno.EMFILE, errno.ENFILE)


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
    """An attempt to connect to the host of a connection at another port, once it is asked."""

    __slots__ = ("_family", "_place", "_result", "_socket", "is_asked")  # for each of 10,000 peers

    def __init__(self) -> None:
        self.is_asked = False
        # Of the host; kept, as a connection that has ended does not know it any more
        self._family = socket.AF_INET
        self._place: tuple[Any, ...] = ()
        self._socket: socket.socket | None = None
        self._result = 0  # as of connect(2)

    def ask(self, connection: socket.socket) -> None:
        """Begin to connect."""
        self.is_asked = True
        with suppress(OSError):
            host, _, *scope = connection.getpeername()
            self._family = connection.family
            self._place = (host, _PORT, *scope)
        self._result = self._attempt()

    def is_answered(self) -> bool:
        """Whether the host was asked, and has accepted or refused by now."""
        if not self.is_asked:
            return False
        if self._result in _PENDING:
            self._result = self._attempt()
        if self._result not in _PENDING:
            self._close_socket()  # there may be many
        return self._result in _ANSWERS

    def close(self) -> None:
        """Drop what was asked, and an answer, which would be too old to count."""
        self.is_asked = False
        self._close_socket()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _attempt(self) -> int:
        """Begin to connect, or find out how that has ended."""
        if not self._place:
            return errno.EHOSTUNREACH
        try:
            if self._socket is None:
                self._socket = socket.socket(self._family)
                self._socket.setblocking(False)
            return self._socket.connect_ex(self._place)
        except OSError as error:
            return error.errno or errno.EHOSTUNREACH
