"""The side of every other agent: it tells rank 0 how its ranks end, and hears from it who failed first."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from ..base.errors import DistbootError
from ..base.text import escape_control
from ..job import messages
from ..job.messages import (
    Exited,
    Failing,
    Register,
    Terminating,
)
from ..job.root_cause import RankState, RootCause, from_disconnect, from_exit
from ..rendezvous.messages import (
    LONGEST_TEXT,
    READY,
    Arrive,
    AskStacks,
    Detach,
    Failed,
    Go,
    Ready,
    Refused,
    RequestStop,
    Resume,
    Resumed,
    ShowStacks,
    as_problem,
)
from ..rendezvous.protocol import ProtocolError
from .heartbeat import HeartbeatConnection
from .participant import (
    AFTER_THE_FIRST,
    CAUSE,
    Answer,
    Participant,
)
from .peer_connection import DisconnectedError, close_gracefully
from .peer_watch import DISCONNECTED
from .returning import NewConnection, Returning, is_refused

_RETURNING = 2.0  # seconds to come back over another connection
_CAUSE = 1.0  # seconds after our end to hear why
_EXPLANATION = 11.0  # seconds, where a peer that is about to end may be the cause
_LAST_MESSAGE = 3.0  # seconds beyond the grace for rank 0 to let us out
_NO_REPORTS = "no reports"  # a topic
_LOOK = "look at the output of rank 0"


@dataclass
class FailureReporter(Participant):
    """The side of an agent other than rank 0's, which knows its own ranks and rank 0."""

    returning: Returning | None = None  # how to come back to rank 0 over another connection
    round: int = 0  # of the job

    def __post_init__(self) -> None:
        super().__post_init__()
        # Until when a connection that has ended may be replaced, and how it ended
        self._return_until, self._why_ended = inf, ""
        self._gone_at, self._why_gone = 0.0, ""  # when and why rank 0 could not be asked any more
        self._not_begun: dict[int, Failed] = {}  # before the script was ready itself
        # What waits for the stacks of all ranks
        self._shows: list[Callable[[Sequence[str]], object]] = []
        self._handlers: dict[type, Callable[[Any, float], object]] = {
            Register: self._register,
            ShowStacks: lambda said, _: self._show(said.lines),
            messages.Abort: lambda said, now: self._stop_own(said.root_cause.escaped(), now),
            messages.CountReads: lambda _, now: self.stops.ask(now),
            messages.Done: lambda _, now: self._end_served(now),
            messages.Locate: self.locate,
            messages.StopAt: lambda said, _: self.stops.stop_at(said.read),
            Resumed: self._resumed,
            Refused: self._refused,
        }

    def take(self, rank: int, message: object, now: float) -> None:
        member = self.members[rank]
        if isinstance(message, Arrive | Ready):
            self._ask(rank, message, now)
        elif isinstance(message, Exited):
            self._exited(member, message, now)
        elif isinstance(message, Register):
            member.pid = message.pid
            self._send(replace(message, detects=self.settings.detects), rank)
        elif isinstance(message, RequestStop) and not self.peers:
            self.stops.stop_at(1)
        elif not isinstance(message, Failing | Terminating):
            self._send(message, rank)
        else:
            if isinstance(message, Failing) and not message.end.cause:
                member.failing = message.end
            if self.detects:
                if isinstance(message, Terminating):
                    for connection in self.peers:
                        self._question(connection, now)
                self._send(message, rank)

    def ask_stacks(self, reply: Callable[[Sequence[str]], object], now: float) -> None:
        self._shows.append(reply)
        self._send(AskStacks(), self.own[0].rank)
        if self.is_cut_off:
            self._show([f"rank 0, which would ask all ranks, {self._describe_absence(now)}"])

    def _show(self, lines: Sequence[str]) -> None:
        shows, self._shows = self._shows, []
        for reply in shows:
            reply(lines)

    def turn(self, now: float) -> None:
        super().turn(now)
        for rank in [rank for rank, wait in self.waiting.items() if now >= wait.until]:
            self._answer_for_rank_0(rank, now)
        if self.returning is not None and self.returning.is_active:
            self._poll_return(self.returning, now)

    def due(self, now: float) -> float:
        attempt = inf if self.returning is None else self.returning.due
        return min([super().due(now), attempt, *(wait.until for wait in self.waiting.values())])

    def finish(self) -> None:
        """See that our last message arrives, if rank 0 is there."""
        if not self.is_cut_off and not self._is_silent():
            close_gracefully(self.peers)

    def close(self) -> None:
        super().close()
        if self.returning is not None:
            self.returning.close()

    def _limit(self) -> float:
        if any(each.is_closed and each.unreachable_since is None for each in self.peers):
            return max(
                self._limit_of_ends(), self._return_until
            )  # rank 0 is to know how they ended
        return self._limit_of_ends()

    def _limit_of_ends(self) -> float:
        ends = [member.end for member in self.own if member.end is not None]
        cause, is_secondary = self.root_cause, any(end.is_secondary for end in ends)
        if cause is None and self.may_restart and not self.is_cut_off:
            return inf  # where a rank fails later all begin again
        if (
            all(end.succeeded for end in ends)
            or not self.detects
            or (cause is not None and cause.restarts)
        ):
            return self._ended_at
        if cause is None:
            patience = _EXPLANATION if is_secondary else _CAUSE
            return self._ended_at + (0.0 if self.is_cut_off else patience)
        if not self.held or not cause.is_failure:
            return max(
                self._ended_at, self._concluded_at + (AFTER_THE_FIRST if is_secondary else 0.0)
            )
        if not self.is_cut_off:
            return self._ended_at + self.settings.grace + _LAST_MESSAGE
        return self._gone_at + (0.0 if self._is_own(cause) else AFTER_THE_FIRST)

    def _is_running(self, connection: HeartbeatConnection) -> bool:
        return super()._is_running(connection) and not self._has_ended

    def _is_silent(self) -> bool:
        return any(connection.is_unusually_silent() for connection in self.peers)

    def _ask(self, rank: int, message: Arrive | Ready, now: float) -> None:
        """Pass on that the script of a rank waits, and see that it gets an answer."""
        before = self._not_begun.get(rank)
        if before is not None and before.key in (None, message.key):
            self._take_answer(rank, before)
        elif self.peers:
            self._send(message, rank)
        else:
            self._answer_for_rank_0(rank, now)

    def _exited(self, member: RankState, message: Exited, now: float) -> None:
        member.end, self._ended_at = message.end, now
        self._send(message, member.rank)
        if not self.detects or self.root_cause is not None:
            return
        if self.is_cut_off and message.end.is_failure:  # for its neighbors
            self._stop_own(from_exit(member, message.end, 0.0), now)
        elif not message.end.succeeded and self._is_silent():
            # Why we failed, perhaps; rank 0 will not say it
            self._lose_rank_0("it did not answer any more", now)

    def _take_from(
        self, connection: HeartbeatConnection, rank: int, message: object, now: float
    ) -> None:
        if isinstance(message, Answer):
            self._take_answers(rank, message)
        elif isinstance(message, Detach):
            if message.ended and not self._has_ended and self.claim(_NO_REPORTS):
                self.say("rank 0 has exited; failures of other ranks are no longer reported")
            self._end(connection, self._why_gone, now)
        elif type(message) in self._handlers:
            self._handlers[type(message)](message, now)
        else:
            raise ProtocolError(f"sends {type(message).__name__}, which only another rank may")

    def _register(self, message: Register, _: float) -> None:
        self.members[0].pid = message.pid

    def _words_for(self, cause: RootCause) -> str:
        """The headline, unless a script of ours or another agent of this node prints it."""
        if self._is_printed_by_script(cause) or not self.claim(CAUSE):
            return ""
        return cause.headline

    def _is_printed_by_script(self, cause: RootCause) -> bool:
        """Whether the only rank of this agent has failed first, and has printed why."""
        if len(self.own) > 1 or cause.restarts:
            return False
        own = self.own[0]
        return own.rank in cause.ranks and own.failing is not None

    def _lose_rank_0(self, why: str, now: float) -> None:
        self.lost_at[0] = time.time()
        self._stop_own(
            replace(from_disconnect([self.members[0]], why), restarts=self.may_restart), now
        )

    def _lose(self, connection: HeartbeatConnection, why: str, how: str, now: float) -> None:
        if self.detects and (self.may_restart or not self._has_ended) and self.root_cause is None:
            self._lose_rank_0(why, now)
        self._end(connection, how, now)

    # Coming back over another connection

    def _disconnected(
        self, connection: HeartbeatConnection, error: DisconnectedError, now: float
    ) -> None:
        # Rank 0 says goodbye so to the rank that failed first, whose exit code the launcher is to see
        # before all others: it waits for the end of this agent.
        is_goodbye = self._has_ended and self.root_cause is not None
        if self.returning is None or is_goodbye:
            super()._disconnected(connection, error, now)
            return
        self._end_connection(connection)
        is_cut = connection.unreachable_since is not None
        if not (is_cut and error.gave_up):
            self._return_until = min(self._return_until, now + _RETURNING)
        self._why_ended = str(error)
        self.returning.start(now)

    def _poll_return(self, returning: Returning, now: float) -> None:
        outcome = returning.poll(now)
        connection = next(iter(self.peers), None)
        if connection is None:
            returning.stop()
        if isinstance(outcome, NewConnection):
            self._go_on(returning, connection, outcome, now)
        elif outcome is not None and connection is not None and connection.is_closed:
            is_over = is_refused(outcome) or now >= self._return_until
            if is_over and self._return_until < inf:
                self._lose(connection, DISCONNECTED, self._why_ended, now)

    def _go_on(
        self,
        returning: Returning,
        connection: HeartbeatConnection | None,
        new: NewConnection,
        now: float,
    ) -> None:
        is_wanted = connection is not None and (
            connection.is_closed or connection.unreachable_since is not None
        )
        if connection is None or not is_wanted or not self._drain(connection, now):
            new.socket.close()
            return
        returning.await_answer(now)
        self._use(connection, new.socket, new.channel)
        agent = self.own[0].rank
        connection.send_first(Resume(agent, returning.process, self.round, connection.received))
        connection.use_round(self.round)

    def _resumed(self, message: Resumed, now: float) -> None:
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
            self._reachable(connection, now - since)

    def _refused(self, message: Refused, now: float) -> None:
        connection = next(iter(self.peers))
        if not connection.is_closed:
            raise ProtocolError("sends Refused, which is only an answer")
        why = f"it did not take this rank back: {escape_control(message.why)}"
        self._lose(connection, why, why, now)

    def _lose_silent(self, connection: HeartbeatConnection, now: float) -> None:  # noqa: ARG002
        self._lose_rank_0("it did not answer any more when SIGTERM arrived", now)

    def _unreachable(self, connection: HeartbeatConnection, why: str, now: float) -> None:  # noqa: ARG002
        text = f"warning: {self._rank_0} {why}; this rank continues without failure detection until"
        self.say(f"{text} it answers again")
        if self.returning is not None:
            self.returning.start(now)
        self._show([f"rank 0, which has asked all ranks, {self._describe_absence(now)}"])

    def _reachable(self, connection: HeartbeatConnection, seconds: float) -> None:  # noqa: ARG002
        if self.returning is not None:
            self.returning.stop()
        self.say(f"{self._rank_0} answers again, after {seconds:.0f} s")

    def _abandon(self, connection: HeartbeatConnection, why: str, now: float) -> None:
        self.say(f"warning: {self._rank_0} {why}; this rank continues without failure detection")
        super()._abandon(connection, why, now)
        self._cannot_ask(why, now)

    def _end(self, connection: HeartbeatConnection, why: str, now: float) -> None:
        self._forget(connection)
        connection.close()
        self._cannot_ask(why, now)

    def _cannot_ask(self, why: str, now: float) -> None:
        self._gone_at, self._why_gone = now, why
        self._show(["rank 0, which has asked all ranks, is no longer there"])
        self.stops.release()
        for rank in list(self.waiting):
            self._answer_for_rank_0(rank, now)

    @property
    def _rank_0(self) -> str:
        return f"rank 0 {self.members[0].where}"

    def _describe_absence(self, now: float) -> str:
        """`"has been unreachable for 40 s"`: why rank 0 does not answer; reads well after its name."""
        for connection in self.peers:
            if connection.unreachable_since is None:
                return "does not answer"
            return f"has been unreachable for {connection.unreachable_for(now)}"
        if not self._why_gone:
            return "ended, or closed its context"
        return f"is not connected any more ({self._why_gone})"

    def _take_answers(self, rank: int, message: Answer) -> None:
        """One that names no key is for all ranks of this agent; a failure also for those that wait later."""
        names_key = not isinstance(message, Go) and message.key is not None
        if isinstance(message, Failed) and not names_key:
            self._not_begun = {member.rank: message for member in self.own}
        for each in [rank] if names_key else {rank, *self.waiting}:
            self._take_answer(each, message)

    def _take_answer(self, rank: int, message: Answer) -> None:
        self.is_starting = self.is_starting and not isinstance(message, Go)
        waits_at = self.waiting[rank].key if rank in self.waiting else None
        if isinstance(message, Failed):
            key = message.key
            if key is not None and key != waits_at and key.name == READY:
                self._not_begun[rank] = message
            elif waits_at is not None and waits_at.name == READY:
                code, text, hint = message.problem
                message = replace(
                    message, problem=(code, f"rank 0 says: {text}"[:LONGEST_TEXT], hint)
                )
        self._answer(rank, message)

    def _answer_for_rank_0(self, rank: int, now: float) -> None:
        """It cannot say what becomes of the key at which this rank waits."""
        key, why = self.waiting[rank].key, self._describe_absence(now)
        if self.is_starting:
            text = f"all ranks joined, and then {self._rank_0} {why}"
            error = DistbootError("rank-failed", text, _LOOK)
        else:
            error = DistbootError("missing-rank", f"{key.text}: {self._rank_0} {why}", _LOOK)
        self._answer(rank, Failed(as_problem(error), key))
