"""Both sides of failure detection in this process, over real connections: what is first, and peers that misbehave."""

import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from inside import replace
from rendezvous_peers import altered, framed
from supervised import pair, raised, shell_of_ranks, wait_to_read

from distboot.agent.agent import connect
from distboot.agent.heartbeat import HeartbeatConnection
from distboot.agent.rank_0_connection import Rank0Connection
from distboot.agent.rank_connections import RankConnections
from distboot.agent.restarts import Restarts
from distboot.base.settings import RestartSettings, SupervisionSettings
from distboot.job.exit_status import ExitStatus, UncaughtException
from distboot.job.keys import Keys
from distboot.job.messages import (
    Abort,
    Exited,
    Exiting,
    Failing,
    Phases,
    Register,
    Terminating,
)
from distboot.job.restarts import failed_round
from distboot.job.root_cause import RootCause, ranks_of
from distboot.rendezvous.events import EventLog
from distboot.rendezvous.join_table import JoinTable
from distboot.rendezvous.membership import Membership
from distboot.rendezvous.messages import Detach, Members
from distboot.rendezvous.protocol import Channel
from distboot.report.job_state import JobState

SETTINGS = SupervisionSettings(grace=5)
MEMBERSHIP = Membership(("host-0", "host-1"), ((0, 1), (2, 3)))
DIED = ExitStatus(signal=9, when=1.0)
OF_A_PEER = raised(
    "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:3456", when=1.0
)
TIMED_OUT = raised("RuntimeError: Timed out waiting 8000ms for recv operation", when=1.0)

# Of the script's own type, raised from that of a framework.
WRAPPED = replace(
    OF_A_PEER,
    exception=UncaughtException(
        is_secondary=True,
        type="train.StepError",
        message="step 7",
        excerpt="RuntimeError: Connection closed by peer\n\ntrain.StepError: step 7",
    ),
)
OF_NO_START = raised(
    "distboot.DistbootError: error[rank-failed]: rank 1 (process 7 on 'host-0') joined, "
    "and ended before the framework could start",
    when=1.0,
)
OF_NO_ANSWER = raised(
    "distboot.DistbootError: error[missing-rank]: rank 3 on host-1: "
    "rank 0 did not answer at 127.0.0.1:29500 within 3 s",
    when=1.0,
)
# The leader's block failed, and the leader caught that
OF_A_BLOCK = raised(
    "distboot.DistbootError: error[rank-failed]: rank 3 on host-1: main_first(): "
    "the block failed on rank 0: OSError: download failed",
    when=1.0,
)
OF_A_BLOCK_WRAPPED = replace(
    OF_A_BLOCK,
    exception=UncaughtException(
        is_secondary=True,
        type="RuntimeError",
        message="no data",
        excerpt=f"{OF_A_BLOCK.traceback}\n\nRuntimeError: no data",
    ),
)
OF_A_BLOCK_OF_A_PEER = raised(
    "distboot.DistbootError: error[rank-failed]: rank 3 on host-1: main_first(): "
    "the block failed on rank 0: RuntimeError: Connection closed by peer",
    when=1.0,
)
OF_A_BLOCK_OF_A_PEER_WRAPPED = replace(
    OF_A_BLOCK_WRAPPED,
    exception=UncaughtException(
        is_secondary=True,
        type="RuntimeError",
        message="no data",
        excerpt=f"{OF_A_BLOCK_OF_A_PEER.traceback}\n\nRuntimeError: no data",
    ),
)
OF_A_BLOCK_OF_A_SERVICE = raised(
    "distboot.DistbootError: error[rank-failed]: rank 3 on host-1: local_main_first() on node 0: "
    "the block failed on rank 2 (node 1): ConnectionResetError: Connection reset by peer",
    when=1.0,
)
OF_A_CLOSED_CONTEXT = raised(
    "distboot.DistbootError: error[missing-rank]: rank 3 on host-1: main_first(): "
    "rank 0 (node 0) ended, or closed its context, without finishing its block",
    when=1.0,
)
OF_A_SERVICE = raised("ConnectionRefusedError: [Errno 111] Connection refused", when=1.0)

OF_A_SERVICE_AFTER_ANOTHER = replace(
    OF_A_SERVICE,
    exception=UncaughtException(
        is_secondary=True,
        type="ConnectionRefusedError",
        message="[Errno 111] Connection refused",
        excerpt="torch.OutOfMemoryError: CUDA out of memory\n\nConnectionRefusedError: [Errno 111]",
    ),
)


class Job:
    """One side of failure detection, the raw other ends of its connections by rank, and what it has printed."""

    def __init__(self, *others: int, own: int = 1) -> None:
        pairs = {rank: pair() for rank in others}
        self.peers = {rank: other for rank, (_, other) in pairs.items()}
        self.lines = {rank: HeartbeatConnection(one, Channel()) for rank, (one, _) in pairs.items()}
        self.said: list[str] = []
        self.now = time.monotonic()
        if 0 in others:
            ranks = ranks_of(MEMBERSHIP)[0 : own + 1 : own]
            peers = connect(ranks, self.lines)
            self.side = shell_of_ranks(ranks, SETTINGS, self.say)
            self.side.use(Rank0Connection(self.side, peers, MEMBERSHIP.heartbeat_timeout))
            return
        self.log = EventLog()
        keys = Keys(MEMBERSHIP, JoinTable(4))
        keys.has_begun = True
        ranks = ranks_of(MEMBERSHIP)
        peers = connect(ranks, self.lines)
        self.side = shell_of_ranks(ranks, SETTINGS, self.say)
        self.side.use(RankConnections(self.side, peers, MEMBERSHIP, keys, self.log))
        self.side.take(0, Register(100), self.now)
        for rank in others:
            self.send(rank, Register(100 + rank))

    def say(self, text: str, *_: object, **__: object) -> None:
        self.said.append(text)

    def send(self, rank: int, message: object) -> None:
        self.send_raw(rank, Channel().sign(message, rank))

    def send_raw(self, rank: int, data: bytes) -> None:
        self.peers[rank].sendall(data)
        self.read(rank)

    def end(self, rank: int) -> None:
        self.peers[rank].close()
        self.read(rank)

    def read(self, rank: int) -> None:
        """Let our side read, once there is something to read."""
        wait_to_read(self.lines[rank].socket)
        self.side.peers.read(self.lines[rank], self.now)
        self.later(0)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.side.turn(self.now)

    @property
    def first(self) -> tuple[int, ...] | None:
        return None if self.side.root_cause is None else self.side.root_cause.ranks

    def close(self) -> None:
        self.side.close()
        for other in self.peers.values():
            other.close()


@pytest.fixture
def running() -> Iterator[Job]:
    """Rank 0's side of four ranks."""
    job = Job(1, 2, 3)
    yield job
    job.close()


@pytest.fixture
def reporter() -> Iterator[Job]:
    """Rank 1's side."""
    job = Job(0)
    yield job
    job.close()


LOST = "the connection ends"
OPEN = "nothing is decided yet"
SPEAKS_OF_A_PEER = (3, Failing(OF_A_PEER))
# What happens, also seconds that go by; who is named then, and how that begins; how many fail later.
ORDERS = {
    "cause-before-consequence": (
        [SPEAKS_OF_A_PEER, OPEN, (2, Exited(DIED)), 1],
        "rank 2 failed first: killed by",
        1,
    ),
    "consequence-alone": (
        [SPEAKS_OF_A_PEER, 1],
        "rank 3 failed first, because a peer disconnected: ",
        0,
    ),
    "timeout-before-the-connection-that-it-closes": (
        [SPEAKS_OF_A_PEER, OPEN, (2, Failing(TIMED_OUT)), 9, 9, 1],
        "rank 2 failed first, because a peer did not answer in time: ",
        1,
    ),
    "ended-too-early": (
        [(1, Exited(ExitStatus(code=0, when=1.0))), SPEAKS_OF_A_PEER, 1],
        (
            "rank 1 exited with code 0 while 3 other ranks were still training, on "
            "host-0; then rank 3 failed, because a "
        ),
        0,
    ),
    "ended-before-init": (
        [(1, Exited(ExitStatus(code=0, when=1.0))), (3, Failing(OF_NO_START)), 1],
        (
            "rank 1 exited with code 0 before the framework could start, on host-0; "
            "then rank 3 failed, because a peer disconnected"
        ),
        0,
    ),
    "ended-before-another-init": (  # from which nobody has disconnected
        [(1, Exited(ExitStatus(code=0, when=1.0))), (3, Failing(OF_NO_ANSWER)), 1],
        (
            "rank 1 exited with code 0 before the framework could start, on host-0; "
            "then rank 3 failed\n"
        ),
        0,
    ),
    "ended-well-beside-a-service": (  # a `ConnectionError` of a service tells nothing of the rank that ended
        [(1, Exited(ExitStatus(code=0, when=1.0))), (3, Failing(OF_A_SERVICE)), 1],
        "rank 3 failed first: uncaught exception: ConnectionRefusedError: [Errno 111] Connection refused, on host-1",
        0,
    ),
    "block-of-the-leader-failed": (
        [(3, Failing(OF_A_BLOCK)), OPEN, 1],
        (
            "rank 3 failed first: error[rank-failed]: main_first(): "
            "the block failed on rank 0: OSError: download failed, on host-1"
        ),
        0,
    ),
    "block-of-the-leader-failed-wrapped": (
        [(1, Exited(ExitStatus(code=0, when=1.0))), (3, Failing(OF_A_BLOCK_WRAPPED)), 1],
        "rank 3 failed first: uncaught exception: RuntimeError: no data, on host-1",
        0,
    ),
    "block-of-the-leader-failed-uncaught": (
        [(3, Failing(OF_A_BLOCK)), OPEN, (0, Exited(ExitStatus(code=1, when=1.0)))],
        "rank 0 failed first: exit code 1, on host-0",
        1,
    ),
    "block-of-the-leader-missed-a-service": (
        [(1, Exited(ExitStatus(code=0, when=1.0))), (3, Failing(OF_A_BLOCK_OF_A_SERVICE)), 1],
        (
            "rank 3 failed first: local_main_first() on node 0: the block failed on "
            "rank 2 (node 1): ConnectionResetError: Connection reset by peer, on host-1"
        ),
        0,
    ),
    "block-of-the-leader-alone-missed-a-peer": (
        [(3, Failing(OF_A_BLOCK_OF_A_PEER)), 1],
        (
            "rank 3 failed first: error[rank-failed]: main_first(): the block failed on rank 0: "
            "RuntimeError: Connection closed by peer, on host-1"
        ),
        0,
    ),
    "block-of-the-leader-alone-missed-a-peer-wrapped": (
        [(3, Failing(OF_A_BLOCK_OF_A_PEER_WRAPPED)), 1],
        "rank 3 failed first: uncaught exception: RuntimeError: no data, on host-1",
        0,
    ),
    "block-of-the-leader-missed-a-peer": (
        [(1, Exited(ExitStatus(code=0, when=1.0))), (3, Failing(OF_A_BLOCK_OF_A_PEER)), 1],
        (
            "rank 1 exited with code 0 while 3 other ranks were still training, on host-0; "
            "then rank 3 failed, because a peer disconnected"
        ),
        0,
    ),
    "leader-closed-its-context": (
        [(3, Failing(OF_A_CLOSED_CONTEXT)), OPEN, 1],
        (
            "rank 3 failed first: error[missing-rank]: main_first(): rank 0 (node 0) ended, "
            "or closed its context, without finishing its block, on host-1"
        ),
        0,
    ),
    "ended-too-early-wrapped": (
        [(1, Exited(ExitStatus(code=0, when=1.0))), (3, Failing(WRAPPED)), 1],
        "rank 1 exited with code 0 while 3 other ranks were still training, on host-0; then rank 3 failed, because a",
        0,
    ),
    "ended-well-beside-a-service-after-another-error": (
        [(1, Exited(ExitStatus(code=0, when=1.0))), (3, Failing(OF_A_SERVICE_AFTER_ANOTHER)), 1],
        "rank 3 failed first: uncaught exception: ConnectionRefusedError: [Errno 111] Connection refused, on host-1",
        0,
    ),
    "consequences-alone": (  # none of which ends before it has heard what the other one may explain
        [SPEAKS_OF_A_PEER, (3, Exiting()), (2, Failing(OF_A_PEER)), (2, Exiting()), 1],
        "rank 3 failed first, because a peer disconnected: ",
        1,
    ),
    "about-to-end": (
        [(2, Exiting()), SPEAKS_OF_A_PEER, 1, OPEN, (2, Exited(ExitStatus(code=3, when=1.0))), 1],
        "rank 2 failed first: exit code 3",
        1,
    ),
    "about-to-end-for-ever": (
        [(2, Exiting()), SPEAKS_OF_A_PEER, 1, OPEN, 15],
        "rank 3 failed first, because ",
        0,
    ),
    "signal-answers-a-failure": (
        [(1, Terminating(15)), OPEN, (2, Exited(DIED))],
        "rank 2 failed first: killed by",
        0,
    ),
    "signal-first": (
        [(1, Terminating(15)), SPEAKS_OF_A_PEER, 1],
        "stopped by an external SIGTERM: rank 1 ",
        1,
    ),
    "signal-alone": (
        [(1, Terminating(15)), OPEN, 1],
        "stopped by an external SIGTERM: rank 1 got it first, on ",
        0,
    ),
    "host": (
        [(3, LOST), (2, LOST), 1],
        (
            "ranks 2-3 became unreachable first: the connection closed without an exit "
            "report, on host-1 (node 1)"
        ),
        0,
    ),
}


@pytest.mark.parametrize(("steps", "text", "later"), list(ORDERS.values()), ids=list(ORDERS))
def test_first_is_named(
    running: Job, steps: list[tuple[int, object] | int | str], text: str, later: int
) -> None:
    for step in steps:
        if step == OPEN:
            assert running.first is None
        elif isinstance(step, int):
            running.later(step)
        elif step[1] == LOST:
            running.end(int(step[0]))
        elif step[0] == 0:
            running.side.take(0, step[1], running.now)
            running.later(0)
        else:
            running.send(int(step[0]), step[1])
    (said,) = running.said
    assert f"{said}\n".startswith(text)
    cause = running.side.root_cause
    assert cause is not None
    assert (cause.is_failure, len(cause.ranks)) == (
        "stopped" not in text,
        1 + text.startswith("ranks"),
    )
    assert JobState(running.log).later_failures() == later


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 100,
    (100).to_bytes(4, "big") + b"x" * 140,
    Channel().sign(Members((), (), None)),
    framed({"kind": "Abort"}),
    *(altered(Exited(DIED), end=end) for end in ({"code": True}, {"code": 1}, 5)),
    *(altered(Phases({}), times={"a": time}) for time in (1e999, -1.0)),
    framed('{"kind":"Exited","end":' + "[" * 30_000 + "]" * 30_000 + "}"),
    altered(Terminating(15), signal="TERM"),
    altered(Register(1), pid="1; rm"),
    Channel("not ours").sign(Exited(DIED)),
    Channel(round=1).sign(Exited(DIED)),
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_reported_once_and_training_continues(
    running: Job, reporter: Job, garbage: bytes
) -> None:
    for job, rank in ((running, 2), (reporter, 0)):
        job.send_raw(rank, garbage)
        job.peers[rank].close()
        job.later(100)
        assert (len(job.said), job.first, job.side.own.orders) == (1, None, {})
        assert job.said[0].isprintable()
    assert running.said[0].startswith(
        "warning: rank 2 on host-1 (node 1, local rank 0, process 102) "
    )
    assert running.said[0].endswith("; failure detection is off for it")
    assert reporter.said[0].endswith("this rank continues without failure detection")
    running.send(1, Exited(DIED))  # the others are still watched
    assert running.first == (1,)


def test_rank_that_said_goodbye_may_end_anyhow(running: Job) -> None:
    # In one piece, of which nothing counts after the goodbye.
    running.send_raw(1, Channel().sign(Detach(), 1) + Channel().sign(Exited(DIED), 1))
    running.later(100)
    assert (running.first, running.said) == (None, [])


FAILED = Abort(RootCause((3,), True, "rank 3\x1b[2J failed\n  | \x07"), speaks=True)


def test_texts_of_rank_0_lose_control_characters() -> None:
    with closing(Job(0, own=2)) as elsewhere:
        elsewhere.send(0, FAILED)
        assert elsewhere.said == ["rank 3\\x1b[2J failed"]  # its traceback is there, and on rank 0
        assert list(elsewhere.side.own.orders) == [2]


def test_agent_that_does_not_speak_stops_its_rank(reporter: Job) -> None:
    reporter.send(0, replace(FAILED, speaks=False))
    assert (reporter.said, list(reporter.side.own.orders)) == ([], [1])


def test_summary_waits_for_another_round(running: Job, capfd: pytest.CaptureFixture[str]) -> None:
    restarts = Restarts(RestartSettings(1), {}, who=None, of_launcher=False)
    restarts.rounds.append(failed_round(0, [2], "rank 2 failed", start=1.0, seconds=None))
    running.side.restarts = restarts
    running.send(2, Exited(ExitStatus(code=4, when=1.0)))
    running.side.facts.is_followed = True
    connections = running.side.connections
    assert isinstance(connections, RankConnections)
    connections.record.summarize()
    assert not any(map(_is_summary, running.said)), running.said
    # None follows, as the job was asked to stop meanwhile
    said = ""
    for _ in range(2):
        restarts.say_unsaid()
        said += capfd.readouterr().err
        lines = [line.removeprefix("distboot: ") for line in said.splitlines()]
        assert len(list(filter(_is_summary, lines))) == 1, said


def _is_summary(said: str) -> bool:
    return said.startswith("summary: 4 ranks on ")
