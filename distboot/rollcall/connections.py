"""The connections of rank 0: accepted, read, refused and dropped within limits, whoever is at the other end.

What the messages say is not the matter of this file.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from ..address import socket_said, without_mapping
from ..errors import printable
from .wire import MOST_FROM_A_RANK, Frames, Session, WireError, frame, fresh

_REPORT_LIMIT = 10.0  # seconds that a peer has to report
_SPARE = 64  # connections beyond those of the ranks, for strangers
_ACCEPTED_AT_ONCE = 64
_MOST_REASONS = 100  # for refusing somebody, that are counted
_SAID_OF_A_REASON = (1, 10, 100, 1000)  # which refusals for one reason get a line


class Peer:
    """One connection."""

    __slots__ = ("at", "born", "challenge", "frames", "ranks", "session", "socket", "welcomed")

    def __init__(self, connection: socket.socket, at: str) -> None:
        self.socket = connection
        self.at = at
        self.born = time.monotonic()
        self.frames = Frames(MOST_FROM_A_RANK)
        self.challenge = fresh()
        self.session: Session | None = None  # once it has said hello
        self.welcomed = 0.0  # seconds since the epoch, when its hello was answered
        self.ranks: set[int] = set()  # for whom it has reported: itself, or those of its node

    def own_address(self) -> str:
        """The address of this host at which the peer reached it."""
        try:
            address: str = self.socket.getsockname()[0]
        except OSError:
            return ""
        return without_mapping(address)


def received(connection: socket.socket) -> bytes | None:
    """What has come over a non-blocking connection; empty if it has ended, None if there is nothing."""
    try:
        return connection.recv(65536)
    except BlockingIOError:
        return None
    except OSError:
        return b""


class OutOfFilesError(Exception):
    """No connection can be accepted, because this process may open no more files."""


class Connections:
    """All connections of rank 0.

    Args:
        listener: a listening socket, which stays open.
        ranks: how many of them belong to the job.
        take: called with each message; raises `WireError` if the peer does not belong.
        lost: called with a peer whose connection has ended.
        say: called with a line for people.
    """

    def __init__(
        self,
        listener: socket.socket,
        ranks: int,
        take: Callable[[Peer, dict[str, object]], None],
        lost: Callable[[Peer], None],
        say: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self.room = ranks + _SPARE
        self._take, self._lost, self._say = take, lost, say
        self._peers: dict[socket.socket, Peer] = {}
        self._strangers: dict[socket.socket, Peer] = {}  # those that have not reported, the oldest first
        self._refused: Counter[str] = Counter()  # why connections were refused
        self._checked = 0.0
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def turn(self, seconds: float) -> None:
        """Take what comes, waiting for it at most so long.

        Raises:
            OutOfFilesError: somebody has come for whom there is no file.
        """
        now = time.monotonic()
        if now >= self._checked + 0.5:
            self._checked = now
            self._refuse_late(now)
        ready = [key.fileobj for key, _ in self._selector.select(max(min(seconds, 0.5), 0.0))]
        for file in ready:
            if file in self._peers:  # it may have gone in this very round
                self._read(self._peers[file])
        if self._listener in ready:  # last: who has said something already is not to make room for strangers
            self._accept()

    def admit(self, peer: Peer) -> None:
        """The peer has reported, and may take its time from now on."""
        self._strangers.pop(peer.socket, None)

    def dismiss(self, peer: Peer) -> None:
        """The peer speaks for nobody any more: a stranger, until it reports again."""
        peer.born = time.monotonic()
        self._strangers[peer.socket] = peer

    def send(self, peer: Peer, data: bytes) -> None:
        """Send what fits into an empty socket buffer; whoever leaves no room for it is dropped."""
        try:
            peer.socket.send(data)
        except OSError:
            self.drop(peer)

    def drop(self, peer: Peer) -> None:
        """End a connection."""
        if self._peers.pop(peer.socket, None) is not None:
            self._strangers.pop(peer.socket, None)
            self._selector.unregister(peer.socket)
            peer.socket.close()
            self._lost(peer)

    def give_away(self, peer: Peer) -> None:
        """Leave a connection to somebody else, as it is."""
        if self._peers.pop(peer.socket, None) is not None:
            self._selector.unregister(peer.socket)

    def drop_strangers(self) -> None:
        """End the connections of all that have not reported."""
        for peer in list(self._strangers.values()):
            self.drop(peer)

    def refusals(self) -> str:
        """Whom we refused and why, as the end of a sentence; empty if nobody."""
        return "".join(f"; {count} refused: the peer {why}" for why, count in self._refused.most_common(3))

    def accept_no_more(self) -> None:
        """Leave those alone that are still to come."""
        with suppress(KeyError):
            self._selector.unregister(self._listener)

    def close(self) -> None:
        """End all connections; the listener stays open."""
        for peer in self._peers.values():
            peer.socket.close()
        self._peers.clear()
        self._strangers.clear()
        self._selector.close()

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, at = self._listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return  # nobody is there any more
                if len(self._strangers) > 1:  # with one, the ranks have all files that there are
                    self._drop_oldest()
                    return
                raise OutOfFilesError from None
            if len(self._peers) >= self.room:
                self._drop_oldest()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._peers[connection] = self._strangers[connection] = Peer(connection, socket_said(at[0], at[1]))
            self._selector.register(connection, selectors.EVENT_READ)

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._strangers.values()))
        self._read(oldest)  # it may be a rank that has not been heard yet
        if oldest.socket in self._strangers:
            self.drop(oldest)

    def _read(self, peer: Peer) -> None:
        data = received(peer.socket)
        if data is None:
            return
        if not data:
            self.drop(peer)
            return
        try:
            for message in peer.frames.feed(data):
                self._take(peer, message)
                if peer.socket not in self._peers:  # it has gone already
                    return
        except WireError as error:
            self._refuse(peer, str(error))
        except RecursionError:
            self._refuse(peer, "sends nonsense")

    def _refuse(self, peer: Peer, why: str) -> None:
        why = printable(why)
        if why in self._refused or len(self._refused) < _MOST_REASONS:
            self._refused[why] += 1
        if self._refused[why] in _SAID_OF_A_REASON:
            self._say(f"refused a connection from {peer.at}: the peer {why}; the job goes on")
        self.send(peer, frame({"refused": f"the peer {why}"}))
        self.drop(peer)

    def _refuse_late(self, now: float) -> None:
        for peer in list(self._strangers.values()):
            if now - peer.born <= _REPORT_LIMIT:
                break  # and all that follow are younger
            self._refuse(peer, f"did not report within {_REPORT_LIMIT:g} s")
