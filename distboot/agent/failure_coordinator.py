"""Rank 0's side of failure detection: it receives every end first, decides which failure was first, and tells all.

It puts the services of `job/` together: keys, the analysis of reports, late ranks, the agreement on
where all stop, and restarts. A message of a rank, its own or that of another agent, is handled by
one of `_handlers`. What follows from the time alone is done in `turn`, in this order: what ranks
wait for at keys, which rank is late, whether a report is the root cause, and where all stop. A
script that was told to stop may end in any way, which is no failure: so the root cause is decided
before the answer is sent.

Once the root cause is known all agents are told (`_tell`), a second time when the rank that failed
has ended, as the others stop only after the launcher has seen its exit code.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from ..base.process import signal_name
from ..base.text import escape_control, ranks_said, writes_json
from ..job import messages
from ..job.exit_status import ExitStatus
from ..job.first_failure import FailureReport
from ..job.late import LateWatch
from ..job.root_cause import RankState, RootCause
from ..job.stop_agreement import StopAgreement
from ..rendezvous.events import own_steps
from ..rendezvous.messages import (
    READY,
    Arrive,
    AskStacks,
    Detach,
    Failed,
    Go,
    Leave,
    Ready,
    RequestStop,
    ShowStacks,
)
from ..rendezvous.protocol import Broadcast, ProtocolError
from .heartbeat import HeartbeatConnection
from .participant import (
    AFTER_THE_FIRST,
    CAUSE,
    Answer,
)
from .peer_connection import close_gracefully
from .rank_connections import RankConnections

_LINGER = 5.0  # seconds after rank 0 has ended well, for the others to end, too
_LAST_MESSAGE = 2.0  # seconds beyond the grace for ranks that were told to stop
_LAUNCHER_LOOKS = 0.25  # seconds from an exit code on a host to the launcher that is elsewhere
_STILL_ENDING = 3.0  # seconds for a Python with torch in it to end after an uncaught exception
_AFTER_A_TIMEOUT = 9.0  # seconds, where its collective operation has timed out
_FIRST_OUT = 0.5  # seconds for the rank that failed to end before the others do
# Seconds for ranks that wait in vain to be stopped, else they end with a traceback
_STOPPING = _STILL_ENDING + 2.0


class _Refusal(NamedTuple):
    """A failed key that a rank is told of later, as it may be stopped before."""

    due: float
    rank: int
    message: Failed


@dataclass
class FailureCoordinator(RankConnections):
    """Rank 0's side, which knows all ranks of the job."""

    # Called when no rank gets ready any more: all are, or cannot be
    started: Callable[[], object] = lambda: None
    is_served: bool = False  # whether the other ranks only serve this one, and end with it

    def __post_init__(self) -> None:
        super().__post_init__()
        self._agreement = StopAgreement(self.members, self.settings.grace / 3)
        self._why_stop = ""
        self._was_stopped = False  # whether a signal asks one of our own ranks to stop
        self._refusals: list[_Refusal] = []
        self._late = LateWatch(self)
        self._handlers: dict[type, Callable[[RankState, Any, float], object]] = {
            Arrive: self._at_key,
            Ready: self._at_key,
            Leave: self._at_key,
            messages.Stalled: self._located,
            messages.Position: self._located,
            AskStacks: self._stacks_asked,
            RequestStop: self._request_stop,
            messages.Reads: self._counted,
            messages.Register: self._registered,
            messages.Phases: self._took_steps,
            messages.Failing: self._failing,
            messages.Exiting: self._exiting,
            messages.Terminating: self._terminating,
            messages.Exited: self._exited,
            messages.Reaped: self._reaped,
        }

    def take(self, rank: int, message: object, now: float) -> None:
        self._handle(self.members[rank], message, now)
        self._send_replies()

    def read(self, connection: HeartbeatConnection, now: float) -> None:
        super().read(connection, now)
        self._send_replies()

    def ask_stacks(
        self,
        reply: Callable[[Sequence[str]], object],
        now: float,
    ) -> None:
        self._late.show(reply, now)

    def turn(self, now: float) -> None:
        super().turn(now)
        self.keys.expire(now)
        self._send_replies()
        self._send_refusals(now)
        self._late.turn(now)
        if self.root_cause is None:
            self._decide(now)
        if self.root_cause is not None or not self._analysis.reports:
            self._decide_stop(now)

    def due(self, now: float) -> float:
        due = min(
            super().due(now),
            self._agreement.due,
            self._late.due,
        )
        refusals = [refusal.due for refusal in self._refusals]
        due = min([due, *self.keys.due(), *refusals])
        if self.root_cause is not None:
            return due
        reports = [report.due for report in self._analysis.reports]
        return min([due, *reports])

    def _take_from(
        self,
        connection: HeartbeatConnection,
        rank: int,
        message: object,
        now: float,
    ) -> None:
        if isinstance(message, Detach):
            self._forget(connection)
            connection.close()
            return
        member = self.members.get(rank)
        if member is None or member.connection is not connection:
            raise ProtocolError(f"speaks for rank {rank}, which is not its own")
        self._handle(member, message, now)

    def _handle(self, member: RankState, message: object, now: float) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise ProtocolError(f"sends {type(message).__name__}, which only rank 0 may")
        handler(member, message, now)

    # Keys

    def _at_key(self, member: RankState, message: Arrive | Ready | Leave, now: float) -> None:
        self.keys.take(member.rank, message, now)

    def _send_replies(self) -> None:
        replies = self.keys.outbox
        self.keys.outbox = []
        if self.keys.not_ready is not None:
            self.log.add("not_ready", ranks=self.keys.not_ready)
            self.keys.not_ready = None
        go: Go | None = None
        for rank, reply in replies:
            if not isinstance(reply, Go):
                self._refuse_or_reply(rank, reply)
                continue
            if go is None:  # all ranks get it: once for those of an agent
                go = replace(reply, stops=self._agreement.begin())
                self._send(go)
            self._reply(rank, go)
        self.is_starting = self.is_starting and not self.keys.has_begun

    def _refuse_or_reply(self, rank: int, reply: object) -> None:
        is_pending = self.detects and bool(self._analysis.reports)
        if is_pending and isinstance(reply, Failed):
            due = time.monotonic() + _STOPPING
            self._refusals.append(_Refusal(due, rank, reply))
        else:
            self._reply(rank, reply)

    def _send_refusals(self, now: float) -> None:
        due = [refusal for refusal in self._refusals if now >= refusal.due]
        for refusal in due:
            self._refusals.remove(refusal)
            self._reply(refusal.rank, refusal.message)

    def _reply(self, rank: int, message: object) -> None:
        member = self.members[rank]
        if member.is_local:
            assert isinstance(message, Answer)
            if _is_of_start(message):
                self.started()
            self._answer(rank, message)
        elif member.connection is not None and not isinstance(message, Go):
            member.connection.send(message, rank)

    # What ranks report

    def _located(
        self,
        member: RankState,
        message: messages.Stalled | messages.Position,
        now: float,
    ) -> None:
        self._late.take(member.rank, message, now)

    def _stacks_asked(self, member: RankState, _: AskStacks, now: float) -> None:
        connection = member.connection
        assert connection is not None  # a script of ours asks its agent
        self._late.show(lambda lines: connection.send(ShowStacks(tuple(lines))), now)

    def _counted(self, member: RankState, message: messages.Reads, _: float) -> None:
        self._agreement.count(member.rank, message.count)

    def _took_steps(self, member: RankState, message: messages.Phases, _: float) -> None:
        self.log.add("phases", member.rank, **own_steps(message.times))

    def _registered(self, member: RankState, message: messages.Register, _: float) -> None:
        """The process of a rank is watched from now on.

        It and rank 0's are told of each other, whichever is first.
        """
        member.pid = message.pid
        member.is_watched = message.detects
        self.log.add("registered", member.rank, pid=message.pid)
        answer = messages.Register(self.members[0].pid)
        if member.connection is not None:
            member.connection.send(answer)
            if self.root_cause is not None:
                member.connection.send(_abort(self.root_cause))
        if member.rank == 0:
            self._send_to_registered(answer)

    def _send_to_registered(self, message: messages.Register) -> None:
        broadcast = Broadcast(message)
        for connection, members in self.peers.items():
            if any(member.pid for member in members):
                connection.send(broadcast)

    def _failing(self, member: RankState, message: messages.Failing, now: float) -> None:
        if member.failing is not None or not self._is_detected(member):
            return
        end = message.end
        member.failing = end
        self.log.add("failing", member.rank, text=end.failure_text())
        self._analysis.failed(member, end, now)
        self._late.fails(end, now)

    def _exiting(self, member: RankState, _: messages.Exiting, now: float) -> None:
        member.exiting = now
        self._leave_late(member.rank)

    def _terminating(self, member: RankState, message: messages.Terminating, now: float) -> None:
        if message.signal == signal.SIGTERM:
            request = RequestStop(signal_name(message.signal))
            self._request_stop(member, request, now)
        if member.is_local:  # another agent has done this itself
            if not self.detects:
                return
            self._question_peers(now)
        self._analysis.terminating(
            member,
            message.signal,
            now,
            of_wrapper=message.of_wrapper,
        )

    def _question_peers(self, now: float) -> None:
        """A signal has arrived here: ask the hosts that are silent, once."""
        if self._was_stopped:
            return
        self._was_stopped = True
        for connection in self.peers:
            if self._is_running(connection):
                self._question(connection, now)

    def _exited(self, member: RankState, message: messages.Exited, now: float) -> None:
        end = _with_exception(message.end, member.failing)
        member.end = end
        member.is_reaped = message.is_reaped
        self._log_end(member.rank, end)
        self._leave(member.rank)
        if member.is_local:
            self._ended_at = now
        if member.rank == 0 and self.is_served and end.succeeded:
            self._send(messages.Done())
            self._end_served(now)
        if self._is_detected(member):
            self._tell_again(member, now)
            self._report_end(member, end, now)

    def _reaped(self, member: RankState, _: messages.Reaped, now: float) -> None:
        member.is_reaped = True
        if self._is_detected(member):
            self._tell_again(member, now)

    def _log_end(self, rank: int, end: ExitStatus) -> None:
        details = end.as_details()
        if self.root_cause is not None and self.root_cause.is_first(rank):
            details["traceback"] = end.traceback
        self.log.add("exited", rank, **details)

    def _tell_again(self, member: RankState, now: float) -> None:
        """More is known of the rank that failed first: its exit code, or that its launcher has seen it."""
        cause = self.root_cause
        if cause is None or not cause.is_first(member.rank):
            return
        again = replace(
            cause,
            delay=self._delay(member),
        )
        if member.end is not None and member.end.is_failure:
            again = replace(again, exit_code=member.end.code_of_job)
        self._tell(again, now)

    def _report_end(self, member: RankState, end: ExitStatus, now: float) -> None:
        if end.terminated_by is not None and not end.stopped_by_us:
            self._analysis.terminating(member, end.terminated_by, now)
        elif end.is_failure and member.failing is None:
            self._analysis.failed(member, end, now)

    # The root cause

    def _decide(self, now: float) -> None:
        report = self._analysis.conclude(now)
        if report is None:
            return
        if report.end is not None:
            rank = report.member.rank
            if self._late.explains(rank, report.end, now) is not False:
                return
        self._conclude(report, now)

    def _conclude(self, report: FailureReport, now: float) -> None:
        cause = self._analysis.explain(
            report,
            self._delay(report.member),
            self._late.held_up(now),
        )
        first = self.members[cause.ranks[0]]
        end = first.end or first.failing
        traceback = ""
        if end is not None:
            traceback = end.traceback
        self.end_job(
            cause,
            cause.headline,
            now,
            kind=report.kind,
            traceback=traceback,
        )

    def end_job(
        self,
        cause: RootCause,
        text: str,
        now: float,
        kind: str = "late",
        traceback: str = "",
    ) -> None:
        first = self.members[cause.ranks[0]]
        self.log.add(
            "root_cause",
            first.rank,
            kind=kind,
            ranks=list(cause.ranks),
            text=text,
            location=first.where,
            traceback=traceback,
        )
        self._tell(cause, now)

    def _tell(self, cause: RootCause, now: float) -> None:
        """Tell all; a second time with a shorter delay, once the rank that failed has ended."""
        why_no_restart = None
        if self.restarts is not None:
            first = cause.ranks[0]
            if cause.then is not None:
                first = cause.then
            for member in self.own:
                self.restarts.look(member.pid)
            cause, why_no_restart = self.restarts.decided(
                cause,
                self.members[first].end or self.members[first].failing,
                now,
                is_asked=self._agreement.is_asked or self._was_stopped,
                is_orphaned=self.is_orphaned,
            )
        self.claim(CAUSE)  # before any other agent of this node knows
        self._send(_abort(cause))
        self._stop_own(cause, now)
        if why_no_restart is not None:
            self.say(why_no_restart)

    def _words_for(self, cause: RootCause) -> str:
        """The headline, and what follows it, unless the rank that failed prints that on this node."""
        first = self.members[cause.ranks[0]]
        is_here = first.node_rank == self.own[0].node_rank
        has_printed = first.failing is not None or first.end is not None
        if is_here and has_printed and not writes_json():
            return cause.headline
        return cause.text

    def _delay(self, member: RankState) -> float:
        """Seconds for which the others wait before they stop: their launcher has to see first who failed."""
        if self.held:
            return 0.0
        if member.failing is not None and member.failing.cause:  # it does not end by itself
            return 0.0
        if member.is_reaped:
            return _LAUNCHER_LOOKS
        return _STILL_ENDING

    def delay(self, rank: int) -> float:
        """The same, where a rank fails of a timeout: it first ends the group that did not answer."""
        member = self.members[rank]
        seconds = self._delay(member)
        if seconds < _STILL_ENDING:
            return seconds
        return _AFTER_A_TIMEOUT

    # Late ranks and stops

    def ask_ranks(self, question: messages.Locate, ranks: Collection[int]) -> None:
        """Ask the agents of these ranks how far they are."""
        wanted = set(ranks)
        broadcast = Broadcast(question)
        for connection, members in self.peers.items():
            if any(member.rank in wanted for member in members):
                connection.send(broadcast)
        if not self._own_ranks.isdisjoint(wanted):
            self.locate(question, time.monotonic())

    def _leave(self, rank: int) -> None:
        self.keys.leave(rank)
        self._agreement.leave(rank)
        self._leave_late(rank)

    def _leave_late(self, rank: int) -> None:
        if not self._analysis.reports:  # else why a rank fails may be for whom it has waited
            self._late.leave(rank)

    def _request_stop(self, member: RankState, message: RequestStop, now: float) -> None:
        if self._agreement.ask(now, lasts=message.lasts):
            why = escape_control(message.why)
            self.log.add("stop_requested", member.rank, text=why)
            self._why_stop = f"rank {member.rank} was asked to stop ({why})"
            self.stops.ask(now)
            self._send(messages.CountReads())

    def _decide_stop(self, now: float) -> None:
        if not self._agreement.decide(now):
            return
        read = self._agreement.read or 1
        missing = self._agreement.missing
        self._send(messages.StopAt(read))
        self.stops.stop_at(read)
        self.log.add("stop_agreed", read=read, missing=missing)
        is_said = self.root_cause is not None and self.root_cause.is_failure  # why all stop
        if is_said or not self._agreement.is_read:
            return
        text = f"{self._why_stop}: all ranks stop at read {read} of ctx.preempted"
        if missing:
            text += f"; without {ranks_said(missing)}, which did not say how far it is"
        self.say(text)

    # The end

    def finish(self) -> None:
        """Let the others end: first the rank that failed, whose exit code the launcher has to see first."""
        has_started = any(member.pid for member in self.own)
        if not self._has_left:
            if not has_started:
                return  # the others are to see that as a loss
            if self.detects:
                self._summarize()
        cause = self.root_cause
        if cause is None or cause.restarts:
            self._say_goodbye()
        elif self.held and not self._hurried:
            self._let_first_end(cause)

    def _say_goodbye(self) -> None:
        if not self._has_left:
            self._send(Detach(ended=self.detects))
        reachable = [each for each in self.peers if each.unreachable_since is None]
        close_gracefully(reachable)

    def _let_first_end(self, cause: RootCause) -> None:
        connections = {self.members[rank].connection for rank in cause.ranks}
        connections.discard(None)
        close_gracefully(connections, _FIRST_OUT)
        if not self._is_own(cause):
            time.sleep(AFTER_THE_FIRST)

    def _summarize(self) -> None:
        """Print one line on how the job ended, and write the report where there is to be one."""
        # Here, as an agent needs it at its end only
        from ..report.content import Doubts, job_report, summary_line
        from ..report.files import try_to_write

        doubts = Doubts(self.settings.apart, self.settings.unused)
        known = (self.log, self.membership, doubts, time.time())
        earlier = []
        if self.restarts is not None:
            earlier = self.restarts.rounds
        exit_code = self._exit_code_of_job()
        self.log.note("ended", exit_code=exit_code)
        if self.root_cause is None or not self.root_cause.restarts:
            line = summary_line(
                *known,
                exit_code,
                rounds=earlier,
            )
            self.say(line)
        if self.settings.report is None or self.log[0].event != "rendezvous_started":
            return
        problem = try_to_write(self.settings.report, lambda: job_report(*known, earlier))
        if problem is not None:
            self.say(problem)

    def _exit_code_of_job(self) -> int | None:
        """The exit code for the launcher; None where no failure and no signal has ended the job."""
        cause = self.root_cause
        if cause is None:
            return None
        found = cause.exit_code
        for rank in (*cause.ranks, *self.members):
            end = self.members[rank].end
            if end is not None:
                found = cause.exit_code_for(end) or end.status or 0
                if found:
                    return found
        return found

    def _limit(self) -> float:
        if not self.detects:
            return self._ended_at
        cause = self.root_cause
        if cause is None and self._analysis.reports:
            return inf
        if not any(member.is_reachable for member in self.members.values()):
            return self._ended_at
        if cause is None:
            if self.may_restart:
                return inf
            return self._ended_at + _LINGER
        seconds = _LINGER
        if cause.is_failure:
            seconds = self.settings.grace + _LAST_MESSAGE
        return max(self._concluded_at + seconds, self._ended_at)


def _abort(cause: RootCause) -> messages.Abort:
    from .claims import own_log  # here, as most jobs end well

    return messages.Abort(cause, own_log())


def _is_of_start(message: Answer) -> bool:
    """Whether an answer ends the start of the ranks: all are ready, or one is not."""
    if isinstance(message, Go):
        return True
    return message.key is not None and message.key.name == READY


def _with_exception(end: ExitStatus, failing: ExitStatus | None) -> ExitStatus:
    """How a rank has ended, with the exception that it had reported before."""
    if failing is None or end.crash or end.exception is not None:
        return end
    return replace(end, exception=failing.exception)
