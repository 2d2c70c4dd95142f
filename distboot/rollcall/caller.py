"""A call to rank 0: wherever it may listen, again and again, until it answers as rank 0 of this very job."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from ..address import is_loopback, socket_said
from ..errors import DistbootError, quoted
from ..record import as_error, is_problem
from ..rendezvous import Wait
from ..resolve import is_this_host, look_up
from .wire import (
    MOST_FROM_A_RANK,
    ONE_DISTBOOT,
    VERSION,
    Frames,
    Membership,
    Session,
    WireError,
    canonical,
    frame,
    fresh,
    most_from_rank_0,
)

_FIRST_LIMIT = 1.0  # seconds for a stranger to answer; it grows, because rank 0 may be busy with thousands
_LAST_LIMIT = 10.0


class NoAnswerError(Exception):
    """An attempt failed; the text says how."""


class _UnreachableError(NoAnswerError):
    """The host itself did not answer, so that its other ports need not be tried."""


class _UnresolvedError(_UnreachableError):
    """The name of the host does not resolve."""


class Caller(ABC):
    """Whoever calls rank 0; subclasses say what follows when it has answered.

    Args:
        hosts: names or addresses of rank 0's host, the likeliest first.
        ports: those that rank 0 may listen at, in the order in which it tries them.
        who: calls, as its lines say it.
        membership: what tells the ranks of this job from everybody else.
        world_size: of the job.
        source: what says that rank 0 is there, for example "MASTER_ADDR".

    Attributes:
        host: where rank 0 was reached, once it was; and so is `port`.
        resolves: whether this host could look that name up.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        ports: Sequence[int],
        who: str,
        membership: Membership,
        *,
        world_size: int,
        source: str = "",
    ) -> None:
        self._hosts = hosts
        self._where = socket_said(hosts[0], ports[0]) + (f" (from {source})" if source else "")
        self._ports = ports
        self._who = who
        self._membership = membership
        self._most = most_from_rank_0(world_size)
        self._frames = Frames(self._most)
        self._session = Session()
        self._refusal = ""  # what somebody who listens there said last to send us away
        self._connection: socket.socket | None = None
        self.host, self.port = hosts[0], ports[0]
        self.resolves = True

    @abstractmethod
    def _welcomed(self, end: float) -> None:
        """Rank 0 has answered; what follows is to be over when `time.monotonic` says `end`."""

    def call(
        self, join_timeout: float, *, quiet: bool = False, first_limit: float = _FIRST_LIMIT, spent: float = 0.0
    ) -> None:
        """Call until rank 0 answers. What does not answer as rank 0 of this job is tried again until the timeout.

        Args:
            join_timeout: in seconds.
            quiet: whether another rank says what is being waited for.
            first_limit: seconds for the first answer.
            spent: seconds of the timeout that are over already.

        Raises:
            DistbootError: what rank 0 says is wrong with the job, or `missing-rank` for rank 0 itself.
        """
        left = max(join_timeout - spent, 0.1)
        end = time.monotonic() + left
        line = f"rank 0 does not answer at {socket_said(self.host, self.port)} yet"
        waiting = Wait(self._who, left, line, quiet=quiet)
        limit = first_limit
        while True:
            try:
                return self._round(end, limit)
            except NoAnswerError as failure:
                last = failure
            if not waiting.once_more(str(last)):
                raise self._unanswered(join_timeout, last)
            limit = min(limit * 2, _LAST_LIMIT)

    def knock(self, limit: float) -> None:
        """Call once, within `limit` seconds.

        Raises:
            NoAnswerError: nobody answers as rank 0 of this job.
            DistbootError: what rank 0 says is wrong with it.
        """
        self._round(time.monotonic() + limit, limit)

    def own_address(self) -> str:
        """The address of this host from which rank 0 was reached."""
        assert self._connection is not None
        return str(self._connection.getsockname()[0])

    def address_of_rank_0(self) -> str:
        """The address at which rank 0 was reached."""
        assert self._connection is not None
        # With the scope, without which a link-local address of IPv6 means nothing.
        return socket.getnameinfo(self._connection.getpeername(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()

    def _round(self, end: float, limit: float) -> None:
        """Knock once wherever rank 0 may be; why the first of these did not answer, if none did."""
        first: NoAnswerError | None = None
        for host in self._hosts:
            for port in self._ports:
                try:
                    return self._attempt(host, port, end, limit)
                except NoAnswerError as failure:  # noqa: PERF203 - what is tried is a connection
                    first = first or failure
                    if isinstance(failure, _UnreachableError):
                        break
        assert first is not None
        raise first

    def _attempt(self, host: str, port: int, end: float, limit: float) -> None:
        limit = max(min(end - time.monotonic(), limit), 0.1)
        self._connection = self._connected(host, port, end, limit)
        self.host, self.port = host, port
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._talk(end, time.monotonic() + limit)

    def _talk(self, end: float, welcome_end: float) -> None:
        """Say hello, and what follows; whatever is wrong ends the connection."""
        try:
            self._greet(welcome_end)
            self._welcomed(end)
        except BaseException as error:
            self.close()
            if isinstance(error, WireError | RecursionError):
                self._refusal = f"who listens there {error}"
                raise NoAnswerError(self._refusal) from None
            if isinstance(error, TimeoutError):
                raise NoAnswerError("somebody listens there, and does not answer as rank 0") from None
            if isinstance(error, OSError):
                raise NoAnswerError(error.strerror or str(error)) from None
            raise

    def _connected(self, host: str, port: int, end: float, limit: float) -> socket.socket:
        self.resolves = True
        try:
            candidates = look_up(host, port, limit)
        except OSError as error:
            if not is_this_host(host):
                raise _UnresolvedError(error.strerror or str(error)) from None
            self.resolves = False  # nobody has told this host its own name
            candidates = [(socket.AF_INET, ("127.0.0.1", port))]
        failure: OSError | None = None
        for family, address in candidates:
            try:
                connection = socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:  # a kernel without IPv6
                failure = error
                continue
            try:
                connection.settimeout(max(min(end - time.monotonic(), limit), 0.1))
                connection.connect(address)
            except OSError as error:
                connection.close()
                failure = error
                continue
            return connection
        if isinstance(failure, ConnectionRefusedError | ConnectionResetError):
            raise NoAnswerError(failure.strerror)
        raise _UnreachableError((failure and failure.strerror) or str(failure))

    def _greet(self, welcome_end: float) -> dict[str, object]:
        """Say hello: the answer of rank 0."""
        assert self._connection is not None
        self._frames, nonce = Frames(MOST_FROM_A_RANK), fresh()
        self._connection.sendall(frame({"distboot": VERSION, "job": self._membership.job, "nonce": nonce}))
        welcome = self._next(welcome_end)
        if "incompatible" in welcome and not self._membership.secret:
            message = f"rank 0 says: {quoted(welcome['incompatible'])}"
            raise DistbootError("version-mismatch", message, ONE_DISTBOOT)
        challenge = welcome.get("challenge")
        if welcome.get("distboot") != VERSION or not isinstance(challenge, str):
            raise WireError("is not rank 0")
        self._session = Session(self._membership.secret, "this rank", challenge, nonce)
        self._frames = Frames(self._most)  # only now: a roster is long
        return welcome

    def _send(self, kind: str, content: object) -> None:
        assert self._connection is not None
        self._connection.sendall(self._session.sealed(kind, canonical(content)))

    def _next(self, end: float) -> dict[str, object]:
        """The next message, which must be complete before `end`, however slowly it trickles in."""
        assert self._connection is not None
        messages: list[dict[str, object]] = []
        while not messages:
            self._connection.settimeout(max(end - time.monotonic(), 0.01))
            # Not a byte more than this message: what follows may be for whoever takes the connection over.
            data = self._connection.recv(min(self._frames.missing, 1 << 20))
            if not data:
                raise WireError("closed the connection")
            messages = self._frames.feed(data)
            if time.monotonic() > end and not messages:
                raise TimeoutError
        (message,) = messages
        if "refused" in message:
            raise WireError(f"refused this rank: {quoted(message['refused'])}")
        return message

    def _unanswered(self, join_timeout: float, why: NoAnswerError) -> DistbootError:
        code = "missing-rank"
        hint = "look at the output of rank 0: it ended early, never started, is on another host, or behind a firewall"
        if isinstance(why, _UnresolvedError):
            code, hint = "unresolvable-address", "check the name, or give an address that this host can look up"
        elif self._refusal:
            hint = "all ranks need the same job, the same distboot and the same DISTBOOT_SECRET, or all of them none"
        elif all(map(is_loopback, self._hosts)):
            hint += f"; {self._hosts[0]} is this very host, so if rank 0 is on another one, set MASTER_ADDR to its name"
        earlier = f"; before that, {self._refusal}" if self._refusal and self._refusal != str(why) else ""
        said = f"{why}{earlier}"
        return DistbootError(code, f"rank 0 did not answer at {self._where} within {join_timeout:g} s: {said}", hint)


def told(said: object, whose: str = "rank 0 says") -> DistbootError:
    """The error that rank 0 sent to all, or the relay to the ranks of its node."""
    if not is_problem(said):
        raise WireError("sends a broken error")
    return as_error(said, whose)
