"""One open connection between rank 0 and another rank, and what the kernel knows of the peer behind it."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
import time
from contextlib import suppress
from dataclasses import dataclass

from ..rollcall.wire import MOST_FROM_A_RANK, Frames, Session, WireError, canonical
from .probe import Probe

KINDS = ("beat", "watch", "ending", "trouble", "stopping", "end", "first", "bye")
SLACK = 0.7  # seconds beyond the bound: a rank that was stopped for just as long has then spoken again
_PROBING = 2.0  # seconds before the bound, to have a second opinion by then
_RECENT = 3.0  # seconds within which a kernel that is there acknowledges what it got
_THIN_LINEAR_TIMEOUTS = 16  # tcp(7): a lost packet is sent again soon, also when several were lost
_LAST_DATA_RECEIVED = 52  # offset of tcpi_last_data_recv in struct tcp_info, linux/tcp.h


class LineEndedError(Exception):
    """The connection has ended; the text says how."""


@dataclass(frozen=True, slots=True)
class Complaint:
    """What is wrong with a peer that is silent.

    Attributes:
        is_lost: else only the lifeline to it is.
        why: what speaks for it; reads well after "rank 3".
    """

    is_lost: bool
    why: str


class Line:
    """An open connection to a peer.

    Args:
        connection: the socket, as the roll call left it.
        session: what its messages are sealed with.
    """

    def __init__(self, connection: socket.socket, session: Session) -> None:
        self.socket = connection
        self.session = session
        self._probe: Probe | None = None
        self._frames = Frames(MOST_FROM_A_RANK)
        self._beat = session.sealed("beat", "null")
        self._acknowledged = self._since = time.monotonic()
        connection.setblocking(False)
        with suppress(OSError):
            # Beats do not wake us up: what is shorter than this is read when we are awake anyway.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(self._beat) + 1)
        if sys.platform == "linux":
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, kind: str, content: object) -> None:
        """Send a message. Who has gone does without; reading will say so."""
        with suppress(OSError):
            self.socket.send(self.session.sealed(kind, canonical(content)))

    def beat(self, now: float) -> None:
        """Say that we are here; called once in a while."""
        if self._unacknowledged() == 0:
            self._acknowledged = now
        with suppress(OSError):
            self.socket.send(self._beat)

    def receive(self) -> list[tuple[str, object]]:
        """Kind and content of every message that has come, without beats.

        Raises:
            LineEndedError: the connection has ended.
            WireError: the peer sends garbage.
        """
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            return []
        except OSError as error:
            raise LineEndedError(error.strerror or str(error)) from None
        if not data:
            raise LineEndedError("closed")
        try:
            messages = [self.session.opened(message, *KINDS) for message in self._frames.feed(data)]
        except RecursionError:
            raise WireError("sends nonsense") from None
        return [message for message in messages if message[0] != "beat"]

    def forgive(self, now: float) -> None:
        """Count from now on: we were asleep ourselves."""
        self._acknowledged = self._since = now

    def quiet(self, now: float) -> float:
        """Seconds for which the peer has said nothing, or has not confirmed what we said."""
        return max(self._silence(now), now - self._acknowledged)

    def complaint(self, now: float, bound: float) -> Complaint | None:
        """What is wrong with the peer, which must not be silent for `bound` seconds; None: nothing yet."""
        quiet = self.quiet(now)
        if quiet > bound - _PROBING and self._probe is None:
            self._probe = Probe(self.socket)
        if quiet < bound + SLACK:
            return None
        if now - self._acknowledged < _RECENT:
            return Complaint(True, f"no answer for {bound:g} s, though the host answers: stopped or frozen")
        if self._probe is not None and self._probe.is_answered():
            return Complaint(False, f"was not heard for {bound:g} s, though its host answers (a firewall?)")
        return Complaint(True, f"nothing heard for {bound:g} s: the host, or the network to it, has gone")

    def end_politely(self, limit: float) -> None:
        """End our direction, and wait `limit` seconds for the peer to end the other."""
        end = time.monotonic() + limit
        with suppress(OSError, LineEndedError, WireError):
            self.socket.shutdown(socket.SHUT_WR)
            while (left := end - time.monotonic()) > 0:
                self.socket.settimeout(left)
                self.receive()

    def close(self) -> None:
        """End the connection."""
        self.socket.close()
        if self._probe is not None:
            self._probe.close()

    def _silence(self, now: float) -> float:
        ours = now - self._since
        if sys.platform != "linux":
            return 0.0 if self._unacknowledged() == 0 else ours
        try:
            # Not when we read it, which may be a second later.
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
        except OSError:
            return ours
        return min(ours, float(struct.unpack_from("I", info, _LAST_DATA_RECEIVED)[0]) / 1000)

    def _unacknowledged(self) -> int:
        """Bytes that were sent, and that the peer's kernel has not confirmed."""
        try:
            return int(struct.unpack("i", fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4)))[0])
        except OSError:
            return 0
