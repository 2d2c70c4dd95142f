"""The messages that a peer may not have received: sent again over a new connection.

Both sides count the messages that they send and receive. Over a new connection each reports how
many it has received, and the other one sends those that follow: none is lost or received twice.
Messages that the peer's kernel has confirmed are not kept: they can be read there after the end of
a connection.
"""

from __future__ import annotations

from ..rendezvous.protocol import Broadcast, ProtocolError

_MOST = 1 << 20  # bytes that are kept for one peer
_MANY = 64  # messages, after which it is worth asking what has been confirmed


class Backlog:
    """The messages for one peer, each with the rank that it is from or for."""

    def __init__(self) -> None:
        self.sent = 0  # messages, ever
        # That are kept. A list, as an empty one is small, and there is one for each of 10,000 peers
        self.messages: list[tuple[int, Broadcast]] = []
        self._size = 0

    @property
    def is_long(self) -> bool:
        kept = len(self.messages)
        if kept < _MANY:
            return False
        return self.sent % _MANY == 0

    def add(self, rank: int, message: Broadcast) -> None:
        self.sent += 1
        self.messages.append((rank, message))
        self._size += message.size
        while self._size > _MOST:
            self._drop(1)

    def clear(self) -> None:
        """The peer's kernel has everything."""
        self.messages.clear()
        self._size = 0

    def confirm(self, received: int) -> None:
        """The peer has received so many messages; `ProtocolError`: the next ones are not kept."""
        first = self.sent - len(self.messages)
        if not first <= received <= self.sent:
            what = f"{received} of {self.sent} messages"
            raise ProtocolError(f"has received {what}, and those before {first} are not kept")
        confirmed = received - first
        self._drop(confirmed)

    def _drop(self, count: int) -> None:
        dropped = self.messages[:count]
        for _, message in dropped:
            self._size -= message.size
        del self.messages[:count]
