"""The side of every other rank: it reports to rank 0, wherever that listens, until it answers with the membership."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..base.errors import DistbootError
from ..base.text import format_address, short_repr
from ..host.network import Backoff, is_this_host, look_up
from . import foreign
from .connection_pool import DetachedConnection
from .membership import (
    COME_BACK,
    JoinPlan,
    Membership,
    describe_earlier,
)
from .messages import (
    ONE_DISTBOOT,
    Failed,
    Hello,
    Members,
    Refused,
    Welcome,
    as_error,
)
from .protocol import (
    Channel,
    Frame,
    Frames,
    ProtocolError,
    decode,
    most_from_rank_0,
    random_nonce,
)

# Seconds for an unknown process to answer; it grows, because rank 0 may be busy with thousands
_FIRST_LIMIT = 1.0
_LAST_LIMIT = 10.0
_ASKED_AFTER = 5.0  # seconds of silence after which a process is asked what it is
_LOOK = 0.2  # seconds between two looks at whether the call is still wanted
_GRACE = 0.8  # seconds beyond the join timeout for rank 0 to say who is missing
_SAME_JOB = (
    "all ranks need the same job, the same distboot and the same DISTBOOT_SECRET, "
    "or all of them none"
)
_LISTENER = "the process that listens there"
_SILENT = "a process listens there, and does not answer as rank 0"


class NoAnswerError(Exception):
    """An attempt failed; the text says how."""


class UnreachableError(NoAnswerError):
    """The host itself did not answer, so that its other ports need not be tried."""


class _UnresolvedError(UnreachableError):
    """The name of the host does not resolve."""


class _SilentError(NoAnswerError):
    """A process accepted the connection and did not answer; the text names it if it was asked what it is."""


class Worker:
    """A rank other than 0 in the rendezvous. `host` and `port` are where rank 0 was reached, once it was."""

    def __init__(
        self,
        plan: JoinPlan,
        # Called again and again; raises if the call is not wanted any more
        wanted: Callable[[], None] = lambda: None,
    ) -> None:
        self._plan, self._own, self._wanted = plan, plan.own, wanted
        self._refusal = ""  # why a process that listens there has not kept us, the last time
        self._remedy = ""  # for that
        self._unit = "node" if plan.own.ranks else "rank"  # of which each agent is one
        self._address: foreign.Address = (socket.AF_INET, None)  # of the last connection
        # What listens at an address and closes each connection, once it was asked
        self._asked: dict[foreign.Address, foreign.Foreign] = {}
        self._frames, self._channel = Frames(), Channel()
        self._connection: socket.socket | None = None
        self.host, self.port = plan.hosts[0], plan.ports[0]
        self.resolves = True  # whether this host could look that name up

    def report(self) -> Membership:
        """Report to rank 0, again and again until it answers.

        `DistbootError`: what rank 0 says is wrong with the job, or `missing-rank` for rank 0 itself.
        """
        join_timeout, limit = self._plan.join_timeout, _FIRST_LIMIT
        who = f"{self._unit} {self._own.rank}"
        line = f"{self._unit} 0 does not answer at {format_address(self.host, self.port)} yet"
        end, backoff = (
            time.monotonic() + join_timeout,
            Backoff(
                who,
                join_timeout,
                line,
                quiet=self._plan.quiet,
                first_line=max(1.0, self._plan.ending),
            ),
        )
        while True:
            self._wanted()
            try:
                return self.try_once(limit, end)
            except NoAnswerError as failure:
                reason = failure
            # A busy rank 0 is silent, too: what is silent for long is asked once, and at the end
            if limit < _ASKED_AFTER <= limit * 2:
                reason = self._name_silent(reason)
            if not backoff.sleep_or_expire(str(reason)):
                raise self._unanswered(self._name_silent(reason)) from None
            limit = min(limit * 2, _LAST_LIMIT)

    def try_once(self, limit: float, end: float) -> Membership:
        """Report wherever rank 0 may be, with `limit` seconds for each, until `end`.

        `NoAnswerError`: why the first of these did not answer, if none did; else as for `report`.
        """
        failures: list[NoAnswerError] = []
        for host in self._plan.hosts:
            for port in self._plan.ports:
                try:
                    return self._attempt(host, port, end, limit)
                except NoAnswerError as failure:  # noqa: PERF203 - what is tried is a connection
                    failures.append(failure)
                    if isinstance(failure, UnreachableError):
                        break
        raise failures[0]

    def own_address(self) -> str:
        return str(self._open.getsockname()[0])

    def address_of_rank_0(self) -> str:
        """With the scope, without which a link-local address of IPv6 means nothing."""
        return socket.getnameinfo(
            self._open.getpeername(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
        )[0]

    def detach_all(self) -> list[DetachedConnection]:
        """The connection, which is the caller's now."""
        connection, self._connection = self._connection, None
        return [] if connection is None else [(0, connection, self._channel)]

    def open_again(self, limit: float) -> tuple[socket.socket, Channel]:
        """Another authenticated connection to rank 0, which is the caller's; `NoAnswerError`: why there is none."""
        end = time.monotonic() + limit
        self._connection = connection = self._connected(self.host, self.port, end, limit)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            self._handshake(end)
        except TimeoutError as error:  # it may be busy
            self.close()
            raise UnreachableError(str(error)) from None
        except (OSError, EOFError, ProtocolError, DistbootError) as error:
            self.close()
            raise NoAnswerError(str(error)) from None
        return connection, self._channel

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    @property
    def _open(self) -> socket.socket:
        assert self._connection is not None
        return self._connection

    def _attempt(self, host: str, port: int, end: float, limit: float) -> Membership:
        limit = max(min(end - time.monotonic(), limit), 0.1)
        self._connection = connection = self._connected(host, port, end, limit)
        self.host, self.port = host, port
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        has_reported = False
        try:
            self._handshake(time.monotonic() + limit)
            self._send(
                replace(self._own, clock=time.time(), patience=max(end - time.monotonic(), 0.0))
            )
            has_reported = True
            return self._membership(end + _GRACE)
        except (ProtocolError, EOFError, OSError) as error:
            if has_reported and isinstance(error, ConnectionError | EOFError):
                why = self._lost()
            else:
                found = None if has_reported else self._identify(connection, error)
                why = self._explain(error, found)
            self.close()
            kind = _SilentError if isinstance(error, TimeoutError) else NoAnswerError
            raise kind(why) from None
        except BaseException:
            self.close()
            raise

    def _lost(self) -> str:
        unit = self._unit
        return self._refused(
            f"{unit} 0 was reached, but disconnected before all {unit}s had joined",
            f"look at the output of {unit} 0: it ended, or was stopped, while the {unit}s joined",
        )

    def _identify(self, connection: socket.socket, error: Exception) -> foreign.Foreign | None:
        """What listens there, if it is not distboot; what is silent is asked later."""
        received = self._frames.pending
        if foreign.identify(foreign.SERVERS, received) is not None:
            received = foreign.read_more(connection, received)
            return foreign.identify(foreign.SERVERS, received)
        if received or isinstance(error, ProtocolError):
            return None
        closes = isinstance(error, EOFError | ConnectionError)
        if closes and self._address not in self._asked:
            self._asked[self._address] = foreign.probe(self._address) or foreign.CLOSES
        return self._asked.get(self._address)

    def _explain(self, error: Exception, found: foreign.Foreign | None) -> str:
        """Why an attempt failed before rank 0 had this rank's report."""
        if found is not None:
            return self._refused(f"{_LISTENER} {found.description}", found.remedy)
        if isinstance(error, ProtocolError | EOFError):
            return self._refused(f"{_LISTENER} {error}", _SAME_JOB)
        if isinstance(error, TimeoutError):
            return _SILENT
        return getattr(error, "strerror", None) or str(error)

    def _refused(self, why: str, remedy: str) -> str:
        self._refusal = why
        self._remedy = remedy
        return why

    def _name_silent(self, failure: NoAnswerError) -> NoAnswerError:
        """The failure, with the name of what does not answer, if it has one."""
        if not isinstance(failure, _SilentError):
            return failure
        found = foreign.probe(self._address)
        if found is not None:
            self._asked[self._address] = found
            return NoAnswerError(self._refused(f"{_LISTENER} {found.description}", found.remedy))
        self._asked.pop(self._address, None)
        if not self._refusal:
            self._refused(_SILENT, foreign.SILENT)
        return NoAnswerError(_SILENT)

    def _connected(self, host: str, port: int, end: float, limit: float) -> socket.socket:
        self.resolves = True
        try:
            candidates = look_up(host, port, limit)
        except OSError as error:
            if not is_this_host(host):
                raise _UnresolvedError(error.strerror or str(error)) from None
            self.resolves = False  # nothing has told this host its own name
            candidates = [(socket.AF_INET, ("127.0.0.1", port))]
        failure: OSError | None = None
        for family, address in candidates:
            connection = None
            try:
                # Which a kernel without IPv6 may not have
                connection = socket.socket(family, socket.SOCK_STREAM)
                connection.settimeout(max(min(end - time.monotonic(), limit), 0.1))
                connection.connect(address)
            except OSError as error:
                failure = error
                if connection is not None:
                    connection.close()
            else:
                self._address = family, address
                return connection
        if isinstance(failure, ConnectionRefusedError | ConnectionResetError):
            raise NoAnswerError(failure.strerror)
        raise UnreachableError((failure and failure.strerror) or str(failure))

    def _handshake(self, end: float) -> None:
        self._frames, self._channel, nonce = Frames(), Channel(), random_nonce()
        self._send(Hello(self._plan.job, nonce))
        frame = self._next_frame(end)
        # Its challenge is in what it authenticates: it is read first, and believed only then.
        answer = decode(self._frames.inflated(frame), Welcome, Refused)
        if isinstance(answer, Refused):
            if answer.incompatible and not self._plan.secret:
                raise DistbootError(
                    "version-mismatch",
                    f"{self._unit} 0 says: {short_repr(answer.why)}",
                    ONE_DISTBOOT,
                )
            raise ProtocolError(f"refused this rank: {short_repr(answer.why)}")
        self._channel = Channel(self._plan.secret, "this rank", answer.challenge, nonce)
        try:
            self._channel.verify(frame, self._frames, Welcome)
        except (
            ProtocolError
        ) as error:  # rank 0, if it is that, is to know why this rank does not join
            self._send(Refused(str(error)))
            raise
        # Only now: the membership is long
        self._frames.most = most_from_rank_0(self._own.world_size)

    def _membership(self, end: float) -> Membership:
        """The answer of rank 0; complete before `end`, however slowly it comes."""
        answer: Any = self._channel.verify(
            self._next_frame(end), self._frames, Members, Failed, Refused
        )
        if isinstance(answer, Refused):
            raise ProtocolError(f"refused this rank: {short_repr(answer.why)}")
        if isinstance(answer, Failed):
            raise as_error(answer.problem, f"{self._unit} 0 says")
        return Membership.from_message(answer, self._own.world_size)

    def _send(self, message: object) -> None:
        self._open.sendall(self._channel.sign(message))

    def _next_frame(self, end: float) -> Frame:
        connection, frames = self._open, list[Frame]()
        while not frames:
            self._wanted()
            connection.settimeout(min(max(end - time.monotonic(), 0.01), _LOOK))
            try:
                # Not a byte more than this message: what follows is for what comes after the rendezvous.
                data = connection.recv(min(self._frames.missing, 1 << 20))
            except TimeoutError:
                if time.monotonic() >= end:
                    raise
                continue
            if not data:
                raise EOFError("closed the connection")
            frames = self._frames.feed(data)
            if time.monotonic() > end and not frames:
                raise TimeoutError
        return frames[0]

    def _unanswered(self, why: NoAnswerError) -> DistbootError:
        # Here, as the agent of `init` needs nothing else of detection
        from ..detection.parse import is_loopback

        plan, code = self._plan, "missing-rank"
        unit = self._unit
        hint = (
            f"look at the output of {unit} 0: "
            "it ended early, never started, is on a different host, or behind a firewall"
        )
        if isinstance(why, _UnresolvedError):
            code, hint = (
                "unresolvable-address",
                "check the name, or give an address that this host can look up",
            )
        elif self._refusal:
            hint = self._remedy
        elif plan.earlier:
            hint = COME_BACK
        elif all(map(is_loopback, plan.hosts)) and self._own.num_nodes != 1:
            hint += f"; {plan.hosts[0]} is this host: if {unit} 0 is on a different one, set MASTER_ADDR to its name"
        earlier = (
            f"; before that, {self._refusal}" if self._refusal and self._refusal != str(why) else ""
        )
        where = format_address(plan.hosts[0], plan.ports[0]) + (
            f" (from {plan.source})" if plan.source else ""
        )
        text = f"{unit} 0 did not answer at {where} within {plan.join_timeout:g} s: {why}{earlier}"
        text += describe_earlier([agent for agent in plan.earlier if agent.number == 0], unit)
        return DistbootError(code, text, hint)
