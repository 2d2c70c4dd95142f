"""Keys as a service of the job: what ranks wait for, answered after all services have heard."""

from __future__ import annotations

from collections import deque
from math import inf
from operator import attrgetter
from typing import NamedTuple

from ..base.dataclass import replace
from ..rendezvous.messages import Arrive, Failed, Go, Leave, Ready
from .effects import Reply, Send
from .facts import Facts
from .keys import Keys
from .root_cause import RankState
from .service import Emit, Service
from .stop_agreement import StopAgreement

# Seconds for ranks that wait in vain to be stopped, else they end with a traceback
_STOPPING = 5.0


class _Refusal(NamedTuple):
    """A failed key that a rank is told of later, as it may be stopped before."""

    due: float
    reply: Reply


class KeyService(Service):
    """barrier(), main_first(), init(): where ranks wait for each other."""

    def __init__(self, facts: Facts, emit: Emit, keys: Keys, agreement: StopAgreement) -> None:
        super().__init__(facts, emit)
        self._keys = keys
        self._agreement = agreement  # counts from zero once all ranks are ready
        self._refusals: deque[_Refusal] = deque()
        self.handlers = {
            Arrive: lambda member, message, now: keys.arrive(member.rank, message, now),
            Ready: lambda member, message, now: keys.get_ready(member.rank, message, now),
            Leave: lambda member, _, __: keys.leave(member.rank, has_ended=False),
        }

    def left(self, member: RankState, why: str) -> None:
        self._keys.leave(
            member.rank,
            why=why,
        )

    def settle(self, now: float) -> None:
        """Answer after all services have heard of an event: it may explain why a key fails."""
        for effect in self._keys.effects:
            self._emit(effect)
        self._keys.effects = []
        replies = self._keys.outbox
        self._keys.outbox = []
        for rank, message in replies:
            if isinstance(message, Go):
                self._begin(message)
                continue
            assert rank is not None
            reply = Reply(rank, message)
            may_be_explained = self._facts.detects and bool(self._facts.reports)
            if may_be_explained and isinstance(message, Failed):
                refusal = _Refusal(now + _STOPPING, reply)
                self._refusals.append(refusal)
            else:
                self._emit(reply)

    def tick(self, now: float) -> None:
        self._keys.expire(now)
        self.settle(now)
        while self._refusals and now >= self._refusals[0].due:
            refusal = self._refusals.popleft()
            self._emit(refusal.reply)

    def due(self) -> float:
        refusals = map(attrgetter("due"), self._refusals)
        return min([*self._keys.due(), *refusals], default=inf)

    def _begin(self, go: Go) -> None:
        """All ranks are ready: one message is for all of them."""
        stops = self._agreement.begin()
        told = replace(go, stops=stops)
        self._emit(Send(told, self._facts.members))
        self._facts.is_starting = False
