"""Both sides of a roll call in threads of this process, over real sockets, and peers that misbehave."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from distboot import DistbootError
from distboot.record import Record
from distboot.rollcall.client import Client
from distboot.rollcall.ready import Ready
from distboot.rollcall.server import Server
from distboot.rollcall.wire import VERSION, Frames, Membership, frame
from distboot.roster import Roster

OURS = Membership("5c2f10aa")
HELLO = frame({"distboot": VERSION, "job": OURS.job, "nonce": "0" * 32})


def record(rank: int, world_size: int, node: str = "a", **more: Any) -> Record:
    """A record of a rank on a node."""
    pid = 1000 + rank
    return Record(rank, "openmpi", node, f"{node}/boot", pid, f"{node}/{pid}", world_size, **more)


class Process(threading.Thread):
    """A rank in a thread of its own; subclasses say what it does. Its error is kept, whatever it is."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.roster: Roster | None = None
        self.offers: dict[int, str] = {}
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.meet()
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.error = error

    def meet(self) -> None:
        raise NotImplementedError

    def met(self) -> Roster:
        """The roster, once it is there; fails if there is an error instead."""
        self.join(30)
        assert self.error is None, self.error
        assert self.roster is not None
        return self.roster

    def failed(self) -> DistbootError:
        """The error that must have come."""
        self.join(30)
        assert isinstance(self.error, DistbootError), self.error
        return self.error


class Rank0(Process):
    """Rank 0 at its server."""

    def __init__(
        self, own: Record, join_timeout: float = 20, membership: Membership = OURS, *, ready: Ready | None = None
    ) -> None:
        super().__init__()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.server = Server(self.listener, own, membership)
        self.arguments = join_timeout, ready
        self.start()

    def meet(self) -> None:
        join_timeout, ready = self.arguments
        self.roster = self.server.hold(join_timeout)
        if ready is not None:
            self.offers = self.server.confirm(ready, join_timeout)

    def close(self) -> None:
        self.join(30)
        self.server.close()
        self.listener.close()


class Rank(Process):
    """Another rank. With `ready` it takes the second step, after waiting for `gate`."""

    def __init__(
        self,
        port: int,
        own: Record,
        join_timeout: float = 20,
        membership: Membership = OURS,
        *,
        ready: Ready | None = None,
        gate: Callable[[Client], object] = lambda _: None,
    ) -> None:
        super().__init__()
        self.client = Client(["127.0.0.1"], [port], own, membership)
        self.arguments = join_timeout, ready, gate
        self.start()

    def meet(self) -> None:
        join_timeout, ready, gate = self.arguments
        try:
            self.roster = self.client.report(join_timeout)
            gate(self.client)
            if ready is not None:
                self.offers = self.client.confirm(ready, join_timeout)
        finally:
            self.client.close()


class FakeRank0(threading.Thread):
    """Somebody who listens where rank 0 is expected, and does to each connection what a function says."""

    def __init__(self, talk: Callable[[socket.socket], None]) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.talk = talk
        self.start()

    def run(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            self.talk(connection)

    def close(self) -> None:
        with suppress(OSError):  # a second time
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.join(30)


def welcome(connection: socket.socket) -> None:
    """What rank 0 answers to a hello; then it has read the record, too."""
    connection.recv(65536)
    connection.sendall(frame({"distboot": VERSION, "challenge": "0" * 32}))
    connection.recv(65536)


def peer(port: int, data: bytes) -> socket.socket:
    """A connection to rank 0 of somebody who sends this."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(data)
    return connection


def answers(connection: socket.socket) -> list[dict[str, object]]:
    """All that is said to a peer until its connection ends."""
    frames, messages = Frames(1 << 20), []
    with connection:
        while data := connection.recv(65536):
            messages += frames.feed(data)
    return messages
