"""Both sides of the lifeline in this process, over real connections: what is first, and peers that misbehave."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
from lifelines import pair

from distboot.lifeline.ends import End
from distboot.lifeline.hub import Hub
from distboot.lifeline.line import FOR_OTHERS, KINDS, Line
from distboot.lifeline.settings import Settings
from distboot.lifeline.spoke import Spoke
from distboot.lifeline.trunk import Trunk
from distboot.lifeline.verdict import Seat, Verdict
from distboot.rollcall.wire import Session, canonical

SETTINGS = Settings(bound=15, grace=5)
SEATS = [Seat(rank, f"host-{rank // 2}", rank // 2, rank % 2) for rank in range(4)]
DIED = End(signal=9, when=1.0)
OF_A_PEER = End(words="RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:3456", when=1.0)


@dataclass
class Job:
    """Rank 0's side, and the raw other ends of its lines."""

    hub: Hub
    said: list[str]
    peers: dict[int, socket.socket]
    now: float = 0.0

    def send(self, rank: int, kind: str, content: object, session: Session | None = None) -> None:
        """What a rank says, read by rank 0."""
        self.peers[rank].sendall((session or Session()).sealed(kind, canonical(content)))
        self.read(rank)

    def read(self, rank: int) -> None:
        line = self.hub.members[rank].line
        assert line is not None
        line.socket.settimeout(5)
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        with suppress(ConnectionResetError):
            line.socket.recv(1, socket.MSG_PEEK)
        line.socket.setblocking(False)
        self.hub.read(line, self.now)
        self.hub.turn(self.now)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.hub.turn(self.now)


@pytest.fixture
def running() -> Iterator[Job]:
    said: list[str] = []
    pairs = {rank: pair() for rank in range(1, 4)}
    lines = {rank: Line(one, Session()) for rank, (one, _) in pairs.items()}
    hub = Hub(SEATS, lines, SETTINGS, held=False, say=said.append)
    hub.start(100)
    started = Job(hub, said, {rank: other for rank, (_, other) in pairs.items()}, time.monotonic())
    for rank in pairs:
        started.send(rank, "watch", {"pid": 100 + rank})
    yield started
    hub.close()
    for _, other in pairs.values():
        other.close()


def _first(job: Job) -> tuple[int, ...]:
    assert job.hub.verdict is not None
    return job.hub.verdict.ranks


def test_failure_is_decided_at_once_and_told_to_all(running: Job) -> None:
    running.send(2, "end", DIED.as_message())
    assert _first(running) == (2,)
    received = running.peers[1].recv(65536)
    assert b'"first"' in received
    assert b"rank 2 failed first: killed by SIGKILL" in received
    assert b"on host-1 (node 1, local rank 0, process 102)" in received
    assert running.said == [running.hub.verdict and running.hub.verdict.text]
    assert running.hub.order is not None


def test_later_failures_are_counted_and_not_said(running: Job) -> None:
    running.send(2, "end", DIED.as_message())
    running.send(3, "end", End(code=3, when=1.0).as_message())
    running.send(1, "end", End(signal=15, told=True, when=1.0).as_message())
    assert (_first(running), running.hub.later, len(running.said)) == ((2,), 1, 1)


def test_steps_of_a_rank_are_taken_and_what_is_none_is_not(running: Job) -> None:
    running.send(2, "steps", {"group_ready": 5.0})
    assert running.hub.members[2].steps == {"group_ready": 5.0}
    running.send(3, "steps", {"group_ready": "now"})
    assert running.said == [
        "warning: rank 3 on host-1 (node 1, local rank 1, process 103) sends broken steps; it is not watched any more"
    ]


def test_cause_comes_before_its_consequence(running: Job) -> None:
    running.send(3, "trouble", OF_A_PEER.as_message())
    assert running.hub.verdict is None
    running.send(2, "end", DIED.as_message())
    running.later(1)
    assert (_first(running), running.hub.later) == ((2,), 1)


def test_consequence_is_named_when_nothing_explains_it(running: Job) -> None:
    running.send(3, "trouble", OF_A_PEER.as_message())
    running.later(1)
    assert _first(running) == (3,)


def test_rank_that_is_about_to_end_is_waited_for(running: Job) -> None:
    running.send(2, "ending", None)
    running.send(3, "trouble", OF_A_PEER.as_message())
    running.later(1)
    assert running.hub.verdict is None
    running.send(2, "end", End(code=3, when=1.0).as_message())
    running.later(1)
    assert _first(running) == (2,)


def test_but_not_for_ever(running: Job) -> None:
    running.send(2, "ending", None)
    running.send(3, "trouble", OF_A_PEER.as_message())
    running.later(1)
    running.later(15)
    assert _first(running) == (3,)


def test_failure_comes_before_the_signal_with_which_a_launcher_answers_it(running: Job) -> None:
    running.send(1, "stopping", 15)
    running.send(2, "end", DIED.as_message())
    assert _first(running) == (2,)
    assert running.hub.verdict is not None
    assert running.hub.verdict.is_failure


def test_signal_from_outside_comes_before_what_peers_say_of_it(running: Job) -> None:
    running.send(1, "stopping", 15)
    running.send(2, "trouble", OF_A_PEER.as_message())
    running.later(1)
    assert running.said[0].startswith("stopped by SIGTERM from outside: rank 1 ")


def test_signal_from_outside_alone_stops_the_job(running: Job) -> None:
    running.send(1, "stopping", 15)
    running.later(1)
    assert running.hub.verdict is not None
    assert not running.hub.verdict.is_failure
    assert running.said[0].startswith("stopped by SIGTERM from outside: rank 1 got it first, on host-0")


def test_ranks_of_a_host_that_dies_are_named_together(running: Job) -> None:
    for rank in (3, 2):
        running.peers[rank].close()
        running.read(rank)
    running.later(1)
    assert sorted(_first(running)) == [2, 3]
    assert running.said[0].startswith("ranks 2-3 lost first: the connection ended without a word, on host-1 (node 1)")


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 100,
    (100).to_bytes(4, "big") + b"x" * 100,
    Session().sealed("roster", "{}"),
    Session().sealed("first", "{}"),
    Session().sealed("end", '{"code":true}'),
    Session().sealed("end", "[" * 30_000 + "]" * 30_000),
    Session().sealed("stopping", '"TERM"'),
    Session().sealed("watch", '{"pid":"1; rm"}'),
    Session("not ours").sealed("end", "{}"),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_said_once_and_the_training_goes_on(running: Job, garbage: bytes) -> None:
    running.peers[2].sendall(garbage)
    running.read(2)
    assert len(running.said) == 1
    assert running.said[0].startswith("warning: rank 2 on host-1 (node 1, local rank 0, process 102) ")
    assert "not watched any more" in running.said[0]
    assert running.said[0].isprintable()
    running.peers[2].close()
    running.later(100)
    assert running.hub.verdict is None
    running.send(1, "end", DIED.as_message())  # the others are still watched
    assert _first(running) == (1,)


def test_connection_of_a_node_is_open_until_its_last_rank_has_gone() -> None:
    ours, theirs = pair()
    trunk = Trunk(ours, Session(), kinds=(*KINDS, *FOR_OTHERS))
    hub = Hub(SEATS, {2: trunk, 3: trunk}, SETTINGS, held=False, say=lambda _: None)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    for rank, is_open in ((2, True), (3, False)):
        theirs.sendall(Session().sealed("of", canonical([[rank, "bye", None]])))
        select.select([ours], [], [], 20)
        hub.read(trunk, 0.0)
        assert list(hub.lines()) == [trunk] * is_open
    assert theirs.recv(1) == b""
    theirs.close()


def test_rank_that_says_goodbye_may_end_as_it_likes(running: Job) -> None:
    running.send(1, "bye", None)
    running.later(100)
    assert (running.hub.verdict, running.said) == (None, [])


@pytest.fixture
def spoke() -> Iterator[tuple[Spoke, socket.socket, list[str]]]:
    said: list[str] = []
    one, other = pair()
    side = Spoke(1, SEATS[0], Line(one, Session()), SETTINGS, held=False, say=said.append)
    yield side, other, said
    side.close()
    other.close()


def _take(spoke: Spoke) -> None:
    assert spoke.line is not None
    spoke.line.socket.settimeout(5)
    spoke.line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    spoke.line.socket.recv(1, socket.MSG_PEEK)
    spoke.line.socket.setblocking(False)
    spoke.read(spoke.line, time.monotonic())


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_from_rank_0_is_said_once_and_the_training_goes_on(
    spoke: tuple[Spoke, socket.socket, list[str]], garbage: bytes
) -> None:
    side, other, said = spoke
    other.sendall(garbage.replace(b"end", b"wat"))
    _take(side)
    assert len(said) == 1
    assert said[0].endswith("this rank goes on without the lifeline")
    assert side.verdict is None
    assert side.order is None


def test_what_rank_0_says_is_shown_without_control_characters(spoke: tuple[Spoke, socket.socket, list[str]]) -> None:
    side, other, said = spoke
    other.sendall(
        Session().sealed("first", canonical(Verdict((2,), True, "rank 2\x1b[2J failed\n  | \x07").as_message()))
    )
    _take(side)
    assert said == ["rank 2\\x1b[2J failed\n  | \\x07"]
    assert side.order is not None


def test_rank_0_that_goes_without_a_word_is_lost(spoke: tuple[Spoke, socket.socket, list[str]]) -> None:
    side, other, said = spoke
    other.close()
    _take_end(side)
    assert said[0].startswith(
        "rank 0 lost first: the connection ended without a word, on host-0 (node 0, local rank 0)"
    )


def _take_end(spoke: Spoke) -> None:
    assert spoke.line is not None
    spoke.line.socket.settimeout(5)
    assert spoke.line.socket.recv(1, socket.MSG_PEEK) == b""
    spoke.read(spoke.line, time.monotonic())
