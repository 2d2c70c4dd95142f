"""What rank 0's job (`job`) and that of any other agent (`follower`) have in common."""

from __future__ import annotations

from .effects import Effect, Stop
from .exit_status import ExitStatus
from .facts import Facts
from .root_cause import from_exit


class AgentJob:
    """The job as one agent takes part in it. Times are those of `time.monotonic`."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts

    def stop_orphans(self, why: str, now: float) -> list[Effect]:
        """The launcher's process above our ranks is gone: they stop, if nothing else has ended the job."""
        running = self.facts.running()
        if not running or self.facts.cause is not None:
            return []
        end = ExitStatus(cause=why)
        cause = from_exit(running[0], end, 0.0)
        self.facts.conclude(cause, now)
        return [Stop(cause)]
