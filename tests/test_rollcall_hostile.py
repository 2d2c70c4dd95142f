"""A roll call among those who do not wish it well: everybody ends in time, with an error of ours or none at all."""

from __future__ import annotations

import gc
import json
import random
import socket
import struct
import sys
import time
import zlib
from contextlib import closing
from dataclasses import replace

import pytest
from conftest import Run
from rollcalls import HELLO, OURS, FakeRank0, Rank, Rank0, answers, peer, record, welcome

from distboot.rollcall import connections
from distboot.rollcall.ready import Ready
from distboot.rollcall.relayed import fitting
from distboot.rollcall.wire import Membership, WireError, frame
from distboot.roster import Roster

ROSTER: dict[str, object] = {"roster": {"hosts": ["a"], "nodes": [[[0, 2]]], "master_addr": None}, "mac": ""}


def test_record_and_reset_in_one_go_leave_no_dead_rank_behind() -> None:
    with closing(Rank0(record(0, 3), 20)) as first:
        for _ in range(20):
            gone = peer(first.port, HELLO + frame({"record": record(1, 3).as_message(), "mac": ""}))
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.close()  # with a reset
        ranks = [Rank(first.port, record(rank, 3)) for rank in (1, 2)]
        assert {each.met() for each in (first, *ranks)} == {Roster(("a",), ((0, 1, 2),))}


@pytest.mark.parametrize("depth", [50, 900, 960, 970, 980, 990, 2000, 30_000])
def test_nested_content_is_refused(depth: int) -> None:
    membership = Membership(OURS.job, "secret")
    with closing(Rank0(record(0, 2), 20, membership)) as first:
        body = f'{{"record":{"[" * depth}{"]" * depth},"mac":"x"}}'.encode()
        said = answers(peer(first.port, HELLO + len(body).to_bytes(4, "big") + body))
        assert "refused" in said[-1]
        assert Rank(first.port, record(1, 2), 20, membership).met() == first.met()


def test_mutated_messages_of_a_rank_end_nothing() -> None:
    chance = random.Random(7)
    with closing(Rank0(record(0, 2), 60)) as first:
        whole = HELLO + frame({"record": record(1, 3, facts=(("torch", "1"),)).as_message(), "mac": ""})
        odd = [b"null", b"true", b"-1", b"1e999", b"NaN", b'"\\ud800"', b"[]", b"{}", b"99999999999999999999"]
        for _ in range(150):
            data = bytearray(whole)
            for _ in range(chance.randrange(1, 4)):
                at = chance.randrange(len(HELLO) if chance.random() < 0.2 else 0, len(data))
                data[at : at + chance.randrange(3)] = (
                    chance.choice(odd) if chance.random() < 0.5 else chance.randbytes(2)
                )
            with peer(first.port, bytes(data)) as connection:
                connection.shutdown(socket.SHUT_WR)
        first.server._end = 0.0
        first.join(20)
        # A mutant may still be a record: of another world size, which is the end of a job, and an error of ours.
        assert first.failed().code in ("missing-rank", "roster-mismatch")


@pytest.mark.parametrize(
    ("welcomes", "data"),
    [
        (False, b"\xff" * 64),
        (False, frame({"distboot": 1, "challenge": 7})),
        (False, frame({"refused": "\x1b[31mno"})),
        (True, frame({"roster": [1], "mac": ""})),
        (True, frame({**ROSTER, "mac": 5})),
        (True, frame({"roster": {"hosts": ["a"], "nodes": [[[0, 1]]], "master_addr": None}, "mac": ""})),
        (True, frame({"roster": {"hosts": ["a"], "nodes": [[[0, 2.0]]], "master_addr": None}, "mac": ""})),
        (True, frame({"roster": {"hosts": ["a"], "nodes": [[[0, 2]]], "master_addr": 5}, "mac": ""})),
        (True, frame({"error": ["x"], "mac": ""})),
        (True, (8000).to_bytes(4, "big") + b'{"roster":' + b"[" * 3995 + b"]" * 3995),
    ],
)
def test_somebody_who_is_not_rank_0_is_not_believed(welcomes: bool, data: bytes) -> None:
    def talk(connection: socket.socket) -> None:
        if welcomes:
            welcome(connection)
        connection.sendall(data)

    with closing(FakeRank0(talk)) as fake:
        error = Rank(fake.port, record(1, 2), 0.5).failed()
    assert error.code == "missing-rank"
    assert "who listens there" in error.message
    assert error.message.isprintable()


@pytest.mark.parametrize("welcomes", [False, True], ids=["welcome", "roster"])
def test_trickle_does_not_outlast_the_join_timeout(welcomes: bool) -> None:
    def talk(connection: socket.socket) -> None:
        if welcomes:
            welcome(connection)
        connection.sendall((1 << 16).to_bytes(4, "big"))
        while True:
            connection.sendall(b" ")
            time.sleep(0.02)

    with closing(FakeRank0(talk)) as fake:
        error = Rank(fake.port, record(1, 2), 0.5).failed()
    assert error.code == "missing-rank"
    assert "somebody listens there, and does not answer as rank 0" in error.message


def test_roster_and_error_in_one_segment_are_both_read() -> None:
    def talk(connection: socket.socket) -> None:
        welcome(connection)
        failure = ["framework-not-installed", "rank 0 on 'a': torch is not installed", "hint"]
        connection.sendall(frame(ROSTER) + frame({"error": failure, "mac": ""}))
        connection.recv(65536)

    with closing(FakeRank0(talk)) as fake:
        error = Rank(fake.port, record(1, 2), ready=Ready()).failed()
        assert (error.code, error.hint) == ("framework-not-installed", "hint")


@pytest.mark.parametrize("said", [None, {}, [[1]], [[7, "x"]], [["1", "x"]], [[1, 2]], [[1, "x" * 301]]])
def test_broken_word_to_go_is_refused(said: object) -> None:
    def talk(connection: socket.socket) -> None:
        welcome(connection)
        connection.sendall(frame(ROSTER))
        connection.recv(65536)
        connection.sendall(frame({"go": said, "mac": ""}))
        connection.recv(65536)

    with closing(FakeRank0(talk)) as fake:
        error = Rank(fake.port, record(1, 2), ready=Ready()).failed()
    assert (error.code, "sends a broken word to go" in error.message) == ("rank-failed", True)


def test_error_with_a_code_of_a_newer_version_is_told_all_the_same() -> None:
    def talk(connection: socket.socket) -> None:
        welcome(connection)
        connection.sendall(frame({"error": ["code-of-tomorrow", "the sky\x1b[2J\nfell", ""], "mac": ""}))

    with closing(FakeRank0(talk)) as fake:
        error = Rank(fake.port, record(1, 2)).failed()
        assert error.code == "rank-failed"
        assert error.message == "rank 0 says: the sky\\x1b[2J\nfell"


def test_reason_for_a_refusal_is_not_forgotten() -> None:
    with closing(
        FakeRank0(lambda connection: connection.sendall(frame({"refused": "the peer belongs to another job"})))
    ) as fake:
        rank = Rank(fake.port, record(1, 2), 1.5)
        rank.join(0.3)
        fake.close()  # and from now on nobody listens
        message = rank.failed().message
        assert "who listens there refused this rank: 'the peer belongs to another job'" in message


def test_same_process_id_in_two_containers_is_not_one_process() -> None:
    with closing(Rank0(record(0, 3), 600)) as first:
        ranks = [Rank(first.port, replace(record(1, 3), process=name)) for name in ("one", "two")]
        assert {each.failed().code for each in (first, *ranks)} == {"duplicate-rank"}


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full", "2>&1 | true"])
def test_stderr_that_takes_nothing_costs_no_job(run: Run, port: int, stderr: str) -> None:
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    script = f"""
    {{ RANK=0 {sys.executable} -m distboot run -- sh -c 'echo up > up'; }} {stderr} &
    sleep 1.5  # longer than the second after which rank 0 has a line to say
    RANK=1 {sys.executable} -m distboot run -- true && wait && cat up
    """
    assert run("bash", "-c", script, env=job).stdout == "up\n"


def test_message_that_a_rank_sends_reaches_no_terminal() -> None:
    with closing(Rank0(record(0, 2), 600)) as first:
        problem = ("device-failed", "a\x1b[2Jb\nc", "\x07")
        error = Rank(first.port, record(1, 2, problem=problem)).failed()
        assert error.message == "rank 0 says: rank 1 on 'a': a\\x1b[2Jb\nc"
        assert error.hint == "\\x07"


def test_fact_with_strange_names_reaches_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with closing(Rank0(record(0, 2), 600)) as first:
        strange = (("accelerators", "\x1b[2J"), ("\x1b[1m\n", "\x1b"), ("NCCL_\x1b=", "\x1b"))
        assert Rank(first.port, record(1, 2, facts=strange)).met() == first.met()
        said = capfd.readouterr().err
        assert "\x1b" not in said
        assert len(said.splitlines()) == 3, json.dumps(said)


def _reported(rank: int, kind: str = "records") -> dict[str, object]:
    said = record(rank, 3).as_message()
    return {kind: [[said, "0" * 32, "1" * 32]] if kind == "records" else said, "mac": ""}


@pytest.mark.parametrize(
    "said",
    [
        [_reported(1, "record"), {**_reported(2, "record"), "records": 0}],
        [_reported(1, "record"), {"of": [[1, "gone", ""]], "mac": ""}],
        [_reported(1), _reported(2, "record")],
    ],
    ids=["two ranks on one connection", "a rank as a relay", "a relay as a rank"],
)
def test_who_speaks_as_a_rank_and_as_a_relay_is_sent_away(said: list[dict[str, object]]) -> None:
    with closing(Rank0(record(0, 3), 20, ready=Ready())) as first:
        with peer(first.port, HELLO + b"".join(map(frame, said))) as connection:
            assert any("refused" in answer for answer in answers(connection))
        ranks = [Rank(first.port, record(rank, 3), ready=Ready()) for rank in (1, 2)]
        assert {each.met() for each in (first, *ranks)} == {Roster(("a",), ((0, 1, 2),))}


def test_relay_whose_ranks_have_gone_is_a_stranger_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_REPORT_LIMIT", 0.5)
    with closing(Rank0(record(0, 3), 20)) as first:
        gone = frame(_reported(1)) + frame({"of": [[1, "gone", ""]], "mac": ""})
        with peer(first.port, HELLO + gone) as connection:
            answers(connection)  # until rank 0 has closed it
        ranks = [Rank(first.port, record(rank, 3)) for rank in (1, 2)]
        assert {each.met() for each in (first, *ranks)} == {Roster(("a",), ((0, 1, 2),))}


def test_relays_that_have_gone_are_forgotten() -> None:
    def there() -> int:
        return sum(type(each) is connections.Peer for each in gc.get_objects())

    before = there()  # of other tests
    with closing(Rank0(record(0, 2), 20)) as first:
        for _ in range(50):
            peer(first.port, HELLO + frame({"records": [], "mac": ""})).close()
        assert Rank(first.port, record(1, 2)).met() == first.met()
        assert there() < before + 10


def _compressed(text: str) -> bytes:
    body = zlib.compress(text.encode(), 9)
    return (len(body) | 1 << 31).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    ("welcomes", "text", "why"),
    [
        (False, f'{{"x":[{"0," * 70_000}0]}}', "more than 65536 bytes"),
        (True, f'{{"roster":[{"0," * 70_000}0]}}', "more than 67584 bytes"),
        (True, '{"roster":{"hosts":["a"],"nodes":[[[0,9999999]]],"master_addr":null},"mac":""}', "too many ranks"),
        (True, '{"roster":{"hosts":["a"],"nodes":[[[0,1]]],"master_addr":null},"mac":""}', "not all there"),
    ],
)
def test_long_answers_in_the_place_of_rank_0_are_not_taken(welcomes: bool, text: str, why: str) -> None:
    def talk(connection: socket.socket) -> None:
        if welcomes:
            welcome(connection)
        else:
            connection.recv(65536)
        connection.sendall(_compressed(text))
        connection.recv(1)

    with closing(FakeRank0(talk)) as fake:
        assert why in Rank(fake.port, record(1, 2), 2).failed().message


@pytest.mark.parametrize(("depth", "text"), [(0, "é" * 20_000), (890, ""), (5000, "")], ids=["long", "deep", "deeper"])
def test_what_rank_0_could_not_read_in_a_batch_ends_the_line_of_one_rank(depth: int, text: str) -> None:
    said: object = text
    for _ in range(depth):
        said = [said]
    with pytest.raises(WireError):
        fitting([3, "end", said])
