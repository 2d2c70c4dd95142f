"""Rank 0's job as a pure machine: events in, effects out. No socket, no clock, no process.

An event is a message of a rank, a rank that is lost or returns, or that time passes. Each is told to
the *services* that take it, in the order of `Job.services`. That order is the only place that says
what is decided before what:

    check      whether all nodes are fit; until that is known no rank starts its framework
    keys       what ranks wait for. Their answers follow at the end of an event, as it may explain
               why a key fails
    models     which ranks train a model each, of which it warns
    late       which ranks are late; where a rank fails of a timeout, that is the cause
    failures   which failure was first
    stop       where all stop. A script that was told to stop may end in any way, which is no
               failure: so this is last

What is known of the ranks (`Facts`) is written here, before any service hears of it. What all of
them lead to is returned as a list of `Effect`, which the agent carries out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ..base.dataclass import replace
from ..rendezvous.events import own_steps
from ..rendezvous.protocol import ProtocolError
from . import messages, stay
from .agent_job import AgentJob
from .check import CheckService
from .effects import Amend, Blame, Conclude, Effect, Heard, Record, Remind, Request, Say, Send, Tell
from .exit_status import ExitStatus
from .facts import Facts
from .failure_service import FailureService
from .first_failure import GATHERING
from .key_service import KeyService
from .keys import GONE, Keys
from .late import LateService
from .root_cause import Circumstances, RankState, RootCause, from_hidden, speakers_of
from .separate_models import SeparateModelsService
from .service import Handler, Handlers, Service
from .stop_agreement import StopAgreement, StopService


class Job(AgentJob):
    """All services of a job. Times are those of `time.monotonic`."""

    def __init__(
        self,
        facts: Facts,
        keys: Keys,
        *,
        is_by_node: bool = False,
        # Of other nodes, as rank 0's agent sees them, by their first rank
        addresses: Mapping[int, str] = {},
    ) -> None:
        super().__init__(facts)
        self._keys = keys
        self._agreement = StopAgreement(facts.members, facts.settings.grace / 3)
        self._effects: list[Effect] = []
        self._speakers: frozenset[int] = frozenset()  # empty: none is told yet
        self._now = 0.0  # of the event
        late = LateService(facts, self._emit)
        self._failures = FailureService(
            facts,
            self._emit,
            late,
            self._agreement,
            is_by_node=is_by_node,
        )
        self.services: tuple[Service, ...] = (
            CheckService(facts, self._emit, keys, addresses),
            KeyService(facts, self._emit, keys, self._agreement),
            SeparateModelsService(facts, self._emit),
            late,
            self._failures,
            StopService(facts, self._emit, self._agreement),
        )
        # What a message says of its rank is noted before any service takes it
        notes: Handlers = {
            messages.Register: self._registered,
            messages.Phases: self._took_steps,
            messages.Failing: self._failing,
            messages.Exiting: self._exiting,
            messages.Exited: self._exited,
            messages.Reaped: self._reaped,
        }
        self._handlers: defaultdict[type, list[Handler]] = defaultdict(list)
        for handlers in (notes, *(service.handlers for service in self.services)):
            for kind, handler in handlers.items():
                self._handlers[kind].append(handler)

    # Events

    def take(self, rank: int, message: object, now: float) -> list[Effect]:
        """A rank says something; `ProtocolError`: it must not say that."""
        kind = type(message)
        if kind not in self._handlers:
            raise ProtocolError(f"sends {kind.__name__}, which only rank 0 may")
        self._now = now
        if self.facts.settings.report is not None:
            self._emit(Heard(rank, message))
        member = self.facts.members[rank]
        for handle in self._handlers[kind]:
            handle(member, message, now)
        return self._settled()

    def left(self, rank: int, now: float, why: str = GONE) -> list[Effect]:
        """The agent of a rank has disconnected for good."""
        self._now = now
        self._leave(self.facts.members[rank], why)
        return self._settled()

    def lost(self, rank: int, why: str, now: float, gathering: float = GATHERING) -> list[Effect]:
        """The agent of a rank is gone; within `gathering` seconds others of its host are lost, too."""
        self._now = now
        self._failures.lost(self.facts.members[rank], why, now, gathering)
        return self._settled()

    def postpone(self, rank: int, due: float) -> None:
        """A rank that was lost may be about to return."""
        self._failures.analysis.postpone(self.facts.members[rank], due)

    def returned(self, rank: int, now: float) -> list[Effect]:
        """A rank that was lost has returned."""
        self._now = now
        self._failures.returned(self.facts.members[rank])
        return self._settled()

    def unreachable(self, rank: int, since: float, why: str, now: float) -> list[Effect]:
        """The agent of a rank does not answer, though its host does: others wait for it all the same."""
        self._now = now
        self._keys.unreachable[rank] = since
        self._emit(Record("silent", rank, {"text": why}))
        return self._settled()

    def reachable(self, rank: int, now: float) -> list[Effect]:
        """It answers again."""
        self._now = now
        self._keys.unreachable.pop(rank, None)
        self._emit(Record("reachable", rank, {}))
        return self._settled()

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        self._now = now
        for service in self.services:
            service.tick(now)
        return self._settled()

    def due(self) -> float:
        """When `tick` is to be called next."""
        return min(service.due() for service in self.services)

    def stays_until(self) -> float:
        """Until when the agent waits for other ranks, once its own have ended."""
        return stay.of_rank_0(self.facts)

    # What is known of a rank

    def _registered(self, member: RankState, message: messages.Register, _now: float) -> None:
        """The process of a rank is watched from now on.

        It and rank 0's are told of each other, whichever is first.
        """
        member.pid = message.pid
        member.is_watched = message.detects
        details = {"pid": message.pid, "cpus": message.cpus}
        self._emit(Record("registered", member.rank, details))
        members = self.facts.members
        answer = messages.Register(members[0].pid)
        if member.rank == 0:
            known = [rank for rank, each in members.items() if each.pid]
            self._emit(Send(answer, known))
            return
        self._emit(Send(answer, (member.rank,)))
        if self.facts.cause is not None:
            speakers = self._speakers_for(self.facts.cause)
            self._emit(Remind(self.facts.cause, speakers, member.rank))

    def _took_steps(self, member: RankState, message: messages.Phases, _now: float) -> None:
        self._emit(Record("phases", member.rank, own_steps(message.times)))

    def _failing(self, member: RankState, message: messages.Failing, _now: float) -> None:
        if member.failing is None and self.facts.is_detected(member):
            member.failing = message.end
            details: dict[str, Any] = {"text": message.end.failure_text()}
            if message.end.external_signal is not None:  # which may be why
                details["external_signal"] = message.end.external_signal
            self._emit(Record("failing", member.rank, details))

    def _exiting(self, member: RankState, _message: messages.Exiting, now: float) -> None:
        member.exiting = now

    def _exited(self, member: RankState, message: messages.Exited, now: float) -> None:
        if member.is_local:
            self.facts.ends.ended_at = now
        end = _with_exception(message.end, member.failing)
        member.end = end
        member.is_reaped = message.is_reaped
        details = end.as_details()
        if end.hides_failure:
            details["hides"] = {"text": from_hidden(member, end), "is_secondary": end.is_secondary}
        cause = self.facts.cause
        if cause is not None and cause.is_first(member.rank):
            details["traceback"] = end.traceback
        self._emit(Record("exited", member.rank, details))
        is_main = member.rank == 0
        if is_main and self.facts.is_served and end.succeeded:
            self._emit(Send(messages.Done(), self.facts.members))
        self._leave(member, GONE)

    def _reaped(self, member: RankState, _message: messages.Reaped, _now: float) -> None:
        member.is_reaped = True

    def _leave(self, member: RankState, why: str) -> None:
        for service in self.services:
            service.left(member, why)

    # Effects

    def _settled(self) -> list[Effect]:
        for service in self.services:
            service.settle(self._now)
        effects = self._effects
        self._effects = []
        # Last, as the file system may not answer
        effects.sort(key=lambda effect: isinstance(effect, Blame))
        return effects

    def _emit(self, effect: Effect | Request) -> None:
        if isinstance(effect, Conclude):
            self._conclude(effect)
        elif isinstance(effect, Amend):
            self._tell(effect.cause)
        else:
            self._effects.append(effect)

    def _conclude(self, conclusion: Conclude) -> None:
        """The job ends. What is found after that, by the check of all nodes for example, is no cause."""
        if self.facts.cause is not None:
            return
        cause = conclusion.cause
        first = self.facts.members[cause.ranks[0]]
        details: dict[str, object] = {
            "kind": conclusion.kind,
            "ranks": list(cause.ranks),
            "text": conclusion.text,
            "location": first.where,
            "traceback": conclusion.traceback,
        }
        if cause.then is not None:
            details["then"] = cause.then
        self._emit(Record("root_cause", first.rank, details))
        self._tell(cause)

    def _tell(self, cause: RootCause) -> None:
        """Tell all; a second time with another delay, once the rank that failed ends."""
        why_no_restart = None
        if self.facts.restarts is not None:
            cause, why_no_restart = self._with_decision(cause)
        self.facts.conclude(cause, self._now)
        self._emit(Tell(cause, self._speakers_for(cause)))
        if why_no_restart is not None:
            self._emit(Say(why_no_restart))

    def _speakers_for(self, cause: RootCause) -> frozenset[int]:
        """Those that were told first: they have printed why."""
        if not self._speakers:
            self._speakers = speakers_of(cause, self.facts.members)
        return self._speakers

    def _with_decision(self, cause: RootCause) -> tuple[RootCause, str | None]:
        """The cause, with whether another round follows; and what to print of that, once."""
        facts = self.facts
        assert facts.restarts is not None
        member = facts.members[cause.failed]
        own = [each.pid for each in facts.members.values() if each.is_local]
        is_asked = facts.was_stopped
        # Once the others stop for this failure, their scripts ask for a stop because of that
        if not facts.is_followed:
            is_asked |= self._agreement.is_asked
        return facts.restarts.decided(
            cause,
            member.end or member.failing,
            self._now,
            Circumstances(is_asked, facts.is_orphaned, member.node_rank in facts.unfit),
            own,
        )


def _with_exception(end: ExitStatus, failing: ExitStatus | None) -> ExitStatus:
    """How a rank has ended, with the exception that it had reported before."""
    if failing is None or end.crash or end.exception is not None:
        return end
    return replace(end, exception=failing.exception)
