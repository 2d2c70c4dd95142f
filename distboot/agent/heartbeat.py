"""One open connection between rank 0 and another rank, and what the kernel knows of the peer behind it."""

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
from typing import NamedTuple

from ..rendezvous.protocol import BEFORE_AUTHENTICATION, HEADER, Broadcast, Channel, Frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rendezvous.membership import Membership

_PORT = 1  # tcpmux, at which nothing listens: a host that is there refuses at once
_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)


class Probe:
    """An attempt to connect to the host of a connection, at another port than that of failure detection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket: socket.socket | None = None
        try:
            self._socket = socket.socket(connection.family, socket.SOCK_STREAM)  # there may be no file left for it
            self._socket.setblocking(False)
            host, _, *scope = connection.getpeername()
            self._address = host, _PORT, *scope
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


INTERVAL = 1.0  # seconds between two beats
_MOST_BEATS = 2000  # a second, that rank 0 answers for: with more agents each beats less often
# In intervals.
_SLACK = 0.6  # beyond the bound: a rank that was stopped for just as long has then spoken again
_PROBING = 1.0  # before the bound, to have a second opinion by then
_RECENT = 3.5  # within which a kernel that is there acknowledges what it got
_UNUSUAL = 3.0  # of silence
_THIN_LINEAR_TIMEOUTS = 16  # tcp(7): a lost packet is sent again soon, also when several were lost
_MOST_UNSENT = 1 << 20  # bytes that wait until the peer's kernel takes more; they are tried again with each heartbeat
_LAST_DATA_RECEIVED = 52  # offset of tcpi_last_data_recv in struct tcp_info, linux/tcp.h


class DisconnectedError(Exception):
    """The connection has ended; the text says how, if it was not closed."""


class LivenessFault(NamedTuple):
    """What is wrong with a peer that is silent: it is lost, or only the connection to it, and what speaks for that."""

    is_lost: bool
    why: str  # reads well after "rank 3"


def interval_of(membership: Membership) -> float:
    """Seconds between two beats in a job of this size, the same for all agents."""
    return max(INTERVAL, len(membership.agents) / _MOST_BEATS)


class HeartbeatConnection:
    """An open connection to a peer, as the rendezvous left it, which sends at most `most` bytes in one body."""

    def __init__(
        self, connection: socket.socket, channel: Channel, interval: float = INTERVAL, most: int = BEFORE_AUTHENTICATION
    ) -> None:
        self.socket = connection
        self._channel, self._interval = channel, interval
        self._probe: Probe | None = None  # while it is suspect
        self._frames = Frames(most)
        self._beat = channel.sign(None)
        self._peers_beat = Broadcast(None).sign(channel, theirs=True)
        self._unsent = bytearray()
        self._heard = self._sent = self._acknowledged = self._since = time.monotonic()
        self._wakes = 0  # bytes that must be there before we wake up
        connection.setblocking(False)
        self._wake_for(len(self._beat) + 1)
        if sys.platform == "linux":
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)

    @property
    def suspect(self) -> bool:
        """Whether it is silent for so long that it is looked at more often."""
        return self._probe is not None

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: object, rank: int = 0) -> None:
        """Send a message, or a `Broadcast`, from or for a rank. That the peer has gone is said by reading."""
        broadcast = message if isinstance(message, Broadcast) else Broadcast(message)
        self._send(broadcast.sign(self._channel, rank))

    def _send(self, data: bytes) -> None:
        if not self._unsent or data is not self._beat:  # else what waits says as much
            self._unsent += data
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > _MOST_UNSENT:  # the peer has not read for very long, and a missing message is worse
                with suppress(OSError):
                    self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended, which reading will say
            self._unsent.clear()

    def heartbeat(self, now: float) -> None:
        """Say that we are here; called once an interval."""
        if self._unacknowledged() == 0:
            self._acknowledged = self._sent  # then, and not only now, the peer's kernel was there
        self._sent = now
        self._send(self._beat)

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

    def reset_timers(self, now: float) -> None:
        """Count from now on: we were asleep ourselves."""
        self._sent = self._acknowledged = self._since = now

    def silence(self, now: float) -> float:
        """Seconds for which the peer has said nothing, or has not confirmed what we said."""
        return max(self._unheard(now), now - self._acknowledged)

    def is_unusually_silent(self, now: float) -> bool:
        """Whether something seems to be wrong with it."""
        return self.silence(now) > _UNUSUAL * self._interval

    def liveness_fault(self, now: float, bound: float) -> LivenessFault | None:
        """What is wrong with the peer, which must not be silent for `bound` seconds; None: nothing yet."""
        if now - min(self._heard, self._acknowledged) < 1.5 * self._interval and not self.suspect:  # by far the most
            return None
        silence = self.silence(now)
        if silence <= bound - _PROBING * self._interval:
            self._forget_probe()
            return None
        if self._probe is None:
            self._probe = Probe(self.socket)
        if silence < bound + _SLACK * self._interval:
            return None
        if now - self._acknowledged < _RECENT * self._interval:
            return LivenessFault(True, f"no answer for {bound:g} s, though the host answers: stopped or frozen")
        if self._probe.is_answered():
            return LivenessFault(False, f"sent no heartbeat for {bound:g} s, though its host answers (a firewall?)")
        return LivenessFault(True, f"no heartbeat for {bound:g} s: the host, or the network to it, is down")

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

    def _unheard(self, now: float) -> float:
        ours = now - max(self._since, self._heard)
        if ours < self._interval:
            return ours
        if sys.platform != "linux":
            return 0.0 if self._unacknowledged() == 0 else ours
        try:
            # Not when we read it, which may be an interval later.
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        except OSError:
            return ours
        return min(now - self._since, float(struct.unpack_from("I", info, _LAST_DATA_RECEIVED)[0]) / 1000)

    def _unacknowledged(self) -> int:
        """Bytes that were sent, and that the peer's kernel has not confirmed."""
        try:
            return int(struct.unpack("i", fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)))[0])
        except OSError:
            return 0


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
