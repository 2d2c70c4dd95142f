"""Rank 0's side of failure detection: it hears of every end first, says who failed first, and tells all the others."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..base.process import signal_name
from ..base.text import escape_control, ranks_said, writes_json
from ..job import messages
from ..job.first_failure import GATHERING, FailureReport, RootCauseAnalysis
from ..job.keys import Keys
from ..job.late import LateWatch
from ..job.root_cause import RankState, RootCause
from ..job.stop_agreement import StopAgreement
from ..rendezvous.connection_pool import Connection
from ..rendezvous.events import EventLog, own_steps
from ..rendezvous.membership import Membership
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
    Resume,
    Resumed,
    ShowStacks,
)
from ..rendezvous.protocol import Broadcast, ProtocolError
from .heartbeat import (
    BEATS_OF_RANK_0,
    HeartbeatConnection,
)
from .participant import (
    AFTER_THE_FIRST,
    CAUSE,
    Answer,
    Participant,
)
from .peer_connection import DisconnectedError, close_gracefully
from .peer_watch import DISCONNECTED

_LINGER = 5.0  # seconds after rank 0 has ended well, for the others to end, too
_LAST_MESSAGE = 2.0  # seconds beyond the grace for ranks that were told to stop
# Seconds for an agent to come back whose connection has ended: it takes milliseconds, unless the network was cut
_RETURNING, _RETURNING_FROM_AFAR = GATHERING, 3.0
_GREETED = 1.0  # seconds from its first message until it is back
_LAUNCHER_LOOKS = 0.25  # seconds; torchrun looks 10 times a second who has ended
_STILL_ENDING = 3.0  # seconds for a Python with torch in it to end after an uncaught exception
_AFTER_A_TIMEOUT = 9.0  # seconds, where its collective operation has timed out
_FIRST_OUT = 0.5  # seconds for the rank that failed to end before the others do
# Seconds for ranks that wait in vain to be stopped, else they end with a traceback
_STOPPING = _STILL_ENDING + 2.0


@dataclass
class FailureCoordinator(Participant):
    """Rank 0's side, which knows all ranks of the job."""

    membership: Membership = field(kw_only=True)
    keys: Keys = field(kw_only=True)  # where ranks wait for each other
    log: EventLog = field(kw_only=True)  # of the events of the job, which goes on here
    # Called when no rank gets ready any more: all are, or cannot be
    started: Callable[[], object] = lambda: None
    is_served: bool = False  # whether the other ranks only serve this one, and end with it

    def __post_init__(self) -> None:
        super().__post_init__()
        self._between = max(int(BEATS_OF_RANK_0 * self.bound), 1)  # less often: it has many peers
        self._analysis = RootCauseAnalysis(
            list(self.members.values()), is_by_node=self.membership.by_node
        )
        self._agreement, self._why_stop = StopAgreement(self.members, self.settings.grace / 3), ""
        self._was_stopped = False
        # When they are to be sent, to which rank
        self._refusals: list[tuple[float, int, Failed]] = []
        # Connections that have ended, and until when their agents may come back over others
        self._returning: dict[HeartbeatConnection, float] = {}
        self._late = LateWatch(self)
        self._handlers: dict[type, Callable[[RankState, Any, float], object]] = {
            **dict.fromkeys(
                (Arrive, Ready, Leave),
                lambda member, said, now: self.keys.take(member.rank, said, now),
            ),
            messages.Stalled: lambda member, said, now: self._late.take(member.rank, said, now),
            messages.Position: lambda member, said, now: self._late.take(member.rank, said, now),
            AskStacks: self._take_question,
            RequestStop: self._request_stop,
            messages.Reads: lambda member, said, _: self._agreement.count(member.rank, said.count),
            messages.Register: self._register,
            messages.Phases: lambda member, said, _: self.log.add(
                "phases", member.rank, **own_steps(said.times)
            ),
            messages.Failing: self._failing,
            messages.Exiting: self._exiting,
            messages.Terminating: self._terminating,
            messages.Exited: self._exited,
        }

    def take(self, rank: int, message: object, now: float) -> None:
        self._take(self.members[rank], message, now)
        self._send_replies()

    def read(self, connection: HeartbeatConnection, now: float) -> None:
        super().read(connection, now)
        self._send_replies()

    def ask_stacks(self, reply: Callable[[Sequence[str]], object], now: float) -> None:
        self._late.show(reply, now)

    def turn(self, now: float) -> None:
        super().turn(now)
        for connection in [each for each, end in self._returning.items() if now >= end]:
            self._lose(connection, DISCONNECTED, "", now)
        self.keys.expire(now)
        self._send_replies()
        for refusal in [one for one in self._refusals if one[0] <= now]:
            self._refusals.remove(refusal)
            self._reply(*refusal[1:])
        self._late.turn(now)
        report = self._analysis.conclude(now) if self.root_cause is None else None
        if report and (
            report.end is None or self._late.explains(report.member.rank, report.end, now) is False
        ):
            self._conclude(report, now)
        # What a script does once it is told to stop is no failure: why it is has to be known before.
        if (self.root_cause is not None or not self._analysis.reports) and self._agreement.decide(
            now
        ):
            self._stop_at()

    def due(self, now: float) -> float:
        reports = [report.due for report in self._analysis.reports if self.root_cause is None]
        refusals = [due for due, _, _ in self._refusals]
        return min(
            [
                super().due(now),
                *self.keys.due(),
                *reports,
                self._agreement.due,
                self._late.due,
                *self._returning.values(),
                *refusals,
            ]
        )

    def finish(self) -> None:
        """Let the others end: first the rank that failed, so that the launcher sees its exit code before all others."""
        if not self._has_left and not any(member.pid for member in self.own):
            return  # nothing was started, which the others are to see as a loss
        if not self._has_left and self.detects:
            self._summarize()
        if self.root_cause is None or self.root_cause.restarts:
            if not self._has_left:
                self._send(Detach(ended=self.detects))
            close_gracefully(each for each in self.peers if each.unreachable_since is None)
        elif self.held and not self._hurried:
            first = [self.members[rank] for rank in self.root_cause.ranks]
            close_gracefully(
                {member.connection for member in first if member.connection is not None}, _FIRST_OUT
            )
            time.sleep(0.0 if self._is_own(self.root_cause) else AFTER_THE_FIRST)

    def _summarize(self) -> None:
        """Print one line on how the job ended, and write the report where --report or DISTBOOT_REPORT says."""
        # Here, as an agent needs it at its end only
        from ..report.content import Doubts, job_report, summary_line
        from ..report.files import try_to_write

        doubts = Doubts(self.settings.apart, self.settings.unused)
        known = self.log, self.membership, doubts, time.time()
        earlier = [] if self.restarts is None else self.restarts.rounds
        if self.root_cause is None or not self.root_cause.restarts:
            self.say(summary_line(*known, self._exit_code_of_job(), rounds=earlier))
        if self.settings.report is not None and self.log[0].event == "rendezvous_started":
            problem = try_to_write(self.settings.report, lambda: job_report(*known, earlier))
            if problem is not None:
                self.say(problem)

    def _exit_code_of_job(self) -> int | None:
        """The exit code that the launcher gets; None where no failure and no signal has ended the job."""
        cause = self.root_cause
        if cause is None:
            return None
        known = False
        for rank in (*cause.ranks, *self.members):
            end = self.members[rank].end
            if end is not None:
                known = True
                code = cause.exit_code_for(end) or end.status
                if code:
                    return code
        return 0 if known else cause.exit_code

    def _limit(self) -> float:
        if not self.detects:
            return self._ended_at
        if self._analysis.reports and self.root_cause is None:
            return math.inf
        if not any(member.is_reachable for member in self.members.values()):
            return self._ended_at
        if self.root_cause is None:
            return math.inf if self.may_restart else self._ended_at + _LINGER
        patience = self.settings.grace + _LAST_MESSAGE if self.root_cause.is_failure else _LINGER
        return max(self._concluded_at + patience, self._ended_at)

    def _send_replies(self) -> None:
        replies, self.keys.outbox = self.keys.outbox, []
        if self.keys.not_ready is not None:
            self.log.add("not_ready", ranks=self.keys.not_ready)
            self.keys.not_ready = None
        go = next((message for _, message in replies if isinstance(message, Go)), None)
        if go is not None:  # all ranks get it: once for those of an agent
            go = replace(go, stops=self._agreement.begin())
            self._send(Broadcast(go))
        for rank, reply in replies:
            if isinstance(reply, Failed) and self.detects and self._analysis.reports:
                self._refusals.append((time.monotonic() + _STOPPING, rank, reply))
            else:
                self._reply(rank, go if isinstance(reply, Go) else reply)
        self.is_starting = self.is_starting and not self.keys.has_begun

    def _reply(self, rank: int, message: object) -> None:
        member = self.members[rank]
        if member.is_local:
            assert isinstance(message, Answer)
            if isinstance(message, Go) or (message.key is not None and message.key.name == READY):
                self.started()
            self._answer(rank, message)
        elif member.connection is not None and not isinstance(message, Go):
            member.connection.send(message, rank)

    def _take_from(
        self, connection: HeartbeatConnection, rank: int, message: object, now: float
    ) -> None:
        member = self.members.get(rank)
        if isinstance(message, Detach):
            self._forget(connection)
            connection.close()
        elif member is None or member.connection is not connection:
            raise ProtocolError(f"speaks for rank {rank}, which is not its own")
        else:
            self._take(member, message, now)

    def _take(self, member: RankState, message: object, now: float) -> None:
        if type(message) not in self._handlers:
            raise ProtocolError(f"sends {type(message).__name__}, which only rank 0 may")
        self._handlers[type(message)](member, message, now)

    def _take_question(self, member: RankState, _: AskStacks, now: float) -> None:
        connection = member.connection
        assert connection is not None  # a script of ours asks its agent
        self._late.show(lambda lines: connection.send(ShowStacks(tuple(lines))), now)

    def _exiting(self, member: RankState, _: messages.Exiting, now: float) -> None:
        member.exiting = now
        self._leave_late(member.rank)

    def _register(self, member: RankState, message: messages.Register, _: float) -> None:
        """The process of a rank is watched from now on. It and rank 0's hear of each other, whichever is first."""
        member.pid, member.is_watched = message.pid, message.detects
        self.log.add("registered", member.rank, pid=message.pid)
        answer = messages.Register(self.members[0].pid)
        if member.connection is not None:
            member.connection.send(answer)
            if self.root_cause is not None:
                member.connection.send(messages.Abort(self.root_cause))
        for connection, members in self.peers.items() if member.rank == 0 else ():
            if any(other.pid for other in members):
                connection.send(answer)

    def _failing(self, member: RankState, message: messages.Failing, now: float) -> None:
        end = message.end
        if member.failing is None and self._is_detected(member):
            member.failing = end
            self.log.add("failing", member.rank, text=end.failure_text())
            self._analysis.failed(member, end, now)
            self._late.fails(end, now)

    def _terminating(self, member: RankState, message: messages.Terminating, now: float) -> None:
        if message.signal == signal.SIGTERM:
            self._request_stop(member, RequestStop(signal_name(message.signal)), now)
        if member.is_local and not self.detects:  # another agent has looked at that itself
            return
        if member.is_local and not self._was_stopped:
            self._was_stopped = True
            for connection in self.peers:
                if self._is_running(connection):
                    self._question(connection, now)
        self._analysis.terminating(member, message.signal, now, of_wrapper=message.of_wrapper)

    def _exited(self, member: RankState, message: messages.Exited, now: float) -> None:
        end = message.end
        if member.failing is not None and end.exception is None and not end.crash:
            end = replace(end, exception=member.failing.exception)
        member.end, rank, cause = end, member.rank, self.root_cause
        is_first = cause is not None and cause.is_first(rank)
        self.log.add(
            "exited", rank, **end.as_details(), **({"traceback": end.traceback} if is_first else {})
        )
        self._leave(rank)
        if member.is_local:
            self._ended_at = now
        if rank == 0 and self.is_served and end.succeeded:
            self._send(messages.Done())
            self._end_served(now)
        if not self._is_detected(member):
            return
        if cause is not None and is_first:
            code = end.code_of_job if end.is_failure else cause.exit_code
            self._tell(replace(cause, delay=self._delay(member), exit_code=code), now)
        if end.terminated_by is not None and not end.stopped_by_us:
            self._analysis.terminating(member, end.terminated_by, now)
        elif end.is_failure and member.failing is None:
            self._analysis.failed(member, end, now)

    def _conclude(self, report: FailureReport, now: float) -> None:
        held_up = self._late.held_up(now)
        cause = self._analysis.explain(report, self._delay(report.member), held_up)
        first = self.members[cause.ranks[0]]
        end = first.end or first.failing
        self.end_job(cause, cause.headline, now, report.kind, "" if end is None else end.traceback)

    def end_job(
        self, cause: RootCause, text: str, now: float, kind: str = "late", traceback: str = ""
    ) -> None:
        first, ranks = self.members[cause.ranks[0]], list(cause.ranks)
        where = {"location": first.where, "traceback": traceback}
        self.log.add("root_cause", first.rank, kind=kind, ranks=ranks, text=text, **where)
        self._tell(cause, now)

    def _tell(self, cause: RootCause, now: float) -> None:
        """Tell all; a second time with a shorter delay, once the rank that failed has ended."""
        said = None
        if self.restarts is not None:
            first = self.members[cause.ranks[0] if cause.then is None else cause.then]
            is_asked = self._agreement.is_asked or self._was_stopped
            for member in self.own:
                self.restarts.look(member.pid)
            cause, said = self.restarts.decided(
                cause,
                first.end or first.failing,
                now,
                is_asked=is_asked,
                is_orphaned=self.is_orphaned,
            )
        self.claim(CAUSE)
        self._send(messages.Abort(cause))
        self._stop_own(cause, now)
        if said is not None:
            self.say(said)

    def _request_stop(self, member: RankState, message: RequestStop, now: float) -> None:
        if self._agreement.ask(now, lasts=message.lasts):
            why = escape_control(message.why)
            self.log.add("stop_requested", member.rank, text=why)
            self._why_stop = f"rank {member.rank} was asked to stop ({why})"
            self.stops.ask(now)
            self._send(messages.CountReads())

    def _stop_at(self) -> None:
        read, missing = self._agreement.read or 1, self._agreement.missing
        self._send(messages.StopAt(read))
        self.stops.stop_at(read)
        self.log.add("stop_agreed", read=read, missing=missing)
        is_said = self.root_cause is not None and self.root_cause.is_failure  # why all stop
        if self._agreement.is_read and not is_said:
            without = (
                f"; without {ranks_said(missing)}, which did not say how far it is"
                if missing
                else ""
            )
            self.say(f"{self._why_stop}: all ranks stop at read {read} of ctx.preempted{without}")

    def _words_for(self, cause: RootCause) -> str:
        """The headline, and what follows it, unless the rank that failed prints that on this node, too."""
        first = self.members[cause.ranks[0]]
        is_here = first.node_rank == self.own[0].node_rank
        has_printed = first.failing is not None or first.end is not None
        if is_here and has_printed and not writes_json():
            return cause.headline
        return cause.text

    def ask_ranks(self, question: messages.Locate, ranks: Collection[int]) -> None:
        """Ask the agents of these ranks how far they are."""
        for connection, members in self.peers.items():
            if any(member.rank in ranks for member in members):
                connection.send(question)
        if any(member.rank in ranks for member in self.own):
            self.locate(question, time.monotonic())

    def _leave(self, rank: int) -> None:
        """A rank has ended, or is not connected any more: the others do not wait for it."""
        self.keys.leave(rank)
        self._agreement.leave(rank)
        self._leave_late(rank)

    def _leave_late(self, rank: int) -> None:
        if not self._analysis.reports:  # else why a rank fails may be for whom it has waited
            self._late.leave(rank)

    def _delay(self, member: RankState) -> float:
        """Seconds for which the others wait before they stop, so that their launcher sees first who failed."""
        # It does not end by itself
        if self.held or (member.failing is not None and member.failing.cause):
            return 0.0
        return _LAUNCHER_LOOKS if member.end is not None else _STILL_ENDING

    def delay(self, rank: int) -> float:
        """The same, where a rank fails of a timeout: it first ends the group that did not answer."""
        seconds = self._delay(self.members[rank])
        if seconds >= _STILL_ENDING:
            seconds = _AFTER_A_TIMEOUT
        return seconds

    def _lose(self, connection: HeartbeatConnection, why: str, how: str, now: float) -> None:  # noqa: ARG002
        was_reported = self._returning.pop(connection, None) is not None
        members = self._forget(connection)
        connection.close()
        for member in members:
            if member.end is None and self._is_detected(member) and not was_reported:
                self._lost(member, why, now)

    def _disconnected(
        self, connection: HeartbeatConnection, error: DisconnectedError, now: float
    ) -> None:
        """A connection has ended: its ranks are lost, unless their agent comes back over another one in time."""
        if not self._is_running(connection):
            super()._disconnected(connection, error, now)
            return
        self._end_connection(connection)
        if error.gave_up and connection.unreachable_since is not None:
            return  # that says nothing about the peer, which may come back whenever it can
        seconds = _RETURNING if connection.unreachable_since is None else _RETURNING_FROM_AFAR
        self._returning[connection] = now + seconds
        for member in self.peers[connection]:
            if member.end is None and self._is_detected(member):
                self._lost(member, DISCONNECTED, now, gathering=seconds)

    def expect_return(self) -> None:
        """A process greets rank 0's agent: it may be one whose connection has ended."""
        due = time.monotonic() + _GREETED
        for connection, end in self._returning.items():
            self._returning[connection] = max(end, due)
            for member in self.peers[connection]:
                self._analysis.postpone(member, due)

    def take_back(self, peer: Connection, message: Resume) -> None:
        """An agent goes on over a new connection; `ProtocolError`: it cannot."""
        now = time.monotonic()
        connection = self.members[message.agent].connection
        if connection is None:
            raise ProtocolError(f"goes on as rank {message.agent}, which is not connected any more")
        if message.round != self.membership.round:
            raise ProtocolError(
                f"goes on in round {message.round} of the job, and this is round {self.membership.round}"
            )
        connection.confirm(message.received)
        if not self._drain(connection, now):
            raise ProtocolError(f"goes on as rank {message.agent}, which has detached")
        self._use(connection, peer.socket, replace(peer.channel, round=self.membership.round))
        connection.send_first(Resumed(connection.received))
        since = connection.unreachable_since
        connection.resume(now)
        if since is not None:
            self._reachable(connection, now - since)
        elif connection in self._returning:
            self.say(f"{self._ranks_of(connection)} has connected again")
        self._returned(connection)
        self._send_replies()

    def _returned(self, connection: HeartbeatConnection) -> None:
        """The ranks of a connection that had ended are not lost."""
        if self._returning.pop(connection, None) is None:
            return
        for member in self.peers[connection]:
            self._analysis.returned(member)
            self.log.add("reachable", member.rank)

    def _lost(self, member: RankState, why: str, now: float, **more: float) -> None:
        self.lost_at[member.rank] = time.time()
        self.log.add("unreachable", member.rank, text=why)
        self._analysis.lost(member, why, now, **more)

    def _lose_silent(self, connection: HeartbeatConnection, now: float) -> None:
        for member in self.peers[connection]:
            if member.is_open:
                why = "it did not answer any more when SIGTERM arrived"
                self._lost(member, why, now, gathering=0.0)

    def _unreachable(self, connection: HeartbeatConnection, why: str, now: float) -> None:
        for member in self.peers[connection]:
            self.keys.unreachable[member.rank] = connection.unreachable_since or now
            self.log.add("silent", member.rank, text=why)
        text = f"warning: {self._ranks_of(connection)} {why}; failures there are not detected until"
        self.say(f"{text} it answers again")

    def _reachable(self, connection: HeartbeatConnection, seconds: float) -> None:
        for member in self.peers[connection]:
            self.keys.unreachable.pop(member.rank, None)
            self.log.add("reachable", member.rank)
        self.say(f"{self._ranks_of(connection)} answers again, after {seconds:.0f} s")

    def _abandon(self, connection: HeartbeatConnection, why: str, now: float) -> None:
        text = f"warning: {self._ranks_of(connection)} {why}; it is not watched any more"
        for member in self.peers[connection]:
            self.keys.leave(member.rank, why=f"is not connected any more ({why})")
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

    def _forget(self, connection: HeartbeatConnection) -> list[RankState]:
        members = super()._forget(connection)
        for member in members:
            self._leave(member.rank)
        return members

    def _is_detected(self, member: RankState) -> bool:
        return self.detects and member.is_watched
