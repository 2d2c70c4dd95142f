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
from dataclasses import replace
from typing import NamedTuple

from ..rendezvous.messages import Refused, Resumed
from ..rendezvous.protocol import (
    BEFORE_AUTHENTICATION,
    HEADER,
    HEARTBEAT,
    Broadcast,
    Channel,
    Frames,
    ProtocolError,
)
from .backlog import Backlog

_PORT = 1  # tcpmux, at which nothing listens: a host that is there refuses at once
_ANSWERS = (0, errno.EISCONN, errno.ECONNREFUSED, errno.ECONNRESET)
# Not decided yet: on its way, or there was no file left for it
_PENDING = (errno.EINPROGRESS, errno.EALREADY, errno.EMFILE, errno.ENFILE)
# With which the kernel ends a connection after sending for minutes in vain; tcp(7), tcp_retries2
_GIVEN_UP = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)


class Probe:
    """An attempt to connect to the host of a connection, at another port than that of failure detection."""

    def __init__(self, connection: socket.socket, end: float) -> None:
        self.end = end  # when it has to be answered
        self._connection = connection
        self._socket: socket.socket | None = None
        self._result = self._attempt()

    def is_answered(self) -> bool:
        """Whether the host has accepted or refused by now."""
        if self._result in _PENDING:
            self._result = self._attempt()
        if self._result not in _PENDING:
            self.close()
        return self._result in _ANSWERS

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _attempt(self) -> int:
        """Begin to connect, or look what has become of it: connect(2)."""
        try:
            host, _, *scope = self._connection.getpeername()
            if self._socket is None:
                self._socket = socket.socket(self._connection.family, socket.SOCK_STREAM)
                self._socket.setblocking(False)
            return self._socket.connect_ex((host, _PORT, *scope))
        except OSError as error:
            return error.errno or errno.EHOSTUNREACH


BOUND = 15.0  # seconds; DISTBOOT_HEARTBEAT_TIMEOUT of rank 0's agent is that of the job
# Of it:
BEATS, BEATS_OF_RANK_0 = 0.5, 1.2  # between two heartbeats
_PATIENCE = 0.75  # without any sign of the peer's kernel, until another port of its host is tried
# Without a heartbeat, also if rank 0 was stopped for as long as it may be just before one was due
_FROZEN = 2.3
_CONFIRMING = 2.0  # seconds; a network takes milliseconds, and we look once a second
_PROBE_LIMIT = 0.9  # seconds for that other port to answer, at the least
_UNCOUNTED = (Resumed, Refused)  # the first answer over another connection
_THIN_LINEAR_TIMEOUTS = 16  # tcp(7): a lost packet is sent again soon, also when several were lost
# Bytes that wait until the peer's kernel takes more; they are tried again each second
_MOST_UNSENT = 1 << 20
# Tcpi_unacked, tcpi_last_data_recv, tcpi_last_ack_recv: linux/tcp.h
_TCP_INFO = struct.Struct("24xI24xII")


class DisconnectedError(Exception):
    """The connection has ended; the text says how, if it was not closed.

    `gave_up`: the peer did not end it; this host has stopped sending to it.
    """

    def __init__(self, text: str = "", *, gave_up: bool = False) -> None:
        super().__init__(text)
        self.gave_up = gave_up


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
        # Since when the peer has given no sign although its host answers; None: it is reachable
        self.unreachable_since: float | None = None
        self.is_closed = (
            False  # whether this connection has ended, and the peer may open another one
        )
        self.received = 0  # messages, ever
        self._kept = Backlog()
        self._has_all = False  # whether nothing was left to read at the last attempt
        self._unsent = bytearray()
        self._is_full = False  # whether too much waits for a peer that takes nothing
        self._channel, self._bound = channel, bound
        # Seconds: these two are compared for each peer, once a second
        self._patience = _PATIENCE * bound
        self._frozen_after = _FROZEN * bound
        self._probe: Probe | None = None  # while it is suspect
        # When we last saw that its kernel had confirmed all that we sent
        self._looked = self._confirmed = self.heard
        self._frames = Frames(most)
        # A heartbeat that needs no proof, of either side; empty: each has a number
        self._plain = b"" if channel.secret else HEARTBEAT.sign(channel)
        self._wakes = 0  # bytes that must be there before we wake up
        self._set_options()

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: object, rank: int = 0) -> None:
        """Send a message, or a `Broadcast`, from or for a rank. That the peer has gone is said by reading."""
        broadcast = message if isinstance(message, Broadcast) else Broadcast(message)
        self._kept.add(rank, broadcast)
        if self.is_closed:
            return
        self._unsent += broadcast.sign(self._channel, rank)
        self.flush()
        if self._kept.is_long:
            self._forget_confirmed()

    def flush(self) -> None:
        """Send what the kernel takes of what waits."""
        try:
            while self._unsent:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            self.backlog.add(self)
            # The peer has not read for very long, and a missing message is worse
            if len(self._unsent) > _MOST_UNSENT:
                self._is_full = True
                with suppress(OSError):
                    self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # it has ended, which reading will say
            self._unsent.clear()

    def heartbeat(self) -> None:
        """Say that we are here."""
        is_open = self.unreachable_since is None and not self.is_closed
        if is_open and not self._unsent:  # else that says as much
            self._unsent += self._plain or HEARTBEAT.sign(self._channel)
            self.flush()

    def receive(self, now: float, *kinds: type) -> list[tuple[int, object]]:
        """Every message of these kinds that has come, without heartbeats, each with the rank that it is from or for.

        `DisconnectedError`: the connection has ended; `ProtocolError`: the peer sends something else.
        """
        try:
            data = self.socket.recv(65536)
        except BlockingIOError:
            self._has_all = True
            return []
        except OSError as error:
            gave_up = error.errno in _GIVEN_UP
            raise DisconnectedError(error.strerror or str(error), gave_up=gave_up) from None
        if not data:
            raise DisconnectedError(gave_up=self._is_full)
        self.heard = now
        if data == self._plain and self._frames.missing == HEADER:  # by far the most
            return []
        messages = [
            (frame.rank, self._channel.verify(frame, self._frames, type(None), *kinds))
            for frame in self._frames.feed(data)
        ]
        # Beats do not wake us up: they are read when we are awake anyway. The rest of a longer message does.
        self._wake_for(HEADER + 1 if self._frames.missing == HEADER else 1)
        found = [each for each in messages if each[1] is not None]
        self.received += sum(not isinstance(message, _UNCOUNTED) for _, message in found)
        return found

    def drain(self, now: float, *kinds: type) -> list[tuple[int, object]]:
        """What was received until this connection ends, or is given up for another one."""
        found: list[tuple[int, object]] = []
        self._has_all = False
        with suppress(DisconnectedError, ProtocolError):
            while not self._has_all:
                found += self.receive(now, *kinds)
        return found

    # Going on over another connection

    def end(self) -> None:
        """This connection has ended: keep what is to be sent until there is another one."""
        self.is_closed = True
        self.socket.close()
        self._unsent.clear()
        self._forget_probe()

    def replace(self, connection: socket.socket, channel: Channel) -> None:
        """Use another connection to the same peer from now on; nothing is sent until `resume`."""
        self.end()
        self.socket = connection
        self._channel = channel
        self._frames = Frames(self._frames.most)
        self._is_full = False
        self._plain = b"" if channel.secret else HEARTBEAT.sign(channel)
        self._wakes = 0
        self._set_options()

    def send_first(self, message: object) -> None:
        """Send what is not counted: how many messages were received."""
        self._unsent += self._channel.sign(message)
        self.flush()

    def use_round(self, number: int) -> None:
        """What follows is of this round of the job: the first messages of a connection are not."""
        self._channel = replace(self._channel, round=number)
        self._plain = self._plain and HEARTBEAT.sign(self._channel)

    def confirm(self, received: int) -> None:
        """The peer has received so many messages; `ProtocolError`: what follows is not kept."""
        self._kept.confirm(received)

    def resume(self, now: float) -> None:
        """Send what the peer has not received."""
        for rank, message in self._kept:
            self._unsent += message.sign(self._channel, rank)
        self.is_closed = False
        self.unreachable_since = None
        self.heard = self._looked = self._confirmed = now
        self.flush()

    def _set_options(self) -> None:
        self.socket.setblocking(False)
        self._wake_for(HEADER + 1)
        if sys.platform == "linux":
            with suppress(OSError):
                self.socket.setsockopt(socket.IPPROTO_TCP, _THIN_LINEAR_TIMEOUTS, 1)

    def _forget_confirmed(self) -> None:
        """Keep nothing that the peer's kernel has confirmed: it can be read there also if the connection ends."""
        with suppress(OSError):
            waiting = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
            if not self._unsent and not any(waiting):
                self._kept.clear()

    @property
    def is_suspect(self) -> bool:
        """Whether it is silent for so long that a second opinion is asked for."""
        return self._probe is not None and self.unreachable_since is None

    def unreachable_for(self, now: float) -> str:
        """`"40 s"`."""
        return f"{now - (self.unreachable_since or now):.0f} s"

    def silence(self) -> tuple[float, bool]:
        """Seconds for which nothing has come from the peer's kernel, and whether it has confirmed all that we sent."""
        try:
            info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        except (OSError, AttributeError):  # as on other systems than Linux
            return 0.0, True
        unconfirmed, *received = _TCP_INFO.unpack(info)
        return min(received) / 1000, not unconfirmed

    def is_unusually_silent(self) -> bool:
        """Whether the peer's host may just have died: a heartbeat is due, or the answer to ours."""
        if self.unreachable_since is not None:
            return False
        silence, is_confirmed = self.silence()
        now = time.monotonic()
        is_late = (
            not is_confirmed
            and now > self._confirmed + _CONFIRMING
            and now < self._looked + _CONFIRMING
        )
        return is_late or silence > BEATS * self._bound + 1

    def fault(self, now: float) -> LivenessFault | None:
        """What is wrong with the peer; asked once a second, after reading, where nothing has come. None: not known.

        A fault that is not a loss is told once, until the peer has been reachable again.
        """
        silence, is_confirmed = self.silence()
        self._looked = now
        if is_confirmed:
            self._confirmed = now
            if self._kept.messages:
                self._forget_confirmed()
        else:
            silence = max(silence, now - self._confirmed)  # a network may fail in one direction
        if silence < self._patience:
            self._forget_probe()
            if self.unreachable_since is None and now - self.heard <= self._frozen_after:
                return None
            return self._frozen(now)
        if self._probe is None:
            self.heartbeat()  # which its kernel confirms, if it is there
            self._probe = Probe(self.socket, now + self._probe_limit(silence))
        is_answered = self._probe.is_answered()
        if now < self._probe.end:
            return None
        self._forget_probe()
        if not is_answered:
            why = f"no answer for {self._bound:g} s: the host, or the network to it, is down"
            return LivenessFault(True, why)
        if self.unreachable_since is not None:
            return None
        self.unreachable_since = now - silence
        why = f"gave no answer for {self._bound:g} s, though its host answers (a firewall?)"
        return LivenessFault(False, why)

    def _probe_limit(self, silence: float) -> float:
        """Seconds for the host to answer; once a peer is unreachable there is no hurry."""
        left = self._bound if self.unreachable_since is not None else self._bound - silence
        return max(left, _PROBE_LIMIT)

    def _frozen(self, now: float) -> LivenessFault | None:
        """What is wrong with a peer whose kernel answers."""
        if self.unreachable_since is not None:  # the time without heartbeats begins now
            self.unreachable_since = None
            self.heard = now
            return None
        seconds = self._frozen_after
        why = f"no answer for {seconds:.0f} s, though the host answers: stopped or frozen"
        return LivenessFault(True, why)

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
