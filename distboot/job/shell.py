"""What the decisions of this folder need of rank 0's agent, which does the io."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from ..base.settings import SupervisionSettings
from ..rendezvous.events import EventLog
from .messages import Locate
from .root_cause import RankState, RootCause


class Shell(Protocol):
    """Rank 0's agent; see `agent/failure_coordinator`."""

    members: dict[int, RankState]
    log: EventLog
    root_cause: RootCause | None
    settings: SupervisionSettings

    @property
    def say(self) -> Callable[..., None]: ...

    def ask_ranks(self, question: Locate, ranks: Collection[int]) -> None: ...
    def delay(self, rank: int) -> float: ...
    def end_job(self, cause: RootCause, text: str, now: float) -> None: ...
