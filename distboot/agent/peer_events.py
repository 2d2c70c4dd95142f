"""What `peer_watch` tells of the connections to other agents; each kind of agents draws its own conclusions."""

from __future__ import annotations

from typing import Protocol

from .heartbeat import HeartbeatConnection
from .peer_connection import DisconnectedError


class PeerEvents(Protocol):
    """What one kind of agents does about a peer."""

    def is_running(self, connection: HeartbeatConnection) -> bool:
        """Whether it matters that the peer of an open connection is there."""

    def take_from(
        self,
        connection: HeartbeatConnection,
        rank: int,
        message: object,
        now: float,
    ) -> None:
        """Handle a message of another agent; `ProtocolError`: it must not send that."""

    def disconnected(
        self,
        connection: HeartbeatConnection,
        error: DisconnectedError,
        now: float,
    ) -> None:
        """A connection has ended: its peer may have ended, too."""

    def lose(
        self,
        connection: HeartbeatConnection,
        why: str,
        now: float,
    ) -> None:
        """An agent is lost, and its ranks with it."""

    def lose_silent(
        self,
        connection: HeartbeatConnection,
        why: str,
        now: float,
    ) -> None:
        """A host was silent when a signal arrived, and has not answered."""

    def unreachable(
        self,
        connection: HeartbeatConnection,
        why: str,
        now: float,
    ) -> None:
        """A peer does not answer, though its host does."""

    def reachable(
        self,
        connection: HeartbeatConnection,
        after: str,
        now: float,
    ) -> None:
        """A peer answers again, after a while (`"40 s"`); the kernels send what was kept."""

    def abandon(
        self,
        connection: HeartbeatConnection,
        why: str,
        now: float,
    ) -> None:
        """A peer has sent what it must not: go on without failure detection to it, for good."""
