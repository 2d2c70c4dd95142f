"""The probe of a link: how long a round trip to a neighbor takes, and how fast it receives.

Over one TCP connection, which the neighbor accepts at a port that the kernel has chosen:

    prober       neighbor
    token     →            32 characters, else the neighbor closes the connection
    ping      ↔  ping      8 bytes each, several times; the shortest round trip counts
    end       →            8 other bytes
    data      →            for `_SENDING` seconds, as fast as it goes
              ←  16 bytes  how many bytes the neighbor has received, in how many microseconds

A host whose CPUs are busy answers late, too. So the prober goes on for a moment while all answers
were late.

The neighbor counts, as the kernel of the prober takes more than the link carries. Every wait has a
limit, and so has the number of connections at a time: any process that reaches the port may
connect.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from functools import partial
from math import inf

from ..base.errors import DistbootError, reason_of
from ..base.text import format_address
from ..base.threads import start_without_signals
from ..job.messages import LONGEST_SEEN, Probe, Probed
from ..rendezvous.connection_pool import listening

_CONNECT = 0.9  # seconds
_ANSWER = 0.5  # seconds for each answer on a connection
_ROUND_TRIPS = 5  # at least
_QUICK = 0.005  # seconds: no link with such a round trip is a bad one
_SLOW = 0.3  # seconds to go on for; a container is held up for 0.1 s at a time by its CPU limit
_MOST_PINGS = 200
_SENDING = 0.06  # seconds
_RECEIVING = 0.2  # seconds: a slow link still has to carry what the prober's kernel holds
_CHUNK = 1 << 18  # bytes
_PING = bytes(8)
_END = b"\xff" * len(_PING)
_COUNT = struct.Struct("!QQ")
_MOST_CONNECTIONS = 4  # at a time
_PAUSE = 0.02  # seconds until the next try to accept a connection


class LinkServer:
    """Answers the probes of a neighbor until it is closed."""

    def __init__(self) -> None:
        """`PortInUse`: this host gives no port; `OSError`: this process may open no more files;
        `DistbootError`: it may start no more threads.
        """
        self._listener = listening(0)
        self.port: int = self._listener.getsockname()[1]
        self.token = os.urandom(16).hex()
        self._free = threading.Semaphore(_MOST_CONNECTIONS)
        self._is_closed = False
        try:
            start_without_signals("distboot-link", self._accept)
        except DistbootError:
            self._listener.close()
            raise

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes up the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it is closed, or this process may open no more files for now
                time.sleep(_PAUSE)
                continue
            self._start(connection)

    def _start(self, connection: socket.socket) -> None:
        """Answer a connection in a thread of its own; close one too many."""
        if not self._free.acquire(blocking=False):
            connection.close()
            return
        try:
            start_without_signals("distboot-probed", partial(self._serve, connection))
        except DistbootError:  # this user may start no more threads
            connection.close()
            self._free.release()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):
                _answer(connection, self.token)
        finally:
            self._free.release()


def _answer(connection: socket.socket, token: str) -> None:
    """The neighbor's part."""
    connection.settimeout(_ANSWER)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    shown = _receive(connection, len(token))
    if not hmac.compare_digest(shown, token.encode()):
        return
    for _ in range(_MOST_PINGS):
        ping = _receive(connection, len(_PING))
        if ping == _END:
            break
        connection.sendall(ping)
    received, seconds = _count(connection)
    connection.sendall(_COUNT.pack(received, max(int(seconds * 1e6), 1)))


def _count(connection: socket.socket) -> tuple[int, float]:
    """Bytes that arrive, and the seconds from the first to the last of them."""
    room = bytearray(_CHUNK)
    total = connection.recv_into(room)
    begin = time.perf_counter()
    last = begin
    first = total
    while total and last < begin + _RECEIVING:
        count = connection.recv_into(room)
        if not count:
            break
        total += count
        last = time.perf_counter()
    return total - first, last - begin


def probe(question: Probe, host_of_rank_0: str) -> Probed:
    """Probe the link to a neighbor; that it cannot be reached is an answer, too."""
    host = question.host or host_of_rank_0
    where = format_address(host, question.port)
    try:
        with socket.create_connection((host, question.port), _CONNECT) as connection:
            round_trip, rate = _measure(connection, question.token)
    except TimeoutError:
        return Probed(question.number, problem=f"no answer from {where} in time")
    except OSError as error:
        why = reason_of(error)
        return Probed(question.number, problem=f"{where}: {why}"[:LONGEST_SEEN])
    return Probed(question.number, round_trip, rate)


def _measure(connection: socket.socket, token: str) -> tuple[float, float]:
    """The prober's part: the shortest round trip in seconds, and bytes a second."""
    connection.settimeout(_ANSWER)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token.encode())
    round_trip = _shortest_round_trip(connection)
    connection.sendall(_END)
    _send(connection)
    received, microseconds = _COUNT.unpack(_receive(connection, _COUNT.size))
    return round_trip, received * 1e6 / max(microseconds, 1)


def _shortest_round_trip(connection: socket.socket) -> float:
    begin = time.perf_counter()
    end = begin + _SLOW
    shortest = inf
    for number in range(1, _MOST_PINGS):
        connection.sendall(_PING)
        _receive(connection, len(_PING))
        now = time.perf_counter()
        shortest = min(shortest, now - begin)
        begin = now
        is_known = shortest < _QUICK or now > end
        if number >= _ROUND_TRIPS and is_known:
            break
    return shortest


def _send(connection: socket.socket) -> None:
    """Send for a moment; the neighbor may stop to read before that."""
    data = bytes(_CHUNK)
    end = time.perf_counter() + _SENDING
    with suppress(OSError):
        while time.perf_counter() < end:
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)


def _receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes; `OSError`: they do not come within `_ANSWER`, also if a byte comes now and then."""
    end = time.perf_counter() + _ANSWER
    data = b""
    while len(data) < size:
        left = end - time.perf_counter()
        connection.settimeout(max(left, 0.001))
        more = connection.recv(size - len(data))
        if not more:
            raise ConnectionError("it closed the connection")
        data += more
    connection.settimeout(_ANSWER)
    return data
