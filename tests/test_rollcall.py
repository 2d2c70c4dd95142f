"""The roll call over real sockets: whoever is missing is named, whoever does not belong is sent away, nobody hangs."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
from conftest import Run
from launched import needs_torch

from distboot import DistbootError
from distboot.rollcall.caller import call
from distboot.rollcall.desk import Desk
from distboot.rollcall.register import Register, ranges
from distboot.rollcall.wire import VERSION, Frames, Membership, WireError, authentication, frame
from distboot.roster import Record, Roster

OURS = Membership("5c2f10aa")


def _record(rank: int, world_size: int, node: str = "a", **known: int) -> Record:
    fields: dict[str, int | None] = dict.fromkeys(("local_rank", "local_world_size", "node_rank", "num_nodes"))
    return Record(rank, "openmpi", node, f"{node}/boot", 1000 + rank, world_size, **{**fields, **known})


class _Rank0(threading.Thread):
    """Rank 0 at its desk, in a thread of its own."""

    def __init__(self, world_size: int, join_timeout: float, membership: Membership = OURS) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.desk = Desk(self.listener, _record(0, world_size), membership)
        self.join_timeout = join_timeout
        self.roster: Roster | None = None
        self.error: DistbootError | None = None
        self.connections: dict[int, socket.socket] = {}
        self.start()

    def run(self) -> None:
        try:
            self.roster, self.connections = self.desk.hold(self.join_timeout)
        except DistbootError as error:
            self.error = error

    def failed(self) -> DistbootError:
        self.join(20)
        assert self.error is not None
        return self.error

    def close(self) -> None:
        self.join(20)
        for connection in (self.listener, *self.connections.values()):
            connection.close()


@pytest.fixture
def rank0() -> Iterator[Callable[..., _Rank0]]:
    started: list[_Rank0] = []

    def start(world_size: int, join_timeout: float = 20, membership: Membership = OURS) -> _Rank0:
        started.append(_Rank0(world_size, join_timeout, membership))
        return started[-1]

    yield start
    for each in started:
        each.close()


class _Rank(threading.Thread):
    """Another rank, in a thread of its own."""

    def __init__(self, port: int, record: Record, join_timeout: float = 20, membership: Membership = OURS) -> None:
        super().__init__(daemon=True)
        self.arguments = ("127.0.0.1", port, record, membership, join_timeout)
        self.roster: Roster | None = None
        self.error: DistbootError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.roster, connection = call(*self.arguments)
            connection.close()
        except DistbootError as error:
            self.error = error

    def ended(self) -> Roster | DistbootError:
        self.join(20)
        result = self.roster or self.error
        assert result is not None
        return result


def _told(rank: _Rank) -> DistbootError:
    error = rank.ended()
    assert isinstance(error, DistbootError)
    return error


def _peer(port: int, data: bytes) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), timeout=20)
    peer.sendall(data)
    return peer


def _answers(peer: socket.socket) -> list[dict[str, object]]:
    """All that is said to a peer until its connection ends."""
    frames, messages = Frames(1 << 20), []
    with peer:
        while data := peer.recv(65536):
            messages += frames.feed(data)
    return messages


HELLO = frame({"distboot": VERSION, "job": OURS.job, "nonce": "0" * 32})


def test_all_ranks_get_the_same_exact_roster(rank0: Callable[..., _Rank0]) -> None:
    first = rank0(5)
    ranks = [_Rank(first.port, _record(rank, 5, node)) for rank, node in ((4, "b"), (2, "a"), (3, "a"), (1, "b"))]
    rosters = [rank.ended() for rank in ranks]
    first.join(20)
    assert first.roster == Roster(("a", "b"), ((0, 2, 3), (1, 4)))
    assert rosters == [first.roster] * 4
    assert sorted(first.connections) == [1, 2, 3, 4]


def test_rank_0_may_come_last() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    rank = _Rank(port, _record(1, 2))
    listener = socket.create_server(("127.0.0.1", port))
    roster, connections = Desk(listener, _record(0, 2), OURS).hold(20)
    assert rank.ended() == roster
    for connection in (listener, *connections.values()):
        connection.close()


def test_missing_ranks_are_named_on_every_rank(rank0: Callable[..., _Rank0]) -> None:
    first = rank0(8, 1.0)
    ranks = [_Rank(first.port, _record(rank, 8), 1.0) for rank in (1, 2, 4, 5, 6)]
    assert first.failed().code == "missing-rank"
    assert "6 of 8 ranks joined within 1 s, missing 3, 7" in first.failed().message
    for rank in ranks:
        assert _told(rank).code == "missing-rank"
        assert "missing 3, 7" in _told(rank).message


def test_missing_rank_0_is_named_by_every_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    error = _told(_Rank(port, _record(1, 2), 0.5))
    assert error.code == "missing-rank"
    assert f"rank 0 did not answer at 127.0.0.1:{port} within 0.5 s: Connection refused" in error.message


def test_second_process_with_the_same_rank_ends_the_job_at_once(rank0: Callable[..., _Rank0]) -> None:
    first = rank0(4, 600)
    ranks = [_Rank(first.port, _record(1, 4)), _Rank(first.port, replace(_record(1, 4, "b"), pid=77))]
    for error in (first.failed(), *map(_told, ranks)):
        assert error.code == "duplicate-rank"
        for said in ("rank 1 is there twice", "process 1001 on 'a'", "process 77 on 'b'"):
            assert said in error.message


def test_other_world_size_ends_the_job_at_once(rank0: Callable[..., _Rank0]) -> None:
    first = rank0(4, 600)
    rank = _Rank(first.port, _record(3, 8))
    for error in (first.failed(), _told(rank)):
        assert error.code == "roster-mismatch"
        assert "rank 0 has a world of 4, but rank 3 on 'a' (process 1003) says 8" in error.message


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (frame({"distboot": VERSION, "job": "another", "nonce": "0" * 32}), "belongs to another job"),
        (frame({"distboot": 99, "job": OURS.job, "nonce": "0" * 32}), "speaks version 99"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "announces a message"),
        (b"\xff" * 100, "announces a message"),
        ((5).to_bytes(4, "big") + b"[1,2]", "sends no JSON object"),
        ((3).to_bytes(4, "big") + b"abc", "sends no JSON"),
        (HELLO + frame({"record": None}), "sends a broken record"),
        (HELLO + frame({"record": {**_record(1, 2).as_message(), "rank": "1"}, "mac": ""}), "its rank is no number"),
        (HELLO + frame({"record": {**_record(1, 2).as_message(), "more": 1}, "mac": ""}), "sends a broken record"),
    ],
)
def test_who_does_not_belong_is_told_so_and_the_job_goes_on(
    rank0: Callable[..., _Rank0], capfd: pytest.CaptureFixture[str], data: bytes, why: str
) -> None:
    first = rank0(2)
    answers = _answers(_peer(first.port, data))
    assert why in str(answers[-1]["refused"])
    rank = _Rank(first.port, _record(1, 2))
    assert rank.ended() == Roster(("a",), ((0, 1),))
    assert why in capfd.readouterr().err


def test_silent_slow_and_vanishing_peers_hold_up_nobody(rank0: Callable[..., _Rank0]) -> None:
    first = rank0(2)
    silent = [_peer(first.port, b"") for _ in range(20)]
    slow = _peer(first.port, HELLO[:3])
    _peer(first.port, HELLO).close()
    start = time.monotonic()
    assert isinstance(_Rank(first.port, _record(1, 2)).ended(), Roster)
    assert time.monotonic() - start < 5
    for peer in (*silent, slow):
        peer.close()


def test_rank_that_lost_its_connection_may_report_again(rank0: Callable[..., _Rank0]) -> None:
    first = rank0(3)
    again = _record(1, 3).as_message()
    lost = _peer(first.port, HELLO + frame({"record": again, "mac": ""}))
    lost.recv(100)
    lost.close()
    ranks = [_Rank(first.port, _record(1, 3)), _Rank(first.port, _record(2, 3))]
    assert all(isinstance(rank.ended(), Roster) for rank in ranks)


def test_who_comes_after_the_last_rank_gets_no_roster(rank0: Callable[..., _Rank0]) -> None:
    first = rank0(2)
    before = _peer(first.port, HELLO)  # has not reported when the roll call ends
    assert isinstance(_Rank(first.port, _record(1, 2)).ended(), Roster)
    first.join(20)
    after = _peer(first.port, HELLO)
    first.listener.close()
    assert all("roster" not in message for message in _answers(before))
    with suppress(ConnectionResetError):
        assert _answers(after) == []


def test_secret_is_needed_on_both_sides(rank0: Callable[..., _Rank0], capfd: pytest.CaptureFixture[str]) -> None:
    ours, others = Membership(OURS.job, "correct horse"), Membership(OURS.job, "battery staple")
    first = rank0(2, 20, ours)
    for wrong in (others, OURS):
        error = _told(_Rank(first.port, _record(1, 2), 0.3, wrong))
        assert "does not know DISTBOOT_SECRET" in error.message
    assert isinstance(_Rank(first.port, _record(1, 2), 20, ours).ended(), Roster)
    said = capfd.readouterr().err
    assert "horse" not in said
    assert "staple" not in said


def test_rank_0_without_the_secret_is_not_believed(rank0: Callable[..., _Rank0]) -> None:
    first = rank0(2, 2.0)
    error = _told(_Rank(first.port, _record(1, 2), 0.5, Membership(OURS.job, "correct horse")))
    assert "does not know DISTBOOT_SECRET" in error.message


def test_what_was_said_once_proves_nothing_the_next_time() -> None:
    first, second = (authentication("secret", challenge, "nonce", "report", "{}") for challenge in ("1", "2"))
    assert first != second
    assert authentication("secret", "1", "nonce", "roster", "{}") != first
    assert authentication("", "1", "nonce", "report", "{}") == ""


def test_frames_come_in_any_pieces() -> None:
    messages: list[dict[str, object]] = [{"a": 1}, {"b": "x" * 5000}, {}]
    data = b"".join(map(frame, messages))
    for step in (1, 3, 4096):
        frames = Frames(1 << 16)
        found = [m for start in range(0, len(data), step) for m in frames.feed(data[start : start + step])]
        assert found == messages
    with pytest.raises(WireError):
        Frames(100).feed((101).to_bytes(4, "big"))


def test_missing_ranks_are_said_as_ranges_with_their_node_where_it_is_proved() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges(range(0, 100, 2)).endswith("and 30 more")
    register = Register(104)
    for rank in range(96):
        placed = {"local_rank": rank % 8, "local_world_size": 8, "node_rank": rank // 8, "num_nodes": 13}
        register.enter(_record(rank, 104, f"n{rank // 8}", **placed))
    assert register.progress() == "96/104 joined, missing 96-103 (node 12)"
    register.enter(_record(97, 104, "n12", local_rank=1, local_world_size=1, node_rank=12, num_nodes=13))
    assert register.progress() == "97/104 joined, missing 96, 98-103", "not every node has eight"


def _job(run: Run, rank: int, world_size: int, port: int, timeout: str) -> subprocess.CompletedProcess[str]:
    env = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    return run(sys.executable, "-m", "distboot", "show", "--job", env={**env, "DISTBOOT_JOIN_TIMEOUT": timeout})


def test_show_job_prints_where_each_rank_is(run: Run, port: int) -> None:
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda rank: _job(run, rank, 3, port, "30"), range(3)))
    assert [result.returncode for result in results] == [0, 0, 0], results
    host = socket.gethostname()
    assert results[0].stdout == f"All 3 ranks are there, on 1 node.\nnode 0     {host}  ranks 0-2\n"
    assert [result.stdout for result in results[1:]] == ["", ""]


def test_show_job_names_the_missing_rank_on_every_rank(run: Run, port: int) -> None:
    with ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda rank: _job(run, rank, 4, port, "4"), (0, 1, 3)))
    for rank, result in zip((0, 1, 3), results, strict=True):
        assert (result.returncode, result.stdout) == (75, "")
        assert f"error[missing-rank]: rank {rank} on {socket.gethostname()}: " in result.stderr
        assert "3 of 4 ranks joined within 4 s, missing 2" in result.stderr


@needs_torch
def test_show_job_under_torchrun_whose_agent_has_the_port(run: Run) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    result = run(*launch, "-m", "distboot", "show", "--job", "--json")
    (line,) = json_lines_of(result)
    assert line["nodes"] == [{"node_rank": 0, "host": socket.gethostname(), "ranks": [0, 1]}]


def json_lines_of(result: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
