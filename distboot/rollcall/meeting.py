"""`Meeting`: what a process holds once all ranks have met, until its framework has started."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from ..errors import DistbootError, first_line
from ..placement import Placement
from ..record import Record, as_problem
from ..report.history import History
from ..report.steps import ALL_READY, IMPORTED
from ..roster import Roster
from .client import Client
from .handed import Handed, say_goodbye
from .ports import Reservation
from .ready import Ready
from .server import Server
from .wire import Membership

T = TypeVar("T")


class Meeting:
    """All ranks have met, or were not to. A context manager, which ends the connections.

    Attributes:
        placement: this process's place, exact; address and port are those where rank 0 was really reached.
        roster: the whole job; None when the ranks have not met.
        findings: what they should have alike and have not, as rank 0 knows it.
        interface: the network interface that leads to the other nodes; None when there are none, or it is not known.
        open_files: the soft limit of open files before it was raised for all connections; None: it was not.
        store_address: host and port of rank 0's listening socket; None when the ranks have not met.
        own_address: address of this host for the ranks of the other nodes; loopback when there are none.
        membership: what tells the ranks of this job from everybody else; None when they have not met.
        own: what this rank has said of itself; None when they have not met.
        offers: what the ranks have offered when they were ready, by rank.
        when_ready: called when all ranks are ready to start the framework.
        is_watched: whether the lifeline has begun.
        steps: when this rank took which, in seconds since the epoch; see `report.steps`.
        join_timeout: seconds for all ranks to be ready once they have met.
    """

    def __init__(self, placement: Placement, join_timeout: float) -> None:
        self.placement = placement
        self.join_timeout = join_timeout
        self.roster: Roster | None = None
        self.findings: list[str] = []
        self.interface: str | None = None
        self.store_address: tuple[str, int] | None = None
        self.own_address = "127.0.0.1"
        self.membership: Membership | None = None
        self.own: Record | None = None
        self.offers: dict[int, str] = {}
        self.link: Server | Client | None = None
        self.listener: socket.socket | None = None
        self.reservation: Reservation | None = None
        self.open_files: int | None = None
        self.when_ready: Callable[[], None] = lambda: None
        self.is_watched = False
        self.steps: dict[str, float] = {}

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host name of each node, by node rank; empty when the ranks have not met."""
        return () if self.roster is None else self.roster.hosts

    def ready(self, step: Callable[[], tuple[T, Ready]]) -> T:
        """Take a step that may fail on some ranks only, and fail on all of them with the first failure of any.

        Args:
            step: returns its result, and what the other ranks are to know of it: see `offers`.
        """
        result, own, failure = _taken(step)
        if failure is None:
            self.mark(IMPORTED)
        self.offers = {} if own.offer is None else {self.placement.rank: own.offer}
        if self.link is not None:
            try:
                self.offers = self.link.confirm(own, self.join_timeout)
            except DistbootError:
                if failure is None:
                    raise
        if failure is not None:
            raise failure
        self.mark(ALL_READY)
        self.when_ready()
        assert result is not None
        return result

    def mark(self, step: str) -> None:
        """This rank has taken a step just now."""
        self.steps[step] = time.time()

    @property
    def history(self) -> History | None:
        """What rank 0 has seen so far, for the report of the job; None on all other ranks."""
        return self.link.history() if isinstance(self.link, Server) else None

    def hand_over(self) -> list[Handed]:
        """The connections, which are the caller's now."""
        return [] if self.link is None else self.link.hand_over()

    def goodbye(self) -> None:
        """Tell those at the other ends that the connections will not be used any more, and end them."""
        say_goodbye(self.hand_over())

    def take_listener(self) -> int | None:
        """The file descriptor of rank 0's listening socket, which is the caller's now; None on all other ranks."""
        listener, self.listener = self.listener, None
        return None if listener is None else listener.detach()

    def take_reservation(self) -> Reservation | None:
        """What keeps other jobs away from the port of rank 0, which is the caller's now to close; None elsewhere."""
        reservation, self.reservation = self.reservation, None
        return reservation

    def vacate(self) -> None:
        """Let the process that we start listen at the port of rank 0, and keep other jobs away from it until we end."""
        if self.listener is not None:
            self.listener.close()

    def close(self) -> None:
        """End what is open."""
        for each in (self.link, self.listener, self.reservation):
            if each is not None:
                each.close()

    def __enter__(self) -> Meeting:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def alone(placement: Placement, join_timeout: float) -> Meeting:
    """What stands for the meeting where the roll call is off.

    Raises:
        DistbootError: `roll-call-needed`, the environment alone leaves something open.
    """
    fields = ("local_rank", "local_world_size", "node_rank", "num_nodes")
    unknown = [field for field in fields if getattr(placement, field) is None]
    if unknown:
        raise DistbootError(
            "roll-call-needed",
            f"DISTBOOT_ROLL_CALL=0, and launcher {placement.launcher!r} does not say the {', '.join(unknown)}",
            "unset DISTBOOT_ROLL_CALL: the ranks find it out when they meet",
        )
    return Meeting(placement, join_timeout)


def _taken(step: Callable[[], tuple[T, Ready]]) -> tuple[T | None, Ready, DistbootError | None]:
    try:
        return *step(), None
    except DistbootError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - whatever a driver says, the other ranks must hear of it
        failure = DistbootError("device-failed", first_line(error), "look at this rank's device and driver")
    return None, Ready(problem=as_problem(failure)), failure
