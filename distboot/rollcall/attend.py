"""The roll call of one job, from this process's side: rank 0 holds it, all others report."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict

from .. import handoff, interfaces
from ..address import is_loopback
from ..errors import DistbootError, tell
from ..placement import Placement
from ..record import Record, own_record
from ..resolve import Found, look_up
from ..roster import Roster
from . import node
from .caller import NoAnswerError
from .client import Client
from .meeting import Meeting
from .ports import Reservation, Taken, TakenByThisJob, all_taken, candidates, listening
from .server import Server
from .wire import Membership

_KNOCK = 1.0  # seconds for who has our port, or our address, to say that it is rank 0 of this very job
_PATIENCE_WITH_A_PROBLEM = 5.0  # seconds to tell the others of it


def attend(
    placement: Placement,
    environ: Mapping[str, str],
    join_timeout: float,
    *,
    hosts: Sequence[str] = (),
    framework: str = "torch",
    on_cpu: bool = False,
    problem: DistbootError | None = None,
    relays: bool = True,
    failed: Callable[[Meeting, BaseException], object] = lambda _, __: None,
) -> Meeting:
    """Meet all other ranks once.

    Args:
        placement: with an address and a port.
        environ: the environment of this process.
        join_timeout: seconds for all of them to be there.
        hosts: where rank 0 may be, if that is more than `master_addr`.
        framework: what this rank is about to start.
        on_cpu: whether this rank will use no accelerator.
        problem: why this rank cannot take part, which the others are to hear at once.
        relays: whether the ranks of a node may share a connection, in a large job.
        failed: called if they do not meet, with what there is of the meeting, and why.

    Raises:
        DistbootError: `unknown-interface`, or what `Server.hold` and `Client.report` raise.
    """
    try:
        interfaces.refuse_unknown(environ)
    except DistbootError as error:
        problem = problem or error
    if problem is not None:
        join_timeout = min(join_timeout, _PATIENCE_WITH_A_PROBLEM)
    own = own_record(placement, environ, framework=framework, on_cpu=on_cpu, problem=problem)
    # With the port, for jobs of which the launcher says the same id (torchrun's is often "none").
    job = handoff.digest(f"{placement.job_id}:{placement.master_port}")
    membership = Membership(job, environ.get("DISTBOOT_SECRET", ""))
    meeting = Meeting(placement, join_timeout)
    meeting.membership, meeting.own = membership, own
    try:
        # They have met before in the wrapper around us: its port is ours, and what it warned of is not repeated.
        _, outer = handoff.take(environ)
        again = outer is not None and outer.met and outer.is_about(placement)
        if placement.rank == 0:
            meeting.roster = _as_rank_0(meeting, own, membership, hosts, again=again)
        else:
            meeting.roster = _as_another_rank(meeting, own, membership, hosts, relay=relays, again=again)
    except BaseException as error:
        failed(meeting, problem or error)
        meeting.close()
        if problem is not None and isinstance(error, DistbootError):
            raise problem from None
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            hint = "raise the limit (ulimit -n), or look for files that are left open"
            raise DistbootError("too-few-files", "this process may open no more files", hint) from None
        raise
    exact = asdict(meeting.roster.place(placement.rank))
    meeting.placement = meeting.placement.with_fields("roll call: all ranks together", exact)
    return meeting


def _as_rank_0(meeting: Meeting, own: Record, membership: Membership, hosts: Sequence[str], *, again: bool) -> Roster:
    port = _listen(meeting, own, membership, again=again)
    assert meeting.listener is not None
    meeting.link = server = Server(meeting.listener, own, membership)
    given = str(meeting.placement.master_addr)
    found = _found(given, port)
    elsewhere = bool(found) and not any(_is_ours(*each) for each in found)
    if not hosts:
        _doubt(server, given, found, elsewhere=elsewhere)
        if elsewhere:
            _refuse_second_rank_0(given, port, own, membership)
    roster = server.hold(meeting.join_timeout, warn=not again)
    meeting.findings, meeting.open_files = server.findings, server.open_files
    meeting.store_address = ("127.0.0.1", port)
    meeting.own_address = roster.master_addr or meeting.own_address
    meeting.interface = roster.master_addr and interfaces.interface_of(roster.master_addr)
    _settle(meeting, given if found and not hosts else roster.master_addr or "127.0.0.1", port)
    return roster


def _as_another_rank(
    meeting: Meeting, own: Record, membership: Membership, hosts: Sequence[str], *, relay: bool, again: bool
) -> Roster:
    placement = meeting.placement
    where, source = hosts or [str(placement.master_addr)], placement.sources.get("master_addr", "")
    ports, limit = candidates(placement), meeting.join_timeout
    meeting.link = client = Client(where, ports, own, membership, source)
    way = None
    if relay and own.problem is None and node.is_used(placement):  # who has one does not wait long
        way = node.connected(where, ports, own, membership, join_timeout=limit, source=source, again=again)
    # One process a node says what all of them are waiting for: on rank 0's own node rank 1, as rank 0 may be missing.
    roster = client.report(limit, quiet=bool(placement.local_rank) and placement.rank != 1, relay=way)
    meeting.store_address = (client.address_of_rank_0(), client.port)
    if roster.master_addr is not None:
        # On rank 0's own host the way to it is loopback, and the way to the others is its address.
        here = interfaces.interface_of(roster.master_addr)
        meeting.interface = here or interfaces.interface_of(client.own_address())
        meeting.own_address = roster.master_addr if here else client.own_address()
    # A host need not know its own name: the address, then, that the others have come to.
    _settle(meeting, client.host if client.resolves else roster.master_addr or "127.0.0.1", client.port)
    return roster


def _settle(meeting: Meeting, host: str, port: int) -> None:
    """Address and port as they turned out to be; the port of torchrun's agent stays its own."""
    found: dict[str, object] = {"master_addr": host}
    if meeting.placement.launcher != "torchrun":
        found["master_port"] = port
    meeting.placement = meeting.placement.with_fields("roll call: where rank 0 was reached", found)


def _listen(meeting: Meeting, own: Record, membership: Membership, *, again: bool) -> int:
    """Listen at the first port that is to be had."""
    taken: list[tuple[int, str]] = []
    for port in candidates(meeting.placement):
        try:
            # The first is reserved already if we have met there before.
            meeting.reservation = None if again and not taken else Reservation(port, membership)
            meeting.listener = listening(port)
        except Taken as reason:
            if meeting.reservation is not None:
                meeting.reservation.close()
            _refuse_second_rank_0("127.0.0.1", port, own, membership)
            if isinstance(reason, TakenByThisJob):  # and does not answer: it is past the roll call
                raise _duplicate(port) from None
            taken.append((port, str(reason)))
            continue
        if taken:
            said = ", ".join(f"port {other} is taken ({why})" for other, why in taken)
            tell("rank 0", f"{said}; the ranks meet at port {port}")
        return port
    raise all_taken(taken)


def _duplicate(port: int) -> DistbootError:
    return DistbootError(
        "duplicate-rank",
        f"rank 0 of this very job is on this host already, and its ranks have met at port {port}",
        "look for a second copy of the job; two jobs without a job id need each its own MASTER_PORT or DISTBOOT_SECRET",
    )


def _refuse_second_rank_0(host: str, port: int, own: Record, membership: Membership) -> None:
    """Report to whoever is there: if it is rank 0 of this very job, there are two of us, and it will say so."""
    with suppress(NoAnswerError):
        Client([host], [port], own, membership).knock(_KNOCK)


def _doubt(server: Server, given: str, found: Found, *, elsewhere: bool) -> None:
    """Why the others may not find rank 0, if something speaks for it. It need not be wrong."""
    if is_loopback(given):
        server.doubt = f"; {given}, where they look for rank 0, means each host itself"
    elif not found:
        server.doubt = f"; {given}, where they look for rank 0, does not resolve on this host"
    elif elsewhere:  # as with a Service of Kubernetes, whose address no host has
        address = found[0][1][0]
        where = given if address == given else f"{given}, {address}"
        server.doubt = f"; they look for rank 0 at {where}, which is no address of this host"
    if server.doubt:
        server.remedy = f"set MASTER_ADDR to the host of rank 0, which is {socket.gethostname()}; or {server.remedy}"


def _found(host: str, port: int) -> Found:
    """The addresses of a host; none if other programs on this one cannot look it up, either."""
    try:
        return look_up(host, port, 1.0)
    except OSError:
        return []


def _is_ours(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True
