"""One concern of the job. It decides on what it hears, and emits effects; it does no io."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from .effects import Effect, Request
from .facts import Facts
from .root_cause import RankState

Emit = Callable[[Effect | Request], None]
# Takes a message of a rank, at a time
Handler = Callable[[RankState, Any, float], None]
Handlers = dict[type, Handler]


class Service:
    """What a service may hear. Times are those of `time.monotonic`."""

    def __init__(self, facts: Facts, emit: Emit) -> None:
        self.handlers: Handlers = {}  # of the messages that it takes
        self._facts = facts
        self._emit = emit

    def left(self, member: RankState, why: str) -> None:
        """A rank has ended, or its agent is disconnected; `why` reads well after "rank 3"."""

    def settle(self, now: float) -> None:
        """All services have heard of an event."""

    def tick(self, now: float) -> None:
        """Decide on what follows from the time."""

    def due(self) -> float:
        """When `tick` is to be called next."""
        return inf
