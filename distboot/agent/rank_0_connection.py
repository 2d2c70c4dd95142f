"""The one connection of an agent other than rank 0's, and how that agent returns over another one.

The connection may be in three states besides open (`job/rank_0_link`):

- *unreachable*: nothing has arrived for the heartbeat timeout, though rank 0's host answers. The
  ranks continue; each attempt to connect anew may end that before the old connection speaks again.
- *closed*: it has ended without an exit report. The agent returns within `_RETURN_TIMEOUT`, or rank
  0 counts as lost. Where the network was cut and the kernel has given the connection up, that says
  nothing about rank 0, so there is no such limit as long as its host answers at another port.
- *gone*: there is no connection any more, as rank 0 has left, is lost, or was abandoned.

Both sides count messages, so that a new connection continues where the old one has ended: see
`backlog` and `returning`. What our ranks report while the connection is closed is sent only once
rank 0 has answered over the new one. So an agent whose ranks have ended stays for that answer: to
rank 0, one that leaves before it is lost.

What this agent prints of a root cause is in `words_for`: one agent of a node speaks for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from ..base.text import escape_control
from ..job import effects as of_job
from ..job.follower import Follower
from ..job.messages import Abort
from ..job.rank_0_link import Rank0Link
from ..job.root_cause import RankState, RootCause
from ..rendezvous.events import clock_time
from ..rendezvous.messages import Detach, Refused, Resume, Resumed
from ..rendezvous.protocol import ProtocolError
from ..rendezvous.worker import NoAnswerError, UnreachableError
from .heartbeat import HeartbeatConnection
from .peer_connection import DisconnectedError, close_gracefully
from .peer_watch import PeerWatch
from .returning import NewConnection, Returning
from .shell import CAUSE, Shell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .connections import Appliers

_WHO = "this agent"  # in a text for users
_RETURN_TIMEOUT = 2.0  # seconds to return over another connection


class Rank0Connection:
    """What an agent other than rank 0's does about its connection."""

    def __init__(
        self,
        shell: Shell,
        peers: Mapping[HeartbeatConnection, list[RankState]],
        bound: float,
        round_: int = 0,
    ) -> None:
        self._shell = shell
        self._rank_0 = shell.facts.members[0]
        self._round = round_  # of the job
        self.peers = PeerWatch(peers, self, bound)
        (self.connection,) = peers
        self._link = Rank0Link()
        self.job = Follower(shell.facts, self._link)
        self.returning = Returning()  # how to connect to rank 0 again
        self._why_ended = ""  # how the connection ended
        self.appliers: Appliers = {
            of_job.Report: lambda effect, _: self.peers.send(effect.message, effect.rank),
            of_job.DoubtRank0: self._doubt,
        }

    def turn(self, now: float) -> None:
        if self.returning.is_active:
            self._poll_return(now)

    def due(self) -> float:
        return self.returning.due

    def close(self) -> None:
        self.peers.close()
        self.returning.close()

    # Messages of rank 0's agent

    def is_running(self, connection: HeartbeatConnection) -> bool:
        if not self._shell.facts.running():
            return False
        return self.peers.has_running(connection)

    def take_from(
        self,
        connection: HeartbeatConnection,  # noqa: ARG002 - there is one
        rank: int,
        message: object,
        now: float,
    ) -> None:
        if isinstance(message, Detach):
            self._shell.apply(self.job.left(message), now)
            self._end("", now)
        elif isinstance(message, Resumed):
            self._resumed(message, now)
        elif isinstance(message, Refused):
            self._refused(message, now)
        else:
            self._shell.apply(self.job.told(rank, message, now), now)

    # A connection that has ended

    def disconnected(
        self,
        connection: HeartbeatConnection,
        error: DisconnectedError,
        now: float,
    ) -> None:
        self._why_ended = str(error)
        if not self.returning.is_possible or self._is_goodbye():
            self._lose(self.peers.why_disconnected(_WHO, now), self._why_ended, now)
            return
        self.peers.end(connection)
        self._link.is_closed = True
        was_cut = connection.is_unreachable
        if not was_cut or not error.gave_up:
            self._link.return_until = min(self._link.return_until, now + _RETURN_TIMEOUT)
        self.returning.start(now)

    def _is_goodbye(self) -> bool:
        """Whether rank 0 has ended the connection on purpose.

        So it does with the rank that failed first, whose exit code the launcher has to see before
        all others: it waits for the end of this agent.
        """
        facts = self._shell.facts
        return facts.cause is not None and not facts.running()

    def _poll_return(self, now: float) -> None:
        outcome = self.returning.poll(now)
        is_used = False
        if not self._link.is_there:
            self.returning.stop()
        elif isinstance(outcome, NewConnection):
            is_used = self._go_on(outcome, now)
        elif outcome is not None and self.connection.is_closed:
            self._not_returned(outcome, now)
        if isinstance(outcome, NewConnection) and not is_used:
            outcome.socket.close()

    def _not_returned(self, error: NoAnswerError, now: float) -> None:
        """An attempt to connect again has failed."""
        until = self._link.return_until
        if until == inf:
            return
        # Else its host answers, but its agent has ended
        is_unreachable = isinstance(error, UnreachableError)
        if now >= until or not is_unreachable:
            self._lose(self.peers.why_disconnected(_WHO, now), self._why_ended, now)

    def _go_on(self, new: NewConnection, now: float) -> bool:
        """Use a new connection in place of the old one, unless that is open; returns whether it is used."""
        connection = self.connection
        if not connection.is_closed and not connection.is_unreachable:
            return False
        if not self.peers.drain(connection, now):
            return False
        self._link.answer_until = self.returning.await_answer(now)
        self.peers.use(connection, new.socket, new.channel)
        self._link.is_closed = True  # until rank 0 answers
        resume = Resume(
            self._shell.facts.own[0].rank,
            self.returning.process,
            self._round,
            connection.received,
        )
        connection.send_first(resume)
        connection.use_round(self._round)
        return True

    def _resumed(self, message: Resumed, now: float) -> None:
        connection = self.connection
        if not connection.is_closed:
            raise ProtocolError("answers what it was not asked")
        connection.confirm(message.received)
        unreachable_for = connection.liveness.unreachable_for(now)
        connection.resume(now)
        self.returning.stop()
        self._link.is_closed = False
        self._link.return_until = inf
        if unreachable_for:
            self.reachable(connection, unreachable_for, now)
        else:
            self._shell.say(f"{self.job.name} reconnected")

    def _refused(self, message: Refused, now: float) -> None:
        if not self.connection.is_closed:
            raise ProtocolError("sends Refused, which is only an answer")
        why = f"it refused to let this rank reconnect: {escape_control(message.why)}"
        self._lose(why, why, now)

    # A connection that is silent

    def lose_silent(
        self,
        connection: HeartbeatConnection,  # noqa: ARG002 - there is one
        why: str,  # noqa: ARG002
        now: float,
    ) -> None:
        self._lose_silent(now, " when SIGTERM arrived")

    def _doubt(self, _: of_job.DoubtRank0, now: float) -> None:
        if self._is_silent():
            self._lose_silent(now)

    def _lose_silent(self, now: float, when: str = "") -> None:
        self._rank_0.lost_at = clock_time()
        self._shell.apply(self.job.silent(now, when), now)

    def _is_silent(self) -> bool:
        return self._link.is_there and self.connection.is_unusually_silent()

    def unreachable(
        self,
        connection: HeartbeatConnection,
        why: str,
        now: float,
    ) -> None:
        self._link.unreachable_since = connection.liveness.unreachable_since
        self.returning.start(now)
        self._shell.apply(self.job.unreachable(why, now), now)

    def reachable(
        self,
        connection: HeartbeatConnection,  # noqa: ARG002 - there is one
        after: str,
        now: float,  # noqa: ARG002
    ) -> None:
        self._link.unreachable_since = None
        self.returning.stop()
        self._shell.say(f"{self.job.name} answered again after {after}")

    # Rank 0 is gone

    def abandon(
        self,
        connection: HeartbeatConnection,
        why: str,
        now: float,
    ) -> None:
        self._shell.say(
            f"warning: {self.job.name} {why}; this rank continues without failure detection"
        )
        self.peers.abandon(connection)
        self._be_gone(why, now)

    def lose(
        self,
        connection: HeartbeatConnection,  # noqa: ARG002 - there is one
        why: str,
        now: float,
    ) -> None:
        self._lose(why, why, now)

    def _lose(self, why: str, how: str, now: float) -> None:
        effects = self.job.lost(why, now)
        if effects:
            self._rank_0.lost_at = clock_time()
        self._shell.apply(effects, now)
        self._end(how, now)

    def _end(self, why: str, now: float) -> None:
        self.peers.forget(self.connection)
        self.connection.close()
        self._be_gone(why, now)

    def _be_gone(self, why: str, now: float) -> None:
        self._link.is_there = False
        self._link.gone_at = now
        self._link.why_gone = why
        self._shell.apply(self.job.gone(now), now)

    # What is printed

    def words_for(self, effect: of_job.Stop) -> str:
        """The headline, unless a script of ours or another agent of this node prints it."""
        cause = effect.cause
        if self._is_printed_by_script(cause) or not self._speaks(effect.told):
            return ""
        return cause.headline

    def _speaks(self, told: Abort | None) -> bool:
        """Whether this agent prints why all stop, for all that print to the same place."""
        if told is not None:
            return told.speaks
        return self._shell.claim(CAUSE)

    def _is_printed_by_script(self, cause: RootCause) -> bool:
        """Whether the only rank of this agent has failed first, and has printed why."""
        all_own = self._shell.facts.own
        if len(all_own) > 1 or cause.restarts:
            return False
        own = all_own[0]
        return own.failing is not None and own.rank in cause.ranks

    # The end

    def finish(self, *, has_left: bool, is_hurried: bool) -> None:  # noqa: ARG002
        """Make sure that the last message arrives, if rank 0 is there."""
        is_there = self._link.is_there and not self.connection.is_silent
        if is_there and not self._is_silent():
            close_gracefully(self.peers.members)
