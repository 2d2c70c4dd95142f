"""What an agent knows of its connection to rank 0's agent; the shell writes it, and the job reads it."""

from __future__ import annotations

from math import inf

from ..base.dataclass import dataclass


@dataclass(slots=True)
class Rank0Link:
    """The connection may be there, and unreachable or ended all the same. Times are those of `time.monotonic`.

    - *unreachable*: nothing has arrived for the heartbeat timeout, though rank 0's host answers.
    - *closed*: it has ended, and may be replaced by another one until `return_until`.
    - not *there*: rank 0 has left, is lost, or was abandoned.
    """

    is_there: bool = True
    unreachable_since: float | None = None
    is_closed: bool = False
    return_until: float = inf
    answer_until: float = 0.0  # until when rank 0 may answer over a new connection
    gone_at: float = 0.0  # since when rank 0 cannot be asked any more
    why_gone: str = ""

    @property
    def is_cut_off(self) -> bool:
        """Whether rank 0 cannot be reached, for now."""
        return not self.is_there or self.unreachable_since is not None

    @property
    def returns_until(self) -> float:
        """Until when rank 0 may take this agent back, and receive what it has not; 0.0: it may not."""
        if not self.is_there or not self.is_closed:
            return 0.0
        if self.return_until == inf:
            return self.answer_until
        return max(self.return_until, self.answer_until)

    def absence(self, now: float) -> str:
        """`"has been unreachable for 40 s"`: why rank 0 does not answer, to follow its name."""
        if self.why_gone:
            return f"disconnected ({self.why_gone})"
        if not self.is_there:
            return "ended, or closed its context"
        if self.unreachable_since is None:
            return "does not answer"
        seconds = now - self.unreachable_since
        return f"has been unreachable for {seconds:.0f} s"
