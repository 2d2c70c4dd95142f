"""One connection between rank 0's agent and another one: its messages, also over another socket.

Nothing waits here. What the kernel does not take is kept in `_unsent`, bounded, and sent later;
`unflushed` is a set that all connections of an agent share, of those that have such bytes. That the
peer is gone is reported by reading alone (`DisconnectedError`).

A heartbeat does not wake this process up: the socket is readable from the first byte *beyond* a
heartbeat on (SO_RCVLOWAT). Heartbeats are read when the process is awake anyway. So 10,000 peers
cost little while nothing happens.

A connection can end, by a reset in the network, while both processes live. Then it goes on over
another socket: `end`, `replace`, the first messages with the counts of what was received
(`send_first`, `confirm`), `resume`. The `Backlog` has what may have to be sent again. The counts
are of messages that were handed to the caller: `received` is raised only when a whole batch is
valid.
"""

from __future__ import annotations

import errno
import fcntl
import selectors
import socket
import sys
import termios
import time
from collections.abc import Iterable
from contextlib import suppress

from ..base.dataclass import replace
from ..base.errors import reason_of
from ..rendezvous.messages import Refused, Resumed
from ..rendezvous.protocol import (
    HEADER,
    HEARTBEAT,
    Broadcast,
    Channel,
    Frames,
    ProtocolError,
)
from .backlog import Backlog

# With which the kernel ends a connection after sending for minutes in vain; tcp(7), tcp_retries2
_GIVEN_UP = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
_UNCOUNTED = (Resumed, Refused)  # the first answer over another connection
_THIN_LINEAR_TIMEOUTS = 16  # tcp(7): a lost packet is sent again soon, also if several were lost
# Bytes that wait until the peer's kernel takes more; they are tried again each second
_MOST_UNSENT = 1 << 20
_RECEIVED_AT_ONCE = 65536  # bytes


class DisconnectedError(Exception):
    """The connection has ended; the text says how, if it was not closed.

    `gave_up`: the peer did not end it; this host has stopped sending to it.
    """

    def __init__(self, text: str = "", *, gave_up: bool) -> None:
        super().__init__(text)
        self.gave_up = gave_up


class PeerConnection:
    """An open connection to a peer, which sends at most `most` bytes in one body."""

    def __init__(self, connection: socket.socket, channel: Channel, most: int) -> None:
        self.socket = connection
        self.unflushed: set[PeerConnection] = set()
        self.heard = time.monotonic()  # when something was read
        self.is_closed = False  # whether the socket has ended; the peer may open another one
        self.received = 0  # messages, ever
        self._kept = Backlog()
        self._has_all = False  # whether nothing was left to read at the last attempt
        self._unsent = bytearray()
        self._is_full = False  # whether too much waits for a peer that takes nothing
        self._channel = channel
        self._frames = Frames(most)
        # A heartbeat without proof, of either side; empty if there is a secret: each has a number
        self._plain = self._plain_heartbeat()
        self._wakes = 0  # bytes from which on the socket is readable
        self._set_options()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: object, rank: int = 0) -> None:
        """Send a message, or a `Broadcast`, from or for a rank."""
        broadcast = message
        if not isinstance(broadcast, Broadcast):
            broadcast = Broadcast(message)
        self._kept.add(rank, broadcast)
        if self.is_closed:
            return
        self._unsent += broadcast.sign(self._channel, rank)
        self.flush()
        if self._kept.is_long:
            self._forget_confirmed()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes wait that the kernel has not taken."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Send what the kernel takes of the bytes that wait."""
        try:
            while self._unsent:
                sent = self.socket.send(self._unsent)
                del self._unsent[:sent]
        except BlockingIOError:
            self.unflushed.add(self)
            if len(self._unsent) > _MOST_UNSENT:
                self._give_up()
        except OSError:  # it has ended, which reading will report
            self._unsent.clear()

    def _give_up(self) -> None:
        """End a connection whose peer has not read for very long: a lost message would be worse."""
        self._is_full = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def receive(self, now: float, *kinds: type) -> list[tuple[int, object]]:
        """The messages of these kinds that have arrived, each with the rank that it is from or for.

        Heartbeats are left out. `DisconnectedError`: the connection has ended; `ProtocolError`: the
        peer has sent something else.
        """
        try:
            data = self.socket.recv(_RECEIVED_AT_ONCE)
        except BlockingIOError:
            self._has_all = True
            return []
        except OSError as error:
            gave_up = error.errno in _GIVEN_UP
            raise DisconnectedError(reason_of(error), gave_up=gave_up) from None
        if not data:
            raise DisconnectedError(gave_up=self._is_full)
        self.heard = now
        if data == self._plain and self._frames.missing == HEADER:  # by far the most
            return []
        return self._messages_in(data, kinds)

    def _messages_in(
        self,
        data: bytes,
        kinds: tuple[type, ...],
    ) -> list[tuple[int, object]]:
        found: list[tuple[int, object]] = []
        counted = 0
        for frame in self._frames.feed(data):
            message = self._channel.verify(
                frame,
                self._frames,
                type(None),
                *kinds,
            )
            if message is None:  # a heartbeat
                continue
            found.append((frame.rank, message))
            if not isinstance(message, _UNCOUNTED):
                counted += 1
        self.received += counted
        if self._frames.missing == HEADER:
            self._wake_for(HEADER + 1)
        else:  # the rest of a longer message
            self._wake_for(1)
        return found

    def drain(self, now: float, *kinds: type) -> list[tuple[int, object]]:
        """All that arrives until this socket ends, or is given up for another one."""
        found: list[tuple[int, object]] = []
        self._has_all = False
        with suppress(DisconnectedError, ProtocolError):
            while not self._has_all:
                found += self.receive(now, *kinds)
        return found

    def close(self) -> None:
        self.socket.close()

    # Going on over another connection

    def end(self) -> None:
        """The socket has ended: keep what is to be sent until there is another one."""
        self.is_closed = True
        self.socket.close()
        self._unsent.clear()

    def replace(self, connection: socket.socket, channel: Channel) -> None:
        """Use another socket to the same peer from now on; nothing is sent until `resume`."""
        self.end()
        self.socket = connection
        self._channel = channel
        self._frames = Frames(self._frames.most)
        self._is_full = False
        self._plain = self._plain_heartbeat()
        self._wakes = 0
        self._set_options()

    def send_first(self, message: object) -> None:
        """Send a message that is not counted: how many messages were received."""
        self._unsent += self._channel.sign(message)
        self.flush()

    def use_round(self, number: int) -> None:
        """From now on messages are of this round of the job; the first ones are of none."""
        self._channel = replace(self._channel, round=number)
        self._plain = self._plain_heartbeat()

    def confirm(self, received: int) -> None:
        """The peer has received so many messages; `ProtocolError`: the next ones are not kept."""
        self._kept.confirm(received)

    def resume(self, now: float) -> None:
        """Send what the peer has not received."""
        for rank, message in self._kept.messages:
            self._unsent += message.sign(self._channel, rank)
        self.is_closed = False
        self.heard = now
        self.flush()

    def _plain_heartbeat(self) -> bytes:
        if self._channel.secret:
            return b""
        return HEARTBEAT.sign(self._channel)

    def _set_options(self) -> None:
        self.socket.setblocking(False)
        self._wake_for(HEADER + 1)
        if sys.platform == "linux":
            with suppress(OSError):
                self.socket.setsockopt(
                    socket.IPPROTO_TCP,
                    _THIN_LINEAR_TIMEOUTS,
                    1,
                )

    def _wake_for(self, size: int) -> None:
        """Be readable when so many bytes are there, or when the connection ends."""
        if size == self._wakes:
            return
        self._wakes = size
        with suppress(OSError):
            self.socket.setsockopt(
                socket.SOL_SOCKET,
                socket.SO_RCVLOWAT,
                size,
            )

    def _forget_confirmed(self) -> None:
        """Keep nothing that the peer's kernel has confirmed: it can be read there even if the
        connection ends.
        """
        with suppress(OSError):
            waiting = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
            if not self._unsent and not any(waiting):
                self._kept.clear()


def close_gracefully(connections: Iterable[PeerConnection], limit: float = 1.0) -> None:
    """End our direction of these, and wait `limit` seconds in all for the peers to end theirs.

    What the kernel has not taken yet, for a slow peer, is sent before that.

    A connection that is closed while something is unread loses what is still on its way to the peer
    (tcp(7), RST).
    """
    end = time.monotonic() + limit
    sockets: list[socket.socket] = []
    unsent: list[PeerConnection] = []
    for connection in connections:
        sockets.append(connection.socket)
        if connection.has_unsent:
            unsent.append(connection)
        else:
            _end_writing(connection.socket)
    _send_until(unsent, end)
    for connection in unsent:
        _end_writing(connection.socket)
    for each in sockets:
        with suppress(OSError):
            _drain_until(each, end)


def _end_writing(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)


def _send_until(connections: Iterable[PeerConnection], end: float) -> None:
    """Send what waits in these, as far as the peers take it by then."""
    with selectors.PollSelector() as selector:
        for connection in connections:
            selector.register(connection, selectors.EVENT_WRITE)
        while selector.get_map():
            left = end - time.monotonic()
            if left <= 0:
                return
            for key, _ in selector.select(left):
                ready: PeerConnection = key.fileobj  # type: ignore[assignment]
                ready.flush()
                if not ready.has_unsent:
                    selector.unregister(ready)


def _drain_until(connection: socket.socket, end: float) -> None:
    data = b"unread"
    while data:
        left = end - time.monotonic()
        if left <= 0:
            return
        connection.settimeout(left)
        data = connection.recv(_RECEIVED_AT_ONCE)
