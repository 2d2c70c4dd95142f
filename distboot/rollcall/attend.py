"""The roll call of one job, from this process's side: rank 0 holds it, all others report."""

from __future__ import annotations

import errno
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict

from .. import interfaces
from ..errors import DistbootError, tell
from ..handoff import digest
from ..placement import Placement
from ..record import Record, own_record
from ..roster import Roster
from .caller import Caller, NoAnswerError
from .desk import Desk
from .meeting import Meeting
from .ports import Hold, Taken, all_taken, candidates, listening
from .resolve import look_up
from .wire import Membership

_SOURCE = "roll call: all ranks together"
_KNOCK = 1.0  # seconds for who has our port to say that it is rank 0 of this very job


def attend(
    placement: Placement,
    environ: Mapping[str, str],
    join_timeout: float,
    *,
    hosts: Sequence[str] = (),
    on_cpu: bool = False,
    again: bool = False,
) -> Meeting:
    """Meet all other ranks once.

    Args:
        placement: with an address and a port.
        environ: the environment of this process.
        join_timeout: seconds for all of them to be there.
        hosts: where else than at `master_addr` rank 0 may be.
        on_cpu: whether this rank will use no accelerator.
        again: whether they have met before, in the wrapper: its port is ours, and its warnings are not repeated.

    Raises:
        DistbootError: `unknown-interface`, or what `Desk.hold` and `Caller.report` raise.
    """
    problem: DistbootError | None = None
    try:
        interfaces.refuse_unknown(environ)
    except DistbootError as error:  # the others are to hear of it at once
        problem = error
    own = own_record(placement, environ, on_cpu=on_cpu, problem=problem)
    membership = Membership(digest(placement.job_id), environ.get("DISTBOOT_SECRET", ""))
    meeting = Meeting(placement, join_timeout)
    try:
        if placement.rank == 0:
            roster = _hold(meeting, own, membership, hosts, again=again)
        else:
            roster = _call(meeting, own, membership, hosts)
    except BaseException as error:
        meeting.close()
        if problem is not None and isinstance(error, DistbootError):
            raise problem from None
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            hint = "raise the limit (ulimit -n), or look for files that are left open"
            raise DistbootError(
                "too-few-files", "this process may open no more files for the roll call", hint
            ) from None
        raise
    meeting.roster = roster
    exact = asdict(roster.seat(placement.rank))
    meeting.placement = meeting.placement.with_fields(_SOURCE, exact)
    return meeting


def _hold(meeting: Meeting, own: Record, membership: Membership, hosts: Sequence[str], *, again: bool) -> Roster:
    placement = meeting.placement
    port = _listen(meeting, own, membership, again=again)
    assert meeting.listener is not None
    meeting.link = desk = Desk(meeting.listener, own, membership)
    desk.doubt = "" if hosts else _elsewhere(str(placement.master_addr), port, own, membership)
    roster = desk.hold(meeting.join_timeout, warn=not again)
    meeting.findings = desk.findings
    meeting.store_address = ("127.0.0.1", port)
    if roster.master_addr is not None:
        meeting.interface = interfaces.interface_of(roster.master_addr)
    _settle(meeting, roster.master_addr or hosts[0] if hosts else str(placement.master_addr), port, roster)
    return roster


def _call(meeting: Meeting, own: Record, membership: Membership, hosts: Sequence[str]) -> Roster:
    placement = meeting.placement
    source = placement.sources.get("master_addr", "")
    where = hosts or [str(placement.master_addr)]
    meeting.link = caller = Caller(where, candidates(placement), own, membership, source)
    # One process a node says what all of them are waiting for.
    roster = caller.report(meeting.join_timeout, quiet=bool(placement.local_rank))
    meeting.store_address = (caller.address_of_rank_0(), caller.port)
    if roster.master_addr is not None:
        beside_rank_0 = roster.seat(own.rank).node_rank == roster.seat(0).node_rank
        meeting.interface = interfaces.interface_of(roster.master_addr if beside_rank_0 else caller.own_address())
    _settle(meeting, caller.host, caller.port, roster)
    return roster


def _settle(meeting: Meeting, host: str, port: int, roster: Roster) -> None:
    """Address and port as they turned out to be; the port of torchrun's agent stays its own."""
    if not _resolves(host, port):
        # A host need not know its own name: the address, then, that the others have come to.
        host = roster.master_addr or "127.0.0.1"
    found: dict[str, object] = {"master_addr": host}
    if meeting.placement.launcher != "torchrun":
        found["master_port"] = port
    meeting.placement = meeting.placement.with_fields("roll call: where rank 0 was reached", found)


def _listen(meeting: Meeting, own: Record, membership: Membership, *, again: bool) -> int:
    """Listen at the first port that is to be had."""
    taken: list[tuple[int, str]] = []
    for port in candidates(meeting.placement):
        try:
            # The first is held for us already if the wrapper around us has met the others there.
            meeting.hold = None if again and not taken else Hold(port)
            meeting.listener = listening(port)
        except Taken as reason:
            if meeting.hold is not None:
                meeting.hold.close()
            _refuse_second_rank_0("127.0.0.1", port, own, membership)
            taken.append((port, str(reason)))
            continue
        if taken:
            said = ", ".join(f"port {other} is taken ({why})" for other, why in taken)
            tell("rank 0", f"{said}; the ranks meet at port {port}")
        return port
    raise all_taken(taken)


def _refuse_second_rank_0(host: str, port: int, own: Record, membership: Membership) -> None:
    """Report to whoever has our port: if it is rank 0 of this very job, there are two of us, and it will say so."""
    with suppress(NoAnswerError):
        Caller([host], [port], own, membership).knock(_KNOCK)


def _elsewhere(host: str, port: int, own: Record, membership: Membership) -> str:
    """What to say with the missing ranks if the address of rank 0 is none of this host, where rank 0 is; else nothing.

    It need not be wrong: the address of a Kubernetes Service is that of no host.
    """
    try:
        found = look_up(host, port, _KNOCK)
    except OSError:
        return ""
    if any(_is_ours(family, address) for family, address in found):
        return ""
    _refuse_second_rank_0(host, port, own, membership)
    return f"; they look for rank 0 at {host}, {found[0][1][0]}, which is no address of this host"


def _is_ours(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
    except OSError:
        return False
    return True


def _resolves(host: str, port: int) -> bool:
    try:
        return bool(look_up(host, port, 1.0))
    except OSError:
        return False
