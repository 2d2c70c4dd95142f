"""The side of every other agent: it tells rank 0 how its ranks end, and hears from it who failed first."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from ..errors import DistbootError
from ..rendezvous.messages import (
    LONGEST_TEXT,
    READY,
    Arrive,
    Detach,
    Failed,
    Go,
    Key,
    Ready,
    Release,
    as_problem,
)
from ..rendezvous.protocol import ProtocolError
from ..settings import SupervisionSettings
from .exit_status import ExitStatus
from .heartbeat import DisconnectedError, HeartbeatConnection, close_gracefully
from .loop import AFTER_THE_FIRST, Participant, Say, StopRequest
from .messages import Abort, Done, Exited, Failing, Register, Terminating
from .root_cause import RankLocation, RootCause, from_disconnect, from_exit

_CAUSE = 1.0  # seconds after our end to hear why
_GOODBYE = 1.0  # seconds for rank 0 to take our last message
_LATER = 2.0  # seconds beyond the limit of a key for rank 0 to say what has become of it
_EXPLANATION = 11.0  # seconds, where a peer that is about to end may be the cause
_LOOK = "look at the output of rank 0"
_LAST_MESSAGE = 3.0  # seconds beyond the grace for rank 0 to let us out


@dataclass
class FailureReporter(Participant):
    """The side of an agent other than rank 0's."""

    rank_0: RankLocation
    own: Sequence[RankLocation]  # the ranks of this agent
    connection: HeartbeatConnection | None  # to rank 0
    settings: SupervisionSettings
    held: bool
    say: Say
    root_cause: RootCause | None = None
    orders: dict[int, StopRequest] = field(default_factory=dict)
    reply: Callable[[int, object], None] = lambda _, __: None
    is_starting: bool = False

    def __post_init__(self) -> None:
        self._ends: dict[int, ExitStatus] = {}
        self._failing: set[int] = set()
        self._has_left = False
        self._ended_at = self._closed_at = self._concluded_at = 0.0
        # Not used any more, and open: its end would be an alarm over there.
        self._abandoned: HeartbeatConnection | None = None
        self._waiting: dict[int, tuple[Key, float]] = {}  # where the script of each rank waits, and until when
        self._why_gone = ""  # why rank 0 cannot be asked any more
        self._not_begun: dict[int, Failed] = {}  # before the script was ready itself

    def connections(self) -> Collection[HeartbeatConnection]:
        return [] if self.connection is None else [self.connection]

    def take(self, rank: int, message: object, now: float) -> None:
        if isinstance(message, Arrive | Ready):
            self._ask(rank, message, now)
        elif isinstance(message, Exited):
            self._exited(rank, message, now)
        elif isinstance(message, Register):
            self._send(replace(message, detects=self.settings.detects), rank)
        elif isinstance(message, Failing | Terminating):
            if isinstance(message, Failing) and not message.end.cause:
                self._failing.add(rank)
            if self._detects:
                if isinstance(message, Terminating) and self._is_silent(now):  # then it may be the launcher's answer
                    self._lose_rank_0("nothing was heard of it any more when SIGTERM came", now)
                self._send(message, rank)
        else:
            self._send(message, rank)

    def read(self, connection: HeartbeatConnection, now: float) -> None:
        if self.connection is not connection:  # dropped in this very round
            return
        try:
            for rank, message in connection.receive(now):
                self._take(rank, message, now)
        except DisconnectedError as error:
            self._drop(now, "" if str(error) == "closed" else str(error))
            if not self._has_ended and self.root_cause is None and self._detects:
                self._lose_rank_0("the connection ended without a word", now)
        except ProtocolError as error:
            self._abandon(str(error))

    def tick(self, now: float) -> None:
        if self.connection is not None:
            self.read(self.connection, now)
        connection = self.connection
        if connection is not None and not self._has_ended:
            connection.heartbeat(now)
            self._check(connection, now)

    def turn(self, now: float) -> None:
        if self.connection is not None and self.connection.suspect and not self._has_ended:
            self._check(self.connection, now)
        for rank in [rank for rank, (_, until) in self._waiting.items() if now >= until]:
            self._why_gone = "it does not answer"
            self._answer_for_rank_0(rank)

    def due(self, now: float) -> float:
        times = [now + (0.1 if self.connection is not None and self.connection.suspect else 3600)]
        times += [until for _, until in self._waiting.values()]
        times += [max(self._limit(), now)] if self._has_ended else []
        return min(times)

    def leave(self) -> None:
        self._send(Detach())
        self._has_left = True

    def hurry(self) -> None:
        self._has_left = True

    def over(self, now: float) -> bool:
        return self._has_left or (self._has_ended and now >= self._limit())

    def finish(self) -> None:
        """See that our last message arrives, if rank 0 is there."""
        if self.connection is not None and not self._is_silent(time.monotonic()):
            close_gracefully([self.connection], _GOODBYE)

    def close(self) -> None:
        for connection in (self.connection, self._abandoned):
            if connection is not None:
                connection.close()

    def _limit(self) -> float:
        """When we need not wait for rank 0 any more, once we have ended."""
        if all(end.succeeded for end in self._ends.values()) or not self._detects:
            return self._ended_at
        cause, is_secondary = self.root_cause, any(end.is_secondary for end in self._ends.values())
        if cause is None:
            patience = _EXPLANATION if is_secondary else _CAUSE
            return self._ended_at + (0.0 if self.connection is None else patience)
        if not self.held or not cause.is_failure:
            return max(self._ended_at, self._concluded_at + (AFTER_THE_FIRST if is_secondary else 0.0))
        if self.connection is not None:
            return self._ended_at + self.settings.grace + _LAST_MESSAGE
        return self._closed_at + (0.0 if self._is_own(cause) else AFTER_THE_FIRST)

    @property
    def _has_ended(self) -> bool:
        return len(self._ends) == len(self.own)

    def _is_own(self, cause: RootCause) -> bool:
        return any(each.rank in cause.ranks for each in self.own)

    def _is_silent(self, now: float) -> bool:
        return self.connection is not None and self.connection.is_unusually_silent(now)

    def _send(self, message: object, rank: int = 0) -> None:
        if self.connection is not None:
            self.connection.send(message, rank)

    def _ask(self, rank: int, message: Arrive | Ready, now: float) -> None:
        """Pass on that the script of a rank waits, and see that it gets an answer."""
        key = message.key
        self._waiting[rank] = key, now + message.limit + _LATER
        before = self._not_begun.get(rank)
        if before is not None and before.key == key:
            self._take_answer(rank, before)
            return
        if self.connection is None:
            self._answer_for_rank_0(rank)
        self._send(message, rank)

    def _exited(self, rank: int, message: Exited, now: float) -> None:
        end = message.end
        self._ends[rank], self._ended_at = end, now
        self._send(message, rank)
        if not self._detects or self.root_cause is not None:
            return
        if self.connection is None and end.is_failure:  # for its neighbours
            location = next(each for each in self.own if each.rank == rank)
            self._decide(from_exit(location, end, 0.0), now)
        elif not end.succeeded and self._is_silent(now):  # why we failed, perhaps; rank 0 will not say it
            self._lose_rank_0("nothing was heard of it any more", now)

    def _take(self, rank: int, message: object, now: float) -> None:
        if isinstance(message, Register):
            self.rank_0 = replace(self.rank_0, pid=message.pid)
        elif isinstance(message, Abort):
            self._decide(message.root_cause.escaped(), now)
        elif isinstance(message, Failed) and message.key is None:  # whatever they wait for
            for each in list(self._waiting):
                self._take_answer(each, message)
        elif isinstance(message, Go | Release | Failed):
            self._take_answer(rank, message)
        elif isinstance(message, Done):
            for own in self.own:
                self.orders.setdefault(own.rank, StopRequest(now, is_failure=False, is_done=True))
        elif isinstance(message, Detach):
            if message.ended and not self._has_ended:
                self.say("rank 0 has ended: from now on no rank is told how another one ends")
            self._drop(now)
        else:
            raise ProtocolError(f"sends {type(message).__name__}, which only another rank may")

    def _decide(self, cause: RootCause, now: float) -> None:
        for rank in [each.rank for each in self.own if each.rank not in self._ends]:
            self.orders[rank] = StopRequest.after(cause, rank, rank in self._failing, now, self.orders.get(rank))
        if self.root_cause is None:
            self.root_cause, self._concluded_at = cause, now
            if len(self.own) > 1 or not self._is_own(cause):  # else its own output says it
                self.say(cause.text)

    def _lose_rank_0(self, why: str, now: float) -> None:
        self._decide(from_disconnect([self.rank_0], why), now)

    def _check(self, connection: HeartbeatConnection, now: float) -> None:
        fault = connection.liveness_fault(now, self.settings.bound)
        if fault is not None and fault.is_lost:
            if self._detects:
                self._lose_rank_0(fault.why, now)
            self._drop(now, fault.why)
        elif fault is not None:
            self._abandon(fault.why)

    def _abandon(self, why: str) -> None:
        self.say(f"warning: rank 0 {self.rank_0.text} {why}; this rank goes on without failure detection")
        self._send(Detach())
        self._abandoned, self.connection = self.connection, None
        self._closed_at, self._why_gone = time.monotonic(), why
        self._answer_for_rank_0(*self._waiting)

    def _drop(self, now: float, why: str | None = None) -> None:
        """The connection is over."""
        if self.connection is not None:
            self.connection.close()
        self.connection, self._closed_at = None, now
        self._why_gone = self._why_gone if why is None else why
        self._answer_for_rank_0(*self._waiting)

    def _take_answer(self, rank: int, message: Go | Release | Failed) -> None:
        key, _ = self._waiting.get(rank, (None, 0.0))
        if not isinstance(message, Go) and message.key is not None and message.key != key:
            if isinstance(message, Failed) and message.key.name == READY:
                self._not_begun[rank] = message
            return  # else it is of a wait that the script has given up
        if isinstance(message, Failed) and key is not None and key.name == READY:
            code, text, hint = message.problem
            message = replace(message, problem=(code, f"rank 0 says: {text}"[:LONGEST_TEXT], hint))
        self.is_starting = self.is_starting and not isinstance(message, Go)
        self._waiting.pop(rank, None)
        self.reply(rank, message)

    def _answer_for_rank_0(self, *ranks: int) -> None:
        """It cannot say any more what becomes of the keys at which these wait."""
        why = f" ({self._why_gone})" if self._why_gone else ""
        for rank in ranks:
            key, _ = self._waiting.pop(rank)
            if self.is_starting:
                text = f"all ranks joined, and then rank 0 {self.rank_0.text} ended{why}"
                error = DistbootError("rank-failed", text, _LOOK)
            else:
                text = f"{key.text}: rank 0 {self.rank_0.text} is not there any more{why}"
                error = DistbootError("missing-rank", f"{text}: it ended, or closed its context", _LOOK)
            self.reply(rank, Failed(as_problem(error), key))
