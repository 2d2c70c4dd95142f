"""The agent's side of how the ranks meet: rank 0's admits the others, which report to it. Detection is over by then."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from ..base.errors import DistbootError
from ..base.text import escape_control, log_line
from ..host import network
from .connection_pool import allow_files
from .coordinator import Coordinator
from .events import EventLog
from .membership import LOOPBACK, JoinPlan, JoinResult
from .worker import NoAnswerError, Worker

_DUPLICATE = (
    "look for a second copy of the job; "
    "two jobs without a job id need each its own MASTER_PORT or DISTBOOT_SECRET"
)
# Seconds for what has our port, or our address, to say that it is rank 0 of this very job
_CALL = 1.0


@dataclass(slots=True)
class Joined:
    """An agent with its connections, once all ranks have met; or while they do."""

    plan: JoinPlan
    result: JoinResult | None = None  # once they have
    side: Coordinator | Worker | None = None
    listener: socket.socket | None = None  # of rank 0
    lease: PortLease | None = None  # what keeps other jobs from its port
    # The soft limit before it was raised for all that it opens; None: it was not
    open_files: int | None = None
    # Called again and again while they meet; may raise
    wanted: Callable[[], None] = field(default=lambda: None)

    def join(self) -> JoinResult:
        """Meet all other ranks; `DistbootError`: what `Coordinator.wait_for_join` and `Worker.report` raise."""
        self.result = self._as_rank_0() if self.plan.own.rank == 0 else self._as_another_rank()
        return self.result

    def log(self) -> EventLog | None:
        """What rank 0 has learned so far; None on all other ranks."""
        return self.side.log if isinstance(self.side, Coordinator) else None

    def take_listener(self) -> socket.socket | None:
        """Rank 0's listening socket, which is the caller's now, so that none of ours answers there any more."""
        listener, self.listener = self.listener, None
        if isinstance(self.side, Coordinator):
            self.side.pool.accept_no_more()
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
        plan, port = self.plan, self._listen()
        assert self.listener is not None
        self.side = coordinator = Coordinator(self.listener, plan, self.wanted)
        given = plan.hosts[0]
        addresses: network.Found = []
        with suppress(OSError):  # then other programs on this host cannot look it up, either
            addresses = network.look_up(given, port, 1.0)
        if plan.is_certain and _hint_at_unreachable(coordinator, given, addresses, plan):
            self._refuse_second_rank_0(given, port)
        membership = coordinator.wait_for_join()
        self.open_files = coordinator.open_files
        reached = membership.master_addr
        return JoinResult(
            membership,
            tuple(coordinator.warnings),
            host=given if addresses and plan.is_certain else reached or LOOPBACK,
            port=port,
            own_address=reached or LOOPBACK,
            interface=reached and network.interface_of(reached),
        )

    def _as_another_rank(self) -> JoinResult:
        plan = self.plan
        if plan.own.ranks:  # the agent of a node
            self.open_files = allow_files(
                1, partial(log_line, f"node {plan.own.rank}"), plan.own.ranks
            )
        self.side = worker = Worker(plan, self.wanted)
        membership = worker.report()
        own_address, interface = LOOPBACK, None
        if membership.master_addr is not None:
            # On rank 0's own host the way to it is loopback, and the way to the others is its address.
            here = network.interface_of(membership.master_addr)
            own_address = membership.master_addr if here else worker.own_address()
            interface = here or network.interface_of(own_address)
        return JoinResult(
            membership,
            # A host need not know its own name: the address, then, that the others have come to.
            host=worker.host if worker.resolves else membership.master_addr or LOOPBACK,
            port=worker.port,
            store_host=worker.address_of_rank_0(),
            own_address=own_address,
            interface=interface,
        )

    def _listen(self) -> int:
        """Listen at the first port that is free."""
        taken: list[tuple[int, str]] = []
        for port in self.plan.ports:
            try:
                self.lease = None if self.plan.again and not taken else PortLease(port, self.plan)
                self.listener = listening(port)
            except PortInUse as reason:
                if self.lease is not None:
                    self.lease.close()
                self._refuse_second_rank_0(LOOPBACK, port)
                # And does not answer: it is past the rendezvous
                if isinstance(reason, PortInUseByThisJob):
                    why = f"rank 0 of this very job is on this host already, and its ranks have met at port {port}"
                    raise DistbootError("duplicate-rank", why, _DUPLICATE) from None
                why = str(reason)
                if port == self.plan.ports[0]:  # which the job was given
                    why += _held_by(port)
                taken.append((port, why))
                continue
            _log_taken(taken, port)
            return port
        reasons = "; ".join(f"{port}: {why}" for port, why in taken)
        text = f"rank 0 cannot listen on any of the ports that the ranks try: {reasons}"
        raise DistbootError("port-taken", text, "set MASTER_PORT to a free port for all processes")

    def _refuse_second_rank_0(self, host: str, port: int) -> None:
        """Report to what listens there: if it is rank 0 of this very job, there are two of us, and it will say so."""
        with suppress(NoAnswerError):
            Worker(replace(self.plan, hosts=(host,), ports=(port,))).try_once(
                _CALL, time.monotonic() + _CALL
            )


def _log_taken(taken: Sequence[tuple[int, str]], port: int) -> None:
    """Say which ports were taken, and at which the ranks meet instead."""
    if taken:
        reasons = ", ".join(f"port {other} is taken ({why})" for other, why in taken)
        log_line("rank 0", f"{reasons}; the ranks meet at port {port}")


def _held_by(port: int) -> str:
    """Which process has a port, as far as that can be known: `" by process 4711: redis-server *:29500"`."""
    from ..host import sockets  # here, as few jobs need these
    from . import foreign

    process = sockets.listener(port)
    if process:
        return f" by {process}"
    found = foreign.probe((socket.AF_INET, (LOOPBACK, port)))
    if found is not None:
        return f": the process that listens there {found.description}"
    return ""


def _hint_at_unreachable(
    coordinator: Coordinator, given: str, addresses: network.Found, plan: JoinPlan
) -> bool:
    """Say with missing ranks why they may not find rank 0, if something speaks for it; whether it is elsewhere."""
    # Here, as the agent of `init` needs nothing else of detection
    from ..detection.parse import is_loopback

    elsewhere = bool(addresses) and not any(_is_ours(*each) for each in addresses)
    where, problem = given, ""
    if is_loopback(given):
        problem = "works on one machine only" if plan.own.num_nodes != 1 else ""
    elif not addresses:
        problem = "does not resolve on this host"
    elif elsewhere:  # as with a Service of Kubernetes, whose address no host has
        problem, address = "is not an address of this host", addresses[0][1][0]
        where = given if address == given else f"{given}, {address}"
    if problem and not plan.earlier:  # else they have found it before
        unit = coordinator.table.unit
        name = _address_name(plan, unit)
        coordinator.reachability_hint = f"; {name} is {where}, which {problem}"
        first = f"set MASTER_ADDR to the host of {unit} 0, which is {escape_control(socket.gethostname())}"
        coordinator.hint = f"{first}; or {coordinator.hint}"
    return elsewhere


def _address_name(plan: JoinPlan, unit: str) -> str:
    if plan.source == "MASTER_ADDR":
        return plan.source
    return f"the address of {unit} 0"


def _is_ours(family: int, address: Sequence[object]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


class PortInUse(Exception):  # noqa: N818 - an answer, not an error
    """Another process has a port; the text says how that was found out."""


class PortInUseByThisJob(PortInUse):
    """A process of this very job has the port: there are two rank 0."""


class PortLease:
    """Keeps other jobs that use distboot from a port of this host until it is closed.

    Between the rendezvous of the wrapper and the moment when its script listens, no process does. A socket that is
    bound without listening would not keep others away, so what is bound are names in the abstract namespace of Unix
    sockets, which is as wide as that of the ports and ends with the process (unix(7)). Elsewhere nothing is reserved.

    Raises:
        PortInUse: another job has it; `PortInUseByThisJob`: this one has, which only jobs without a secret can tell.
    """

    def __init__(self, port: int, plan: JoinPlan) -> None:
        self._names: list[socket.socket] = []
        if sys.platform != "linux":
            return
        of_job = [] if plan.secret else [f"\0distboot-port-{port}-{plan.job}"]
        for name in (*of_job, f"\0distboot-port-{port}"):
            self._names.append(socket.socket(socket.AF_UNIX))
            try:
                self._names[-1].bind(name)
            except OSError as error:
                self.close()
                kind = PortInUseByThisJob if name in of_job else PortInUse
                raise kind(f"another job holds it: {error.strerror}") from None
        # It ends with this process, not with its last data loader
        os.register_at_fork(after_in_child=self.close)

    def close(self) -> None:
        for name in self._names:
            name.close()


def listening(port: int) -> socket.socket:
    """A socket that listens at a port, for IPv4 and IPv6; `PortInUse`: it cannot."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        return socket.create_server(
            ("", port),
            family=family,
            backlog=socket.SOMAXCONN,
            dualstack_ipv6=family == socket.AF_INET6,
        )
    except OSError as error:
        # Its own text names the port once more: "Address already in use (while attempting to bind on address …)".
        raise PortInUse(os.strerror(error.errno) if error.errno else str(error)) from None
