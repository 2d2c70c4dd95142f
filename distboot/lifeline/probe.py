"""A second opinion on a peer that is silent: whether its host still answers at all."""

from __future__ import annotations

import errno
import select
import socket

_PORT = 1  # tcpmux, at which nobody listens: a host that is there refuses at once
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


class Probe:
    """An attempt to connect to a host, at another port than that of the lifeline.

    Args:
        connection: to the host, whose address is the one to try.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.socket(connection.family, socket.SOCK_STREAM)  # there may be no file left for it
            self._socket.setblocking(False)
            address = connection.getpeername()
            self._early = self._socket.connect_ex((address[0], _PORT, *address[2:]))
        except OSError as error:
            self._early = error.errno or errno.EHOSTUNREACH

    def is_answered(self) -> bool:
        """Whether the host has answered by now."""
        if self._socket is None or self._early != errno.EINPROGRESS:
            return self._early in _ANSWERS
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(0):
            return False
        return self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS

    def close(self) -> None:
        """Give it up."""
        if self._socket is not None:
            self._socket.close()
