"""The processes of an agent's own ranks, and the orders to stop them.

An *order* is for one process: stop, at this time. The loop executes it (`execute`) when its time
has come. An earlier one for the same rank wins, unless the rank that failed first gets more time to
end. An order for a rank whose process does not run yet waits for the process.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from operator import attrgetter

from ..job.facts import Facts
from ..job.messages import Locate
from ..job.root_cause import RootCause
from .own_process import OwnProcess, Terminate

_is_leaving = attrgetter("is_leaving")
_NEVER = Terminate(inf, is_failure=False)


class OwnProcesses:
    """The processes of one agent. All times are those of `time.monotonic`."""

    def __init__(self, facts: Facts) -> None:
        self.watched: dict[int, OwnProcess] = {}  # by rank, once it runs
        self.orders: dict[int, Terminate] = {}  # by rank
        self.shares_keys = False  # whether the keys of our terminal reach the ranks, too
        # Until when a script that ends by itself answers a SIGINT that came to its wrapper
        self.answers_interrupt_until = 0.0
        # Whether the kernel is ending the launcher's process above our ranks
        self.launcher_is_ending: Callable[[], bool] = bool
        self._facts = facts
        self._delay = inf  # of the cause for which all stop, in seconds
        self._untold: list[OwnProcess] = []  # those to be told of the root cause
        self._stopped: set[int] = set()  # ranks whose order was executed

    @property
    def is_leaving(self) -> bool:
        """Whether an exit code was reported, and is not yet where its launcher reads it."""
        return any(map(_is_leaving, self.watched.values()))

    def poll(self, now: float) -> None:
        """Once a second."""
        for watched in self.watched.values():
            watched.poll(now)

    def pass_key(self, rank: int, now: float) -> None:
        """Note that a script moves: it begins to wait at a key, or goes on there."""
        watched = self.watched.get(rank)
        if watched is not None:
            watched.pass_key(now)

    def locate(self, question: Locate, now: float) -> None:
        """Let our ranks report how far they are."""
        for watched in self.watched.values():
            watched.locate(question, now)

    def stop(self, cause: RootCause, now: float) -> None:
        """Order all to stop."""
        has_more_time = cause.delay > self._delay
        self._delay = cause.delay
        for member in self._facts.running():
            at = now + cause.until_stop(member, shares_keys=self.shares_keys)
            before = self.orders.get(member.rank, _NEVER)
            if not has_more_time:
                at = min(at, before.at)
            self.orders[member.rank] = Terminate(at, is_failure=cause.is_failure)
        self._untold = list(self.watched.values())

    def end_served(self, now: float) -> None:
        """Rank 0's script has ended well: stop our own ranks, which only serve it."""
        order = Terminate(
            at=now,
            is_failure=False,
            is_done=True,
        )
        for member in self._facts.running():
            self.orders.setdefault(member.rank, order)

    def due(self) -> float:
        """When `execute` is to be called next."""
        due = inf
        for rank in self._pending():
            due = min(due, self.orders[rank].at)
        return due

    def execute(self, now: float) -> None:
        """Tell our processes of the root cause, and stop those whose time has come."""
        untold = self._untold
        self._untold = []
        for watched in untold:
            watched.decided()
        for rank in self._pending():
            order = self.orders[rank]
            if now >= order.at:
                self._stopped.add(rank)
                self.watched[rank].stop(order, now)
        for watched in self.watched.values():
            watched.pass_on_term(now)

    def _pending(self) -> set[int]:
        """The ranks with an order that is not executed, whose processes run."""
        ordered = self.orders.keys()
        running = self.watched.keys()
        return (ordered & running) - self._stopped
