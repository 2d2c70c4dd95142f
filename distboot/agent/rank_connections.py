"""Rank 0's connections to all other agents, which may end, fall silent, and return.

A connection that has ended without an exit report is kept for a moment: its agent may return over
another one, as after a cut of the network (see `returning`). Until then its ranks are reported as
lost with a due time; if the agent is back before that, the reports are withdrawn.

Where an agent is silent but its host answers, only the connection is cut. Its ranks are then
unreachable: what waits for them at a key says so, and nobody is stopped for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ..base.text import ranks_said, without_mapping
from ..host import network
from ..job.effects import Effect
from ..job.first_failure import GATHERING
from ..job.job import Job
from ..job.keys import Keys
from ..job.root_cause import RankState
from ..rendezvous.connection_pool import Connection
from ..rendezvous.events import EventLog
from ..rendezvous.membership import Membership
from ..rendezvous.messages import Resume, Resumed
from ..rendezvous.protocol import ProtocolError
from .heartbeat import BEATS_OF_RANK_0, HeartbeatConnection
from .participant import Participant
from .peer_connection import DisconnectedError
from .peer_watch import DISCONNECTED

# Seconds for an agent to return whose connection has ended: it takes milliseconds
_RETURN_TIMEOUT = GATHERING
# The same, where the network was cut
_RETURN_TIMEOUT_AFTER_CUT = 3.0
_GREETED = 1.0  # seconds from the first message of an agent until it is back


@dataclass
class RankConnections(Participant):
    """What rank 0's agent does about its connections."""

    membership: Membership = field(kw_only=True)
    keys: Keys = field(kw_only=True)  # where ranks wait for each other
    log: EventLog = field(kw_only=True)  # of the events of the job, which goes on here

    def __post_init__(self) -> None:
        super().__post_init__()
        self._between = max(int(BEATS_OF_RANK_0 * self.bound), 1)  # less often: it has many peers
        self.job = Job(
            self.facts,
            self.keys,
            is_by_node=self.membership.by_node,
            addresses=self._addresses(),
        )
        # Connections that have ended, and until when their agents may return over others
        self._returning: dict[HeartbeatConnection, float] = {}

    def _addresses(self) -> dict[int, str]:
        """Where other nodes are, by their first rank."""
        if not self.settings.checks:
            return {}
        found = {}
        for rank, member in self.members.items():
            if member.local_rank == 0 and member.connection is not None:
                with suppress(OSError):  # it has ended already
                    address = network.address_of_peer(member.connection.socket)
                    found[rank] = without_mapping(address)
        return found

    def _apply(self, effects: Sequence[Effect], now: float) -> None:
        """Carry out what an event has led to."""
        raise NotImplementedError

    def turn(self, now: float) -> None:
        super().turn(now)
        over = [connection for connection, end in self._returning.items() if now >= end]
        for connection in over:
            self._lose(
                connection,
                DISCONNECTED,
                "",
                now,
            )

    def due(self, now: float) -> float:
        return min([super().due(now), *self._returning.values()])

    # Ends

    def _disconnected(
        self,
        connection: HeartbeatConnection,
        error: DisconnectedError,
        now: float,
    ) -> None:
        """Its ranks are lost, unless their agent returns over another connection in time."""
        if not self._is_running(connection):
            super()._disconnected(connection, error, now)
            return
        self._end_connection(connection)
        seconds = _RETURN_TIMEOUT
        if connection.unreachable_since is not None:
            if error.gave_up:
                return  # that says nothing about the peer, which may return whenever it can
            seconds = _RETURN_TIMEOUT_AFTER_CUT
        self._returning[connection] = now + seconds
        for member in self._detected(connection):
            self._lost(
                member,
                DISCONNECTED,
                now,
                gathering=seconds,
            )

    def _lose(
        self,
        connection: HeartbeatConnection,
        why: str,
        how: str,  # noqa: ARG002
        now: float,
    ) -> None:
        lost = self._detected(connection)
        if self._returning.pop(connection, None) is not None:
            lost = []  # it was reported then
        self._forget(connection)
        connection.close()
        for member in lost:
            self._lost(member, why, now)

    def _detected(self, connection: HeartbeatConnection) -> list[RankState]:
        """The ranks of a connection that are to end yet, and whose end is reported to all."""
        found = []
        for member in self.peers[connection]:
            if member.end is None and self.facts.is_detected(member):
                found.append(member)
        return found

    def _lost(
        self,
        member: RankState,
        why: str,
        now: float,
        gathering: float = GATHERING,
    ) -> None:
        self.lost_at[member.rank] = time.time()
        effects = self.job.lost(
            member.rank,
            why,
            now,
            gathering=gathering,
        )
        self._apply(effects, now)

    def _forget(self, connection: HeartbeatConnection) -> list[RankState]:
        members = super()._forget(connection)
        now = time.monotonic()
        for member in members:
            effects = self.job.left(member.rank, now)
            self._apply(effects, now)
        return members

    # Returns

    def expect_return(self) -> None:
        """A process greets rank 0's agent: it may be one whose connection has ended."""
        due = time.monotonic() + _GREETED
        for connection, end in self._returning.items():
            self._returning[connection] = max(end, due)
            for member in self.peers[connection]:
                self.job.postpone(member.rank, due)

    def take_back(self, peer: Connection, message: Resume) -> None:
        """An agent goes on over a new connection; `ProtocolError`: it cannot."""
        now = time.monotonic()
        own_round = self.membership.round
        agent = f"goes on as rank {message.agent}"
        connection = self.members[message.agent].connection
        if connection is None:
            raise ProtocolError(f"{agent}, which is not connected any more")
        if message.round != own_round:
            raise ProtocolError(
                f"goes on in round {message.round} of the job, and this is round {own_round}"
            )
        connection.confirm(message.received)
        if not self._drain(connection, now):
            raise ProtocolError(f"{agent}, which has detached")
        channel = replace(peer.channel, round=own_round)
        self._use(connection, peer.socket, channel)
        connection.send_first(Resumed(connection.received))
        since = connection.unreachable_since
        connection.resume(now)
        if since is not None:
            self._reachable(connection, now - since, now)
        elif connection in self._returning:
            self.say(f"{self._ranks_of(connection)} has connected again")
        self._returned(connection, now)

    def _returned(self, connection: HeartbeatConnection, now: float) -> None:
        """The ranks of a connection that had ended are not lost."""
        if self._returning.pop(connection, None) is None:
            return
        for member in self.peers[connection]:
            effects = self.job.returned(member.rank, now)
            self._apply(effects, now)

    # Silence

    def _lose_silent(self, connection: HeartbeatConnection, now: float) -> None:
        for member in self.peers[connection]:
            if member.is_open:
                self._lost(
                    member,
                    "it did not answer any more when SIGTERM arrived",
                    now,
                    gathering=0.0,
                )

    def _unreachable(
        self,
        connection: HeartbeatConnection,
        why: str,
        now: float,
    ) -> None:
        since = connection.unreachable_since or now
        for member in self.peers[connection]:
            effects = self.job.unreachable(member.rank, since, why, now)
            self._apply(effects, now)
        text = f"warning: {self._ranks_of(connection)} {why}; failures there are not detected until"
        self.say(f"{text} it answers again")

    def _reachable(
        self,
        connection: HeartbeatConnection,
        seconds: float,
        now: float,
    ) -> None:
        for member in self.peers[connection]:
            effects = self.job.reachable(member.rank, now)
            self._apply(effects, now)
        self.say(f"{self._ranks_of(connection)} answers again, after {seconds:.0f} s")

    def _abandon(
        self,
        connection: HeartbeatConnection,
        why: str,
        now: float,
    ) -> None:
        text = f"warning: {self._ranks_of(connection)} {why}; it is not watched any more"
        for member in self.peers[connection]:
            effects = self.job.left(member.rank, now, f"is not connected any more ({why})")
            self._apply(effects, now)
        super()._abandon(connection, why, now)
        self.say(text)

    def _ranks_of(self, connection: HeartbeatConnection) -> str:
        """`"rank 3 on node-b (node 1, local rank 0)"`."""
        members = self.peers[connection]
        first = members[0]
        if len(members) == 1:
            return f"rank {first.rank} {first.where}"
        ranks = ranks_said([member.rank for member in members])
        return f"{ranks} {first.host_said} (node {first.node_rank})"
