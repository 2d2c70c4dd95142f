"""Who is ready to start the framework, once all ranks have met, and who is not. Pure, as `register` is."""

from __future__ import annotations

from ..errors import DistbootError, quoted
from ..record import as_error
from ..roster import Roster, with_nodes
from .ready import Ready
from .register import Register


class Readiness:
    """What the ranks have said of it.

    Args:
        roster: of the job.
        register: the records of all ranks.

    Attributes:
        roster: of the job.
        unready: the ranks that are not ready.
        offers: what those that are ready offer to the others, by rank.
    """

    def __init__(self, roster: Roster, register: Register) -> None:
        self.offers: dict[int, str] = {}
        self.roster, self._register = roster, register
        self.unready = set(register.records)
        register.forget_accelerators()  # of which the frameworks know better

    def enter(self, rank: int, ready: Ready) -> None:
        """Enter one rank.

        Raises:
            DistbootError: why it cannot go on, or `shared-accelerator`.
        """
        record = self._register.records[rank]
        if ready.problem is not None:
            raise as_error(ready.problem, f"rank {rank} on {quoted(record.host)}")
        self._register.claim(rank, ready.device, record)
        self.unready.discard(rank)
        if ready.offer is not None:
            self.offers[rank] = ready.offer

    @property
    def is_complete(self) -> bool:
        """Whether every rank is ready."""
        return not self.unready

    def progress(self) -> str:
        """What is being waited for."""
        return f"all ranks are there; waiting for {self._unready_said()} to be ready"

    def late(self) -> DistbootError:
        """The error for all, when the time is over."""
        return DistbootError(
            "missing-rank",
            f"all ranks joined, and then did not get ready in time: {self._unready_said()}",
            "look at their output: the import of the framework hangs or is slow there, or their host has gone",
        )

    def _unready_said(self) -> str:
        return f"rank {with_nodes(sorted(self.unready), self.roster.node_of())}"
