"""An agent joins: rank 0's admits the others, which report to it. Detection is over by then."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial

from ..base.dataclass import dataclass, field, replace
from ..base.errors import DistbootError
from ..base.process import peer_of
from ..base.text import escape_control, log_line
from ..host import lease_name, network
from .connection_pool import PortInUse, allow_files, listening
from .events import Event, EventLog, own_clock
from .membership import LOOPBACK, JoinPlan, JoinResult

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .coordinator import Coordinator
    from .worker import Worker

_HINT_AT_DUPLICATE = (
    "look for a second copy of the job, or wait until one that was stopped has ended; "
    "two jobs without a job id need each its own MASTER_PORT or DISTBOOT_SECRET"
)
# Seconds for what has this port, or this address, to answer that it is rank 0 of this very job
_CALL = 1.0
# Seconds for which a process of this very job may have the port until it has ended: an agent ends
# up to a second after its script
_ENDING = 4.0
_PAUSE = 0.1  # seconds between two attempts


@dataclass(slots=True)
class Joined:
    """An agent with its connections, once all ranks have met; or while they do."""

    plan: JoinPlan
    result: JoinResult | None = None  # once they have
    coordinator: Coordinator | None = None  # of rank 0
    worker: Worker | None = None  # of any other
    listener: socket.socket | None = None  # of rank 0
    lease: PortLease | None = None  # keeps other jobs from its port
    # The soft limit of open files before it was raised; None: it was not
    open_files: int | None = None
    # Called while they meet; raises to end that
    wanted: Callable[[], None] = field(default=lambda: None)
    # On rank 0, called with each event of the job when it happens
    record: Callable[[Event], object] = field(default=lambda _: None)

    def join(self) -> JoinResult:
        """Meet all other ranks.

        Raises:
            DistbootError: as `Coordinator.wait_for_join` and `Worker.report`.
        """
        if self.plan.own.rank == 0:
            self.result = self._as_rank_0()
        else:
            self.result = self._as_worker()
        return self.result

    @property
    def side(self) -> Coordinator | Worker | None:
        """What meets the others here."""
        return self.coordinator or self.worker

    def log(self) -> EventLog | None:
        """What rank 0 has learned so far; None on all other ranks."""
        if self.coordinator is None:
            return None
        return self.coordinator.log

    def take_listener(self) -> socket.socket | None:
        """Give rank 0's listening socket to the caller; this agent no longer answers there."""
        listener = self.listener
        self.listener = None
        if self.coordinator is not None:
            self.coordinator.pool.accept_no_more()
        return listener

    def close_listener(self) -> None:
        """Let another process listen at the port of rank 0, and keep other jobs away from it."""
        listener = self.take_listener()
        if listener is not None:
            listener.close()

    def release_port(self) -> None:
        """Let any process have the port of rank 0."""
        self.close_listener()
        if self.lease is not None:
            self.lease.close()

    def close(self) -> None:
        for each in (self.side, self.listener, self.lease):
            if each is not None:
                each.close()

    def _as_rank_0(self) -> JoinResult:
        from .coordinator import Coordinator  # here, as the other ranks do not need it

        plan = self.plan
        port = self._listen()
        assert self.listener is not None
        coordinator = Coordinator(self.listener, plan, self.wanted)
        self.coordinator = coordinator
        coordinator.log.record(self.record)
        host = plan.hosts[0]
        addresses: network.Found = []
        with suppress(OSError):  # then other programs on this host cannot look it up, either
            addresses = network.look_up(host, port, 1.0)
        if plan.is_certain:
            self._check_address(coordinator, host, port, addresses)
        membership = coordinator.wait_for_join()
        self.open_files = coordinator.open_files
        own_address = membership.master_addr or LOOPBACK
        is_found = plan.is_certain and bool(addresses)
        if not is_found:
            host = own_address
        interface = None
        if membership.master_addr is not None:
            interface = network.interface_of(own_address)
        return JoinResult(
            membership,
            tuple(coordinator.warnings),
            host=host,
            port=port,
            own_address=own_address,
            interface=interface,
            booted=own_clock.booted,
        )

    def _as_worker(self) -> JoinResult:
        from .worker import Worker  # here and below, as rank 0 seldom needs it

        plan = self.plan
        if plan.own.ranks:  # the agent of a node
            say = partial(log_line, f"node {plan.own.rank}")
            self.open_files = allow_files(1, say, plan.own.ranks)
        worker = Worker(plan, self.wanted)
        self.worker = worker
        membership = worker.report()
        address_of_rank_0 = membership.master_addr or LOOPBACK
        own_address = LOOPBACK
        interface = None
        if membership.master_addr is not None:
            # On rank 0's own host the way to it is loopback, and its address the way to the others.
            own_address = address_of_rank_0
            interface = network.interface_of(own_address)
            if not interface:
                own_address = worker.own_address
                interface = network.interface_of(own_address)
        host = worker.host
        if not worker.resolves:  # a host need not know its own name
            host = address_of_rank_0
        return JoinResult(
            membership,
            host=host,
            port=worker.port,
            store_host=worker.address_of_rank_0,
            own_address=own_address,
            interface=interface,
            booted=own_clock.booted,
        )

    def _listen(self) -> int:
        """Listen at the first port that is free."""
        taken: list[tuple[int, str]] = []
        for port in self.plan.ports:
            try:
                self._listen_once_ended(port, is_first=not taken)
            except PortInUse as reason:  # noqa: PERF203 - there are five ports
                why = str(reason)
                if port == self.plan.ports[0]:  # the port of the job
                    why += _describe_holder(port)
                taken.append((port, why))
            else:
                _print_taken(taken, port, by_node=self.plan.own.ranks > 0)
                return port
        reasons = "; ".join(f"{port}: {why}" for port, why in taken)
        text = f"rank 0 cannot listen on any of the ports that the ranks try: {reasons}"
        raise DistbootError("port-taken", text, "set MASTER_PORT to a free port for all processes")

    def _listen_once_ended(self, port: int, *, is_first: bool) -> None:
        """Listen at a port; before that, wait for a process of this very job that is ending.

        `duplicate-rank`: it does not end; or it is rank 0, and its ranks are joining.
        """
        end = time.monotonic() + _ENDING
        while time.monotonic() < end:
            try:
                return self._listen_at(port, is_first=is_first)
            except PortInUseByThisJob:  # its ranks join, or have joined, or it is ending
                self._call_rank_0(LOOPBACK, port)
            except PortInUse:
                if self.lease is not None:
                    self.lease.close()
                self._call_rank_0(LOOPBACK, port)
                raise
            self.wanted()
            time.sleep(_PAUSE)
        text = (
            f"another process of this host is rank 0 of this very job already, at port {port}, "
            f"and has not ended within {_ENDING:g} s"
        )
        raise DistbootError("duplicate-rank", text, _HINT_AT_DUPLICATE)

    def _listen_at(self, port: int, *, is_first: bool) -> None:
        self.lease = None
        # Else an agent around this one keeps the port
        if not self.plan.again or not is_first:
            self.lease = PortLease(port, self.plan)
        self.listener = listening(port)

    def _call_rank_0(self, host: str, port: int) -> None:
        """Report to what listens there: rank 0 of this very job refuses a second one."""
        from .worker import NoAnswerError, Worker

        plan = replace(self.plan, hosts=(host,), ports=(port,))
        end = time.monotonic() + _CALL
        with suppress(NoAnswerError):
            Worker(plan).try_once(_CALL, end)

    def _check_address(
        self, coordinator: Coordinator, host: str, port: int, addresses: network.Found
    ) -> None:
        """Whether the other ranks can find this process at the address that all were given."""
        is_elsewhere = bool(addresses) and not any(_is_own(*each) for each in addresses)
        self._hint_at_unreachable(coordinator, host, addresses, is_elsewhere=is_elsewhere)
        if is_elsewhere:
            self._call_rank_0(host, port)

    def _hint_at_unreachable(
        self, coordinator: Coordinator, host: str, addresses: network.Found, *, is_elsewhere: bool
    ) -> None:
        """Print with missing ranks why they may not find rank 0."""
        # Here, as the agent of `init` needs nothing else of detection
        from ..detection.parse import is_loopback

        plan = self.plan
        where = host
        problem = ""
        if is_loopback(host):
            if plan.own.num_nodes != 1:
                problem = "works on one machine only"
        elif not addresses:
            problem = "does not resolve on this host"
        elif is_elsewhere:  # as with a Service of Kubernetes, whose address no host has
            problem = "is not an address of this host"
            address = addresses[0][1][0]
            if address != host:
                where = f"{host}, {address}"
        if not problem or plan.earlier:  # in an earlier round they have found it
            return
        unit = coordinator.table.unit
        name = f"the address of {unit} 0"
        if plan.source == "MASTER_ADDR":
            name = plan.source
        own_name = escape_control(socket.gethostname())
        remedy = f"set MASTER_ADDR to the host of {unit} 0, which is {own_name}"
        coordinator.why_missing = coordinator.why_missing._replace(
            said=f"; {name} is {where}, which {problem}",
            hint=f"{remedy}; or {coordinator.why_missing.hint}",
        )


def _print_taken(taken: Sequence[tuple[int, str]], port: int, *, by_node: bool) -> None:
    """Print which ports were taken, and at which the ranks meet instead."""
    if not taken:
        return
    from .join_table import UNITS  # here, as only rank 0 uses it

    unit, _ = UNITS[by_node]
    reasons = ", ".join(f"port {other} is taken ({why})" for other, why in taken)
    log_line(f"{unit} 0", f"{reasons}; the ranks meet at port {port}")


def _is_own(family: int, address: Sequence[object]) -> bool:
    """Whether an address is one of this host."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


class PortInUseByThisJob(PortInUse):
    """A process of this very job has the port: two processes are rank 0."""


class PortLease:
    """Keeps other jobs that use distboot from a port of this host until it is closed.

    Between the rendezvous of the wrapper and the moment when its script listens, no process does.
    A socket that is bound without listening would not keep others away. So names in the abstract
    namespace of Unix sockets are bound, which is as wide as that of the ports and ends with the
    process (unix(7)). Without such names nothing is reserved.

    Raises:
        PortInUse: another job has it; `PortInUseByThisJob`: this one has, which only jobs without a
            secret can tell.
    """

    def __init__(self, port: int, plan: JoinPlan) -> None:
        self._names: list[socket.socket] = []
        if sys.platform != "linux":
            return
        for name, in_use in _names(port, plan):
            taken = socket.socket(socket.AF_UNIX)
            self._names.append(taken)
            try:
                taken.bind(name)
                taken.listen()  # so that others can ask whose it is
            except OSError as error:
                self.close()
                why = f"another job holds it: {error.strerror}"
                if _is_of_this_user(name):
                    raise in_use(why) from None
                raise PortInUse(why) from None
        _leases.add(self)
        _close_leases_at_fork()

    def close(self) -> None:
        for name in self._names:
            name.close()
        _leases.discard(self)


_leases: set[PortLease] = set()


def _close_leases() -> None:
    for lease in tuple(_leases):
        lease.close()


@cache
def _close_leases_at_fork() -> None:
    """End leases with this process, not with its last data loader; no callback can be removed."""
    os.register_at_fork(after_in_child=_close_leases)


def _is_of_this_user(name: str) -> bool:
    """Whether a process of this user has bound a name, which any process can."""
    with socket.socket(socket.AF_UNIX) as asking, suppress(OSError):
        asking.setblocking(False)
        asking.connect(name)
        _, user = peer_of(asking)
        return user == os.geteuid()
    return False


def _names(port: int, plan: JoinPlan) -> Iterator[tuple[str, type[PortInUse]]]:
    """The names to bind, and what it means if one is taken."""
    name = lease_name(port)
    if not plan.secret:
        yield f"{name}-{plan.job}", PortInUseByThisJob
    yield name, PortInUse


def _describe_holder(port: int) -> str:
    """The process that has a port: `" by process 4711: redis-server *:29500"`; empty: not known."""
    from ..host import sockets  # here, as few jobs need these
    from . import foreign

    process = sockets.listener(port)
    if process:
        return f" by {process}"
    found = foreign.probe((socket.AF_INET, (LOOPBACK, port)))
    if found is not None:
        return f": the process that listens there {found.description}"
    return ""
