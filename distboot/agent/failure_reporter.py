"""The side of every agent other than rank 0's: it reports how its ranks end, and is told who failed first.

It decides nothing alone, unless rank 0 is gone. A message of a script of ours goes to rank 0's
agent, and what that sends is executed: stop our ranks, answer a script that waits at a key, publish
the read of `ctx.preempted` at which all stop. When our own ranks have ended, this side waits for
the answer of rank 0 for as long as `_limit` says, as a wrapper ends with the exit code of the job.

Where rank 0 is gone (`rank_0_connection` finds that out), the scripts that wait get an error, and
our ranks stop. What this agent prints is in `_words_for`: one agent of a node speaks for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter
from typing import Any

from ..base.errors import DistbootError
from ..base.table import first_that_holds
from ..job import messages
from ..job.exit_status import ExitStatus
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
    Key,
    Ready,
    Refused,
    Release,
    RequestStop,
    Resumed,
    as_problem,
)
from ..rendezvous.protocol import ProtocolError
from .heartbeat import HeartbeatConnection
from .participant import (
    AFTER_THE_FIRST,
    CAUSE,
)
from .peer_connection import close_gracefully
from .rank_0_connection import Rank0Connection

_CAUSE_TIMEOUT = 1.0  # seconds after our end to be told why
_EXPLANATION_TIMEOUT = 11.0  # seconds, where a peer that is about to end may be the cause
_LAST_MESSAGE = 3.0  # seconds beyond the grace for rank 0 to let this agent end
_NO_REPORTS = "no reports"  # the topic of the line that rank 0 has ended well
_LOOK = "look at the output of rank 0"
_has_succeeded = attrgetter("has_succeeded")
_end = attrgetter("end")


@dataclass
class FailureReporter(Rank0Connection):
    """The side of an agent other than rank 0's, which knows its own ranks and rank 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._abort: messages.Abort | None = None  # the first one of rank 0
        # By rank, why rank 0 failed before the script was ready itself
        self._not_begun: dict[int, Failed] = {}
        self._handlers: dict[type, Callable[[int, Any, float], object]] = {
            **self._executors,
            Go: self._take_go,
            Release: lambda rank, message, _: self._answer(rank, message),
            Failed: self._take_failed,
            Detach: self._rank_0_left,
            Register: self._rank_0_registered,
            messages.Abort: self._aborted,
            Resumed: self._resumed,
            Refused: self._refused,
        }
        # Of our own ranks; any other message is sent on as it is
        self._own_handlers: dict[type, Callable[[RankState, Any, float], object]] = {
            Arrive: self._ask,
            Ready: self._ask,
            Exited: self._exited,
            Register: self._registered,
            RequestStop: self._stop_requested,
            Failing: self._failing,
            Terminating: self._terminating,
        }

    # Messages of our own ranks

    def take(self, rank: int, message: object, now: float) -> None:
        handler = self._own_handlers.get(type(message))
        if handler is None:
            self._send(message, rank)
        else:
            handler(self.members[rank], message, now)

    def _registered(self, member: RankState, message: Register, _: float) -> None:
        member.pid = message.pid
        told = replace(message, detects=self.settings.detects)
        self._send(told, member.rank)

    def _stop_requested(self, member: RankState, message: RequestStop, _: float) -> None:
        if self.peers:
            self._send(message, member.rank)
        else:
            self.stops.stop_at(1)

    def _failing(self, member: RankState, message: Failing, _: float) -> None:
        if not message.end.cause:
            member.failing = message.end
        if self.detects:
            self._send(message, member.rank)

    def _terminating(self, member: RankState, message: Terminating, now: float) -> None:
        if self.detects:
            self._question_peers(now)
            self._send(message, member.rank)

    def _exited(self, member: RankState, message: Exited, now: float) -> None:
        end = message.end
        member.end = end
        self._ended_at = now
        self._send(message, member.rank)
        if not self.detects or self.root_cause is not None:
            return
        if end.is_failure and self.is_cut_off:  # for its neighbors
            self._stop_own(from_exit(member, end, 0.0), now)
        elif not end.succeeded and self._is_silent():
            # Perhaps why it failed; rank 0 will not say
            self._lose_rank_0("it did not answer any more", now)

    def _is_silent(self) -> bool:
        return any(connection.is_unusually_silent() for connection in self.peers)

    def ask_stacks(
        self,
        reply: Callable[[Sequence[str]], object],
        now: float,
    ) -> None:
        self._shows.append(reply)
        self._send(AskStacks(), self.own[0].rank)
        if self.is_cut_off:
            self._show([f"rank 0, which would ask all ranks, {self._describe_absence(now)}"])

    # Messages of rank 0's agent

    def _take_from(
        self,
        connection: HeartbeatConnection,  # noqa: ARG002 - there is one
        rank: int,
        message: object,
        now: float,
    ) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"sends {type(message).__name__}, which only another rank may")
        handler(rank, message, now)

    def _rank_0_left(self, _rank: int, message: Detach, now: float) -> None:
        is_early = message.ended and not self._has_ended
        if is_early and self.claim(_NO_REPORTS):
            self.say("rank 0 has exited; failures of other ranks are no longer reported")
        for connection in list(self.peers):
            self._end(connection, self._why_gone, now)

    def _rank_0_registered(self, _rank: int, message: Register, _: float) -> None:
        self.members[0].pid = message.pid

    def _aborted(self, _rank: int, message: messages.Abort, now: float) -> None:
        self._abort = self._abort or message
        self._stop_own(message.root_cause.escaped(), now)

    def _lose_rank_0(self, why: str, now: float) -> None:
        self.lost_at[0] = time.time()
        cause = from_disconnect([self.members[0]], why)
        self._stop_own(replace(cause, restarts=self.may_restart), now)

    def _words_for(self, cause: RootCause) -> str:
        """The headline, unless a script of ours or another agent of this node prints it."""
        if self._is_printed_by_script(cause) or self._is_printed_by_rank_0():
            return ""
        if not self._speaks():
            return ""
        return cause.headline

    def _speaks(self) -> bool:
        """Whether this agent is the one of its node that prints why all stop."""
        from .claims import own_log  # here, as most jobs end well

        shares_stream = own_log() == ""
        if self._abort is not None and shares_stream:
            return not self._own_ranks.isdisjoint(self._abort.speakers)
        return self.claim(CAUSE)

    def _is_printed_by_script(self, cause: RootCause) -> bool:
        """Whether the only rank of this agent has failed first, and has printed why."""
        if len(self.own) > 1 or cause.restarts:
            return False
        own = self.own[0]
        return own.failing is not None and own.rank in cause.ranks

    def _is_printed_by_rank_0(self) -> bool:
        """Whether rank 0's agent has told this one why, and prints it to the same log."""
        if self._abort is None or self.own[0].node_rank != self.members[0].node_rank:
            return False
        from .claims import own_log  # here, as most jobs end well

        return own_log() in ("", self._abort.log)

    # Scripts that wait at a key

    def turn(self, now: float) -> None:
        super().turn(now)
        late = [rank for rank, wait in self.waiting.items() if now >= wait.until]
        for rank in late:
            self._answer_for_rank_0(rank, now)

    def due(self, now: float) -> float:
        ends = [wait.until for wait in self.waiting.values()]
        return min([super().due(now), *ends])

    def _ask(self, member: RankState, message: Arrive | Ready, now: float) -> None:
        """Pass on that the script of a rank waits, and make sure that it gets an answer."""
        rank = member.rank
        before = self._not_begun.get(rank)
        if before is not None and before.key in (None, message.key):
            self._answer_failed(rank, before)
        elif self.peers:
            self._send(message, rank)
        else:
            self._answer_for_rank_0(rank, now)

    def _take_go(self, rank: int, message: Go, _: float) -> None:
        """All ranks are ready."""
        self.facts.is_starting = False
        for each in {rank, *self.waiting}:
            self._answer(each, message)

    def _take_failed(self, rank: int, message: Failed, _: float) -> None:
        """A failure that names no key is for all ranks of this agent, those that wait later, too."""
        if message.key is not None:
            self._answer_failed(rank, message)
            return
        self._not_begun = {member.rank: message for member in self.own}
        for each in {rank, *self.waiting}:
            self._answer_failed(each, message)

    def _answer_failed(self, rank: int, message: Failed) -> None:
        self._keep_failed_start(rank, message)
        message = self._with_name_of_rank_0(rank, message)
        self._answer(rank, message)

    def _waits_at(self, rank: int) -> Key | None:
        wait = self.waiting.get(rank)
        if wait is None:
            return None
        return wait.key

    def _keep_failed_start(self, rank: int, message: Failed) -> None:
        """The script of a rank may not wait for it yet."""
        key = message.key
        is_of_start = key is not None and key.name == READY
        if is_of_start and key != self._waits_at(rank):
            self._not_begun[rank] = message

    def _with_name_of_rank_0(self, rank: int, message: Failed) -> Failed:
        """A failure of the start as the script is told."""
        waits_at = self._waits_at(rank)
        if waits_at is None or waits_at.name != READY:
            return message
        if message.key not in (None, waits_at):
            return message
        code, text, hint = message.problem
        text = f"rank 0 says: {text}"[:LONGEST_TEXT]
        return replace(message, problem=(code, text, hint))

    def _answer_for_rank_0(self, rank: int, now: float) -> None:
        """Rank 0 cannot say what becomes of the key at which this rank waits."""
        key = self.waiting[rank].key
        why = self._describe_absence(now)
        if self.facts.is_starting:
            text = f"all ranks joined, and then {self._rank_0} {why}"
            error = DistbootError("rank-failed", text, _LOOK)
        else:
            error = DistbootError("missing-rank", f"{key.text}: {self._rank_0} {why}", _LOOK)
        self._answer(rank, Failed(as_problem(error), key))

    # The end

    def finish(self) -> None:
        """Make sure that the last message arrives, if rank 0 is there."""
        if not self.is_cut_off and not self._is_silent():
            close_gracefully(self.peers)

    def _is_running(self, connection: HeartbeatConnection) -> bool:
        if self._has_ended:
            return False
        return super()._is_running(connection)

    def _limit(self) -> float:
        limit = self._limit_of_ends()
        for connection in self.peers:
            if connection.is_away:
                limit = max(limit, self._return_until)  # rank 0 has to receive how they ended
        return limit

    def _limit_of_ends(self) -> float:
        """Until when this agent stays for the answer of rank 0."""
        cause = self.root_cause
        if cause is None:
            return self._limit_without_cause()
        ended = self._ended_at
        is_told = not self.held or not cause.is_failure
        return first_that_holds(
            (self._is_done() or cause.restarts, ended),
            # One that failed first has to be seen first
            (is_told and self._is_secondary(), max(ended, self.release_at)),
            (is_told, max(ended, self._concluded_at)),
            (not self.is_cut_off, ended + self.settings.grace + _LAST_MESSAGE),
            (self._is_own(cause), self._gone_at),
            (True, self._gone_at + AFTER_THE_FIRST),
        )

    def _limit_without_cause(self) -> float:
        ended = self._ended_at
        return first_that_holds(
            (self.is_cut_off, ended),
            (self.may_restart, inf),  # where a rank fails later, all begin again
            (self._is_done(), ended),
            (self._is_secondary(), ended + _EXPLANATION_TIMEOUT),
            (True, ended + _CAUSE_TIMEOUT),
        )

    def _is_done(self) -> bool:
        """Whether nothing is to be heard of rank 0: all of ours ended well, or it does not say."""
        has_all_succeeded = all(map(_has_succeeded, self.own))
        return has_all_succeeded or not self.detects

    def _is_secondary(self) -> bool:
        """Whether one of our ranks has failed as a peer was gone."""
        ends = map(_end, self.own)
        return any(map(_is_end_secondary, ends))


def _is_end_secondary(end: ExitStatus | None) -> bool:
    return end is not None and end.is_secondary
