"""A connection that ends or gives no sign while both agents live: what was said meanwhile arrives, and arrives once."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from math import inf

import pytest
from conftest import StartRank0
from rendezvous_peers import HELLO, OPEN, Rank, answers, peer, plan_for, record
from supervised import pair, shell_of_ranks, until, wait_to_read

from distboot.agent.agent import connect
from distboot.agent.backlog import Backlog
from distboot.agent.heartbeat import HeartbeatConnection
from distboot.agent.peer_watch import DISCONNECTED
from distboot.agent.rank_0_connection import Rank0Connection
from distboot.agent.rank_connections import RankConnections
from distboot.agent.returning import NewConnection, Returning
from distboot.base.settings import SupervisionSettings
from distboot.job.exit_status import ExitStatus
from distboot.job.keys import Keys
from distboot.job.messages import (
    CountReads,
    Exited,
    Exiting,
    Position,
    Register,
    Terminating,
)
from distboot.job.root_cause import ranks_of
from distboot.rendezvous.connection_pool import Connection
from distboot.rendezvous.events import EventLog
from distboot.rendezvous.join_table import JoinTable
from distboot.rendezvous.membership import Membership
from distboot.rendezvous.messages import (
    BARRIER,
    Arrive,
    Key,
    Ready,
    Refused,
    Release,
    Resume,
    Resumed,
)
from distboot.rendezvous.protocol import Broadcast, Channel, ProtocolError
from distboot.rendezvous.worker import Worker
from distboot.report.job_state import JobState

MEMBERSHIP = Membership(("host-0", "host-1"), ((0,), (1,)), round=3)
SETTINGS = SupervisionSettings(grace=5)
SECRET = "shared"
STOP = Terminating(15)


class Job:
    """Rank 0's side with one other agent, whose part a test plays."""

    def __init__(self, secret: str = "") -> None:
        self.secret = secret
        self.now = time.monotonic()
        self.said: list[str] = []
        self.peers: list[socket.socket] = []
        ours, self.channel = self.connect("first")
        self.line = HeartbeatConnection(ours, self.as_rank_0("first"))
        keys = Keys(MEMBERSHIP, JoinTable(2))
        keys.has_begun = True
        self.log = EventLog()
        ranks = ranks_of(MEMBERSHIP)
        peers = connect(ranks, {1: self.line})
        self.side = shell_of_ranks(ranks, SETTINGS, self.say)
        self.connections = RankConnections(self.side, peers, MEMBERSHIP, keys, self.log)
        self.side.use(self.connections)
        self.side.take(0, Register(100), self.now)
        self.send(Register(101))
        self.read()

    def say(self, text: str, *_: object, **__: object) -> None:
        self.said.append(text)

    def as_rank_0(self, challenge: str, round_: int = 3) -> Channel:
        return Channel(self.secret, True, challenge, "nonce", round_)

    def connect(self, challenge: str) -> tuple[socket.socket, Channel]:
        """Our end of a new connection, and what authenticates the other one."""
        ours, theirs = pair()
        theirs.settimeout(5)
        self.peers.append(theirs)
        return ours, Channel(self.secret, False, challenge, "nonce", 3)

    def send(self, *messages: object) -> None:
        for message in messages:
            self.peers[-1].sendall(self.channel.sign(message, 1))

    def read(self) -> None:
        self.line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self.line.socket.settimeout(5)
        with suppress(OSError):
            self.line.socket.recv(1, socket.MSG_PEEK)
        self.line.socket.setblocking(False)
        self.side.peers.read(self.line, self.now)
        self.turn(0.0)

    def turn(self, seconds: float) -> None:
        self.now += seconds
        self.side.turn(self.now)

    def end(self) -> None:
        """The connection ends, and nothing is heard of its agent."""
        self.peers[-1].close()
        self.read()

    def come_back(self, received: int, agent: int = 1, round_: int = 3) -> None:
        """The agent connects again; `ProtocolError`: it is refused."""
        challenge = f"again {len(self.peers)}"
        ours, channel = self.connect(challenge)
        its = Connection(ours, "10.0.0.2", channel=self.as_rank_0(challenge, round_))
        try:
            self.connections.take_back(its, Resume(agent, "its process", round_, received))
        except ProtocolError:
            ours.close()
            self.peers.pop().close()
            raise
        self.channel = channel

    def received(self) -> list[object]:
        """All that has come over the newest connection, without heartbeats."""
        other = HeartbeatConnection(self.peers[-1], self.channel)
        self.peers[-1].setblocking(True)
        self.peers[-1].settimeout(5)
        self.peers[-1].recv(1, socket.MSG_PEEK)
        self.peers[-1].setblocking(False)
        return [message for _, message in other.drain(self.now, *_EXPECTED)]

    @property
    def first(self) -> tuple[int, ...] | None:
        return None if self.side.root_cause is None else self.side.root_cause.ranks

    def close(self) -> None:
        self.side.close()
        for each in self.peers:
            each.close()


_EXPECTED = (type(None), Register, Resumed, Release, CountReads, Exited)


@pytest.fixture(params=["", SECRET], ids=["open", "secret"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    with closing(Job(request.param)) as one:
        yield one


def test_agent_that_returns_in_time_is_no_failure(job: Job) -> None:
    job.end()
    job.turn(0.05)
    job.connections.expect_return()  # it greets, and takes a while
    job.turn(0.5)
    job.come_back(received=1)
    job.turn(60)
    assert (job.first, JobState(job.log).failed) == (None, set())
    assert job.said == ["rank 1 on host-1 (node 1, local rank 0, process 101) reconnected"]


def test_agent_that_has_greeted_may_close_its_connection(job: Job) -> None:
    job.connections.expect_return()
    job.end()
    job.turn(0.5)  # a busy host runs it late
    job.come_back(received=1)
    job.turn(60)
    assert job.first is None


def test_greetings_delay_a_loss_for_seconds_only(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not authenticated: without a limit, any process could hold off the loss for ever."""
    monkeypatch.setattr(time, "monotonic", lambda: job.now)
    job.end()
    for _ in range(4):
        job.connections.expect_return()
        job.turn(0.5)
    assert job.first is None
    for _ in range(4):
        job.connections.expect_return()
        job.turn(0.5)
    assert job.first == (1,)


def test_agent_that_does_not_come_back_is_lost(job: Job) -> None:
    job.end()
    job.turn(0.05)
    assert job.said == []
    job.turn(0.1)
    assert job.first == (1,)
    assert DISCONNECTED in job.said[0]


def test_what_both_say_meanwhile_arrives_once(job: Job) -> None:
    key = Key(BARRIER)
    job.send(Arrive(key, 60.0))
    job.read()
    job.end()
    job.side.ask(0, Arrive(key, 60.0), lambda _: None, job.now)  # which lets both ranks go
    job.turn(0.0)
    job.come_back(received=1)  # the first Register alone
    assert job.received() == [Resumed(2), Release(key)]
    job.send(Exited(ExitStatus(code=0, when=1.0)))
    job.read()
    member = job.side.facts.members[1]
    assert member.end is not None
    assert member.end.code == 0
    assert job.line.received == 3


def test_what_came_over_the_old_connection_counts(job: Job) -> None:
    job.send(Arrive(Key(BARRIER), 60.0))
    job.come_back(received=1)  # before rank 0 has seen anything
    assert job.received() == [Resumed(2)]
    assert job.line.received == 2


@pytest.mark.parametrize(
    ("attempt", "why"),
    [
        (
            lambda job: job.come_back(1, round_=2),
            ("goes on in round 2; the job is in round 3"),
        ),
        (lambda job: job.come_back(2), "has received 2 of 1 messages"),
        (
            lambda job: job.come_back(0, agent=0),
            ("goes on as rank 0, which is disconnected"),
        ),
    ],
    ids=["another-round", "more-than-was-sent", "another-rank"],
)
def test_peer_that_cannot_go_on_is_refused(
    job: Job, attempt: Callable[[Job], None], why: str
) -> None:
    with pytest.raises(ProtocolError, match=why):
        attempt(job)
    job.send(Arrive(Key(BARRIER), 60.0))  # over the connection that it has
    job.read()
    assert job.line.received == 2
    assert job.first is None


def test_rank_that_was_given_up_is_refused(job: Job) -> None:
    job.end()
    job.turn(0.3)
    with pytest.raises(ProtocolError, match="goes on as rank 1, which is disconnected"):
        job.come_back(received=1)


def test_old_frames_are_refused_on_new_connections() -> None:
    with closing(Job(SECRET)) as job:
        old = job.channel.sign(Exited(ExitStatus(code=1, when=1.0)), 1)
        job.come_back(received=1)
        job.peers[-1].sendall(old)
        job.read()
        assert job.side.facts.members[1].end is None
        assert "failure detection is off for it" in job.said[-1]


def test_agent_may_come_back_twice(job: Job) -> None:
    for _ in range(2):
        job.end()
        job.come_back(received=1)
    job.turn(60)
    assert job.first is None
    assert job.received() == [Resumed(1)]


def test_unreachable_rank_keeps_its_place_at_a_key(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeartbeatConnection, "silence", lambda _: (1000.0, False))
    answers: list[object] = []
    job.side.ask(0, Arrive(Key(BARRIER), 60.0), answers.append, job.now)
    for _ in range(20):
        job.now += 1
        job.side.tick(job.now)
    assert "gave no answer for 15 s, though its host answers (a firewall?)" in job.said[0]
    assert (job.first, answers) == (None, [])
    job.turn(41)
    assert len(answers) == 1
    assert (
        "1 of 2 ranks arrived within 60 s; missing: rank 1 (node 1); rank 1 (host-1) has been"
        in str(answers[0])
    )
    job.side.take(0, STOP, job.now)  # and no failure of that rank
    job.turn(1)
    assert job.first == (0,)


@pytest.mark.parametrize("speaks", [True, False])
def test_agent_that_speaks_again_is_waited_for(
    job: Job, monkeypatch: pytest.MonkeyPatch, speaks: bool
) -> None:
    """Before it is known that its host confirms what we send: its ranks may have ended just now, too."""
    monkeypatch.setattr(HeartbeatConnection, "silence", lambda _: (1000.0, False))
    for _ in range(20):
        job.now += 1
        job.side.tick(job.now)
    if speaks:
        job.send(Exiting())
        job.read()
    job.side.take(0, Exited(ExitStatus(code=0)), job.now)
    assert job.side.over(job.now + 0.1) is not speaks


class Attempts(Returning):
    """How an agent connects again, where a test says when an attempt has ended, and how."""

    def __init__(self) -> None:
        self.is_possible = True
        self.process = "its process"
        self.due = inf
        self.new: NewConnection | None = None

    @property
    def is_active(self) -> bool:
        return True

    def poll(self, _: float) -> NewConnection | None:
        new = self.new
        self.new = None
        return new

    def close(self) -> None:
        """Nothing is open."""


class OtherAgent:
    """The side of rank 1's agent, and the ends of its connections that a test plays."""

    def __init__(self) -> None:
        self.now = time.monotonic()
        self.said: list[str] = []
        ours, self.old = pair()
        self.new: socket.socket | None = None
        self.line = HeartbeatConnection(ours, Channel("", False, "old", "nonce", 3))
        self.attempts = Attempts()
        ranks = ranks_of(MEMBERSHIP)
        peers = connect(ranks, {0: self.line})
        self.side = shell_of_ranks(ranks, SETTINGS, self.say, is_held=True)
        self.connection = Rank0Connection(self.side, peers, MEMBERSHIP.heartbeat_timeout, 3)
        self.side.use(self.connection)
        self.connection.returning.close()
        self.connection.returning = self.attempts

    def say(self, text: str, *_: object, **__: object) -> None:
        self.said.append(text)

    def be_cut_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rank 0's host answers, and nothing gets through on the connection."""
        with monkeypatch.context() as patch:
            patch.setattr(HeartbeatConnection, "silence", lambda _: (1000.0, False))
            for _ in range(20):
                self.now += 1
                self.side.tick(self.now)
        assert "gave no answer for 15 s, though its host answers" in self.said[0]

    def connect_again(self) -> None:
        """An attempt has ended well: the agent closes its old connection, and greets over the new one."""
        ours, self.new = pair()
        self.attempts.new = NewConnection(ours, Channel("", False, "new", "nonce", 0))
        self.side.turn(self.now)

    def answer(self, received: int) -> None:
        assert self.new is not None
        channel = Channel("", True, "new", "nonce", 3)
        self.new.sendall(channel.sign(Resumed(received)))
        wait_to_read(self.line.socket)
        self.side.peers.read(self.line, self.now)

    def received(self, round_: int) -> list[object]:
        """All of a round that has come over the new connection; the first message is of none."""
        assert self.new is not None
        other = HeartbeatConnection(self.new, Channel("", True, "new", "nonce", round_))
        return [message for _, message in other.drain(self.now, type(None), Resume, Exited)]

    def is_over(self, seconds: float = 0.0) -> bool:
        return self.side.over(self.now + seconds)

    def close(self) -> None:
        self.side.close()
        self.old.close()
        if self.new is not None:
            self.new.close()


@pytest.fixture
def other() -> Iterator[OtherAgent]:
    with closing(OtherAgent()) as one:
        yield one


WELL = Exited(ExitStatus(code=0, when=1.0))


def test_end_is_reported_before_rank_0_answers(
    other: OtherAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.be_cut_off(monkeypatch)
    other.connect_again()
    assert other.received(round_=0) == [Resume(1, "its process", 3, 0)]
    other.side.take(1, WELL, other.now)
    assert not other.is_over()
    other.answer(received=0)
    assert other.received(round_=3) == [WELL]
    assert other.is_over()


def test_cut_off_agent_does_not_stay_for_ever(
    other: OtherAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.be_cut_off(monkeypatch)
    other.connect_again()
    other.side.take(1, WELL, other.now)
    assert other.is_over(6)


def test_cut_off_agent_ends_where_nothing_gets_through(
    other: OtherAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    other.be_cut_off(monkeypatch)
    other.side.take(1, WELL, other.now)
    assert other.is_over()


def test_agent_ends_gracefully_once_rank_0_speaks_again(
    other: OtherAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is unread here would let the kernel reset the connection, and the last message be lost."""
    other.be_cut_off(monkeypatch)
    channel = Channel("", True, "old", "nonce", 3)
    other.old.sendall(channel.sign(Register(100)))
    wait_to_read(other.line.socket)
    other.side.peers.read(other.line, other.now)
    other.side.take(1, WELL, other.now)
    other.old.sendall(channel.sign(CountReads()))
    other.old.shutdown(socket.SHUT_WR)
    wait_to_read(other.line.socket)
    other.side.finish()
    other.side.close()
    other.old.settimeout(5)
    while other.old.recv(65536):
        """Until the end, which is no reset."""


def test_unkept_message_is_not_skipped() -> None:
    backlog = Backlog()
    for _ in range(3):
        backlog.add(1, Broadcast(Resumed(1)))
    backlog.confirm(2)
    assert len(backlog.messages) == 1
    backlog.clear()
    backlog.add(1, Broadcast(Position(1, 1.0, {}, 0, 0)))
    with pytest.raises(ProtocolError, match="has received 2 of 4 messages, and those before 3"):
        backlog.confirm(2)
    backlog.confirm(4)
    assert backlog.messages == []


def test_backlog_is_bounded() -> None:
    backlog = Backlog()
    long = Broadcast(Refused("x" * 1000))
    for _ in range(5000):
        backlog.add(1, long)
    assert sum(message.size for _, message in backlog.messages) <= 1 << 20
    assert backlog.sent == 5000


def test_process_that_did_not_join_is_refused(rank0: StartRank0) -> None:
    first = rank0(1)
    first.met()
    connection = peer(first.port, HELLO + OPEN.sign(Resume(0, "another process", 0, 0)))
    for _ in range(3):  # to accept it, and to read twice
        first.server.serve(0.5)
    why = "the connecting process is not the process that joined as rank 0"
    assert answers(connection)[-1] == Refused(why)


@pytest.mark.parametrize("secret", ["", SECRET], ids=["open", "secret"])
def test_agent_of_later_round_reads_its_refusal(
    rank0: StartRank0, other: OtherAgent, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    first = rank0(1, secret=secret)
    first.met()
    other.be_cut_off(monkeypatch)
    worker = Worker(plan_for(record(1, 2), secret=secret, port=first.port))
    with ThreadPoolExecutor() as pool:
        connecting = pool.submit(worker.open_again, 10.0)
        while not connecting.done():
            first.server.serve(0.05)
        other.attempts.new = NewConnection(*connecting.result())
    other.side.turn(other.now)
    for _ in range(2):  # its only frame, and no more
        first.server.serve(0.5)
    wait_to_read(other.line.socket)
    other.side.peers.read(other.line, other.now)
    why = "the connecting process is not the process that joined as rank 1"
    assert f"it refused to let this rank reconnect: {why}" in other.said[-1]


@pytest.mark.parametrize("secret", ["", SECRET], ids=["open", "secret"])
def test_connection_that_is_reset_is_replaced(rank0: StartRank0, secret: str) -> None:
    first = rank0(2, secret=secret, ready=Ready())
    first.ended.clear()
    other = Rank(first.port, record(1, 2), secret=secret, ready=Ready())
    other.ended.clear()
    until(lambda: other.offers is not None and first.agent is not None and first.is_ready())
    until(lambda: other.agent is not None and not other.agent.shell.facts.is_starting)
    assert other.agent is not None
    assert first.agent is not None
    (line,) = other.agent.shell.peers.members
    before = line.socket
    before.shutdown(socket.SHUT_RDWR)
    until(lambda: line.socket is not before and not line.is_closed)
    (its,) = first.agent.shell.peers.members
    until(lambda: not its.is_closed)  # rank 0 may still be reading who has connected
    assert first.agent.shell.root_cause is None
    assert other.agent.shell.root_cause is None
    for each in (first, other):
        each.ended.set()
