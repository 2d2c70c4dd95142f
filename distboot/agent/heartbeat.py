"""One open connection between rank 0's agent and another one, and whether the peer is still there."""

from __future__ import annotations

import errno
import socket
import struct
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from ..rendezvous.protocol import BEFORE_AUTHENTICATION, HEADER, Broadcast, Channel, Frames

_PORT = 1  # tcpmux, at which nothing listens: a host that is there refuses at once
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


class Probe:
    """An attempt to connect to the host of a connection, at another port than that of failure detection."""

    def __init__(self, connection: socket.socket, end: float) -> None:
        self.end = end  # when it has to be answered
        self._socket: socket.socket | None = None
        try:
            # There may be no file left for it
            self._socket = socket.socket(connection.family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            host, _, *scope = connection.getpeername()
            self._address = host, _PORT, *scope
            self._result = self._socket.connect_ex(self._address)
        except OSError as error:
            self._result = error.errno or errno.EHOSTUNREACH

    def is_answered(self) -> bool:
        """Whether the host accepts or refuses by now; asked once."""
        if self._socket is not None and self._result == errno.EINPROGRESS:
            # What has become of the first one: connect(2)
            self._result = self._socket.connect_ex(self._address)
        return self._result in _ANSWERS

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


BOUND = 15.0  # seconds; DISTBOOT_HEARTBEAT_TIMEOUT of rank 0's agent is that of the job
# Of it:
BEATS, BEATS_OF_RANK_0 = 0.5, 1.2  # between two heartbeats
_PATIENCE = 0.75  # without any sign of the peer's kernel, until another port of its host is tried
# Without a heartbeat, also if rank 0 was stopped for as long as it may be just before one was due
_FROZEN = 2.3
_CONFIRMING = 2.0  # seconds; a network takes milliseconds, and we look once a second
_PROBE_LIMIT = 0.9  # seconds for that other port to answer, at the least
_THIN_LINEAR_TIMEOUTS = 16  # tcp(7): a lost packet is sent again soon, also when several were lost
# Bytes that wait until the peer's kernel takes more; they are tried again each second
_MOST_UNSENT = 1 << 20
# Tcpi_unacked, tcpi_last_data_recv, tcpi_last_ack_recv: linux/tcp.h
_TCP_INFO = struct.Struct("24xI24xII")


class DisconnectedError(Exception):
    """The connection has ended; the text says how, if it was not closed."""


class LivenessFault(NamedTuple):
    """What is wrong with a peer: it is lost, or only the connection to it, and what speaks for that."""

    is_lost: bool
    why: str  # reads well after "rank 3"


class HeartbeatConnection:
    """An open connection to a peer, as the rendezvous left it, which sends at most `most` bytes in one body.

    Heartbeats come without waking us up. Where none is there when we look, the kernel says for how long the other one
    has given no sign; that one answers for a process that is stopped or frozen, too.
    """

    def __init__(
        self,
        connection: socket.socket,
        channel: Channel,
        bound: float = BOUND,
        most: int = BEFORE_AUTHENTICATION,
    ) -> None:
        self.socket = connection
        # Those of all connections whose kernel takes no more for now
        self.backlog: set[HeartbeatConnection] = set()
        self.heard = time.monotonic()  # when something was read
        self._unsent = bytearray()
        self._channel, self._bound = channel, bound
        self._probe: Probe | None = None  # while it is suspect
        # When we last saw that its kernel had confirmed all that we sent
        self._looked = self._confirmed = self.heard
        self._frames = Frames(most)
        self._beat = channel.sign(None)
        self._peers_beat = Broadcast(None).sign(channel, theirs=True)
        self._wakes = 0  # bytes that must be there before we wake up
        connection.setblocking(False)
        self._wake_for(len(self._beat) + 1)
        if sys.platform == "linux":
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: object, rank: int = 0) -> None:
        """Send a message, or a `Broadcast`, from or for a rank. That the peer has gone is said by reading."""
        broadcast = message if isinstance(message, Broadcast) else Broadcast(message)
        self._unsent += broadcast.sign(self._channel, rank)
        self.flush()

    def flush(self) -> None:
        """Send what the kernel takes of what waits."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            self.backlog.add(self)
            # The peer has not read for very long, and a missing message is worse
            if len(self._unsent) > _MOST_UNSENT:
                with suppress(OSError):
                    self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended, which reading will say
            self._unsent.clear()

    def heartbeat(self) -> None:
        """Say that we are here."""
        if not self._unsent:  # else that says as much
            self._unsent += self._beat
            self.flush()

    def receive(self, now: float, *kinds: type) -> list[tuple[int, object]]:
        """Every message of these kinds that has come, without heartbeats, each with the rank that it is from or for.

        `DisconnectedError`: the connection has ended; `ProtocolError`: the peer sends something else.
        """
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return []
        except OSError as error:
            raise DisconnectedError(error.strerror or str(error)) from None
        if not data:
            raise DisconnectedError
        self.heard = now
        if data == self._peers_beat and self._frames.missing == HEADER:  # by far the most
            return []
        messages = [
            (frame.rank, self._channel.verify(frame, self._frames, type(None), *kinds))
            for frame in self._frames.feed(data)
        ]
        # Beats do not wake us up: they are read when we are awake anyway. The rest of a longer message does.
        self._wake_for(len(self._beat) + 1 if self._frames.missing == HEADER else 1)
        return [each for each in messages if each[1] is not None]

    @property
    def is_suspect(self) -> bool:
        """Whether it is silent for so long that a second opinion is asked for."""
        return self._probe is not None

    def silence(self) -> tuple[float, bool]:
        """Seconds for which nothing has come from the peer's kernel, and whether it has confirmed all that we sent."""
        try:
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except (OSError, AttributeError):  # as on other systems than Linux
            return 0.0, True
        unconfirmed, *received = _TCP_INFO.unpack(info)
        return min(received) / 1000, not unconfirmed

    def is_unusually_silent(self) -> bool:
        """Whether something seems to be wrong with the peer's host: a heartbeat is due, or the answer to ours."""
        silence, is_confirmed = self.silence()
        now = time.monotonic()
        is_late = (
            not is_confirmed
            and now > self._confirmed + _CONFIRMING
            and now < self._looked + _CONFIRMING
        )
        return is_late or silence > BEATS * self._bound + 1

    def fault(self, now: float) -> LivenessFault | None:
        """What is wrong with the peer; asked once a second, after reading, where nothing has come. None: not known."""
        silence, is_confirmed = self.silence()
        self._looked, self._confirmed = now, now if is_confirmed else self._confirmed
        silence = max(silence, now - self._confirmed)  # a network may fail in one direction
        if silence < _PATIENCE * self._bound:
            self._forget_probe()
            seconds = _FROZEN * self._bound
            why = f"no answer for {seconds:.0f} s, though the host answers: stopped or frozen"
            return LivenessFault(True, why) if now - self.heard > seconds else None
        if self._probe is None:
            self.heartbeat()  # which its kernel confirms, if it is there
            self._probe = Probe(self.socket, now + max(self._bound - silence, _PROBE_LIMIT))
        if now < self._probe.end:
            return None
        if self._probe.is_answered():
            return LivenessFault(
                False,
                f"gave no answer for {self._bound:g} s, though its host answers (a firewall?)",
            )
        return LivenessFault(
            True, f"no answer for {self._bound:g} s: the host, or the network to it, is down"
        )

    def close(self) -> None:
        self.socket.close()
        self._forget_probe()

    def _forget_probe(self) -> None:
        """An old opinion is worth nothing."""
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _wake_for(self, size: int) -> None:
        """Be woken up when so many bytes are there, or when the connection ends."""
        if size != self._wakes:
            self._wakes = size
            with suppress(OSError):
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)


def close_gracefully(connections: Iterable[HeartbeatConnection], limit: float = 1.0) -> None:
    """End our direction of these, and wait `limit` seconds in all for the peers to end theirs.

    A connection that is closed while something is unread loses what is still on its way to the peer (tcp(7), RST).
    """
    end = time.monotonic() + limit
    sockets = [connection.socket for connection in connections]
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_WR)
    for each in sockets:
        with suppress(OSError):
            while (left := end - time.monotonic()) > 0:
                each.settimeout(left)
                if not each.recv(65536):
                    break
