"""One open connection between rank 0's agent and another one, and whether the peer is still there."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
import sys
import termios
import time
from collections.abc import Iterable
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple

from ..rendezvous.protocol import BEFORE_AUTHENTICATION, HEADER, Broadcast, Channel, Frames

_PORT = 1  # tcpmux, at which nothing listens: a host that is there refuses at once
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


class Probe:
    """An attempt to connect to the host of a connection, at another port than that of failure detection."""

    def __init__(self, family: int, peer: tuple[Any, ...], now: float) -> None:
        self.began = now
        self._socket: socket.socket | None = None
        self._address = (*peer[:1], _PORT, *peer[2:])
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM)  # there may be no file left for it
            self._socket.setblocking(False)
            self._result = self._socket.connect_ex(self._address)
        except OSError as error:
            self._result = error.errno or errno.EHOSTUNREACH

    def is_answered(self) -> bool:
        """Whether the host accepts or refuses by now; asked once."""
        if self._socket is not None and self._result == errno.EINPROGRESS:
            self._result = self._socket.connect_ex(self._address)  # what has become of the first one: connect(2)
        return self._result in _ANSWERS

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


BOUND = 15.0  # seconds; DISTBOOT_HEARTBEAT_TIMEOUT of rank 0's agent is that of the job
_PATIENCE = 0.75  # of them; the rest is for a second opinion, which the kernel tries several times to get
_PROBE_LIMIT = 0.9  # seconds for that, at the least
_MISSED = 1.9  # bounds without a heartbeat: two were due, and each may come a little late
_KEEPALIVES = 4  # questions of the kernel until it gives up
_THIN_LINEAR_TIMEOUTS = 16  # tcp(7): a lost packet is sent again soon, also when several were lost
_MOST_UNSENT = 1 << 20  # bytes that wait until the peer's kernel takes more; they are tried again each second
_LAST_RECEIVED = 52  # offset of tcpi_last_data_recv and tcpi_last_ack_recv in struct tcp_info, linux/tcp.h
_SILENCE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class DisconnectedError(Exception):
    """The connection has ended; the text says how, if it was not closed."""


class UnansweredError(Exception):
    """The kernel has ended the connection: for too long there was no answer from the other side."""


class LivenessFault(NamedTuple):
    """What is wrong with a peer: it is lost, or only the connection to it, and what speaks for that."""

    is_lost: bool
    why: str  # reads well after "rank 3"


class HeartbeatConnection:
    """An open connection to a peer, as the rendezvous left it, which sends at most `most` bytes in one body.

    A host that is lost, or the network to it, is found by the kernel, which asks the other one every few seconds. That
    one also answers for a process that is stopped or frozen. Such a process sends no heartbeat, which each side sends
    once in `bound` seconds: it is found after one to three of these.
    """

    def __init__(
        self, connection: socket.socket, channel: Channel, bound: float = BOUND, most: int = BEFORE_AUTHENTICATION
    ) -> None:
        self.socket = connection
        self.unsent = bytearray()
        self._peer: tuple[Any, ...] = ()  # its address, which the kernel forgets with the connection
        self._channel, self._bound = channel, bound
        self._patience = _PATIENCE * bound  # seconds until another port of the host is tried
        self._usual = inf  # seconds of silence between two questions of the kernel
        self._probe: Probe | None = None
        self._frames = Frames(most)
        self._beat = channel.sign(None)
        self._peers_beat = Broadcast(None).sign(channel, theirs=True)
        self._heard = time.monotonic()
        self._is_unanswered = False  # whether the kernel has ended it for that
        self._wakes = 0  # bytes that must be there before we wake up
        connection.setblocking(False)
        self._wake_for(len(self._beat) + 1)
        with suppress(OSError):  # it has ended
            self._peer = connection.getpeername()
            if sys.platform == "linux":
                self._keep_alive()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: object, rank: int = 0) -> None:
        """Send a message, or a `Broadcast`, from or for a rank. That the peer has gone is said by reading."""
        broadcast = message if isinstance(message, Broadcast) else Broadcast(message)
        self.unsent += broadcast.sign(self._channel, rank)
        self.flush()

    def flush(self) -> None:
        """Send what the kernel takes of what waits."""
        try:
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
        except BlockingIOError:
            if len(self.unsent) > _MOST_UNSENT:  # the peer has not read for very long, and a missing message is worse
                with suppress(OSError):
                    self.socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:  # it has ended, which reading will say
            self._is_unanswered |= error.errno in _SILENCE
            self.unsent.clear()

    def heartbeat(self) -> None:
        """Say that we are here; called once in `bound` seconds."""
        if not self.unsent:  # else that says as much
            self.unsent += self._beat
            self.flush()

    def receive(self, now: float, *kinds: type) -> list[tuple[int, object]]:
        """Every message of these kinds that has come, without heartbeats, each with the rank that it is from or for.

        `DisconnectedError`, `UnansweredError`: the connection has ended; `ProtocolError`: the peer sends something
        else.
        """
        how = ""
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return []
        except OSError as error:
            self._is_unanswered |= error.errno in _SILENCE
            data, how = b"", error.strerror or str(error)
        if not data:
            raise UnansweredError if self._is_unanswered else DisconnectedError(how)
        self._heard = now
        if data == self._peers_beat and self._frames.missing == HEADER:  # by far the most
            return []
        messages = [
            (frame.rank, self._channel.verify(frame, self._frames, type(None), *kinds))
            for frame in self._frames.feed(data)
        ]
        # Beats do not wake us up: they are read when we are awake anyway. The rest of a longer message does.
        self._wake_for(len(self._beat) + 1 if self._frames.missing == HEADER else 1)
        return [each for each in messages if each[1] is not None]

    def reset_timer(self, now: float) -> None:
        """Count from now on: we were asleep ourselves."""
        self._heard = now

    def silence(self) -> float:
        """Seconds for which the peer's kernel has given no sign."""
        if self._is_unanswered:
            return inf
        try:
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            return float(min(struct.unpack_from("II", info, _LAST_RECEIVED))) / 1000
        except (OSError, AttributeError):  # as on other systems than Linux
            return 0.0

    def is_unusually_silent(self) -> bool:
        """Whether something seems to be wrong with the peer's host: a question of the kernel has no answer yet."""
        return self.silence() > self._usual

    def is_acknowledged(self) -> bool:
        """Whether the peer's kernel has confirmed all that was sent."""
        if self._is_unanswered:
            return False
        try:
            return not int.from_bytes(fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except OSError:
            return True

    def is_frozen(self, now: float) -> bool:
        """Whether no heartbeat has come for too long; asked after reading."""
        return now - self._heard > _MISSED * self._bound

    def fault(self, now: float) -> LivenessFault | None:
        """What is wrong with the peer; asked once a second where something may be. None: nothing yet."""
        if self.silence() < self._patience:
            self._forget_probe()
            why = f"no answer for {2 * self._bound:g} s, though the host answers: stopped or frozen"
            return LivenessFault(True, why) if self.is_frozen(now) else None
        if self._probe is None:
            self._probe = Probe(self.socket.family, self._peer, now)
        if now < self._probe.began + max(self._bound - self._patience - 1.1, _PROBE_LIMIT):  # we look once a second
            return None
        if self._probe.is_answered():
            return LivenessFault(False, f"gave no answer for {self._bound:g} s, though its host answers (a firewall?)")
        return LivenessFault(True, f"no answer for {self._bound:g} s: the host, or the network to it, is down")

    def close(self) -> None:
        self.socket.close()
        self._forget_probe()

    def _keep_alive(self) -> None:
        """Let the kernel ask the other one, and end the connection when it has no answer for that long: tcp(7).

        It looks at TCP_USER_TIMEOUT with each question but the first. Those of many connections do not come at once.
        """
        end = max(round(self._patience), 2)
        between = max((end - 1) // _KEEPALIVES, 1)
        end -= self.fileno() % between
        first = max(end - _KEEPALIVES * between, 1)
        options = {
            socket.TCP_KEEPIDLE: first,
            socket.TCP_KEEPINTVL: between,
            socket.TCP_USER_TIMEOUT: end * 1000 - 500,
            _THIN_LINEAR_TIMEOUTS: 1,
        }
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in options.items():
            self.socket.setsockopt(socket.IPPROTO_TCP, option, value)
        self._usual = max(first, between) + 1.0

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
