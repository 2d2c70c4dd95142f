"""The one connection of an agent other than rank 0's, and how that agent returns over another one.

The connection may be in three states besides open:

- *unreachable*: nothing has arrived for the heartbeat timeout, though rank 0's host answers. The
  ranks continue; each attempt to connect anew may end that before the old connection speaks again.
- *closed*: it has ended without an exit report. The agent returns within `_RETURN_TIMEOUT`, or rank
  0 counts as lost. Where the network was cut and the kernel has given the connection up, that says
  nothing about rank 0, so there is no such limit.
- *gone*: there is no connection any more, as rank 0 has left, is lost, or was abandoned.

Both sides count messages, so that a new connection continues where the old one has ended: see
`backlog` and `returning`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..base.text import escape_control
from ..job.root_cause import RootCause
from ..rendezvous.messages import Refused, Resume, Resumed
from ..rendezvous.protocol import ProtocolError
from ..rendezvous.worker import NoAnswerError
from .heartbeat import HeartbeatConnection
from .participant import Participant
from .peer_connection import DisconnectedError
from .peer_watch import DISCONNECTED
from .returning import NewConnection, Returning, is_refused

_RETURN_TIMEOUT = 2.0  # seconds to return over another connection


@dataclass
class Rank0Connection(Participant):
    """What an agent other than rank 0's does about its connection."""

    returning: Returning | None = None  # how to connect to rank 0 again
    round: int = 0  # of the job

    def __post_init__(self) -> None:
        super().__post_init__()
        self._return_until = inf  # until when a closed connection may be replaced
        self._why_ended = ""  # how the connection ended
        self._gone_at = 0.0  # since when rank 0 cannot be asked any more
        self._why_gone = ""

    def _lose_rank_0(self, why: str, now: float) -> None:
        """Stop our own ranks, as rank 0 is lost."""
        raise NotImplementedError

    def _answer_for_rank_0(self, rank: int, now: float) -> None:
        """Answer a script that waits for rank 0, which is not there any more."""
        raise NotImplementedError

    def turn(self, now: float) -> None:
        super().turn(now)
        if self.returning is not None and self.returning.is_active:
            self._poll_return(self.returning, now)

    def due(self, now: float) -> float:
        due = super().due(now)
        if self.returning is not None:
            due = min(due, self.returning.due)
        return due

    def close(self) -> None:
        super().close()
        if self.returning is not None:
            self.returning.close()

    # A connection that has ended

    def _disconnected(
        self,
        connection: HeartbeatConnection,
        error: DisconnectedError,
        now: float,
    ) -> None:
        if self.returning is None or self._is_goodbye(self.root_cause):
            super()._disconnected(connection, error, now)
            return
        self._end_connection(connection)
        was_cut = connection.unreachable_since is not None
        if not was_cut or not error.gave_up:
            self._return_until = min(self._return_until, now + _RETURN_TIMEOUT)
        self._why_ended = str(error)
        self.returning.start(now)

    def _is_goodbye(self, cause: RootCause | None) -> bool:
        """Whether rank 0 has ended the connection on purpose.

        So it does with the rank that failed first, whose exit code the launcher has to see before
        all others: it waits for the end of this agent.
        """
        return cause is not None and self._has_ended

    def _poll_return(self, returning: Returning, now: float) -> None:
        outcome = returning.poll(now)
        connection = next(iter(self.peers), None)
        is_used = False
        if connection is None:
            returning.stop()
        elif isinstance(outcome, NewConnection):
            is_used = self._go_on(returning, connection, outcome, now)
        elif outcome is not None and connection.is_closed:
            self._not_returned(connection, outcome, now)
        if isinstance(outcome, NewConnection) and not is_used:
            outcome.socket.close()

    def _not_returned(
        self,
        connection: HeartbeatConnection,
        error: NoAnswerError,
        now: float,
    ) -> None:
        """An attempt to connect again has failed."""
        if self._return_until == inf:
            return
        if now >= self._return_until or is_refused(error):
            self._lose(
                connection,
                DISCONNECTED,
                self._why_ended,
                now,
            )

    def _go_on(
        self,
        returning: Returning,
        connection: HeartbeatConnection,
        new: NewConnection,
        now: float,
    ) -> bool:
        """Use a new connection in place of the old one, unless that is open; returns whether it is used."""
        if not connection.is_closed and connection.unreachable_since is None:
            return False
        if not self._drain(connection, now):
            return False
        returning.await_answer(now)
        self._use(connection, new.socket, new.channel)
        resume = Resume(
            self.own[0].rank,
            returning.process,
            self.round,
            connection.received,
        )
        connection.send_first(resume)
        connection.use_round(self.round)
        return True

    def _resumed(self, _rank: int, message: Resumed, now: float) -> None:
        connection = next(iter(self.peers))
        if self.returning is None or not connection.is_closed:
            raise ProtocolError("answers what it was not asked")
        connection.confirm(message.received)
        since = connection.unreachable_since
        connection.resume(now)
        self.returning.stop()
        self._return_until = inf
        if since is None:
            self.say(f"{self._rank_0} is connected again")
        else:
            self._reachable(connection, now - since, now)

    def _refused(self, _rank: int, message: Refused, now: float) -> None:
        connection = next(iter(self.peers))
        if not connection.is_closed:
            raise ProtocolError("sends Refused, which is only an answer")
        why = f"it did not take this rank back: {escape_control(message.why)}"
        self._lose(
            connection,
            why,
            why,
            now,
        )

    # A connection that is silent

    def _lose_silent(
        self,
        connection: HeartbeatConnection,  # noqa: ARG002
        now: float,
    ) -> None:
        self._lose_rank_0("it did not answer any more when SIGTERM arrived", now)

    def _unreachable(
        self,
        connection: HeartbeatConnection,  # noqa: ARG002
        why: str,
        now: float,
    ) -> None:
        text = f"warning: {self._rank_0} {why}; this rank continues without failure detection until"
        self.say(f"{text} it answers again")
        if self.returning is not None:
            self.returning.start(now)
        self._show([f"rank 0, which has asked all ranks, {self._describe_absence(now)}"])

    def _reachable(
        self,
        connection: HeartbeatConnection,  # noqa: ARG002
        seconds: float,
        now: float,  # noqa: ARG002
    ) -> None:
        if self.returning is not None:
            self.returning.stop()
        self.say(f"{self._rank_0} answers again, after {seconds:.0f} s")

    # Rank 0 is gone

    def _abandon(
        self,
        connection: HeartbeatConnection,
        why: str,
        now: float,
    ) -> None:
        self.say(f"warning: {self._rank_0} {why}; this rank continues without failure detection")
        super()._abandon(connection, why, now)
        self._cannot_ask(why, now)

    def _lose(
        self,
        connection: HeartbeatConnection,
        why: str,
        how: str,
        now: float,
    ) -> None:
        has_to_stop = self.may_restart or not self._has_ended
        if has_to_stop and self.detects and self.root_cause is None:
            self._lose_rank_0(why, now)
        self._end(connection, how, now)

    def _end(self, connection: HeartbeatConnection, why: str, now: float) -> None:
        self._forget(connection)
        connection.close()
        self._cannot_ask(why, now)

    def _cannot_ask(self, why: str, now: float) -> None:
        self._gone_at = now
        self._why_gone = why
        self._show(["rank 0, which has asked all ranks, is no longer there"])
        self.stops.release()
        for rank in list(self.waiting):
            self._answer_for_rank_0(rank, now)

    @property
    def _rank_0(self) -> str:
        return f"rank 0 {self.members[0].where}"

    def _describe_absence(self, now: float) -> str:
        """`"has been unreachable for 40 s"`: why rank 0 does not answer, to follow its name."""
        for connection in self.peers:
            if connection.unreachable_since is None:
                return "does not answer"
            return f"has been unreachable for {connection.unreachable_for(now)}"
        if not self._why_gone:
            return "ended, or closed its context"
        return f"is not connected any more ({self._why_gone})"
