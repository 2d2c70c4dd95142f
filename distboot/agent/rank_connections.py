"""Rank 0's connections to all other agents, and what its job sends there.

A connection that has ended without an exit report is kept for a moment: its agent may return over
another one, as after a cut of the network (see `returning`). Until then its ranks are reported as
lost with a due time; if the agent is back before that, the reports are withdrawn.

Where an agent is silent but its host answers, only the connection is cut. Its ranks are then
unreachable: what waits for them at a key says so, and no rank is stopped for it.

Once the root cause is known all agents are told, a second time when the rank that failed has ended,
as the others stop only after the launcher has seen its exit code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from math import inf
from operator import attrgetter

from ..base.dataclass import dataclass
from ..base.text import ranks_said, writes_json
from ..job import effects as of_job
from ..job.facts import AFTER_THE_FIRST
from ..job.first_failure import GATHERING
from ..job.job import Job
from ..job.keys import Keys
from ..job.messages import Abort
from ..job.root_cause import RankState, RootCause
from ..rendezvous.connection_pool import Connection
from ..rendezvous.events import EventLog, clock_time
from ..rendezvous.membership import Membership
from ..rendezvous.messages import READY, Detach, Go, Resume, Resumed
from ..rendezvous.protocol import Broadcast, ProtocolError
from .heartbeat import HeartbeatConnection
from .job_record import JobRecord
from .liveness import BEATS_OF_RANK_0
from .peer_connection import DisconnectedError, close_gracefully
from .peer_watch import PeerWatch
from .shell import CAUSE, Shell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .connections import Appliers

_WHO = "the agent of rank 0"  # in a text for users
# Seconds for an agent to return whose connection has ended: it takes milliseconds
_RETURN_TIMEOUT = GATHERING
# The same, where the network was cut
_RETURN_TIMEOUT_AFTER_CUT = 3.0
_GREETED = 1.0  # seconds from the first message of an agent until it is back
# Seconds by which such messages delay a loss at most, as any process can send them. An agent
# returns within 2 (`rank_0_connection`)
_LONGEST_DELAY = 3.0
_FIRST_OUT = 0.5  # seconds for the rank that failed to end before the others do
_pid = attrgetter("pid")


@dataclass(slots=True)
class _Absence:
    """A connection that has ended."""

    until: float  # when its agent may not return any more
    latest: float  # the latest value of `until`


class RankConnections:
    """The connections of rank 0's agent. All times are those of `time.monotonic`."""

    def __init__(
        self,
        shell: Shell,
        peers: Mapping[HeartbeatConnection, list[RankState]],
        membership: Membership,
        keys: Keys,
        log: EventLog,
        *,
        # Of other nodes, by their first rank
        addresses: Mapping[int, str] = {},
        # Called when no rank gets ready any more: all are, or cannot be
        started: Callable[[], object] = lambda: None,
    ) -> None:
        self._shell = shell
        self._members = shell.facts.members
        self._round = membership.round
        self._started = started
        self.peers = PeerWatch(
            peers,
            self,
            membership.heartbeat_timeout,
            BEATS_OF_RANK_0,  # less often than others: it has many peers
        )
        self.job = Job(
            shell.facts,
            keys,
            is_by_node=membership.by_node,
            addresses=addresses,
        )
        self.record = JobRecord(shell, membership, log)
        # Connections that have ended, whose agents may return over others
        self._returning: dict[HeartbeatConnection, _Absence] = {}
        self._greeted_until = 0.0  # until when the last process that greeted may return
        self.appliers: Appliers = {
            **self.record.appliers,
            of_job.Send: self._send_to,
            of_job.Reply: self._reply,
            of_job.Tell: self._tell,
            of_job.Remind: self._remind,
        }

    def turn(self, now: float) -> None:
        for connection, absence in list(self._returning.items()):
            if now >= absence.until:
                self.lose(connection, self.peers.why_disconnected(_WHO, now), now)
        if self._waits_for_launcher():
            self.record.summarize()

    def due(self) -> float:
        return min((absence.until for absence in self._returning.values()), default=inf)

    def close(self) -> None:
        self.peers.close()

    # Messages of other agents

    def is_running(self, connection: HeartbeatConnection) -> bool:
        return self.peers.has_running(connection)

    def take_from(
        self,
        connection: HeartbeatConnection,
        rank: int,
        message: object,
        now: float,
    ) -> None:
        if isinstance(message, Detach):
            for each in self.peers.members[connection]:
                self.record.hear(of_job.Heard(each.rank, message), now)
            self._forget(connection, now)
            connection.close()
            return
        member = self._members.get(rank)
        if member is None or member.connection is not connection:
            raise ProtocolError(f"sent a message for rank {rank}, which is not one of its own")
        self._shell.take(rank, message, now)

    # Ends

    def disconnected(
        self,
        connection: HeartbeatConnection,
        error: DisconnectedError,
        now: float,
    ) -> None:
        """Its ranks are lost, unless their agent returns over another connection in time."""
        if not self.is_running(connection):
            self.lose(connection, self.peers.why_disconnected(_WHO, now), now)
            return
        self.peers.end(connection)
        seconds = _RETURN_TIMEOUT
        if connection.is_unreachable:
            if error.gave_up:
                return  # the peer may return whenever it can, while its host answers
            seconds = _RETURN_TIMEOUT_AFTER_CUT
        # An agent greets over its new connection before it closes the old one
        seconds = max(seconds, self._greeted_until - now)
        until = now + seconds
        self._returning[connection] = _Absence(until, until + _LONGEST_DELAY)
        for member in self._detected(connection):
            self._lost(
                member,
                self.peers.why_disconnected(_WHO, now),
                now,
                gathering=seconds,
            )

    def lose(
        self,
        connection: HeartbeatConnection,
        why: str,
        now: float,
    ) -> None:
        lost = self._detected(connection)
        if self._returning.pop(connection, None) is not None:
            lost = []  # it was reported then
        self._forget(connection, now)
        connection.close()
        for member in lost:
            self._lost(member, why, now)

    def _detected(self, connection: HeartbeatConnection) -> list[RankState]:
        """The ranks of a connection that are to end yet, and whose end is reported to all."""
        found = []
        for member in self.peers.members[connection]:
            if member.end is None and self._shell.facts.is_detected(member):
                found.append(member)
        return found

    def _lost(
        self,
        member: RankState,
        why: str,
        now: float,
        gathering: float = GATHERING,
    ) -> None:
        member.lost_at = clock_time()
        effects = self.job.lost(
            member.rank,
            why,
            now,
            gathering=gathering,
        )
        self._shell.apply(effects, now)

    def _forget(self, connection: HeartbeatConnection, now: float) -> None:
        for member in self.peers.forget(connection):
            self._shell.apply(self.job.left(member.rank, now), now)

    # Returns

    def expect_return(self) -> None:
        """A process greets rank 0's agent: it may be one whose connection has ended, or is about to."""
        due = time.monotonic() + _GREETED
        self._greeted_until = due
        for connection, absence in self._returning.items():
            postponed = min(due, absence.latest)
            absence.until = max(absence.until, postponed)
            for member in self.peers.members[connection]:
                self.job.postpone(member.rank, postponed)

    def take_back(self, peer: Connection, message: Resume) -> None:
        """An agent goes on over a new connection; `ProtocolError`: it cannot."""
        now = time.monotonic()
        agent = f"goes on as rank {message.agent}"
        connection = self._members[message.agent].connection
        if connection is None:
            raise ProtocolError(f"{agent}, which is disconnected")
        if message.round != self._round:
            raise ProtocolError(
                f"goes on in round {message.round}; the job is in round {self._round}"
            )
        connection.confirm(message.received)
        if not self.peers.drain(connection, now):
            raise ProtocolError(f"{agent}, which has detached")
        self.peers.use(connection, peer.socket, peer.channel)
        connection.send_first(Resumed(connection.received))
        unreachable_for = connection.liveness.unreachable_for(now)
        connection.resume(now)
        if unreachable_for:
            self.reachable(connection, unreachable_for, now)
        elif connection in self._returning:
            self._shell.say(f"{self._ranks_of(connection)} reconnected")
        self._returned(connection, now)

    def _returned(self, connection: HeartbeatConnection, now: float) -> None:
        """The ranks of a connection that had ended are not lost."""
        if self._returning.pop(connection, None) is None:
            return
        for member in self.peers.members[connection]:
            member.lost_at = 0.0
            self._shell.apply(self.job.returned(member.rank, now), now)

    # Silence

    def lose_silent(
        self,
        connection: HeartbeatConnection,
        why: str,
        now: float,
    ) -> None:
        for member in self.peers.members[connection]:
            if member.is_open:
                self._lost(member, why, now, gathering=0.0)

    def unreachable(
        self,
        connection: HeartbeatConnection,
        why: str,
        now: float,
    ) -> None:
        since = connection.liveness.unreachable_since or now
        for member in self.peers.members[connection]:
            effects = self.job.unreachable(member.rank, since, why, now)
            self._shell.apply(effects, now)
        text = f"warning: {self._ranks_of(connection)} {why}; failures there are not detected until"
        self._shell.say(f"{text} it answers again")

    def reachable(
        self,
        connection: HeartbeatConnection,
        after: str,
        now: float,
    ) -> None:
        for member in self.peers.members[connection]:
            self._shell.apply(self.job.reachable(member.rank, now), now)
        self._shell.say(f"{self._ranks_of(connection)} answered again after {after}")

    def abandon(
        self,
        connection: HeartbeatConnection,
        why: str,
        now: float,
    ) -> None:
        text = f"warning: {self._ranks_of(connection)} {why}; failure detection is off for it"
        members = self.peers.members[connection]
        self.peers.abandon(connection)
        for member in members:
            effects = self.job.left(member.rank, now, f"disconnected ({why})")
            self._shell.apply(effects, now)
        self._shell.say(text)

    def _ranks_of(self, connection: HeartbeatConnection) -> str:
        """`"rank 3 on node-b (node 1, local rank 0)"`."""
        members = self.peers.members[connection]
        first = members[0]
        if len(members) == 1:
            return f"rank {first.rank} {first.where}"
        ranks = ranks_said([member.rank for member in members])
        return f"{ranks} {first.host_said} (node {first.node_rank})"

    # Effects

    def _send_to(self, effect: of_job.Send, now: float) -> None:
        self._send_to_agents(effect.message, effect.ranks)
        if self._shell.facts.has_own(effect.ranks):
            if isinstance(effect.message, Go):
                self._started()
            self._shell.execute(effect.message, now)

    def _send_to_agents(self, message: object, ranks: Collection[int]) -> None:
        """Send a message once to each other agent that has one of these ranks."""
        connections = {self._members[rank].connection: None for rank in ranks}
        connections.pop(None, None)
        broadcast = Broadcast(message)
        for connection in connections:
            connection.send(broadcast)

    def _reply(self, effect: of_job.Reply, now: float) -> None:
        member = self._members[effect.rank]
        message = effect.message
        if member.is_local:
            key = message.key
            if key is not None and key.name == READY:
                self._started()  # it ends here: a rank is not ready
            self._shell.answer(effect.rank, message, now)
        elif member.connection is not None:
            member.connection.send(message, effect.rank)

    def _tell(self, effect: of_job.Tell, now: float) -> None:
        self._shell.claim(CAUSE)  # before any other agent of this node knows
        self._send_cause(effect, self.peers.members)
        self._shell.stop(of_job.Stop(effect.cause), now)

    def _remind(self, effect: of_job.Remind, _: float) -> None:
        connection = self._members[effect.rank].connection
        if connection is not None:
            self._send_cause(effect, (connection,))

    def _send_cause(
        self,
        effect: of_job.Tell | of_job.Remind,
        connections: Iterable[HeartbeatConnection],
    ) -> None:
        speaking = {self._members[rank].connection for rank in effect.speakers}
        silent = Broadcast(Abort(effect.cause))
        loud = Broadcast(Abort(effect.cause, speaks=True))
        for connection in connections:
            abort = silent
            if connection in speaking:
                abort = loud
            connection.send(abort)

    def words_for(self, effect: of_job.Stop) -> str:
        """The headline, and what follows it, unless the rank that failed prints that on this node."""
        cause = effect.cause
        first = self._members[cause.ranks[0]]
        is_here = first.node_rank == self._shell.facts.own[0].node_rank
        has_failed = first.failing is not None or first.end is not None
        # Of a rank that failed because of the first one, nothing is printed there
        has_printed = has_failed and cause.then is None
        if is_here and has_printed and not writes_json():
            return cause.headline
        return cause.text

    # The end

    def _waits_for_launcher(self) -> bool:
        """Whether all ranks have ended, and this agent only stays for their launcher to see it.

        The launcher then ends, too, and closes the output that this agent writes to.
        """
        facts = self._shell.facts
        if facts.cause is None:
            return False
        if facts.is_followed:
            return False
        if facts.is_held:
            return False
        if self.record.has_summary:
            return False
        if not facts.detects:
            return False
        if facts.running():
            return False
        ends = (member.end for member in facts.members.values())
        return all(ends)

    def finish(self, *, has_left: bool, is_hurried: bool) -> None:
        """Let the others end: first the rank that failed, whose exit code the launcher has to see first."""
        facts = self._shell.facts
        if has_left:
            self._say_goodbye()
            return
        if not any(map(_pid, facts.own)):
            return  # the others are to see that as a loss
        if facts.detects:
            self.record.summarize()
        if facts.cause is None or facts.is_followed:
            self.peers.send(Detach(ended=facts.detects))
            self._say_goodbye()
        elif facts.is_held and not is_hurried:
            self._let_first_end(facts.cause)

    def _say_goodbye(self) -> None:
        reachable = [each for each in self.peers.members if not each.is_unreachable]
        close_gracefully(reachable)

    def _let_first_end(self, cause: RootCause) -> None:
        connections = {self._members[rank].connection for rank in cause.ranks}
        connections.discard(None)
        close_gracefully(connections, _FIRST_OUT)
        if not self._shell.facts.has_own(cause.ranks):
            time.sleep(AFTER_THE_FIRST)
