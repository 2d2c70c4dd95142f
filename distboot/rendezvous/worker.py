"""Every other rank's part of the rendezvous: it reports to rank 0 until that answers.

Rank 0 may start later, listen at the second of five ports, or be at any of several hosts. So one
*try* goes through all hosts and ports, and `report` tries again until the join timeout. One attempt
at one address ends in one of these ways:

    Members                  all ranks have joined: done
    Failed, version          `DistbootError`: the job cannot start, and another attempt cannot help
    UnreachableError         the host does not answer: its other ports are not tried
    _SilentError             a process accepts and does not answer
    NoAnswerError            anything else: refused, a foreign process, a lost connection

Two things make this longer than a loop:

- A silent process may be a rank 0 that is busy with thousands of ranks, or one that will never
  answer, such as a store of torch. The limit of an attempt grows from 1 to 10 seconds. After 5
  seconds, and at the end, `foreign` asks the process once what it is.
- The error at the end has to name the cause. So the last refusal is kept, with its remedy: a later
  attempt may find a closed port where a foreign process had answered before.

Once the report is sent, the wait for the answer lasts until the join timeout, and a little longer:
rank 0 has the same timeout, and its answer names the missing ranks.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from ..base.dataclass import replace
from ..base.errors import DistbootError, reason_of
from ..base.text import format_address, said_by, short_repr
from ..host.network import Backoff, address_of_peer, is_this_host, look_up
from .connection_pool import DetachedConnection
from .events import clock_time
from .membership import (
    JoinPlan,
    Membership,
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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from . import foreign

# Seconds for an unknown process to answer, which double: rank 0 may be busy with thousands
_FIRST_LIMIT = 1.0
_LAST_LIMIT = 10.0
_ASKED_AFTER = 5.0  # seconds of silence after which a process is asked what it is
_INTERVAL = 0.2  # seconds between two checks whether the call is still wanted
_GRACE = 0.8  # seconds beyond the join timeout for rank 0's list of missing ranks
_LEAST_LIMIT = 0.1  # seconds
_MOST_RECEIVED = 1 << 20  # bytes at once
_SAME_JOB = (
    "all ranks need the same job, the same distboot and the same DISTBOOT_SECRET, "
    "or all of them none"
)
_LISTENER = "the process that listens there"
_SILENT = "a process listens there, and does not answer as rank 0"


class NoAnswerError(Exception):
    """An attempt failed; the text tells how."""


class UnreachableError(NoAnswerError):
    """The host itself did not answer: its other ports need not be tried."""


class _UnresolvedError(UnreachableError):
    """The name of the host does not resolve."""


class _SilentError(NoAnswerError):
    """A process accepted the connection and did not answer."""


class Worker:
    """A rank other than 0 in the rendezvous.

    `host` and `port` are where rank 0 was reached, once it was.
    """

    def __init__(
        self,
        plan: JoinPlan,
        # Called while it waits; raises to end the wait
        wanted: Callable[[], None] = lambda: None,
    ) -> None:
        if plan.secret:  # before connections may take the last file
            from . import authentication  # noqa: F401 - here, as few jobs have a secret

        self._plan = plan
        self._own = plan.own
        self._wanted = wanted
        self._refusal = ""  # why a listening process has refused this rank, the last time
        self._remedy = ""  # for that
        self._unit = "rank"  # what each agent stands for
        if plan.own.ranks:
            self._unit = "node"
        self._address: foreign.Address = (socket.AF_INET, None)  # of the last connection
        # What listens at an address, once it was asked
        self._asked: dict[foreign.Address, foreign.Foreign] = {}
        self._frames = Frames()
        self._channel = Channel()
        self._connection: socket.socket | None = None
        self.host = plan.hosts[0]
        self.own_address = ""  # on the way to rank 0
        self.address_of_rank_0 = ""  # with the scope that a link-local address of IPv6 needs
        self.port = plan.ports[0]
        self.resolves = True  # whether this host could look up the name of rank 0's host

    def report(self) -> Membership:
        """Report to rank 0 until it answers.

        Raises:
            DistbootError: why rank 0 cannot start the job, or `missing-rank` for rank 0 itself.
        """
        join_timeout = self._plan.join_timeout
        limit = _FIRST_LIMIT
        end = time.monotonic() + join_timeout
        backoff = Backoff(
            f"{self._unit} {self._own.rank}",
            join_timeout,
            f"{self._unit} 0 does not answer at {format_address(self.host, self.port)} yet",
            quiet=self._plan.quiet,
            first_line=max(1.0, self._plan.ending),
        )
        while True:
            self._wanted()
            try:
                return self.try_once(limit, end)
            except NoAnswerError as failure:
                reason = failure
            # Once, and at the end: a busy rank 0 is silent, too
            if limit < _ASKED_AFTER <= limit * 2:
                reason = self._name_silent(reason)
            if not backoff.sleep_or_expire(str(reason)):
                raise self._unanswered(self._name_silent(reason)) from None
            limit = min(limit * 2, _LAST_LIMIT)

    def try_once(self, limit: float, end: float) -> Membership:
        """Report to each address where rank 0 may be, with `limit` seconds for each, until `end`.

        Raises:
            NoAnswerError: why the first of these did not answer.
            DistbootError: as for `report`.
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

    def detach_all(self) -> list[DetachedConnection]:
        """Give the connection to the caller."""
        connection = self._connection
        self._connection = None
        if connection is None:
            return []
        return [(0, connection, self._channel)]

    def open_again(self, limit: float) -> tuple[socket.socket, Channel]:
        """A new authenticated connection to rank 0, for the caller; `NoAnswerError`: none."""
        end = time.monotonic() + limit
        connection = self._connect(self.host, self.port, end, limit)
        try:
            self._handshake(end)
        except TimeoutError as error:  # rank 0 may be busy
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
        limit = max(min(end - time.monotonic(), limit), _LEAST_LIMIT)
        connection = self._connect(host, port, end, limit)
        self.host = host
        self.port = port
        has_reported = False
        try:
            self.own_address = str(connection.getsockname()[0])
            self.address_of_rank_0 = address_of_peer(connection)
            self._handshake(time.monotonic() + limit)
            patience = max(end - time.monotonic(), 0.0)
            self._send(replace(self._own, clock=clock_time(), patience=patience))
            has_reported = True
            return self._receive_membership(end + _GRACE)
        except (ProtocolError, EOFError, OSError) as error:
            if has_reported:
                why = self._explain_after_report(error)
            else:
                why = self._explain(error, self._identify(connection, error))
            self.close()
            if isinstance(error, TimeoutError):
                raise _SilentError(why) from None
            raise NoAnswerError(why) from None
        except BaseException:
            self.close()
            raise

    def _explain_after_report(self, error: Exception) -> str:
        if not isinstance(error, ConnectionError | EOFError):
            return self._explain(error, None)
        unit = self._unit
        return self._refused(
            f"{unit} 0 was reached, but disconnected before all {unit}s had joined",
            f"look at the output of {unit} 0: it ended, or was stopped, while the {unit}s joined",
        )

    def _identify(self, connection: socket.socket, error: Exception) -> foreign.Foreign | None:
        """What listens there, if it is not distboot. A silent process is asked later."""
        from . import foreign  # here and below, as few jobs need it

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
            why = f"{_LISTENER} {found.description}"
            if found.is_vague and self._refusal:
                return why
            return self._refused(why, found.remedy)
        if isinstance(error, ProtocolError | EOFError):
            return self._refused(f"{_LISTENER} {error}", _SAME_JOB)
        if isinstance(error, TimeoutError):
            return _SILENT
        return reason_of(error)

    def _refused(self, why: str, remedy: str) -> str:
        self._refusal = why
        self._remedy = remedy
        return why

    def _name_silent(self, failure: NoAnswerError) -> NoAnswerError:
        """Ask a silent process what it is; the failure with the answer."""
        if not isinstance(failure, _SilentError):
            return failure
        from . import foreign

        found = foreign.probe(self._address)
        if found is not None:
            self._asked[self._address] = found
            return NoAnswerError(self._refused(f"{_LISTENER} {found.description}", found.remedy))
        self._asked.pop(self._address, None)
        if not self._refusal:
            self._refused(_SILENT, foreign.SILENT)
        return NoAnswerError(_SILENT)

    def _connect(self, host: str, port: int, end: float, limit: float) -> socket.socket:
        """Open a connection, which stays `self._connection`."""
        self.resolves = True
        try:
            candidates = look_up(host, port, limit)
        except OSError as error:
            if not is_this_host(host):
                raise _UnresolvedError(reason_of(error)) from None
            self.resolves = False  # this host does not know its own name
            candidates = [(socket.AF_INET, ("127.0.0.1", port))]
        failure: OSError | None = None
        for family, address in candidates:
            seconds = max(min(end - time.monotonic(), limit), _LEAST_LIMIT)
            try:
                connection = _connected(family, address, seconds)
            except OSError as error:
                failure = error
                continue
            self._address = family, address
            self._connection = connection
            return connection
        if isinstance(failure, ConnectionRefusedError | ConnectionResetError):
            raise NoAnswerError(failure.strerror)
        raise UnreachableError(getattr(failure, "strerror", None) or str(failure))

    def _handshake(self, end: float) -> None:
        self._frames = Frames()
        self._channel = Channel()
        nonce = random_nonce()
        self._send(Hello(self._plan.job, nonce))
        frame = self._next_frame(end)
        # The answer is needed to verify it: it has the challenge. It counts only after that.
        answer = decode(self._frames.inflated(frame), Welcome, Refused)
        if isinstance(answer, Refused):
            raise self._error_of_refusal(answer)
        self._channel = Channel(
            self._plan.secret,
            is_rank_0=False,
            challenge=answer.challenge,
            nonce=nonce,
        )
        try:
            self._channel.verify(frame, self._frames, Welcome)
        except ProtocolError as error:
            # Rank 0 prints why this rank does not join
            self._send(Refused(str(error)))
            raise
        # Only now: the membership is long
        self._frames.most = most_from_rank_0(self._own.world_size)

    def _error_of_refusal(self, answer: Refused) -> Exception:
        why = short_repr(answer.why)
        # With a secret the refusal is not authenticated, and must not end the job.
        if answer.incompatible and not self._plan.secret:
            text = f"{self._unit} 0 says: {why}"
            return DistbootError("version-mismatch", text, ONE_DISTBOOT)
        return ProtocolError(f"refused this rank: {why}")

    def _receive_membership(self, end: float) -> Membership:
        """The answer of rank 0, complete before `end`, however slowly it arrives."""
        answer: Any = self._channel.verify(
            self._next_frame(end), self._frames, Members, Failed, Refused
        )
        if isinstance(answer, Refused):
            raise ProtocolError(f"refused this rank: {short_repr(answer.why)}")
        if isinstance(answer, Failed):
            code, text, hint = answer.problem
            text = said_by(f"{self._unit} 0", text)
            raise as_error((code, text, hint), "")
        return Membership.from_message(answer, self._own.world_size)

    def _send(self, message: object) -> None:
        self._open.sendall(self._channel.sign(message))

    def _next_frame(self, end: float) -> Frame:
        connection = self._open
        frames: list[Frame] = []
        while not frames:
            self._wanted()
            connection.settimeout(min(max(end - time.monotonic(), 0.01), _INTERVAL))
            try:
                # Exactly one frame: later bytes belong to the agent.
                data = connection.recv(min(self._frames.missing, _MOST_RECEIVED))
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
        plan = self._plan
        where = format_address(plan.hosts[0], plan.ports[0])
        if plan.source:
            where += f" (from {plan.source})"
        text = f"{self._unit} 0 did not answer at {where} within {plan.join_timeout:g} s: {why}"
        if self._refusal not in ("", str(why)):
            text += f"; before that, {self._refusal}"
        from .earlier import describe_earlier  # here and below, as few jobs need it

        rank_0 = [agent for agent in plan.earlier if agent.number == 0]
        text += describe_earlier(rank_0, self._unit)
        if isinstance(why, _UnresolvedError):
            hint = "check the name, or give an address that this host can look up"
            return DistbootError("unresolvable-address", text, hint)
        return DistbootError("missing-rank", text, self._hint_for_rank_0())

    def _hint_for_rank_0(self) -> str:
        if self._refusal:
            return self._remedy
        if self._plan.earlier:
            from .earlier import COME_BACK

            return COME_BACK
        unit = self._unit
        hint = (
            f"look at the output of {unit} 0: "
            "it ended early, never started, is on a different host, or behind a firewall"
        )
        # Here, as the agent of `init` needs nothing else of detection
        from ..detection.here import is_own_host
        from ..detection.parse import is_loopback

        hosts = self._plan.hosts
        is_loopback_only = all(map(is_loopback, hosts))
        # On node 0 the name of this host is right
        is_named = self._own.node_rank != 0 and all(map(is_own_host, hosts))
        is_here = is_loopback_only or is_named
        if is_here and self._own.num_nodes != 1:
            hint += (
                f"; {hosts[0]} is this host: if {unit} 0 is on a different one,"
                " set MASTER_ADDR to its name"
            )
        return hint


def _connected(family: int, address: Any, seconds: float) -> socket.socket:
    # A kernel without IPv6 refuses already the socket
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        connection.connect(address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except OSError:
        connection.close()
        raise
    return connection
