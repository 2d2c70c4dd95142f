"""The connections to the agents of other ranks: what is read there, and which peer is gone.

A heartbeat does not wake this process up. So once a second each peer (of many peers a part, in
turn) is *polled*: what has arrived is read. A peer from which nothing has arrived is *doubtful*. It
is polled, as soon as its silence can be a fault, each second until a message arrives, and
`HeartbeatConnection.fault` judges the silence:

- lost: its host is down, or its process is stopped. Its ranks are lost (`_lose`).
- unreachable: the host answers, but not on this connection. The job goes on, and what is for the
  peer is kept (`_unreachable`), until it answers again (`_reachable`).

A launcher that sees a host die sends SIGTERM to all other ranks, long before a heartbeat is missed.
So a SIGTERM is a *question*: each peer that is unusually silent at that moment has a tenth of a
second to show that its host is there (`_question`); one that does not is lost (`_lose_silent`).

What always holds: `peers` has exactly the open connections, those that have ended and may be
replaced included. A connection that is in `_doubtful`, or that the loop reads, is in `peers`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from operator import attrgetter

from ..job.messages import KINDS
from ..job.root_cause import RankState
from ..rendezvous.messages import Detach
from ..rendezvous.protocol import Broadcast, Channel, ProtocolError
from .heartbeat import BEATS, HeartbeatConnection, Probe
from .peer_connection import DisconnectedError, PeerConnection

# Seconds for the host of a silent peer to answer after a signal: mpirun kills a rank 0.24 s later
_HOST_ANSWERS = 0.1
_SUSPECT_POLL = 0.1  # seconds between two polls of a peer whose host is being asked
_FEW = 32  # peers, all of which are polled each second
_is_suspect = attrgetter("is_suspect")
DISCONNECTED = "the connection closed without an exit report"


class PeerWatch:
    """The connections to other agents. All times are those of `time.monotonic`."""

    bound: float  # seconds for which a host may give no sign
    # Of the loop
    add_reader: Callable[[int | HeartbeatConnection, Callable[[float], None]], None]
    remove_reader: Callable[[int | HeartbeatConnection], None]

    def __init__(self, peers: Mapping[HeartbeatConnection, list[RankState]]) -> None:
        # The ranks at the other end of each connection
        self.peers: dict[HeartbeatConnection, list[RankState]] = dict(peers)
        self._backlog: set[PeerConnection] = set()  # those with something left to send
        for connection in self.peers:
            connection.backlog = self._backlog
        self._doubtful: set[HeartbeatConnection] = set()
        self._questioned: dict[HeartbeatConnection, Probe] = {}
        self._ticks = 0
        self._between = max(int(BEATS * self.bound), 1)  # ticks between two heartbeats
        # Not closed before the end, which would be a failure to the peer
        self._abandoned: list[HeartbeatConnection] = []

    @property
    def is_cut_off(self) -> bool:
        """Whether no other agent can be reached, for now."""
        return all(connection.unreachable_since is not None for connection in self.peers)

    def read(self, connection: HeartbeatConnection, now: float) -> None:
        """Receive and handle the messages of another agent."""
        self._read(connection, now)

    def _read(self, connection: HeartbeatConnection, now: float) -> None:
        try:
            for rank, message in connection.receive(now, *KINDS):
                if connection in self.peers:  # the message before may have ended it
                    self._take_from(
                        connection,
                        rank,
                        message,
                        now,
                    )
        except DisconnectedError as error:
            self._disconnected(connection, error, now)
        except ProtocolError as error:
            self._abandon(connection, str(error), now)

    def _tick_peers(self, now: float) -> None:
        """Once a second: send what is left, poll the peers, and send heartbeats."""
        for connection in list(self._backlog):
            self._backlog.discard(connection)
            connection.flush()
        self._ticks += 1
        peers = list(self.peers)
        parts = 1
        if len(peers) > _FEW:
            parts = max(int(BEATS * self.bound), 1)
        doubtful = [each for each in self._doubtful if now >= each.no_fault_before]
        for connection in {*peers[self._ticks % parts :: parts], *doubtful}:
            self._poll(connection, now)
        # After that, as a kernel needs time to confirm a heartbeat
        for connection in peers[self._ticks % self._between :: self._between]:
            if self._is_running(connection):
                connection.heartbeat()

    def _suspects(self) -> list[HeartbeatConnection]:
        """The peers whose hosts are being asked."""
        return list(filter(_is_suspect, self._doubtful))

    def _poll_suspects(self, now: float) -> None:
        """In each turn: poll the suspects."""
        for connection in self._suspects():
            self._poll(connection, now)
        had_time = [each for each, probe in self._questioned.items() if now >= probe.end]
        for connection in had_time:
            self._judge_silent(connection, now)

    def _suspects_due(self, now: float) -> float:
        """When `_poll_suspects` is to be called next."""
        ends = [probe.end for probe in self._questioned.values()]
        due = min(ends, default=inf)
        if self._suspects():
            due = min(due, now + _SUSPECT_POLL)
        return due

    def _poll(self, connection: HeartbeatConnection, now: float) -> None:
        """Read what has arrived; if nothing has, find out whether the peer is still there."""
        if connection.is_closed:
            return
        self._read(connection, now)  # rank 0 sends the replies later in this turn
        if self._is_heard(connection, now) or not self._is_running(connection):
            self._doubtful.discard(connection)
            return
        self._doubtful.add(connection)
        since = connection.unreachable_since
        fault = connection.fault(now)
        if fault is None:
            if since is not None and connection.unreachable_since is None:
                self._reachable(connection, now - since, now)
        elif fault.is_lost:
            self._lose(
                connection,
                fault.why,
                fault.why,
                now,
            )
        else:
            self._unreachable(connection, fault.why, now)

    @staticmethod
    def _is_heard(connection: HeartbeatConnection, now: float) -> bool:
        """Whether nothing is to be found out, as something has arrived, or the end."""
        if connection.is_closed:
            return True
        return connection.unreachable_since is None and connection.heard == now

    def _is_running(self, connection: HeartbeatConnection) -> bool:
        """Whether a rank at the other end of an open connection has not ended."""
        for member in self.peers.get(connection, ()):
            if member.end is None:
                return True
        return False

    def _question_peers(self, now: float) -> None:
        """A signal has arrived here: ask the hosts that are silent."""
        for connection in self.peers:
            if self._is_running(connection):
                self._question(connection, now)

    def _question(
        self,
        connection: HeartbeatConnection,
        now: float,
    ) -> None:
        """A signal has arrived: ask the host of a peer that is unusually silent."""
        if connection.is_unusually_silent():
            probe = Probe(connection.socket, now + _HOST_ANSWERS)
            self._questioned[connection] = probe

    def _judge_silent(self, connection: HeartbeatConnection, now: float) -> None:
        probe = self._questioned.pop(connection)
        is_answered = probe.is_answered()
        probe.close()
        if is_answered or connection not in self.peers:
            return
        if connection.is_unusually_silent():
            self._lose_silent(connection, now)

    def _send(self, message: object, rank: int = 0) -> None:
        broadcast = Broadcast(message)
        for connection in self.peers:
            connection.send(broadcast, rank)

    def _disconnected(
        self,
        connection: HeartbeatConnection,
        error: DisconnectedError,
        now: float,
    ) -> None:
        """A connection has ended: its peer may have ended, too."""
        self._lose(
            connection,
            DISCONNECTED,
            str(error),
            now,
        )

    def _end_connection(self, connection: HeartbeatConnection) -> None:
        """A connection has ended, and its peer may return over another one."""
        self.remove_reader(connection)
        self._doubtful.discard(connection)
        connection.end()

    def _drain(self, connection: HeartbeatConnection, now: float) -> bool:
        """Handle all that arrived on a connection before another one replaces it.

        Returns whether its peer is still one of `peers`.
        """
        for rank, message in connection.drain(now, *KINDS):
            if connection in self.peers:
                self._take_from(
                    connection,
                    rank,
                    message,
                    now,
                )
        return connection in self.peers

    def _use(
        self,
        connection: HeartbeatConnection,
        new: socket.socket,
        channel: Channel,
    ) -> None:
        """Go on over a new connection."""
        self.remove_reader(connection)
        connection.replace(new, channel)
        self.add_reader(connection, partial(self.read, connection))

    def _abandon(
        self,
        connection: HeartbeatConnection,
        why: str,  # noqa: ARG002 - the sides print it
        now: float,  # noqa: ARG002
    ) -> None:
        """Go on without failure detection to an agent, for good."""
        connection.send(Detach())
        self._abandoned.append(connection)
        self._forget(connection)

    def _forget(self, connection: HeartbeatConnection) -> list[RankState]:
        """Remove a connection from the peers; returns the ranks at its other end."""
        self.remove_reader(connection)
        self._doubtful.discard(connection)
        members = self.peers.pop(connection)
        for member in members:
            member.connection = None
        return members

    def close(self) -> None:
        for connection in self.peers:
            connection.close()
        for connection in self._abandoned:
            connection.close()
        for probe in self._questioned.values():
            probe.close()

    # What each side of failure detection does about a peer

    def _take_from(
        self,
        connection: HeartbeatConnection,
        rank: int,
        message: object,
        now: float,
    ) -> None:
        """Handle a message of another agent; `ProtocolError`: it must not send that."""
        raise NotImplementedError

    def _lose(
        self,
        connection: HeartbeatConnection,
        why: str,
        how: str,
        now: float,
    ) -> None:
        """An agent is lost, and its ranks with it; `how` the connection ended, if that is known."""
        raise NotImplementedError

    def _lose_silent(
        self,
        connection: HeartbeatConnection,
        now: float,
    ) -> None:
        """A host was silent when a signal arrived, and has not answered."""
        raise NotImplementedError

    def _unreachable(
        self,
        connection: HeartbeatConnection,
        why: str,
        now: float,
    ) -> None:
        """A peer does not answer, though its host does."""
        raise NotImplementedError

    def _reachable(
        self,
        connection: HeartbeatConnection,
        seconds: float,
        now: float,
    ) -> None:
        """A peer answers again, after so many seconds; the kernels send what was kept."""
        raise NotImplementedError
