"""`Session`: what a process holds once all ranks have met, and how its script waits for the other ranks."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ..base.errors import DistbootError, with_rank
from ..base.text import first_line
from ..detection.order import LAUNCHERS
from ..detection.placement import LEFT_OPEN, Placement
from ..rendezvous.events import ALL_READY, IMPORTED, EventLog
from ..rendezvous.messages import (
    Arrive,
    Key,
    Ready,
    as_problem,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rendezvous.connection_pool import DetachedConnection
    from ..rendezvous.join import Joined
    from ..rendezvous.membership import JoinResult, Membership
    from .link import AgentLink

T = TypeVar("T")


class Session:
    """All ranks have met, or were not to."""

    def __init__(self, placement: Placement, join_timeout: float) -> None:
        # Exact once they have met, with the address and port where rank 0 was reached
        self.placement = placement
        self.join_timeout = join_timeout  # seconds for all ranks to be ready once they have met
        self.membership: Membership | None = None  # once the ranks have met
        # What they should have alike and have not, as rank 0 knows it
        self.warnings: list[str] = []
        # That leads to the other nodes, if there are any, and it is known
        self.interface: str | None = None
        # Of this host for the ranks of the other nodes; loopback when there are none
        self.own_address = "127.0.0.1"
        # Of rank 0's listening socket, once the ranks have met
        self.store_address: tuple[str, int] | None = None
        # What the ranks have offered when they were ready, by rank
        self.offers: dict[int, str] = {}
        self.joined: Joined | None = None  # the agent's part, where this very process is the agent
        self.link: AgentLink | None = None  # the way to the agent, if there is one
        # That is about to be started, and has to be the same on all ranks; empty: any
        self.framework = ""
        self.count = 1  # how often this process has got ready, this time included
        # Why this process will not get ready, if it is known by now
        self.problem: DistbootError | None = None
        # Called when all ranks are ready to start the framework
        self.when_ready: Callable[[], None] = lambda: None
        self.is_watched = False  # whether failure detection has begun
        # How to wait at keys, if not through the agent
        self.arrive: Callable[[Arrive], None] | None = None
        self.is_listener_taken = False  # whether the script has rank 0's listening socket
        # When this rank took which (see `report`), in seconds since the epoch
        self.steps: dict[str, float] = {}
        self._met = time.monotonic()
        self._process = os.getpid()
        # How often this rank has come to a key
        self._counts: Counter[tuple[str, int | None]] = Counter()

    def take(self, result: JoinResult) -> None:
        """The ranks have met: what the agent knows now."""
        self._met = time.monotonic()
        self.membership, self.warnings = result.membership, list(result.warnings)
        self.interface, self.own_address = result.interface, result.own_address
        self.store_address = (result.store_host, result.port)
        where: dict[str, object] = {"master_addr": result.host}
        if not LAUNCHERS[self.placement.launcher].serves_master_port:
            where["master_port"] = result.port
        placement = self.placement.with_fields("roll call: where rank 0 was reached", where)
        # Else it is a node's, and not that of a rank
        if self.joined is None or not self.joined.plan.own.ranks:
            exact = self.membership.place(placement.rank)
            placement = placement.with_fields("roll call: all ranks together", exact)
        self.placement = placement

    def of_rank(self, placement: Placement) -> Session:
        assert self.joined is not None
        assert self.joined.result is not None
        job = Session(placement, self.join_timeout)
        job.take(self.joined.result)
        return job

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host name of each node, by node rank; empty when the ranks have not met."""
        return () if self.membership is None else self.membership.hosts

    def ready(self, step: Callable[[], tuple[T, Ready]]) -> T:
        """Take a step that may fail on some ranks only, and fail on all of them with the first failure of any.

        It returns its result, and what the other ranks are to know of it: see `offers`.
        """
        failure = self.problem
        try:
            if failure is None:
                result, own = step()
                self.mark(IMPORTED)
        except Exception as error:  # noqa: BLE001 - whatever a driver says, the other ranks must hear of it
            of_driver = DistbootError(
                "device-failed", first_line(error), "look at this rank's device and driver"
            )
            failure = error if isinstance(error, DistbootError) else of_driver
        if failure is not None:
            own = Ready(problem=as_problem(failure))
        self.offers = {} if own.offer is None else {self.placement.rank: own.offer}
        if self.link is not None:
            left = max(self._met + self.join_timeout - time.monotonic(), 0.5)
            try:
                own = replace(own, framework=self.framework, count=self.count, limit=left)
                self.offers = self.link.get_ready(own)
            except DistbootError:
                if failure is None:
                    raise
        if failure is not None:
            raise failure
        self.mark(ALL_READY)
        self.when_ready()
        return result

    def mark(self, step: str) -> None:
        self.steps[step] = time.time()

    @property
    def log(self) -> EventLog | None:
        """What rank 0 has learned so far; None on all other ranks."""
        known = self.joined or self.link
        return None if known is None else known.log()

    def detach_all(self) -> list[DetachedConnection]:
        """The connections of this process, which are the caller's now."""
        return (
            [] if self.joined is None or self.joined.side is None else self.joined.side.detach_all()
        )

    def take_listener(self) -> int | None:
        """The file descriptor of rank 0's listening socket, which is the caller's now; None on all other ranks."""
        if self.placement.rank != 0 or self.store_address is None:
            return None
        self.is_listener_taken = True
        agent = self.link or self.joined  # both, where the agent is a thread of this process
        listener = None if agent is None else agent.take_listener()
        return None if listener is None else listener.detach()

    def wait_for(
        self,
        what: str,
        limit: float,
        *,
        opens: bool = False,
        node: int | None = None,
        failure: str | None = None,
    ) -> None:
        """Wait for the other ranks, which may come later than each other by `limit` seconds, at "barrier()".

        Or wait for a leader at "main_first()", say; or, `opens`, be it, and let those on that wait, or will. Rank 0
        leads, or the first rank of a node. A `failure` of the leader is why the others are not to go on.
        `missing-rank`: it was not through in time, or a rank has not waited so long; `rank-failed`: it has failed.
        """
        self._counts[what, node] += 1
        key = Key(what, node, self._counts[what, node])
        with with_rank(self.placement.who):
            if os.getpid() != self._process:
                why = (
                    f"{what} in a process that the rank forked: the rank is process {self._process}"
                )
                raise DistbootError("already-joined", why, "call it there, not in this process")
            arrive = self.arrive or (None if self.link is None else self.link.arrive)
            if arrive is not None:
                arrive(Arrive(key, limit, opens, failure))
            elif self.placement.world_size > 1:
                why = f"{key.text} needs the roll call, and it is off"
                raise DistbootError("rendezvous-needed", why, "unset DISTBOOT_RENDEZVOUS")

    def leave(self) -> None:
        """The script has closed its context."""
        if self.link is not None and os.getpid() == self._process:
            self.link.leave()

    def close(self) -> None:
        if self.joined is not None:
            self.joined.close()


def alone(placement: Placement, join_timeout: float) -> Session:
    """What a process holds where the rendezvous is off; `rendezvous-needed`: its environment leaves something open."""
    unknown = ", ".join(field for field in LEFT_OPEN if getattr(placement, field) is None)
    if unknown:
        why = (
            f"DISTBOOT_RENDEZVOUS=0, and launcher {placement.launcher!r} does not say the {unknown}"
        )
        hint = "unset DISTBOOT_RENDEZVOUS: the ranks find it out when they meet"
        raise DistbootError("rendezvous-needed", why, hint)
    return Session(placement, join_timeout)
