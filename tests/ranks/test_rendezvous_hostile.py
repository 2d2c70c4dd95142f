"""A roll call with strangers and enemies: they are sent away, and everybody ends in time, with our error or none."""

import errno
import gc
import json
import random
import socket
import struct
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any
from unittest.mock import MagicMock

import pytest
from conftest import Fake, Run, StartRank0
from rendezvous_peers import (
    HELLO,
    NONCE,
    OPEN,
    OURS,
    Rank,
    altered,
    answers,
    framed,
    peer,
    plan_for,
    record,
    refusal,
    welcome,
)
from supervised import until

from distboot.rendezvous import connection_pool
from distboot.rendezvous.membership import Membership
from distboot.rendezvous.messages import (
    Failed,
    Go,
    Hello,
    Members,
    Ready,
    Refused,
    Welcome,
)
from distboot.rendezvous.protocol import HEADER, Channel

MEMBERS = Members(("a",), (((0, 2),),), None)


def _saying(*said: bytes, welcomes: bool = True) -> Callable[[socket.socket], None]:
    """In the place of rank 0: say each of these once something has come, with `welcomes` after the handshake."""

    def talk(connection: socket.socket) -> None:
        if welcomes:
            welcome(connection)
        for data in said:
            connection.sendall(data)
            connection.recv(65536)

    return talk


@pytest.mark.parametrize("depth", [50, 900, 960, 970, 980, 990, 2000, 30_000])
@pytest.mark.parametrize("secret", ["", "secret"])
def test_nested_content_is_refused(depth: int, secret: str, rank0: StartRank0) -> None:
    first = rank0(2, 20, secret)
    body = f'{{"kind":"WorkerInfo","rank":{"[" * depth}{"]" * depth}}}'
    assert refusal(peer(first.port, HELLO + framed(body)))
    assert Rank(first.port, record(1, 2), 20, secret).met() == first.met()


def test_mutated_messages_of_a_rank_end_nothing(rank0: StartRank0) -> None:
    chance = random.Random(7)
    first = rank0(2, 60)
    whole = HELLO + OPEN.sign(record(1, 3, facts=(("torch", "1"),)))
    odd = [
        b"null",
        b"true",
        b"-1",
        b"1e999",
        b"NaN",
        b'"\\ud800"',
        b"[]",
        b"{}",
        b"99999999999999999999",
    ]
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            at = chance.randrange(len(HELLO) if chance.random() < 0.2 else 0, len(data))
            data[at : at + chance.randrange(3)] = (
                chance.choice(odd) if chance.random() < 0.5 else chance.randbytes(2)
            )
        # It may be closed already
        with peer(first.port, bytes(data)) as connection, suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
    first.server._first = first.server._first._replace(end=0.0)
    first.join(20)
    # A mutant may still be a record: of another world size, which is the end of a job, and an error of ours.
    assert first.failed().code in ("missing-rank", "membership-mismatch")


def _compressed(message: bytes) -> bytes:
    body = zlib.compress(message[HEADER:], 9)
    return (len(body) | 1 << 31).to_bytes(4, "big") + bytes(HEADER - 4) + body


LONG = framed(f'{{"x":[{"0," * 70_000}0]}}')


@pytest.mark.parametrize(
    ("welcomes", "data", "why"),
    [
        (False, b"\xff" * 64, ""),
        (False, altered(Welcome(NONCE), challenge=7), ""),
        (False, OPEN.sign(Refused("\x1b[31mno")), ""),
        (False, _compressed(LONG), "more than 65536 bytes"),
        (
            False,
            (70_000).to_bytes(4, "big"),
            "announces a message of 70000 bytes (limit: 65536)",
        ),
        (True, altered(MEMBERS, hosts=5), ""),
        (True, OPEN.sign(MEMBERS)[:20] + b"x" + OPEN.sign(MEMBERS)[21:], ""),  # as with a secret
        (True, altered(MEMBERS, nodes=[[[0, 1]]]), "not all there"),
        (True, altered(MEMBERS, nodes=[[[0, 2.0]]]), ""),
        (True, altered(MEMBERS, master_addr=5), ""),
        (True, altered(Failed(("a", "b", "c")), problem=["x"]), ""),
        (True, framed('{"kind":' + "[" * 3995 + "]" * 3995), ""),
        (True, _compressed(LONG), "more than 67584 bytes"),
        (True, _compressed(altered(MEMBERS, nodes=[[[0, 9999999]]])), "too many ranks"),
    ],
)
def test_impostor_of_rank_0_is_not_trusted(
    welcomes: bool, data: bytes, why: str, fake: Fake
) -> None:
    somebody = fake(_saying(data, welcomes=welcomes))
    error = Rank(somebody.port, record(1, 2), 1).failed()
    assert error.code == "missing-rank"
    assert "the process that listens there" in error.message
    assert why in error.message
    assert error.message.isprintable()


@pytest.mark.parametrize("says", ["nothing", "welcome", "membership"])
def test_silence_and_trickle_end_at_the_join_timeout(says: str, fake: Fake) -> None:
    def talk(connection: socket.socket) -> None:
        while says == "nothing" and connection.recv(65536):
            pass
        if says == "membership":
            welcome(connection)
        connection.sendall((1 << 16).to_bytes(4, "big"))
        while True:
            connection.sendall(b" ")
            time.sleep(0.02)

    somebody = fake(talk)
    error = Rank(somebody.port, record(1, 2), 0.5).failed()
    assert error.code == "missing-rank"
    assert "a process listens there, and does not answer as rank 0" in error.message


def test_rank_0_that_ended_while_joining_is_reported(fake: Fake) -> None:
    somebody = fake(welcome)
    error = Rank(somebody.port, record(1, 3), 0.5).failed()
    assert error.code == "missing-rank"
    assert "rank 0 was reached, but disconnected before all ranks had joined" in error.message
    assert error.hint.startswith("look at the output of rank 0: it ended, or was stopped")


def test_membership_and_error_in_one_segment_are_read(fake: Fake) -> None:
    failure = ("framework-not-installed", "rank 0 on 'a': torch is not installed", "hint")
    somebody = fake(_saying(OPEN.sign(MEMBERS) + OPEN.sign(Failed(failure))))
    error = Rank(somebody.port, record(1, 2), ready=Ready()).failed()
    assert (error.code, error.hint) == ("framework-not-installed", "hint")


@pytest.mark.parametrize(
    "said",
    [
        None,
        {},
        [[1]],
        [{"rank": "1", "offer": "x"}],
        [{"rank": 1, "offer": 2}],
        [{"rank": 1, "offer": "x" * 301}],
    ],
)
def test_broken_word_to_go_is_refused(said: object, fake: Fake) -> None:
    somebody = fake(_saying(OPEN.sign(MEMBERS), altered(Go(), offers=said)))
    error = Rank(somebody.port, record(1, 2), ready=Ready()).failed()
    assert (error.code, "sends a broken Go" in error.message) == ("rank-failed", True)


def test_error_of_a_newer_version_is_shown(fake: Fake) -> None:
    somebody = fake(_saying(OPEN.sign(Failed(("code-of-tomorrow", "the sky\x1b[2J\nfell", "")))))
    error = Rank(somebody.port, record(1, 2)).failed()
    assert error.code == "rank-failed"
    assert error.message == "rank 0 says: the sky\\x1b[2J\nfell"


def test_reason_for_a_refusal_is_not_forgotten(fake: Fake) -> None:
    somebody = fake(
        lambda connection: connection.sendall(OPEN.sign(Refused("the peer belongs to another job")))
    )
    rank = Rank(somebody.port, record(1, 2), 1.5)
    rank.join(0.3)
    somebody.close()  # and from now on nobody listens
    message = rank.failed().message
    assert (
        "the process that listens there refused this rank: 'the peer belongs to another job'"
        in message
    )


def test_closed_connection_hides_no_refusal(fake: Fake) -> None:
    answers = [OPEN.sign(Refused("the peer belongs to another job"))]
    somebody = fake(lambda connection: connection.sendall(answers.pop()) if answers else None)
    error = Rank(somebody.port, record(1, 2), 1.5).failed()
    assert (
        "closes the connection at once; before that, the process that listens there refused "
        "this rank: 'the peer belongs to another job'"
    ) in error.message
    assert error.hint.startswith("all ranks need the same job, ")


def test_port_of_two_jobs_is_explained(rank0: StartRank0) -> None:
    first = rank0(2, 1)
    refusal(peer(first.port, OPEN.sign(Hello("another", NONCE))))
    error = first.failed()
    assert "1 refused: the connecting process belongs to another job" in error.message
    assert error.hint.startswith(
        "another job uses this address and port: give each job its own MASTER_PORT; or look at"
    )


@pytest.mark.parametrize("stderr", ["2>&-", "2>/dev/full", "2>&1 | true"])
def test_stderr_that_takes_nothing_costs_no_job(run: Run, port: int, stderr: str) -> None:
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    script = f"""
    {{ RANK=0 {sys.executable} -m distboot run -- sh -c 'echo up > up'; }} {stderr} &
    sleep 1.5  # longer than the second after which rank 0 has a line to say
    RANK=1 {sys.executable} -m distboot run -- true && wait && cat up
    """
    assert run("bash", "-c", script, env=job).stdout == "up\n"


def test_message_that_a_rank_sends_reaches_no_terminal(rank0: StartRank0) -> None:
    first = rank0(2, 600)
    problem = ("device-failed", "a\x1b[2Jb\nc", "\x07")
    error = Rank(first.port, record(1, 2, problem=problem)).failed()
    assert error.message == "rank 0 says: rank 1 on 'a': a\\x1b[2Jb\nc"
    assert error.hint == "\\x07"


def test_fact_with_strange_names_reaches_no_terminal(
    capfd: pytest.CaptureFixture[str], rank0: StartRank0
) -> None:
    first = rank0(2, 600)
    strange = (("accelerators", "\x1b[2J"), ("\x1b[1m\n", "\x1b"), ("NCCL_\x1b=", "\x1b"))
    assert Rank(first.port, record(1, 2, facts=strange)).met() == first.met()
    said = capfd.readouterr().err
    assert "\x1b" not in said
    assert len(said.splitlines()) == 3, json.dumps(said)


def test_second_record_on_one_connection_is_refused(rank0: StartRank0) -> None:
    first = rank0(3, 20)
    said = b"".join(OPEN.sign(record(rank, 3)) for rank in (1, 2))
    assert "reports twice" in refusal(peer(first.port, HELLO + said))
    ranks = [Rank(first.port, record(rank, 3)) for rank in (1, 2)]
    assert {each.met() for each in (first, *ranks)} == {Membership(("a",), ((0, 1, 2),))}


def test_timeout_of_a_rank_that_left_is_forgotten(rank0: StartRank0) -> None:
    first = rank0(3, 20)
    gone = peer(first.port, HELLO + OPEN.sign(record(1, 3, patience=1.0)))
    until(lambda: 1 in first.server.table.records)
    gone.close()
    end = time.monotonic() + 1.2
    until(lambda: time.monotonic() > end)
    ranks = [Rank(first.port, record(rank, 3)) for rank in (1, 2)]
    assert {each.met() for each in (first, *ranks)} == {Membership(("a",), ((0, 1, 2),))}


def test_no_file_left_is_no_busy_wait(run: Run) -> None:
    script = """
import os, resource, select, socket, time
from distboot.rendezvous.connection_pool import ConnectionPool, OutOfFilesError

pool = ConnectionPool(socket.create_server(("127.0.0.1", 0)), 2, print, print, print)
port = pool.listen_also()
peer = socket.create_connection(("127.0.0.1", port))
files = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
try:
    while True:
        files.append(os.dup(0))
except OSError:
    now = time.monotonic()
waits = select.poll()  # which takes no file
waits.register(pool.fileno(), select.POLLIN)
assert waits.poll(5000)
try:
    pool.poll(0.0)
except OutOfFilesError:
    pool.pause(now)
assert not waits.poll(0)
for _ in range(2):  # Linux takes a file for the next connection before it looks for one
    os.close(files.pop())
pool.refuse_overdue(now + 2)
assert waits.poll(5000)
pool.poll(0.0)
assert len(pool.unauthenticated) == 1
"""
    done = run(sys.executable, "-c", script)
    assert (done.returncode, done.stderr) == (0, "")


class _Ended(socket.socket):
    """What macOS accepts if the peer has disconnected again."""

    def setsockopt(self, *_: Any) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_peer_that_has_gone_ends_no_rendezvous() -> None:
    ours, its = socket.socketpair()
    listener = MagicMock()
    listener.accept.side_effect = [(_Ended(fileno=ours.detach()), ("::1", 1)), BlockingIOError]
    with socket.create_server(("127.0.0.1", 0)) as real, its:
        pool = connection_pool.ConnectionPool(real, 2, MagicMock(), MagicMock(), MagicMock())
        pool._accept(listener)
        assert len(pool.unauthenticated) == 1
        pool.drop(pool.unauthenticated[0])


def test_peer_without_room_for_a_message_is_dropped() -> None:
    lost = MagicMock()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pool = connection_pool.ConnectionPool(listener, 2, MagicMock(), lost, MagicMock())
        with socket.create_connection(listener.getsockname()):
            pool.poll(5.0)
            (connection,) = pool.unauthenticated
            pool.send(connection, bytes(1 << 26))
    lost.assert_called_once_with(connection)


def test_ranks_that_have_gone_are_forgotten(rank0: StartRank0) -> None:
    def there() -> int:
        return sum(type(each) is connection_pool.Connection for each in gc.get_objects())

    before = there()  # of other tests
    first = rank0(3, 20)
    for reset in (False, True) * 30:
        gone = peer(first.port, HELLO + OPEN.sign(record(1, 3)))
        if reset:
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.close()
    ranks = [Rank(first.port, record(rank, 3)) for rank in (1, 2)]
    assert {each.met() for each in (first, *ranks)} == {Membership(("a",), ((0, 1, 2),))}
    assert there() < before + 10


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (OPEN.sign(Hello("another", NONCE)), "belongs to another job"),
        (
            altered(Hello(OURS, NONCE), job="x" * 9000),
            "sends a broken Hello: job is not a valid text",
        ),
        (
            altered(Hello(OURS, NONCE), nonce="0"),
            "sends a broken Hello: nonce is not a valid nonce",
        ),
        (
            altered(Hello(OURS, NONCE), nonce="\ud800" * 32),
            "sends a broken Hello: nonce is not a valid nonce",
        ),
        (
            b"\x00\xce\xf7\x85\x3c",
            "looks for torch's store: it runs without distboot, or with DISTBOOT_RENDEZVOUS=0",
        ),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "sends HTTP ('GET')"),
        (b"\xff" * 100, "does not use distboot's protocol: it begins with ff ff"),
        (framed("[1,2]"), "does not send the expected Hello"),
        (framed("abc"), "sent data that is not JSON"),
        (framed("[" * 4000), "sent data that is not JSON"),
        (HELLO + OPEN.sign(Ready()), "does not send the expected WorkerInfo"),
        (HELLO + framed({"kind": "WorkerInfo"}), "sends a broken WorkerInfo"),
        *(
            (HELLO + altered(record(1, 2), rank=rank), "rank is not a valid number")
            for rank in ("1", True, -1)
        ),
        (HELLO + altered(record(1, 2), facts={"a": 1}), "facts is not a valid list"),
        (
            HELLO + altered(record(1, 2), facts=[["a", "b", "c"]]),
            "facts is not a valid list of names and values",
        ),
        (HELLO + altered(record(1, 2), clock="now"), "clock is not a valid number of seconds"),
        (HELLO + altered(record(1, 2), problem=["x"]), "problem is not a valid error"),
        (HELLO + altered(record(1, 2), more=1), "sends a broken WorkerInfo"),
    ],
)
def test_process_outside_the_job_is_refused(
    rank0: StartRank0, capfd: pytest.CaptureFixture[str], data: bytes, why: str
) -> None:
    first = rank0(2)
    assert why in refusal(peer(first.port, data))
    assert Rank(first.port, record(1, 2)).met() == Membership(("a",), ((0, 1),))
    assert why in capfd.readouterr().err


def test_scanner_hides_no_refusal_of_a_rank(
    rank0: StartRank0, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of its connections sends something else."""
    first = rank0(2, 3, "secret")
    for number in range(120):
        refusal(peer(first.port, bytes([255, number]) * 8))
    assert "no DISTBOOT_SECRET" in refusal(peer(first.port, HELLO + OPEN.sign(record(1, 2))))
    text = str(first.failed())
    assert "120 refused: the connecting process does not use distboot's protocol: it begins" in text
    assert "no DISTBOOT_SECRET" in text
    assert capfd.readouterr().err.count("does not use distboot's protocol") <= 4


def test_other_version_ends_the_job_at_once(rank0: StartRank0) -> None:
    first = rank0(3, 600)
    early = Rank(first.port, record(1, 3))
    (said,) = answers(peer(first.port, OPEN.sign(Hello(OURS, NONCE, 99))))
    assert said == Refused(
        "the connecting process uses version 99 of the protocol; rank 0 uses version 2",
        incompatible=True,
    )
    for error in (first.failed(), early.failed()):
        assert (error.code, "uses version 99" in error.message) == ("version-mismatch", True)


def test_other_version_needs_the_secret_to_count(rank0: StartRank0) -> None:
    first = rank0(2, 600, "secret")
    assert "uses version 99" in refusal(peer(first.port, OPEN.sign(Hello(OURS, NONCE, 99))))
    assert Rank(first.port, record(1, 2), 20, "secret").met() == first.met()


def test_silent_connection_is_closed_in_time(
    rank0: StartRank0, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_pool, "_REPORT_LIMIT", 0.3)
    first = rank0(2, 600)
    slow = [peer(first.port, data) for data in (b"", HELLO[:3], HELLO)]
    for each in slow:
        assert "did not report within 0.3 s" in refusal(each)
    assert Rank(first.port, record(1, 2)).met() == first.met()


def test_no_frame_follows_half_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_pool, "_ANSWER_LIMIT", 0.1)
    message = bytes(10 << 20)  # more than a socket holds
    ours, its = socket.socketpair()
    with ours, its:
        ours.setblocking(False)
        connection_pool.send_to_all({ours: lambda: message})
        its.settimeout(5)
        arrived = 0
        while data := its.recv(1 << 20):
            arrived += len(data)
        assert 0 < arrived < len(message)
        with pytest.raises(BrokenPipeError):
            ours.send(b"a later frame")


@pytest.mark.parametrize("stopped_before", ["hello", "report"])
def test_report_of_before_a_pause_counts(
    monkeypatch: pytest.MonkeyPatch, stopped_before: str
) -> None:
    """As where the host of rank 0 was stopped for longer than a peer has to report."""
    monkeypatch.setattr(connection_pool, "_REPORT_LIMIT", 0.05)
    monkeypatch.setattr(connection_pool, "_CHECK_INTERVAL", 0.0)
    listener = socket.create_server(("127.0.0.1", 0))
    reported: list[connection_pool.Connection] = []

    def handle(one: connection_pool.Connection, _frame: object) -> None:
        if not one.welcomed:
            one.welcomed = 1.0
        else:
            one.rank = 1
            reported.append(one)

    pool = connection_pool.ConnectionPool(listener, 2, handle, lambda _: None, print)
    with closing(listener), closing(pool), peer(listener.getsockname()[1], b"") as rank:
        pool.poll(5)  # accepts it
        if stopped_before == "report":
            rank.sendall(HELLO)
            pool.poll(5)
        else:
            time.sleep(0.1)
            rank.sendall(HELLO)
            pool.refuse_overdue(time.monotonic())
        rank.sendall(OPEN.sign(record(1, 2)))
        time.sleep(0.1)
        pool.refuse_overdue(time.monotonic())
        assert len(reported) == 1


@pytest.mark.parametrize("data", [b"", HELLO], ids=["nothing", "hello"])
def test_silent_connection_is_closed_after_the_start(
    rank0: StartRank0, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(connection_pool, "_REPORT_LIMIT", 0.3)
    first = rank0(2, ready=Ready())
    first.ended.clear()
    other = Rank(first.port, record(1, 2), ready=Ready())
    until(first.is_ready)
    assert first.membership is not None
    silent = peer(first.membership.resume_port, data)
    assert "did not report within 0.3 s" in refusal(silent)
    first.ended.set()
    assert other.met() == first.met()


def test_too_many_unauthenticated_peers_keep_nobody_out(rank0: StartRank0) -> None:
    first = rank0(2)
    strangers = [peer(first.port, data) for data in (HELLO[:3], *[b""] * 100)]
    peer(first.port, HELLO).close()
    assert Rank(first.port, record(1, 2), 5).met()
    for each in strangers:
        each.close()


def test_latecomer_gets_no_membership(rank0: StartRank0) -> None:
    first = rank0(2)
    before = peer(first.port, HELLO)  # has not reported when the roll call ends
    assert Rank(first.port, record(1, 2)).met()
    first.join(20)
    after = peer(first.port, HELLO)
    first.close()
    assert not any(isinstance(message, Members) for message in answers(before))
    with suppress(ConnectionResetError):
        assert answers(after) == []


def test_secret_is_needed_on_both_sides(
    rank0: StartRank0, capfd: pytest.CaptureFixture[str]
) -> None:
    ours = "correct horse"
    others = "battery staple"
    first = rank0(2, 20, ours)
    for wrong, why in (
        (others, "has a different DISTBOOT_SECRET"),
        ("", "has a DISTBOOT_SECRET, but this rank has none"),
    ):
        error = Rank(first.port, record(1, 2), 0.3, wrong).failed()
        assert f"the process that listens there {why}" in error.message
    assert Rank(first.port, record(1, 2), 20, ours).met()
    said = capfd.readouterr().err
    assert "the connecting process has a different DISTBOOT_SECRET" in said
    assert "the connecting process has no DISTBOOT_SECRET" in said
    said += repr(plan_for(record(0, 2), secret=ours)) + repr(Channel(ours))
    assert "horse" not in said
    assert "staple" not in said


def test_rank_0_without_the_secret_is_not_believed(rank0: StartRank0) -> None:
    first = rank0(2, 2.0)
    error = Rank(first.port, record(1, 2), 0.5, "correct horse").failed()
    assert "the process that listens there has no DISTBOOT_SECRET" in error.message
    missing = first.failed()
    assert (
        "refused: the connecting process has a DISTBOOT_SECRET, but rank 0 has none"
        in missing.message
    )
    assert missing.hint.startswith("give all ranks the same DISTBOOT_SECRET; or ")
