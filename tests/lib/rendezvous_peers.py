"""Both sides of a roll call in threads of this process, over real sockets, and peers that misbehave."""

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import create_autospec

from inside import replace

from distboot import DistbootError
from distboot.agent.agent import Agent
from distboot.agent.link import AgentLink
from distboot.base.settings import SupervisionSettings
from distboot.job.messages import KINDS, Register
from distboot.rendezvous.coordinator import Coordinator, TakesBack
from distboot.rendezvous.join import Joined
from distboot.rendezvous.membership import JoinPlan, JoinResult, Membership
from distboot.rendezvous.messages import (
    Hello,
    Members,
    Ready,
    Refused,
    Welcome,
    WorkerInfo,
)
from distboot.rendezvous.protocol import (
    HEADER,
    Channel,
    Frames,
    decode,
    encode,
)
from distboot.rendezvous.worker import Worker

OURS = "5c2f10aa"  # the job
OPEN = Channel()  # of a job without a secret
FROM_RANK_0 = (type(None), Welcome, Members, Refused, *KINDS)
NONCE = "0" * 32
HELLO = OPEN.sign(Hello(OURS, NONCE))


def framed(body: bytes | str | dict[str, Any]) -> bytes:
    """A frame with any body, which no secret authenticates."""
    data = (
        json.dumps(body).encode()
        if isinstance(body, dict)
        else body.encode()
        if isinstance(body, str)
        else body
    )
    return len(data).to_bytes(4, "big") + bytes(HEADER - 4) + data


def altered(message: object, **fields: Any) -> bytes:
    """A frame with a message of which some fields are others."""
    return framed({**json.loads(encode(message)), **fields})


def record(rank: int, world_size: int, node: str = "a", **more: Any) -> WorkerInfo:
    """A record of a rank on a node."""
    pid = 1000 + rank
    return WorkerInfo(
        rank, "openmpi", node, f"{node}/boot", pid, f"{node}/{pid}", world_size, **more
    )


def plan_for(
    own: WorkerInfo, join_timeout: float = 20, secret: str = "", port: int = 1
) -> JoinPlan:
    """The plan of a rank of our job, whose rank 0 listens on this host."""
    return JoinPlan(
        own,
        OURS,
        ("127.0.0.1",),
        (port,),
        join_timeout,
        secret,
    )


class Process(threading.Thread):
    """A rank in a thread of its own; subclasses say what it does. Its error is kept, whatever it is."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.membership: Membership | None = None
        self.offers: dict[int, str] = {}
        self.agent: Agent | None = None  # once it gets ready
        self.rank = 0
        self.ended = threading.Event()  # set where a test wants the agents to go on for a while
        self.ended.set()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.meet()
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.error = error

    def meet(self) -> None:
        raise NotImplementedError

    def get_ready(self, side: Coordinator | Worker, ready: Ready, limit: float) -> None:
        """What the agent of the rank does once all have met."""
        assert self.membership is not None
        joined = Joined(side._plan)
        if isinstance(side, Coordinator):
            joined.coordinator = side
        else:
            joined.worker = side
        joined.result = JoinResult(self.membership)
        self.agent = agent = Agent(joined, SupervisionSettings(5.0), held=False)
        agent.shell.take(self.rank, Register(1000 + self.rank), time.monotonic())
        ours, its = socket.socketpair()
        agent.scripts.serve(its, self.rank)

        def work() -> None:
            agent.loop.run()
            agent.close()

        working = threading.Thread(target=work, daemon=True)
        working.start()
        try:
            with ours:
                self.offers = AgentLink(ours).get_ready(replace(ready, limit=limit))
        finally:
            self.ended.wait(20)
            agent.shell.hurry()
            working.join(20)  # what it prints belongs to this test

    def is_ready(self) -> bool:
        """Whether rank 0, which this is, has got ready by now."""
        return self.agent is not None and not self.agent.shell.facts.is_starting

    def met(self) -> Membership:
        """The membership, once it is there; fails if there is an error instead."""
        self.join(30)
        assert self.error is None, self.error
        assert self.membership is not None
        return self.membership

    def failed(self) -> DistbootError:
        """The error that must have come."""
        self.join(30)
        assert isinstance(self.error, DistbootError), self.error
        return self.error


class Rank0(Process):
    """Rank 0 at its server."""

    def __init__(
        self,
        own: WorkerInfo,
        join_timeout: float = 20,
        secret: str = "",
        *,
        ready: Ready | None = None,
    ) -> None:
        super().__init__()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.server = Coordinator(self.listener, plan_for(own, join_timeout, secret))
        self.arguments = join_timeout, ready
        self.start()

    def meet(self) -> None:
        join_timeout, ready = self.arguments
        self.server.returns = create_autospec(TakesBack)  # until there is an agent
        self.membership = self.server.wait_for_join()
        if ready is not None:
            self.get_ready(self.server, ready, join_timeout)

    def close(self) -> None:
        self.join(30)
        self.server.close()
        self.listener.close()


class Rank(Process):
    """Another rank. With `ready` it takes the second step, after waiting for `gate`."""

    def __init__(
        self,
        port: int,
        own: WorkerInfo,
        join_timeout: float = 20,
        secret: str = "",
        *,
        ready: Ready | None = None,
        gate: Callable[[Worker], object] = lambda _: None,
    ) -> None:
        super().__init__()
        self.client = Worker(plan_for(own, join_timeout, secret, port))
        self.rank = own.rank
        self.arguments = join_timeout, ready, gate
        self.start()

    def meet(self) -> None:
        join_timeout, ready, gate = self.arguments
        try:
            self.membership = self.client.report()
            gate(self.client)
            if ready is not None:
                self.get_ready(self.client, ready, join_timeout)
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
    connection.sendall(OPEN.sign(Welcome(NONCE)))
    connection.recv(65536)


def peer(port: int, data: bytes) -> socket.socket:
    """A connection to rank 0 of somebody who sends this."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(data)
    return connection


def answers(connection: socket.socket) -> list[Any]:
    """All messages that are sent to a peer until its connection ends."""
    frames = Frames(1 << 20)
    messages = []
    with connection:
        while data := connection.recv(65536):
            messages += [
                decode(frames.inflated(frame), *FROM_RANK_0) for frame in frames.feed(data)
            ]
    return messages


def refusal(connection: socket.socket) -> str:
    """Why the connection of a peer was ended."""
    last = answers(connection)[-1]
    assert isinstance(last, Refused), last
    return last.why
