"""The side of every other rank: it reports to rank 0 and gets the roster back, or the reason why there is none."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

from ..errors import CODES, DistbootError, quoted
from ..rendezvous import Wait
from ..roster import Record, Roster
from .wire import (
    MOST_FROM_RANK_0,
    VERSION,
    Frames,
    Membership,
    WireError,
    authentication,
    canonical,
    frame,
    fresh,
    is_authentic,
)

_GRACE = 1.0  # seconds beyond the join timeout for rank 0, whose clock started a little later, to say who is missing
_ANSWER_LIMIT = 10.0  # seconds for rank 0 to send its challenge


class _NoAnswerError(Exception):
    """This attempt failed; the text says how."""


def call(
    host: str, port: int, own: Record, membership: Membership, join_timeout: float
) -> tuple[Roster, socket.socket]:
    """Report to rank 0 at `host` and `port`: the roster, and the connection, which stays open.

    What does not answer as rank 0 of this job is tried again until the join timeout, in seconds.

    Raises:
        DistbootError: what rank 0 says is wrong with the job, or `missing-rank` for rank 0 itself.
    """
    end = time.monotonic() + join_timeout
    waiting = Wait(f"rank {own.rank}", join_timeout, f"rank 0 does not answer at {host}:{port} yet")
    while True:
        try:
            return _attempt((host, port), own, membership, end)
        except _NoAnswerError as failure:
            why = str(failure)
        if not waiting.once_more(why):
            raise DistbootError(
                "missing-rank",
                f"rank 0 did not answer at {host}:{port} within {join_timeout:g} s: {why}",
                "look at the output of rank 0: it ended early, never started, is on another host, or behind a firewall",
            )


def _attempt(address: tuple[str, int], own: Record, membership: Membership, end: float) -> tuple[Roster, socket.socket]:
    limit = max(min(end - time.monotonic(), _ANSWER_LIMIT), 0.1)
    try:
        connection = socket.create_connection(address, timeout=limit)
    except OSError as error:
        raise _NoAnswerError(error.strerror or str(error)) from None
    try:
        roster = _report(connection, own, membership, end)
    except BaseException as error:
        connection.close()
        if isinstance(error, WireError):
            raise _NoAnswerError(f"who listens there {error}") from None
        if isinstance(error, OSError):
            raise _NoAnswerError(error.strerror or str(error)) from None
        raise
    connection.settimeout(None)
    return roster, connection


def _report(connection: socket.socket, own: Record, membership: Membership, end: float) -> Roster:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    nonce, messages = fresh(), _messages(connection)
    connection.sendall(frame({"distboot": VERSION, "job": membership.job, "nonce": nonce}))
    welcome = next(messages)
    challenge = welcome.get("challenge")
    if welcome.get("distboot") != VERSION or not isinstance(challenge, str):
        raise WireError(f"refused us: {quoted(welcome['refused'])}" if "refused" in welcome else "is not rank 0")
    content = own.as_message()
    mac = authentication(membership.secret, challenge, nonce, "report", canonical(content))
    connection.sendall(frame({"record": content, "mac": mac}))
    connection.settimeout(max(end - time.monotonic(), 0.0) + _GRACE)
    answer = next(messages)
    if "refused" in answer:
        raise WireError(f"refused us: {quoted(answer['refused'])}")
    kind = "roster" if "roster" in answer else "error"
    said = answer.get(kind)
    if not is_authentic(
        answer.get("mac", ""), authentication(membership.secret, challenge, nonce, kind, canonical(said))
    ):
        raise WireError("does not know DISTBOOT_SECRET")
    if kind == "error":
        raise _told(said)
    try:
        return Roster.from_message(said)
    except (TypeError, ValueError) as error:
        raise WireError(f"sends a broken roster: {error}") from None


def _messages(connection: socket.socket) -> Iterator[dict[str, object]]:
    frames = Frames(MOST_FROM_RANK_0)
    while True:
        data = connection.recv(65536)
        if not data:
            raise WireError("closed the connection")
        yield from frames.feed(data)


def _told(said: object) -> DistbootError:
    """The error that rank 0 sent to all."""
    if not (isinstance(said, list) and len(said) == 3 and all(isinstance(text, str) for text in said)):
        raise WireError("sends a broken error")
    code, message, hint = said
    return DistbootError(code if code in CODES else "roster-mismatch", f"rank 0 says: {message}", hint)
