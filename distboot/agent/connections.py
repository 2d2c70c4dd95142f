"""What the shell of an agent asks of its connections; there is one class for each kind of agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from ..job import effects as of_job
from ..job.follower import Follower
from ..job.job import Job
from .peer_watch import PeerWatch

Appliers = Mapping[type, Callable[[Any, float], object]]


class Connections(Protocol):
    """What one kind of agents has of its own."""

    peers: PeerWatch
    appliers: Appliers  # of the effects that only this kind has

    @property
    def job(self) -> Job | Follower:
        """What decides: it hears of events, and returns the effects that they lead to."""

    def turn(self, now: float) -> None:
        """In each turn of the loop: what is due of the connections."""

    def due(self) -> float:
        """When `turn` is to be called next."""

    def words_for(self, effect: of_job.Stop) -> str:
        """What this agent prints of a root cause; empty: nothing."""

    def finish(self, *, has_left: bool, is_hurried: bool) -> None:
        """The loop ends: say goodbye to the peers."""

    def close(self) -> None:
        """Nothing is open afterwards."""
