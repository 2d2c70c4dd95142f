"""Both sides of failure detection in this process, over real connections: what is first, and peers that misbehave."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
from rendezvous_peers import altered, framed
from supervised import pair

from distboot.agent.exit_status import ExitStatus
from distboot.agent.failure_coordinator import FailureCoordinator
from distboot.agent.failure_reporter import FailureReporter
from distboot.agent.heartbeat import HeartbeatConnection
from distboot.agent.messages import Abort, Exited, Exiting, Failing, Phases, Register, Terminating
from distboot.agent.root_cause import RankLocation, RootCause
from distboot.rendezvous.messages import Detach, Members
from distboot.rendezvous.protocol import Channel
from distboot.report.content import JobState
from distboot.settings import SupervisionSettings

SETTINGS = SupervisionSettings(bound=15, grace=5)
SEATS = [RankLocation(rank, f"host-{rank // 2}", rank // 2, rank % 2) for rank in range(4)]
DIED = ExitStatus(signal=9, when=1.0)
OF_A_PEER = ExitStatus(words="RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:3456", when=1.0)


@dataclass
class Job:
    """Rank 0's side, and the raw other ends of its lines."""

    coordinator: FailureCoordinator
    said: list[str]
    peers: dict[int, socket.socket]
    now: float = 0.0

    def send(self, rank: int, message: object) -> None:
        """What a rank says, read by rank 0."""
        self.peers[rank].sendall(Channel().sign(message, rank))
        self.read(rank)

    def read(self, rank: int) -> None:
        line = self.coordinator.members[rank].connection
        assert line is not None
        line.socket.settimeout(5)
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        with suppress(ConnectionResetError):
            line.socket.recv(1, socket.MSG_PEEK)
        line.socket.setblocking(False)
        self.coordinator.read(line, self.now)
        self.coordinator.turn(self.now)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.coordinator.turn(self.now)


@pytest.fixture
def running() -> Iterator[Job]:
    said: list[str] = []
    pairs = {rank: pair() for rank in range(1, 4)}
    lines = {rank: HeartbeatConnection(one, Channel()) for rank, (one, _) in pairs.items()}
    coordinator = FailureCoordinator(SEATS, lines, SETTINGS, held=False, say=lambda text, _=None: said.append(text))
    coordinator.take(0, Register(100), time.monotonic())
    started = Job(coordinator, said, {rank: other for rank, (_, other) in pairs.items()}, time.monotonic())
    for rank in pairs:
        started.send(rank, Register(100 + rank))
    yield started
    coordinator.close()
    for _, other in pairs.values():
        other.close()


def _first(job: Job) -> tuple[int, ...]:
    assert job.coordinator.root_cause is not None
    return job.coordinator.root_cause.ranks


def _later(job: Job) -> int:
    return JobState(job.coordinator.log).later_failures()


def test_failure_is_decided_at_once_and_told_to_all(running: Job) -> None:
    running.send(2, Exited(DIED))
    assert _first(running) == (2,)
    received = running.peers[1].recv(65536)
    assert b'"Abort"' in received
    assert b"rank 2 failed first: killed by SIGKILL" in received
    assert b"on host-1 (node 1, local rank 0, process 102)" in received
    assert running.said == [running.coordinator.root_cause and running.coordinator.root_cause.text]
    assert list(running.coordinator.orders) == [0]


def test_later_failures_are_counted_and_not_said(running: Job) -> None:
    running.send(2, Exited(DIED))
    running.send(3, Exited(ExitStatus(code=3, when=1.0)))
    running.send(1, Exited(ExitStatus(signal=15, stopped_by_us=True, when=1.0)))
    assert (_first(running), _later(running), len(running.said)) == ((2,), 1, 1)


def test_steps_of_a_rank_are_taken_and_what_is_none_is_not(running: Job) -> None:
    running.send(2, Phases({"group_ready": 5.0}))
    assert [one.details for one in running.coordinator.log if one.event == "phases"] == [{"group_ready": 5.0}]
    running.send(3, Phases({"group_ready": -1.0}))
    why = "sends a broken Phases: times is not a valid number of seconds; it is not watched any more"
    assert running.said == [f"warning: rank 3 on host-1 (node 1, local rank 1, process 103) {why}"]


def test_cause_comes_before_its_consequence(running: Job) -> None:
    running.send(3, Failing(OF_A_PEER))
    assert running.coordinator.root_cause is None
    running.send(2, Exited(DIED))
    running.later(1)
    assert (_first(running), _later(running)) == ((2,), 1)


def test_consequence_is_named_when_nothing_explains_it(running: Job) -> None:
    running.send(3, Failing(OF_A_PEER))
    running.later(1)
    assert _first(running) == (3,)


def test_rank_that_is_about_to_end_is_waited_for(running: Job) -> None:
    running.send(2, Exiting())
    running.send(3, Failing(OF_A_PEER))
    running.later(1)
    assert running.coordinator.root_cause is None
    running.send(2, Exited(ExitStatus(code=3, when=1.0)))
    running.later(1)
    assert _first(running) == (2,)


def test_but_not_for_ever(running: Job) -> None:
    running.send(2, Exiting())
    running.send(3, Failing(OF_A_PEER))
    running.later(1)
    running.later(15)
    assert _first(running) == (3,)


def test_failure_comes_before_the_signal_with_which_a_launcher_answers_it(running: Job) -> None:
    running.send(1, Terminating(15))
    running.send(2, Exited(DIED))
    assert _first(running) == (2,)
    assert running.coordinator.root_cause is not None
    assert running.coordinator.root_cause.is_failure


def test_signal_from_outside_comes_before_what_peers_say_of_it(running: Job) -> None:
    running.send(1, Terminating(15))
    running.send(2, Failing(OF_A_PEER))
    running.later(1)
    assert running.said[0].startswith("stopped by SIGTERM from outside: rank 1 ")


def test_signal_from_outside_alone_stops_the_job(running: Job) -> None:
    running.send(1, Terminating(15))
    running.later(1)
    assert running.coordinator.root_cause is not None
    assert not running.coordinator.root_cause.is_failure
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
    (100).to_bytes(4, "big") + b"x" * 140,
    Channel().sign(Members((), (), None)),
    framed({"kind": "Abort"}),
    altered(Exited(DIED), end={"code": True}),
    framed('{"kind":"Exited","end":' + "[" * 30_000 + "]" * 30_000 + "}"),
    altered(Terminating(15), signal="TERM"),
    altered(Register(1), pid="1; rm"),
    Channel("not ours").sign(Exited(DIED)),
    Channel(round=1).sign(Exited(DIED)),
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
    assert running.coordinator.root_cause is None
    running.send(1, Exited(DIED))  # the others are still watched
    assert _first(running) == (1,)


def test_rank_that_says_goodbye_may_end_as_it_likes(running: Job) -> None:
    bye_and_more = Channel().sign(Detach(), 1) + Channel().sign(Exited(DIED), 1)
    running.peers[1].sendall(bye_and_more)  # in one piece, of which nothing counts after the goodbye
    running.read(1)
    running.later(100)
    assert (running.coordinator.root_cause, running.said) == (None, [])


@pytest.fixture
def reporter() -> Iterator[tuple[FailureReporter, socket.socket, list[str]]]:
    said: list[str] = []
    one, other = pair()
    line = HeartbeatConnection(one, Channel())
    side = FailureReporter(SEATS[0], [SEATS[1]], line, SETTINGS, held=False, say=lambda text, _=None: said.append(text))
    yield side, other, said
    side.close()
    other.close()


def _take(reporter: FailureReporter) -> None:
    assert reporter.connection is not None
    reporter.connection.socket.settimeout(5)
    reporter.connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
    reporter.connection.socket.recv(1, socket.MSG_PEEK)
    reporter.connection.socket.setblocking(False)
    reporter.read(reporter.connection, time.monotonic())


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_from_rank_0_is_said_once_and_the_training_goes_on(
    reporter: tuple[FailureReporter, socket.socket, list[str]], garbage: bytes
) -> None:
    side, other, said = reporter
    other.sendall(garbage)
    _take(side)
    assert len(said) == 1
    assert said[0].endswith("this rank goes on without failure detection")
    assert side.root_cause is None
    assert not side.orders


def test_what_rank_0_says_is_shown_without_control_characters(
    reporter: tuple[FailureReporter, socket.socket, list[str]],
) -> None:
    side, other, said = reporter
    other.sendall(Channel().sign(Abort(RootCause((2,), True, "rank 2\x1b[2J failed\n  | \x07"))))
    _take(side)
    assert said == ["rank 2\\x1b[2J failed\n  | \\x07"]
    assert list(side.orders) == [1]


def test_rank_0_that_goes_without_a_word_is_lost(reporter: tuple[FailureReporter, socket.socket, list[str]]) -> None:
    side, other, said = reporter
    other.close()
    _take_end(side)
    assert said[0].startswith(
        "rank 0 lost first: the connection ended without a word, on host-0 (node 0, local rank 0)"
    )


def _take_end(reporter: FailureReporter) -> None:
    assert reporter.connection is not None
    reporter.connection.socket.settimeout(5)
    assert reporter.connection.socket.recv(1, socket.MSG_PEEK) == b""
    reporter.read(reporter.connection, time.monotonic())
