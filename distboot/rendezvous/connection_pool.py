"""The connections of rank 0: accepted, read, refused and dropped, within limits for any peer.

Any process can connect to the port of rank 0: a rank, an agent that comes back after a lost
connection, a health check, a port scanner, a rank of another job. The pool holds their sockets; the
coordinator judges their messages. A connection has these states:

    accepted         no valid frame yet; it has `_REPORT_LIMIT` seconds
    welcomed         its Hello was answered, and its frames are authenticated from then on
    authenticated    it has reported, and `rank` is set; no time limit of the pool applies any more
    refused          a `ProtocolError`: it gets `Refused` with the reason, and is dropped
    detached         the caller owns the socket; the pool forgets it

There is room for each rank and for `_SPARE` others. If the room, or the limit of open files, is
used up, the oldest connection that is not authenticated makes way: a flood of foreign connections
cannot keep ranks out. Before it is dropped it is read once more, as it may be a rank whose report
has arrived; so is a connection whose time is over. For the same reason `poll` reads before it
accepts.

Nothing here blocks. Sockets have no timeout, a message is sent if the buffer of the socket has room
for it, and a peer that does not read is dropped. One refusal costs one line at most: the 1st, 10th,
100th and 1000th for the same reason are printed, so that a scanner does not fill the log.
"""

from __future__ import annotations

import os
import resource
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress

from ..base.dataclass import dataclass, field
from ..base.errors import too_few_files
from ..base.patterns import pattern
from ..base.text import escape_control, format_address
from .messages import LONGEST_TEXT, Refused
from .protocol import (
    Channel,
    Frame,
    Frames,
    ProtocolError,
    random_nonce,
)

# The rank at the other end, its socket, and what authenticates its messages
DetachedConnection = tuple[int, socket.socket, Channel]
_UNAUTHENTICATED = Channel()
_OWN_FILES = 64  # that the process has open for itself
# Open for each rank that it starts: pipes, the log file, the connection of the script
_FILES_OF_A_RANK = 10
_REPORT_LIMIT = 10.0  # seconds that a peer has to report
_SPARE = 64  # connections beyond those of the ranks, for those that have not reported
_ACCEPTED_AT_ONCE = 64
# In the description of what is not distboot: what it has sent, and how much it announces
_VARYING = pattern(r" \(.*|[0-9a-f]{2}(?: [0-9a-f]{2})+|[0-9]+")
_MOST_REASONS = 100  # for refusing a connection, that are counted
_PRINTED = (1, 10, 100, 1000)  # which refusals for one reason get a line
_PAUSE = 1.0  # seconds without new connections while no file can be opened for one
_CHECK_INTERVAL = 0.5  # seconds between two checks for peers that do not report
_ANSWER_LIMIT = 10.0  # seconds for all ranks together to read the answer
_LONGEST_WAIT = 0.5  # seconds


def allow_files(connections: int, say: Callable[[str], None], ranks: int) -> int | None:
    """Raise the soft limit of open files for these connections and for the ranks of this process.

    Warns with `say` if the hard limit is too low. Returns the previous limit; None: it was enough.
    """
    needed = connections + ranks * _FILES_OF_A_RANK + _OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    reachable = needed
    if hard != resource.RLIM_INFINITY:
        reachable = min(needed, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < needed:
        what = "the connections of all ranks"
        if ranks:
            what = f"the {ranks} ranks of this node"
        say(
            f"warning: {needed} open files are needed for {what}, and this process may "
            f"have {allowed}: raise the limit "
            "(ulimit -Hn, LimitNOFILE=, docker run --ulimit nofile=…)"
        )
    return soft


class PortInUse(Exception):  # noqa: N818 - an answer, not an error
    """Another process has a port; the text tells how that was found out."""


def listening(port: int) -> socket.socket:
    """A socket that listens at a port, for IPv4 and IPv6; `PortInUse`: it cannot.

    Raises:
        OSError: this process may open no more files, and so has none for any port.
    """
    is_dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET
    if is_dual:
        family = socket.AF_INET6
    try:
        return socket.create_server(
            ("", port),
            family=family,
            backlog=socket.SOMAXCONN,  # all ranks may come at one time
            dualstack_ipv6=is_dual,
        )
    except OSError as error:
        if too_few_files(error) is not None:
            raise
        why = str(error)
        if error.errno:
            # Its own text has the port once more: "Address already in use (while attempting to
            # bind on address …)".
            why = os.strerror(error.errno)
        raise PortInUse(why) from None


def send_to_all(outgoing: Mapping[socket.socket, Callable[[], bytes]]) -> None:
    """Send to each of these non-blocking sockets the result of its function.

    A peer that has disconnected is left out: its next read fails. So does that of a peer that does
    not read in time: its connection is shut down, as later frames would follow half a frame.
    """
    end = time.monotonic() + _ANSWER_LIMIT
    # It needs no file of its own: there may be none left
    with selectors.PollSelector() as selector:
        for connection, signed in outgoing.items():
            # One by one: thousands of copies of a membership would fill the memory.
            rest = _send_part(connection, memoryview(signed()))
            if rest:
                selector.register(connection, selectors.EVENT_WRITE, rest)
        while selector.get_map() and time.monotonic() < end:
            for key, _ in selector.select(_LONGEST_WAIT):
                ready: socket.socket = key.fileobj  # type: ignore[assignment]
                rest = _send_part(ready, key.data)
                if rest:
                    selector.modify(ready, selectors.EVENT_WRITE, rest)
                else:
                    selector.unregister(ready)
        for key in selector.get_map().values():
            late: socket.socket = key.fileobj  # type: ignore[assignment]
            with suppress(OSError):  # it has disconnected
                late.shutdown(socket.SHUT_RDWR)


def _send_part(connection: socket.socket, data: memoryview) -> memoryview:
    """Send as much as fits; return the rest, which is empty if the peer has disconnected."""
    try:
        return data[connection.send(data) :]
    except BlockingIOError:
        return data
    except OSError:
        return data[:0]


@dataclass(slots=True, eq=False)
class Connection:
    """One connection, and what is known of its peer."""

    socket: socket.socket
    at: str
    born: float = field(default_factory=time.monotonic)
    frames: Frames = field(default_factory=Frames)
    challenge: str = field(default_factory=random_nonce)
    # From its hello on one of its own, with what authenticates it
    channel: Channel = _UNAUTHENTICATED
    welcomed: float = 0.0  # in `job_time`, when its hello was answered; 0.0: it was not
    rank: int | None = None  # once it has reported


class OutOfFilesError(Exception):
    """A connection cannot be accepted; the text tells how many files this process may open."""


class ConnectionPool:
    """All connections of rank 0."""

    def __init__(
        self,
        listener: socket.socket,  # which stays open
        ranks: int,
        # Raises `ProtocolError` if the peer does not belong
        handle: Callable[[Connection, Frame], None],
        lost: Callable[[Connection], None],  # called when a connection has ended
        say: Callable[[str], None],
    ) -> None:
        self._listener = listener
        self._listeners = [listener]  # with that of `listen_also`
        self._paused: list[socket.socket] = []  # of these, while no file can be opened
        self._paused_until = 0.0
        self.room = ranks + _SPARE
        self._handle = handle
        self._lost = lost
        self._say = say
        self._peers: dict[socket.socket, Connection] = {}
        self._refused: Counter[str] = Counter()  # how many connections were refused for one reason
        self._reasons: dict[str, str] = {}  # by that, the first time
        self.remedy = ""  # what to do about a refused process that may stand in the way of a rank
        self._checked = 0.0
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def poll(self, seconds: float) -> None:
        """Read and accept once, after waiting for at most so long.

        Raises:
            OutOfFilesError: this process may open no file for a new connection.
        """
        self.refuse_overdue(time.monotonic())
        wait = max(min(seconds, _LONGEST_WAIT), 0.0)
        events = self._selector.select(wait)
        ready = [key.fileobj for key, _ in events]
        for file in ready:
            if file in self._peers:  # it may have been dropped in this call
                peer = self._peers[file]
                self._read(peer)
        # Last: a connection with something to read is not to make room for a new one
        for listener in set(self._listeners).intersection(ready):
            self._accept(listener)

    def refuse_overdue(self, now: float) -> None:
        """Refuse the connections that have not reported in time."""
        if now < self._checked + _CHECK_INTERVAL:
            return
        self._checked = now
        self._go_on(now)
        why = f"did not report within {_REPORT_LIMIT:g} s"
        for peer in self.unauthenticated:
            age = now - peer.born
            if age > _REPORT_LIMIT and self._is_silent(peer):
                self._refuse(peer, why)

    def _is_silent(self, peer: Connection) -> bool:
        """Read a connection once more; return whether it is still here, and waits for nothing.

        Its message may have arrived while this process was stopped, for example with its host.
        """
        welcomed = peer.welcomed
        self._read(peer)
        if peer.socket not in self._peers or peer.rank is not None:
            return False
        return peer.welcomed == welcomed  # else its report can only follow now

    @property
    def unauthenticated(self) -> list[Connection]:
        """The connections that have not reported, the oldest first."""
        found = []
        for peer in self._peers.values():
            if peer.rank is None:
                found.append(peer)
        return found

    def send(self, peer: Connection, data: bytes) -> None:
        """Send what fits into the socket's buffer; drop a peer that leaves no room for it."""
        sent = 0
        with suppress(OSError):
            sent = peer.socket.send(data)
        if sent < len(data):
            self.drop(peer)

    def drop(self, peer: Connection) -> None:
        if self.detach(peer):
            peer.socket.close()
            self._lost(peer)

    def detach(self, peer: Connection) -> bool:
        """Give a connection to the caller, as it is; return whether it was still here."""
        if self._peers.pop(peer.socket, None) is None:
            return False
        self._selector.unregister(peer.socket)
        return True

    def refusals(self) -> str:
        """Which connections were refused and why, as the end of a sentence; empty if no one was."""
        text = ""
        for kind, count in self._refused.most_common(3):
            text += f"; {count} refused: the connecting process {self._reasons[kind]}"
        return text

    def fileno(self) -> int:
        """The descriptor that is readable when `poll` has something to do."""
        return int(self._selector.fileno())

    def accept_no_more(self) -> None:
        """Leave new connections to the next owner of the listening socket."""
        with suppress(KeyError, ValueError):  # ValueError: it is closed
            self._selector.unregister(self._listener)
        with suppress(ValueError):  # there is no pause
            self._paused.remove(self._listener)

    def pause(self, now: float) -> None:
        """Accept no connection for a moment: no file can be opened for one."""
        for listener in self._listeners:
            with suppress(KeyError, ValueError):  # it is not accepted from
                self._selector.unregister(listener)
                self._paused.append(listener)
        self._paused_until = now + _PAUSE

    def _go_on(self, now: float) -> None:
        """End a pause once it is over."""
        if self._paused and now >= self._paused_until:
            for listener in self._paused:
                with suppress(KeyError):  # by `accept_again`
                    self._selector.register(listener, selectors.EVENT_READ)
            self._paused = []

    def accept_again(self) -> None:
        """Accept again, also the connections that have waited since `accept_no_more`."""
        with suppress(KeyError, ValueError):
            self._selector.register(self._listener, selectors.EVENT_READ)

    def close(self) -> None:
        for peer in self._peers.values():
            peer.socket.close()
        self._peers.clear()
        self._paused = []
        own_listeners = self._listeners[1:]
        for listener in own_listeners:
            listener.close()
        self._selector.close()

    def listen_also(self) -> int:
        """Accept at a second port, too, which stays with this process; 0: none is free."""
        try:
            listener = listening(0)
        except (PortInUse, OSError):
            return 0
        self._listeners.append(listener)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        return int(listener.getsockname()[1])

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, at = listener.accept()
            except OSError as error:
                if too_few_files(error) is not None:
                    self._make_room_for_files()
                return  # else the peer has disconnected again
            if len(self._peers) >= self.room:
                self._drop_oldest()
            connection.setblocking(False)
            with suppress(OSError):  # on macOS, if the peer has disconnected again
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            host, port, *_ = at
            peer = Connection(connection, format_address(host, port))
            self._peers[connection] = peer
            self._selector.register(connection, selectors.EVENT_READ)

    def _make_room_for_files(self) -> None:
        # With only one left, the ranks themselves use up all files
        if len(self.unauthenticated) > 1:
            self._drop_oldest()
            return
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OutOfFilesError(f"{allowed} files")

    def _drop_oldest(self) -> None:
        waiting = self.unauthenticated
        oldest = waiting[0]
        self._read(oldest)  # it may be a rank whose report has arrived
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
                self._handle(peer, frame)
                if peer.socket not in self._peers:  # it was dropped
                    return
        except ProtocolError as error:
            why = self._name_foreign(peer)
            self._refuse(peer, why or str(error))

    def _name_foreign(self, peer: Connection) -> str:
        """What a peer is if it is not distboot; empty: it may be.

        Keeps the remedy for missing ranks.
        """
        if peer.welcomed:
            return ""
        try:
            from .foreign import CLIENTS, identify  # here, as few jobs need it
        except OSError:  # no file may be opened any more; the name is not worth the job
            return ""
        found = identify(CLIENTS, peer.frames.pending)
        if found is None:
            return ""
        self.remedy = found.remedy or self.remedy
        return found.description

    def _refuse(self, peer: Connection, why: str) -> None:
        why = escape_control(why)
        reason = f"the connecting process {why}"
        kind = why
        if not peer.welcomed:  # a scanner sends something else each time
            kind = _VARYING.sub("", why)
        is_known = kind in self._refused
        if is_known or len(self._refused) < _MOST_REASONS:
            self._refused[kind] += 1
            self._reasons.setdefault(kind, why)
        if self._refused[kind] in _PRINTED:
            self._say(f"refused a connection from {peer.at}: {reason}; the job continues")
        refusal = Refused(reason[:LONGEST_TEXT])
        self.send(peer, peer.channel.sign(refusal))
        self.drop(peer)
