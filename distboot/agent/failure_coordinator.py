"""Rank 0's side of failure detection: it hears of every end first, says who failed first, and tells all the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from ..rendezvous.keys import Keys
from ..rendezvous.messages import Arrive, Detach, Leave, Ready
from ..rendezvous.protocol import ProtocolError
from ..report import EventLog, own_steps
from ..settings import SupervisionSettings
from ..text import ranks_said
from .exit_status import ExitStatus
from .heartbeat import DisconnectedError, HeartbeatConnection, close_gracefully
from .loop import AFTER_THE_FIRST, Participant, Say, StopRequest
from .messages import Abort, Done, Exited, Exiting, Failing, Phases, Register, Terminating
from .root_cause import FailureReport, RankLocation, RankState, RootCause, RootCauseAnalysis, failure_text

_LINGER = 5.0  # seconds after rank 0 has ended well, for the others to end, too
_LAST_MESSAGE = 2.0  # seconds beyond the grace for ranks that were told to stop
_LAUNCHER_LOOKS = 0.25  # seconds; torchrun looks 10 times a second who has ended
_STILL_ENDING = 3.0  # seconds for a Python with torch in it to end after an uncaught exception
_FIRST_OUT = 0.5  # seconds for the rank that failed to end before the others do
_GOODBYE = 1.0  # seconds for the others to take our last message


@dataclass
class FailureCoordinator(Participant):
    """Rank 0's side."""

    locations: list[RankLocation]  # of all ranks, by rank
    connection_of: Mapping[int, HeartbeatConnection]  # of every rank of another agent
    settings: SupervisionSettings
    held: bool
    say: Say
    is_served: bool = False  # whether the other ranks only serve this one, and end with it
    conclude: Callable[[FailureCoordinator], None] = lambda _: None  # called when all that can be known is known
    log: EventLog = field(default_factory=EventLog)  # of the events of the job, which goes on here
    keys: Keys | None = None  # where ranks wait for each other
    reply: Callable[[int, object], None] = lambda _, __: None
    is_starting: bool = False
    root_cause: RootCause | None = None
    orders: dict[int, StopRequest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.members = [RankState(each, self.connection_of.get(each.rank)) for each in self.locations]
        self._local = [member for member in self.members if member.is_local]
        self._at: dict[HeartbeatConnection, list[RankState]] = {}
        for member in self.members:
            if member.connection is not None:
                self._at.setdefault(member.connection, []).append(member)
        self._analysis = RootCauseAnalysis(self.members)
        # Not used any more, and open: their end would be an alarm over there.
        self._abandoned: list[HeartbeatConnection] = []
        self._has_left = self._hurried = self._was_stopped = False
        self._ended_at = self._concluded_at = 0.0

    def connections(self) -> Collection[HeartbeatConnection]:
        return list(self._at)

    def take(self, rank: int, message: object, now: float) -> None:
        member = self.members[rank]
        if isinstance(message, Register):
            self._begin(member, message.pid)
            for connection, members in self._at.items() if rank == 0 else ():
                if any(other.location.pid for other in members):  # it has registered before us
                    connection.send(Register(message.pid))
        elif isinstance(message, Terminating):
            self._terminating(member, message.signal, now)
        else:
            self._take(member, message, now)
        if isinstance(message, Exited):
            self._ended_at = now
            if rank == 0 and self.is_served and message.end.succeeded:
                self._send_to_all(Done())
                for other in self._local[1:]:
                    self.orders.setdefault(other.location.rank, StopRequest(now, is_failure=False, is_done=True))
        self._send_replies()

    def read(self, connection: HeartbeatConnection, now: float) -> None:
        if connection not in self._at:  # dropped in this very round
            return
        try:
            for rank, message in connection.receive(now):
                if connection in self._at:  # else it has detached just now
                    self._take_from(connection, rank, message, now)
        except DisconnectedError:
            self._lose(connection, "the connection ended without a word", now)
        except ProtocolError as error:
            self._abandon(connection, str(error))
        self._send_replies()

    def tick(self, now: float) -> None:
        for connection in self.connections():
            self.read(connection, now)
            if self._is_running(connection):
                connection.heartbeat(now)
                self._check(connection, now)

    def turn(self, now: float) -> None:
        for connection in self.connections():
            if connection.suspect and self._is_running(connection):
                self._check(connection, now)
        if self.keys is not None:
            self.keys.expire(now)
            self._send_replies()
        report = self._analysis.conclude(now) if self.root_cause is None else None
        if report is not None:
            self._decide(report, now)

    def due(self, now: float) -> float:
        times = self._analysis.due() if self.root_cause is None else []
        times += [self._limit()] if self._has_ended else []
        times += [now + 0.1] if any(connection.suspect for connection in self._at) else []
        times += [] if self.keys is None else self.keys.due()
        return min(times, default=now + 3600)

    def leave(self) -> None:
        self._send_to_all(Detach())
        self._has_left = True

    def hurry(self) -> None:
        self._hurried = True

    def over(self, now: float) -> bool:
        if self._has_left or self._hurried or (self._has_ended and not self._detects):
            return True
        if not self._has_ended or (self._analysis.reports and self.root_cause is None):
            return False
        return now >= self._limit() or not any(member.is_open for member in self.members)

    def finish(self) -> None:
        """Let the others end: first the rank that failed, so that the launcher sees its exit code before all others."""
        if not self._has_left and not any(member.location.pid for member in self._local):
            return  # nothing was started, which the others are to see as a loss
        if not self._has_left and self._detects:
            self.conclude(self)
        if self.root_cause is None:
            if not self._has_left:
                self._send_to_all(Detach(ended=self._detects))
            close_gracefully(self.connections(), _GOODBYE)
        elif self.held and not self._hurried:
            first = [self.members[rank] for rank in self.root_cause.ranks]
            close_gracefully({member.connection for member in first if member.connection is not None}, _FIRST_OUT)
            time.sleep(0.0 if any(member.is_local for member in first) else AFTER_THE_FIRST)

    def close(self) -> None:
        for connection in (*self._at, *self._abandoned):
            connection.close()

    def _limit(self) -> float:
        """When we stop waiting for the others, once we have ended ourselves."""
        if self.root_cause is None:
            return self._ended_at + _LINGER
        patience = self.settings.grace + _LAST_MESSAGE if self.root_cause.is_failure else _LINGER
        return max(self._concluded_at + patience, self._ended_at)

    @property
    def _has_ended(self) -> bool:
        return all(member.end is not None for member in self._local)

    def _is_running(self, connection: HeartbeatConnection) -> bool:
        return any(member.end is None for member in self._at.get(connection, ()))

    def _send_to_all(self, message: object) -> None:
        for connection in self._at:
            connection.send(message)

    def _send_replies(self) -> None:
        """Send what the keys have to say."""
        if self.keys is None:
            return
        replies, self.keys.outbox = self.keys.outbox, []
        if self.keys.not_ready is not None:
            self.log.add("not_ready", ranks=self.keys.not_ready)
            self.keys.not_ready = None
        for rank, message in replies:
            member = self.members[rank]
            if member.is_local:
                self.reply(rank, message)
            elif member.connection is not None:
                member.connection.send(message, rank)
        self.is_starting = self.is_starting and not self.keys.has_begun

    def _take_from(self, connection: HeartbeatConnection, rank: int, message: object, now: float) -> None:
        if isinstance(message, Detach):
            self._forget(connection)
            connection.close()
            return
        member = self.members[min(rank, len(self.members) - 1)]
        if member.connection is not connection or member.location.rank != rank:
            raise ProtocolError(f"speaks for rank {rank}, which is not its own")
        if isinstance(message, Register):
            member.is_watched = message.detects
            self._begin(member, message.pid)
            connection.send(Register(self.members[0].location.pid))
            if self.root_cause is not None:
                connection.send(Abort(self.root_cause))
        elif isinstance(message, Terminating):
            self._analysis.terminating(member, message.signal, now)
        else:
            self._take(member, message, now)

    def _take(self, member: RankState, message: object, now: float) -> None:
        """Take what a rank says, whichever agent it has."""
        rank = member.location.rank
        if isinstance(message, Arrive | Ready | Leave):
            assert self.keys is not None
            self.keys.take(rank, message, now)
        elif isinstance(message, Phases):
            self.log.add("phases", rank, **own_steps(message.times))
        elif isinstance(message, Exiting):
            member.exiting = now
        elif isinstance(message, Failing):
            if member.failing is None and self._is_detected(member):
                member.failing = message.end
                self.log.add("failing", rank, text=failure_text(message.end))
                self._analysis.failed(member, message.end, now)
        elif isinstance(message, Exited):
            self._exited(member, message.end, now)
        else:
            raise ProtocolError(f"sends {type(message).__name__}, which only rank 0 may")

    def _begin(self, member: RankState, pid: int) -> None:
        member.location = replace(member.location, pid=pid)
        self.log.add("registered", member.location.rank, pid=pid)

    def _terminating(self, member: RankState, number: int, now: float) -> None:
        """An external signal stops a local rank."""
        if not self._detects:
            return
        silent, self._was_stopped = () if self._was_stopped else self.members, True
        for other in silent:  # what is silent just then may be what the launcher answers
            if other.is_open and other.connection is not None and other.connection.is_unusually_silent(now):
                why = "nothing was heard of it any more when SIGTERM came"
                self.log.add("unreachable", other.location.rank, text=why)
                self._analysis.lost(other, why, now, gathering=0.0)  # mpirun gives us 0.24 s to live
        self._analysis.terminating(member, number, now)

    def _exited(self, member: RankState, end: ExitStatus, now: float) -> None:
        if member.failing is not None and not end.words:
            end = replace(end, words=member.failing.words)
        member.end, rank, cause = end, member.location.rank, self.root_cause
        is_first = cause is not None and rank in cause.ranks
        self.log.add("exited", rank, **end.as_details(), **({"traceback": end.words} if is_first else {}))
        self._leave_keys(member)
        if not self._is_detected(member):
            return
        if cause is not None and is_first:
            self._tell(replace(cause, delay=self._delay(member)), now)
        if end.terminated_by is not None and not end.stopped_by_us:
            self._analysis.terminating(member, end.terminated_by, now)
        elif end.is_failure and member.failing is None:
            self._analysis.failed(member, end, now)

    def _decide(self, report: FailureReport, now: float) -> None:
        cause = self._analysis.explain(report, self._delay(report.member))
        self.root_cause, self._concluded_at = cause, now
        first = self.members[cause.ranks[0]]
        end = first.end or first.failing
        self.log.add(
            "root_cause",
            first.location.rank,
            kind="stopped" if report.signal is not None else "lost" if report.is_loss else "failed",
            ranks=list(cause.ranks),
            text=cause.text.splitlines()[0],
            location=first.location.text,
            traceback="" if end is None else end.words,
        )
        self._tell(cause, now)
        if len(self._local) > 1 or not first.is_local:  # else its own output says it
            self.say(cause.text)

    def _tell(self, cause: RootCause, now: float) -> None:
        """Tell all; a second time with a shorter delay, once the rank that failed has ended."""
        self._send_to_all(Abort(cause))
        for member in self._local:
            rank, failing = member.location.rank, member.failing is not None and not member.failing.cause
            if member.end is None:
                self.orders[rank] = StopRequest.after(cause, rank, failing, now, self.orders.get(rank))

    def _delay(self, member: RankState) -> float:
        """Seconds for which the others wait before they stop, so that their launcher sees first who failed."""
        if self.held or (member.failing is not None and member.failing.cause):  # it does not end by itself
            return 0.0
        return _LAUNCHER_LOOKS if member.end is not None else _STILL_ENDING

    def _check(self, connection: HeartbeatConnection, now: float) -> None:
        fault = connection.liveness_fault(now, self.settings.bound)
        if fault is not None and fault.is_lost:
            self._lose(connection, fault.why, now)
        elif fault is not None:
            self._abandon(connection, fault.why)

    def _lose(self, connection: HeartbeatConnection, why: str, now: float) -> None:
        """An agent is unreachable, and its ranks with it."""
        members = self._forget(connection)
        connection.close()
        for member in members:
            if member.end is None and self._is_detected(member):
                self.log.add("unreachable", member.location.rank, text=why)
                self._analysis.lost(member, why, now)

    def _abandon(self, connection: HeartbeatConnection, why: str) -> None:
        """Go on without failure detection to an agent."""
        members = self._forget(connection)
        connection.send(Detach())
        self._abandoned.append(connection)
        where = members[0].location
        ranks = ranks_said([member.location.rank for member in members])
        place = where.text if len(members) == 1 else f"on {where.host} (node {where.node_rank})"
        self.say(f"warning: {ranks} {place} {why}; it is not watched any more")

    def _forget(self, connection: HeartbeatConnection) -> list[RankState]:
        """The ranks of an agent, whose connection is not ours any more."""
        members = self._at.pop(connection)
        for member in members:
            member.connection = None
            self._leave_keys(member)
        return members

    def _leave_keys(self, member: RankState) -> None:
        if self.keys is not None:
            self.keys.leave(member.location.rank)

    def _is_detected(self, member: RankState) -> bool:
        return self._detects and member.is_watched
