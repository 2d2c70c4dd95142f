"""The job as one agent takes part in it: rank 0's decides (`job`), any other one follows (`follower`)."""

from __future__ import annotations

from .effects import Effect, Stop
from .exit_status import ExitStatus
from .facts import Facts
from .root_cause import from_exit


class AgentJob:
    """What the shell of an agent tells its job. Times are those of `time.monotonic`."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def take(self, rank: int, message: object, now: float) -> list[Effect]:
        """A rank says something; other agents hear their own ranks alone."""
        raise NotImplementedError

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        raise NotImplementedError

    def due(self) -> float:
        """When `tick` is to be called next."""
        raise NotImplementedError

    def stays_until(self) -> float:
        """Until when the agent waits for other ranks, once its own have ended."""
        raise NotImplementedError

    def stop_orphans(self, why: str, now: float) -> list[Effect]:
        """The launcher's process above our ranks is gone: they stop, if nothing else has ended the job."""
        running = self.facts.running()
        if not running or self.facts.cause is not None:
            return []
        end = ExitStatus(cause=why)
        cause = from_exit(running[0], end, 0.0)
        self.facts.conclude(cause, now)
        return [Stop(cause)]
