"""`Session`: what a process holds once all ranks have met, and how its script waits for others."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TypeVar

from ..base.dataclass import replace
from ..base.errors import DistbootError, with_rank
from ..base.settings import share_env_setting
from ..base.text import first_line
from ..detection.order import LAUNCHERS
from ..detection.placement import OPTIONAL_NUMBERS, Placement
from ..rendezvous.events import ALL_READY, IMPORTED, EventLog, clock_time, own_clock
from ..rendezvous.membership import JoinResult, Membership
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
    from .link import AgentLink

T = TypeVar("T")
_NOT_MET = JoinResult(Membership((), ()))


class Session:
    """What this process knows of its job, from before the ranks meet until it ends."""

    def __init__(self, placement: Placement, join_timeout: float) -> None:
        # Exact once the ranks have met, with the address and port where rank 0 was reached
        self.placement = placement
        self.join_timeout = join_timeout  # seconds for all ranks to be ready once they have met
        self.result = _NOT_MET  # what the agent knows once the ranks have met
        # By rank, what it has offered when it was ready
        self.offers: dict[int, str] = {}
        self.joined: Joined | None = None  # the agent's part, where this very process is the agent
        self.link: AgentLink | None = None  # the way to the agent, if there is one
        # To be started next, the same on all ranks; empty: any
        self.framework = ""
        self.count = 1  # how often this process has got ready, this time included
        # Why this process will not get ready, if that is known already
        self.problem: DistbootError | None = None
        # Called when all ranks are ready to start the framework
        self.when_ready: Callable[[], None] = lambda: None
        self.is_watched = False  # whether failure detection has begun
        # Waits at a key, if not through the agent
        self.arrive: Callable[[Arrive], None] | None = None
        # When this rank took each step (see `report`), in seconds since the epoch
        self.steps: dict[str, float] = {}
        self._met = time.monotonic()
        self._keys = _KeyCalls()
        self.refuse_fork = self._keys.refuse_fork

    def take(self, result: JoinResult) -> None:
        """The ranks have met: hold what the agent knows now."""
        self._met = time.monotonic()
        self.result = result
        booted = result.booted
        if booted:
            # As all times of this rank, the steps of this process are by the clock of its agent
            own_clock.booted = booted
        where: dict[str, object] = {"master_addr": result.host}
        if not LAUNCHERS[self.placement.launcher].serves_master_port:
            where["master_port"] = result.port
        placement = self.placement.with_fields("roll call: where rank 0 was reached", where)
        is_of_node = self.joined is not None and bool(self.joined.plan.own.ranks)
        if not is_of_node:
            exact = result.membership.place(placement.rank)
            placement = placement.with_fields("roll call: all ranks together", exact)
        self.placement = placement

    def of_rank(self, placement: Placement) -> Session:
        """The session of one rank, from that of its node."""
        assert self.joined is not None
        assert self.joined.result is not None
        job = Session(placement, self.join_timeout)
        job.take(self.joined.result)
        return job

    @property
    def membership(self) -> Membership | None:
        """None until the ranks have met."""
        if self.result is _NOT_MET:
            return None
        return self.result.membership

    @property
    def warnings(self) -> tuple[str, ...]:
        """What differs between the ranks and should not, as rank 0 reports it."""
        return self.result.warnings

    @property
    def interface(self) -> str | None:
        """The network interface toward the other nodes; None if there are none, or if it is unknown."""
        return self.result.interface

    @property
    def own_address(self) -> str:
        """Of this host, for the ranks of other nodes; loopback if there are none."""
        return self.result.own_address

    @property
    def store_address(self) -> tuple[str, int] | None:
        """Of rank 0's listening socket, once the ranks have met."""
        if self.result is _NOT_MET:
            return None
        return self.result.store_host, self.result.port

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host name of each node, by node rank; empty if the ranks have not met."""
        return self.result.membership.hosts

    def ready(self, step: Callable[[], tuple[T, Ready]]) -> T:
        """Take a step that may fail on some ranks only; then all ranks fail, for the first failure.

        It returns its result, and what the other ranks learn from it: see `offers`.
        """
        failure = self.problem
        if failure is None:
            try:
                result, own = step()
                self.mark(IMPORTED)
            except Exception as error:  # noqa: BLE001 - the other ranks must learn of any error
                failure = _as_failure(error)
        if failure is not None:
            own = Ready(problem=as_problem(failure))
        self._exchange(own, failure)
        if failure is not None:
            raise failure
        self.mark(ALL_READY)
        self.when_ready()
        return result

    def _exchange(self, own: Ready, failure: DistbootError | None) -> None:
        """Report that this rank is ready or fails, and wait for the others.

        Another rank's failure is raised, unless this one has failed.
        """
        self.offers = {}
        if own.offer is not None:
            self.offers[self.placement.rank] = own.offer
        if self.link is None:
            return
        left = self._met + self.join_timeout - time.monotonic()
        own = replace(
            own,
            framework=self.framework,
            count=self.count,
            limit=max(left, 0.5),
        )
        try:
            self.offers = self.link.get_ready(own)
        except DistbootError:
            if failure is None:
                raise

    def mark(self, step: str) -> None:
        self.steps[step] = clock_time()

    def shared_variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Those of rank 0 that this rank is to have, too, as it has none; see `--share-env`."""
        patterns = share_env_setting(environ)
        if self.membership is None or not patterns:
            return {}
        from ..host.shared_variables import taken  # here, as few jobs share any

        return taken(self.membership.shared, environ, patterns)

    @property
    def log(self) -> EventLog | None:
        """What rank 0 has learned so far; None on all other ranks."""
        agent = self.joined or self.link
        if agent is None:
            return None
        return agent.log()

    def detach_all(self) -> list[DetachedConnection]:
        """Give the connections of this process to the caller."""
        if self.joined is None or self.joined.side is None:
            return []
        return self.joined.side.detach_all()

    def take_listener(self) -> int | None:
        """Give rank 0's listening socket, a file descriptor, to the caller; None on other ranks."""
        if self.placement.rank != 0 or self.store_address is None:
            return None
        agent = self.link or self.joined  # both, where the agent is a thread of this process
        if agent is None:
            return None
        listener = agent.take_listener()
        if listener is None:
            return None
        return listener.detach()

    def wait_for(
        self,
        what: str,
        limit: float,
        *,
        opens: bool = False,
        node: int | None = None,
        failure: str | None = None,
    ) -> None:
        """Wait for the other ranks at a key: they may come `limit` seconds apart.

        `what` is "barrier()" or "main_first()". At the latter the ranks wait for a leader: rank 0,
        or the first rank of a node. `opens`: this rank leads, and lets those go on that wait, or
        will. A `failure` of the leader is why they must not go on.

        `missing-rank`: a rank was not there in time; `rank-failed`: it has failed.
        """
        with with_rank(self.placement.who):
            key = self._keys.next_key(what, node)
            arrive = self.arrive
            if arrive is None and self.link is not None:
                arrive = self.link.arrive
            if arrive is not None:
                arrive(Arrive(key, limit, opens, failure))
            elif self.placement.world_size > 1:
                raise DistbootError(
                    "rendezvous-needed",
                    f"{key.text} needs the roll call, and it is off",
                    "unset DISTBOOT_RENDEZVOUS",
                )

    def leave(self) -> None:
        """The script has closed its context."""
        if self.link is not None and not self._keys.is_forked:
            self.link.leave()

    def close(self) -> None:
        if self.joined is not None:
            self.joined.close()


class _KeyCalls:
    """How often the script of a rank has used each key."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._counts: Counter[tuple[str, int | None]] = Counter()  # by name and node

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked by that of the rank."""
        return os.getpid() != self._process

    def refuse_fork(self, name: str) -> None:
        """Refuse to wait for other ranks in a process that is not the rank."""
        if self.is_forked:
            raise DistbootError(
                "already-joined",
                f"{name} in a process that the rank forked: the rank is process {self._process}",
                "call it there, not in this process",
            )

    def next_key(self, name: str, node: int | None) -> Key:
        self.refuse_fork(name)
        self._counts[name, node] += 1
        return Key(name, node, self._counts[name, node])


def _as_failure(error: Exception) -> DistbootError:
    if isinstance(error, DistbootError):
        return error
    return DistbootError(
        "device-failed",
        first_line(error),
        "look at this rank's device and driver",
    )


def alone(placement: Placement, join_timeout: float) -> Session:
    """The session of a process without a rendezvous.

    `rendezvous-needed`: the environment alone does not prove every field.
    """
    unknown = [field for field in OPTIONAL_NUMBERS if getattr(placement, field) is None]
    if unknown:
        missing = ", ".join(unknown)
        launcher = placement.launcher
        raise DistbootError(
            "rendezvous-needed",
            f"DISTBOOT_RENDEZVOUS=0, and launcher {launcher!r} does not say the {missing}",
            "unset DISTBOOT_RENDEZVOUS: the ranks find it out when they meet",
        )
    return Session(placement, join_timeout)
