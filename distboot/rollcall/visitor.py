"""The side of every other rank at the gate: it says where it is, and waits for rank 0's word."""

from __future__ import annotations

import socket
import sys

from ..address import socket_said
from ..errors import DistbootError, printable, quoted, tell
from ..placement import Placement
from ..record import as_error, is_problem
from .doors import LONGEST_FAILURE, Door, Patience, door_of
from .wire import MOST_FROM_A_RANK, Frames, Session, WireError, canonical

_CONNECT_AT_ONCE = 5.0  # seconds; there is room in rank 0's queue, even if it is busy
_LAST_WORD = 1.0  # seconds beyond the limit for rank 0 to say who is missing
_IDLE, _INTERVAL = 60, 20  # seconds; a firewall may forget a connection on which nothing was said for minutes


class Visitor:
    """Another rank at the gate.

    Args:
        address: host and port of rank 0's listening socket.
        session: of this rank in the roll call.
        job: digest of the job.
        placement: of this rank.
    """

    def __init__(self, address: tuple[str, int], session: Session, job: str, placement: Placement) -> None:
        self._address, self._session, self._job, self._placement = address, session, job, placement
        self._frames = Frames(MOST_FROM_A_RANK)
        self._failed: dict[Door, str] = {}  # where the one that opened it has failed, and why
        self._passed: dict[tuple[str, int | None], int] = {}  # name of a door -> how often we may pass
        self._connection: socket.socket | None = None
        try:
            self._connect(_CONNECT_AT_ONCE)
        except ConnectionRefusedError:  # it has ended already, or closed its context: said when it is needed
            pass
        except OSError as error:  # it is tried once more when it is needed
            said = f"rank 0 is not to be reached at {socket_said(*address)} ({error.strerror or error})"
            tell(placement.who, f"warning: {said}: main_first() and the like will not work before it is")

    def meet(self, door: Door, limit: float) -> None:
        """Wait until all are there.

        Raises:
            DistbootError: `missing-rank`.
        """
        patience = Patience(limit, speaks=self._placement.rank == 1)
        self._send("here", door.as_message(), patience, door)
        if self._passes(door, patience, f"{door.said}: rank 0 has not let us pass yet"):
            return
        self._send("late", [door.as_message(), limit], patience, door)
        if self._passes(door, Patience(_LAST_WORD, speaks=False), ""):
            return
        raise DistbootError(
            "missing-rank",
            f"{door.said}: rank 0 did not come within {limit:g} s",
            "look at the output of rank 0: it hangs, is busy with something else, or does not come here",
        )

    def open(self, door: Door, limit: float, failure: str | None = None) -> None:
        """Let all ranks of this node pass, which wait at this door, or will; or let them know that we have failed."""
        message = door.as_message()
        kind, content = ("through", message) if failure is None else ("failed", [message, failure])
        self._send(kind, content, Patience(limit, speaks=False), door)

    def wait(self, door: Door, limit: float) -> None:
        """Wait until the door is open.

        Raises:
            DistbootError: `missing-rank`.
        """
        if door.node is None:
            whose, speaks = "rank 0", self._placement.rank == 1
        else:
            whose, speaks = "the first rank there", self._placement.local_rank == 1
            whose += "" if door.node == 0 else ", or rank 0, which passes its word on,"
        patience = Patience(limit, speaks=speaks)
        if self._passes(door, patience, f"{door.said}: {whose} is not through yet"):
            if door in self._failed:
                raise door.failed("rank 0" if door.node is None else "the first rank there", self._failed.pop(door))
            return
        self._send("late", [door.as_message(), limit], patience, door)
        raise door.not_opened(whose, limit)

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()

    def _passes(self, door: Door, patience: Patience, said: str) -> bool:
        """Whether rank 0 lets us pass before our patience is over."""
        while self._passed.get(door.name, 0) < door.times:
            if not patience.left():
                return False
            line = patience.line(said)
            if line is not None:
                tell(self._placement.who, line)
            self._read(door, patience)
        return True

    def _read(self, door: Door, patience: Patience) -> None:
        connection = self._connected(door, patience)
        connection.settimeout(max(patience.pause(), 0.01))
        try:
            data = connection.recv(65536)
            if not data:
                raise self._ended(door)
            for message in self._frames.feed(data):
                self._take(message)
        except TimeoutError:
            return
        except (OSError, WireError) as error:
            raise self._ended(door, (isinstance(error, OSError) and error.strerror) or str(error)) from None

    def _take(self, message: dict[str, object]) -> None:
        if "refused" in message:
            raise WireError(f"it refused this rank: {quoted(message['refused'])}")
        kind, content = self._session.opened(message, "pass", "failed", "error")
        if kind == "error":
            if not is_problem(content):
                raise WireError("sends a broken error")
            raise as_error(content, "rank 0 says")
        failure = None
        if kind == "failed":
            content, failure = content if isinstance(content, list) and len(content) == 2 else (None, None)
        passed = door_of(content)
        if passed is None or (kind == "failed" and not isinstance(failure, str)):
            raise WireError(f"sends a broken {kind}")
        if failure is not None:
            self._failed[passed] = printable(str(failure))[:LONGEST_FAILURE]
        self._passed[passed.name] = passed.times

    def _send(self, kind: str, content: object, patience: Patience, door: Door) -> None:
        connection = self._connected(door, patience)
        try:
            connection.settimeout(max(patience.left(), 1.0))
            connection.sendall(self._session.sealed(kind, canonical(content)))
        except OSError as error:
            raise self._ended(door, error.strerror) from None

    def _connected(self, door: Door, patience: Patience) -> socket.socket:
        """The connection; if rank 0 had no room for it when the framework started, once it has."""
        while self._connection is None:
            try:
                self._connect(max(patience.left(), 0.1))
            except OSError as error:  # noqa: PERF203 - what is tried is a connection
                if not isinstance(error, TimeoutError) or not patience.left():
                    raise self._ended(door, error.strerror) from None
        return self._connection

    def _connect(self, limit: float) -> None:
        connection = socket.create_connection(self._address, timeout=limit)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if sys.platform == "linux":
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _INTERVAL)
            connection.sendall(self._session.sealed("gate", canonical([self._job, self._placement.rank])))
        except OSError:
            connection.close()
            raise
        self._connection = connection

    def _ended(self, door: Door, why: str | None = None) -> DistbootError:
        return DistbootError(
            "missing-rank",
            f"{door.said}: rank 0 is not at {socket_said(*self._address)} any more"
            f"{f' ({why})' if why else ''}: it ended, or closed its context",
            "look at the output of rank 0",
        )
