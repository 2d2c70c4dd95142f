"""One open connection between rank 0 and another rank, and what the kernel knows of the peer behind it."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from ..rollcall.node import RELAYS_FROM
from ..rollcall.wire import MOST_FROM_A_RANK, Frames, Session, WireError, canonical
from ..roster import Roster
from .probe import Probe

KINDS = ("beat", "watch", "steps", "ending", "trouble", "stopping", "end", "first", "bye")
FOR_OTHERS = ("of", "to", "gone", "ready", "go", "error")  # what only relays say, or pass on
INTERVAL = 1.0  # seconds between two beats
_MOST_BEATS = 2000  # a second, that rank 0 answers for: in larger jobs every rank beats less often
# In intervals.
_SLACK = 0.6  # beyond the bound: a rank that was stopped for just as long has then spoken again
_PROBING = 1.0  # before the bound, to have a second opinion by then
_RECENT = 3.5  # within which a kernel that is there acknowledges what it got
_UNUSUAL = 3.0  # of silence
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


def interval_of(roster: Roster) -> float:
    """Seconds between two beats in a job of this size, the same on all ranks."""
    world_size = sum(map(len, roster.nodes))
    return max(INTERVAL, (len(roster.nodes) if world_size >= RELAYS_FROM else world_size) / _MOST_BEATS)


class Line:
    """An open connection to a peer.

    Args:
        connection: the socket, as the roll call left it.
        session: what its messages are sealed with.
        interval: seconds between two beats.
        most: bytes of a message from the peer.
        kinds: of messages that the peer may send.
    """

    def __init__(
        self,
        connection: socket.socket,
        session: Session,
        interval: float = INTERVAL,
        most: int = MOST_FROM_A_RANK,
        kinds: tuple[str, ...] = KINDS,
    ) -> None:
        self.socket = connection
        self.is_suspect = False  # silent for so long that it is looked at more often
        self.is_local = connection.family == socket.AF_UNIX  # to a process on this host, of which the kernel says more
        self._session, self._interval, self._kinds = session, interval, kinds
        self._probe: Probe | None = None
        self._frames = Frames(most)
        self._beat = session.sealed("beat", "null")
        self._heard = self._sent = self._acknowledged = self._since = time.monotonic()
        self._wakes = 0  # bytes that must be there before we wake up
        connection.setblocking(False)
        self._wake_for(len(self._beat) + 1)
        if sys.platform == "linux":
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)

    def fileno(self) -> int:
        """For selectors."""
        return self.socket.fileno()

    def send(self, kind: str, content: object) -> None:
        """Send a message. Who has gone does without; reading will say so."""
        self.send_sealed(self.sealed(kind, canonical(content)))

    def sealed(self, kind: str, text: str) -> bytes:
        """A message whose content is a canonical text, as a frame."""
        return self._session.sealed(kind, text)

    def send_sealed(self, data: bytes) -> None:
        """Send a frame."""
        try:
            sent = self.socket.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:  # it has ended, which reading will say
            return
        if sent != len(data) and (sent or data is not self._beat):
            # The peer has not read for very long. Half a message is garbage, and a missing one is worse: an end it is.
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def heard(self, now: float) -> list[tuple[int | None, str, object]]:
        """The same with the rank whose message it is; None: of the only one at the other end."""
        return [(None, kind, content) for kind, content in self.receive(now)]

    def tell(self, rank: int | None, kind: str, content: object) -> None:  # noqa: ARG002 - for those behind a relay
        """Send a message to one of the ranks at the other end, or to all of them (None)."""
        self.send(kind, content)

    def beat(self, now: float) -> None:
        """Say that we are here; called once an interval."""
        if self._unacknowledged() == 0:
            self._acknowledged = self._sent  # then, and not only now, the peer's kernel was there
        self._sent = now
        self.send_sealed(self._beat)

    def receive(self, now: float) -> list[tuple[str, object]]:
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
        self._heard = now
        if data == self._beat and self._frames.missing == 4:  # by far the most
            return []
        try:
            messages = [self._session.opened(message, *self._kinds) for message in self._frames.feed(data)]
        except RecursionError:
            raise WireError("sends nonsense") from None
        # Beats do not wake us up: they are read when we are awake anyway. The rest of a longer message does.
        self._wake_for(len(self._beat) + 1 if self._frames.missing == 4 else 1)
        return [message for message in messages if message[0] != "beat"]

    def forgive(self, now: float) -> None:
        """Count from now on: we were asleep ourselves."""
        self._sent = self._acknowledged = self._since = now

    def quiet(self, now: float) -> float:
        """Seconds for which the peer has said nothing, or has not confirmed what we said."""
        return max(self._silence(now), now - self._acknowledged)

    def is_unusually_quiet(self, now: float) -> bool:
        """Whether something seems to be wrong with it."""
        return self.quiet(now) > _UNUSUAL * self._interval

    def complaint(self, now: float, bound: float) -> Complaint | None:
        """What is wrong with the peer, which must not be silent for `bound` seconds; None: nothing yet."""
        if now - min(self._heard, self._acknowledged) < 1.5 * self._interval and not self.is_suspect:  # by far the most
            return None
        quiet = self.quiet(now)
        self.is_suspect = quiet > bound - _PROBING * self._interval
        if not self.is_suspect:
            self._forget_probe()
        elif self._probe is None and not self.is_local:
            self._probe = Probe(self.socket)
        if quiet < bound + _SLACK * self._interval:
            return None
        self.is_suspect = False
        if self.is_local or now - self._acknowledged < _RECENT * self._interval:
            return Complaint(True, f"no answer for {bound:g} s, though the host answers: stopped or frozen")
        if self._probe is not None and self._probe.is_answered():
            return Complaint(False, f"was not heard for {bound:g} s, though its host answers (a firewall?)")
        return Complaint(True, f"nothing heard for {bound:g} s: the host, or the network to it, has gone")

    def close(self) -> None:
        """End the connection."""
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

    def _silence(self, now: float) -> float:
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


def end_politely(lines: Iterable[Line], limit: float) -> None:
    """End our direction of these, and wait `limit` seconds in all for the peers to end theirs.

    A connection that is closed while something is unread loses what is still on its way to the peer (tcp(7), RST).
    """
    end = time.monotonic() + limit
    lines = list(lines)
    for line in lines:
        with suppress(OSError):
            line.socket.shutdown(socket.SHUT_WR)
    for line in lines:
        with suppress(OSError):
            while (left := end - time.monotonic()) > 0:
                line.socket.settimeout(left)
                if not line.socket.recv(65536):
                    break
