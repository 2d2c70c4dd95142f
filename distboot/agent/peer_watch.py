"""The connections to the agents of other ranks: what is read there, and which peer is gone.

A heartbeat does not wake this process up. So once a second each peer (of many peers a part, in
turn) is *polled*: what has arrived is read. A peer from which nothing has arrived is *doubtful*. It
is polled, as soon as its silence can be a fault, each second until a message arrives, and its
silence is judged (`liveness`):

- lost: its host is down, or its process is stopped. Its ranks are lost (`lose`).
- unreachable: the host answers, but not on this connection. The job goes on, and what is for the
  peer is kept (`unreachable`), until it answers again (`reachable`).
- silent: a SIGTERM has arrived here, and the host does not answer. It counts as lost at once
  (`lose_silent`).

What follows from that is up to the `PeerEvents` of the agent: `rank_connections` on rank 0,
`rank_0_connection` on any other.

What always holds: `members` has each connection that is open, or closed and may be replaced. A
connection that is doubtful, or that the loop reads, is in `members`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import inf

from ..job.messages import KINDS
from ..job.root_cause import RankState
from ..rendezvous.messages import Detach
from ..rendezvous.protocol import Broadcast, Channel, ProtocolError
from .heartbeat import HeartbeatConnection
from .liveness import BEATS, LOST, REACHABLE, SILENT, UNREACHABLE
from .peer_connection import DisconnectedError, PeerConnection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .peer_events import PeerEvents

_SUSPECT_POLL = 0.1  # seconds between two polls of a peer whose host is being asked
_FEW = 32  # peers that are polled in one second, unless each one is due
DISCONNECTED = "the connection closed without an exit report"
_JUST_WOKEN = 10.0  # seconds: a peer may return for some of them


class PeerWatch:
    """The connections to other agents. All times are those of `time.monotonic`.

    Args:
        members: the ranks at the other end of each connection.
        events: hears of them.
        bound: seconds for which a host may give no sign.
        beats: of the bound, between two heartbeats of ours.
    """

    # Of the loop
    add_reader: Callable[[int | HeartbeatConnection, Callable[[float], None]], None]
    remove_reader: Callable[[int | HeartbeatConnection], None]

    def __init__(
        self,
        members: Mapping[HeartbeatConnection, list[RankState]],
        events: PeerEvents,
        bound: float,
        beats: float = BEATS,
    ) -> None:
        self.members = dict(members)
        self.bound = bound
        self.add_reader = lambda _file, _ready: None
        self.remove_reader = lambda _: None
        self._events = events
        self._heard_by = {
            LOST: events.lose,
            SILENT: events.lose_silent,
            UNREACHABLE: events.unreachable,
            REACHABLE: events.reachable,
        }
        self._woken_at = -inf  # when this process itself went on after it was stopped
        self._stopped_for = 0.0  # seconds
        self._unflushed: set[PeerConnection] = set()  # those with something left to send
        for connection in self.members:
            connection.unflushed = self._unflushed
        self._doubtful: set[HeartbeatConnection] = set()
        self._suspects: set[HeartbeatConnection] = set()  # of these: their hosts are being asked
        self._ticks = 0
        between = max(int(beats * bound), 1)  # ticks between two heartbeats
        everyone = list(self.members)
        # By tick, whom to send a heartbeat. The turn of a peer stays the same when others leave
        self._turns = [everyone[turn::between] for turn in range(between)]
        # Not closed before the end, which would be a failure to the peer
        self._abandoned: list[HeartbeatConnection] = []

    def wake(
        self,
        stopped_for: float,
        now: float,
    ) -> None:
        """This process was stopped: the silence of its peers counts from now on."""
        self._woken_at = now
        self._stopped_for = stopped_for
        for connection in self.members:
            connection.wake(now)

    def why_disconnected(self, agent: str, now: float) -> str:
        """Why the rank at the other end of a connection that has closed is lost.

        The peer has closed it, where this process was stopped longer than it waits.

        Args:
            agent: this one, in the words of that text.
            now: the time.
        """
        was_given_up = self._stopped_for > self.bound
        has_just_woken = now < self._woken_at + _JUST_WOKEN
        if was_given_up and has_just_woken:
            seconds = f"{self._stopped_for:.0f} s"
            return f"the connection closed while {agent} was stopped for {seconds}"
        return DISCONNECTED

    def read(self, connection: HeartbeatConnection, now: float) -> None:
        """Receive and handle the messages of another agent."""
        try:
            received = connection.receive(now, *KINDS)
            if received:
                self._take(received, connection, now)
        except DisconnectedError as error:
            self._events.disconnected(connection, error, now)
        except ProtocolError as error:
            self._events.abandon(connection, str(error), now)

    def _take(
        self,
        received: Iterable[tuple[int, object]],
        connection: HeartbeatConnection,
        now: float,
    ) -> None:
        for rank, message in received:
            if connection in self.members:  # the message before may have ended it
                self._events.take_from(
                    connection,
                    rank,
                    message,
                    now,
                )

    def tick(self, now: float) -> None:
        """Once a second: send what is left, poll the peers, and send heartbeats."""
        for connection in list(self._unflushed):
            self._unflushed.discard(connection)
            connection.flush()
        self._ticks += 1
        peers = list(self.members)
        most = max(int(BEATS * self.bound), 1)
        parts = min(1 + len(peers) // (_FEW + 1), most)
        part = peers[self._ticks % parts :: parts]
        doubtful = [each for each in self._doubtful if now >= each.liveness.no_fault_before]
        for connection in dict.fromkeys([*part, *doubtful]):
            self._poll(connection, now)
        # After that, as a kernel needs time to confirm a heartbeat
        turn = self._ticks % len(self._turns)
        beaten = filter(self.members.__contains__, self._turns[turn])
        for connection in beaten:
            if self._events.is_running(connection):
                connection.heartbeat()

    def poll_suspects(self, now: float) -> None:
        """In each turn: poll the suspects."""
        for connection in list(self._suspects):
            self._poll(connection, now)

    def due(self, now: float) -> float:
        """When `poll_suspects` is to be called next."""
        due = inf
        for connection in self._suspects:
            due = min(due, now + _SUSPECT_POLL, connection.liveness.asked_until)
        return due

    def _poll(self, connection: HeartbeatConnection, now: float) -> None:
        """Read what has arrived; if nothing has, find out whether the peer is still there."""
        if connection not in self.members:  # it was lost with another one
            return
        if not connection.is_closed:
            self.read(connection, now)  # rank 0 sends the replies later in this turn
        if self._is_heard(connection, now) or not self._matters(connection):
            self._trust(connection)
            return
        was_suspect = connection in self._suspects
        self._doubtful.add(connection)
        found = connection.fault(now)
        self._follow(connection)
        if found is None:
            return
        alike = [connection]
        # Its host does not answer, and so neither for the others
        if was_suspect and found.kind == LOST:
            host = self._host_of(connection)
            alike += filter(lambda each: self._host_of(each) == host, self._suspects)
        hear = self._heard_by[found.kind]
        for each in alike:
            hear(each, found.text, now)

    def _host_of(self, connection: HeartbeatConnection) -> set[int]:
        """The node of a peer; none, where it has no rank any more."""
        return {member.node_rank for member in self.members.get(connection, ())}

    def _follow(self, connection: HeartbeatConnection) -> None:
        """Poll a doubtful peer in each turn, as long as its host is asked."""
        if not connection.liveness.is_suspect:
            self._suspects.discard(connection)
            return
        self._doubtful.add(connection)
        self._suspects.add(connection)

    def _trust(self, connection: HeartbeatConnection) -> None:
        """Something has arrived from a peer, or its connection has ended."""
        if connection in self._doubtful:
            self._doubtful.remove(connection)
            self._suspects.discard(connection)
            connection.trust()

    def _matters(self, connection: HeartbeatConnection) -> bool:
        """Whether it is to be known if a peer is there. A question is answered in any case."""
        return connection.liveness.is_question or self._events.is_running(connection)

    @staticmethod
    def _is_heard(connection: HeartbeatConnection, now: float) -> bool:
        """Whether nothing is to be found out, as something has arrived, or the end.

        A connection that was cut may end, too: then its host is still asked whether it is there.
        """
        if connection.is_unreachable:
            return False
        return connection.is_closed or connection.heard == now

    def has_running(self, connection: HeartbeatConnection) -> bool:
        """Whether a rank at the other end of an open connection has not ended."""
        for member in self.members.get(connection, ()):
            if member.end is None:
                return True
        return False

    def question_all(self, now: float) -> None:
        """A signal has arrived here: ask the hosts that are silent."""
        for connection in self.members:
            if self._events.is_running(connection):
                connection.question(now)
                self._follow(connection)

    def send(self, message: object, rank: int = 0) -> None:
        """Send a message to all."""
        broadcast = Broadcast(message)
        for connection in self.members:
            connection.send(broadcast, rank)

    def end(self, connection: HeartbeatConnection) -> None:
        """A connection has ended, and its peer may return over another one."""
        self.remove_reader(connection)
        self._trust(connection)
        connection.end()

    def drain(self, connection: HeartbeatConnection, now: float) -> bool:
        """Handle all that arrived on a connection before another one replaces it.

        Returns whether its peer is still one of `members`.
        """
        received = connection.drain(now, *KINDS)
        self._take(received, connection, now)
        return connection in self.members

    def use(
        self,
        connection: HeartbeatConnection,
        new: socket.socket,
        channel: Channel,
    ) -> None:
        """Go on over a new connection."""
        self.remove_reader(connection)
        self._trust(connection)
        connection.replace(new, channel)
        self.add_reader(connection, partial(self.read, connection))

    def abandon(self, connection: HeartbeatConnection) -> None:
        """Go on without failure detection to an agent, for good."""
        connection.send(Detach())
        self._abandoned.append(connection)
        self.forget(connection)

    def forget(self, connection: HeartbeatConnection) -> list[RankState]:
        """Remove a connection from the peers; returns the ranks at its other end."""
        self.remove_reader(connection)
        self._trust(connection)
        members = self.members.pop(connection)
        for member in members:
            member.connection = None
        return members

    def close(self) -> None:
        for connection in (*self.members, *self._abandoned):
            connection.close()
