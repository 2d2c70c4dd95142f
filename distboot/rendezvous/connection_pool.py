"""The connections of rank 0: accepted, read, refused and dropped within limits, whatever is at the other end."""

from __future__ import annotations

import errno
import resource
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from ..base.text import escape_control, format_address
from .foreign import CLIENTS, identify
from .messages import LONGEST_TEXT, Refused
from .protocol import (
    Channel,
    Frame,
    Frames,
    ProtocolError,
    random_nonce,
)

# The rank at its other end, and what its messages are authenticated with.
DetachedConnection = tuple[int, socket.socket, Channel]
_OWN = 64  # files that the process has open for itself
# Files that it has open for a rank that it starts: pipes, the log file, the connection of the script
_OF_A_RANK = 10
_REPORT_LIMIT = 10.0  # seconds that a peer has to report
_SPARE = 64  # connections beyond those of the ranks, for those that have not reported
_ACCEPTED_AT_ONCE = 64
_MOST_REASONS = 100  # for refusing a connection, that are counted
_SAID_OF_A_REASON = (1, 10, 100, 1000)  # which refusals for one reason get a line


def allow_files(connections: int, say: Callable[[str], None], ranks: int = 0) -> int | None:
    """Raise the soft limit for so many connections, `say` it if that does not go far enough, and return what it was.

    Also for the ranks that this process starts. None: it stays.
    """
    needed = connections + ranks * _OF_A_RANK + _OWN
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    reachable = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < needed:
        what = f"the {ranks} ranks of this node" if ranks else "the connections of all ranks"
        say(
            f"warning: {needed} open files are needed for {what}, and this process may "
            f"have {allowed}: raise the limit (ulimit -Hn, LimitNOFILE=, docker run --ulimit nofile=…)"
        )
    return soft


def send_to_all(outgoing: Mapping[socket.socket, Callable[[], bytes]], limit: float) -> None:
    """Send to each of these non-blocking sockets what its function returns, within `limit` seconds in all.

    A peer that has disconnected, or does not take it in time, does without: what waits for it next will say so.
    """
    left: dict[socket.socket, memoryview] = {}
    end = time.monotonic() + limit
    # Which needs no file of its own: there may be none left
    with selectors.PollSelector() as selector:
        for connection in outgoing:
            selector.register(connection, selectors.EVENT_WRITE)
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(0.5):
                connection: socket.socket = key.fileobj  # type: ignore[no-redef]
                # Asked for only now: thousands of copies of a membership would fill the memory.
                data = left.pop(connection, None) or memoryview(outgoing[connection]())
                try:
                    data = data[connection.send(data) :]
                except BlockingIOError:
                    pass
                except OSError:
                    data = data[:0]
                if data:
                    left[connection] = data
                else:
                    selector.unregister(connection)


@dataclass(slots=True, eq=False)
class Connection:
    """One connection, and the peer there."""

    socket: socket.socket
    at: str
    born: float = field(default_factory=time.monotonic)
    frames: Frames = field(default_factory=Frames)
    challenge: str = field(default_factory=random_nonce)
    # From its hello on with what authenticates it
    channel: Channel = field(default_factory=Channel)
    welcomed: float = 0.0  # seconds since the epoch, when its hello was answered; 0.0: it was not
    rank: int | None = None  # once it has reported


class OutOfFilesError(Exception):
    """A connection cannot be accepted; the text says how many files this process may open."""


class ConnectionPool:
    """All connections of rank 0."""

    def __init__(
        self,
        listener: socket.socket,  # which stays open
        ranks: int,
        # Raises `ProtocolError` if the peer does not belong
        take: Callable[[Connection, Frame], None],
        lost: Callable[[Connection], None],  # called when a connection has ended
        say: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._second: socket.socket | None = None
        self.room = ranks + _SPARE
        self._take, self._lost, self._say = take, lost, say
        self._peers: dict[socket.socket, Connection] = {}
        self._refused: Counter[str] = Counter()  # why connections were refused
        self.remedy = ""  # what to do about a refused process that may stand in the way of a rank
        self._checked = 0.0
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def poll(self, seconds: float) -> None:
        """Take what comes, waiting for it at most so long; `OutOfFilesError`: there is no file for a new connection."""
        now = time.monotonic()
        if now >= self._checked + 0.5:
            self._checked = now
            for peer in self.unauthenticated:
                if now - peer.born > _REPORT_LIMIT:
                    self._refuse(peer, f"did not report within {_REPORT_LIMIT:g} s")
        ready = [key.fileobj for key, _ in self._selector.select(max(min(seconds, 0.5), 0.0))]
        for file in ready:
            if file in self._peers:  # it may have gone in this very round
                self._read(self._peers[file])
        # Last: a connection with something to read is not to make room for a new one
        for listener in (self._listener, self._second):
            if listener in ready:
                assert listener is not None
                self._accept(listener)

    @property
    def unauthenticated(self) -> list[Connection]:
        """Those that have not reported, the oldest first."""
        return [peer for peer in self._peers.values() if peer.rank is None]

    def send(self, peer: Connection, data: bytes) -> None:
        """Send what fits into an empty socket buffer; a peer that leaves no room for it is dropped."""
        try:
            peer.socket.send(data)
        except OSError:
            self.drop(peer)

    def drop(self, peer: Connection) -> None:
        if self.detach(peer):
            peer.socket.close()
            self._lost(peer)

    def detach(self, peer: Connection) -> bool:
        """Leave a connection to the caller, as it is; whether it was still here."""
        if self._peers.pop(peer.socket, None) is None:
            return False
        self._selector.unregister(peer.socket)
        return True

    def refusals(self) -> str:
        """Which connections were refused and why, as the end of a sentence; empty if no one was."""
        return "".join(
            f"; {count} refused: the connecting process {why}"
            for why, count in self._refused.most_common(3)
        )

    def fileno(self) -> int:
        """What is readable when `poll` has something to do."""
        return int(self._selector.fileno())

    def accept_no_more(self) -> None:
        """Leave those that come to whatever takes the listening socket."""
        with suppress(KeyError, ValueError):  # ValueError: it is closed
            self._selector.unregister(self._listener)

    def accept_again(self) -> None:
        """Take also those that have come since `accept_no_more`."""
        with suppress(KeyError, ValueError):
            self._selector.register(self._listener, selectors.EVENT_READ)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.socket.close()
        self._peers.clear()
        if self._second is not None:
            self._second.close()
        self._selector.close()

    def listen_also(self) -> int:
        """Accept at a second port, too, which no store of the script takes over; 0: there is none."""
        try:
            family = self._listener.family
            is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
            self._second = listener = socket.create_server(
                ("", 0), family=family, dualstack_ipv6=is_dual
            )
        except OSError:
            return 0
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        return int(listener.getsockname()[1])

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, at = listener.accept()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    return  # it has disconnected again
                # With one, the ranks have all files that there are
                if len(self.unauthenticated) > 1:
                    self._drop_oldest()
                    return
                raise OutOfFilesError(
                    f"{resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files"
                ) from None
            if len(self._peers) >= self.room:
                self._drop_oldest()
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = Connection(connection, format_address(at[0], at[1]))
            self._peers[connection] = peer
            self._selector.register(connection, selectors.EVENT_READ)

    def _drop_oldest(self) -> None:
        oldest = self.unauthenticated[0]
        self._read(oldest)  # it may be a rank that has not been heard yet
        if oldest.rank is None:
            self.drop(oldest)

    def _read(self, peer: Connection) -> None:
        try:
            data = peer.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.drop(peer)
            return
        try:
            for frame in peer.frames.feed(data):
                self._take(peer, frame)
                if peer.socket not in self._peers:  # it was dropped
                    return
        except ProtocolError as error:
            self._refuse(peer, self._name_foreign(peer) or str(error))

    def _name_foreign(self, peer: Connection) -> str:
        """What a peer is that never was a rank, and its remedy for whoever misses a rank; empty: it may be one."""
        found = None if peer.welcomed else identify(CLIENTS, peer.frames.pending)
        if found is None:
            return ""
        self.remedy = found.remedy or self.remedy
        return found.description

    def _refuse(self, peer: Connection, why: str) -> None:
        why = escape_control(why)
        if why in self._refused or len(self._refused) < _MOST_REASONS:
            self._refused[why] += 1
        if self._refused[why] in _SAID_OF_A_REASON:
            self._say(
                f"refused a connection from {peer.at}: the connecting process {why}; the job continues"
            )
        self.send(peer, peer.channel.sign(Refused(f"the connecting process {why}"[:LONGEST_TEXT])))
        self.drop(peer)
