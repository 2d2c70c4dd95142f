"""The roll call over real sockets: whoever is missing is named, whoever does not belong is sent away, nobody hangs."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rollcalls import HELLO, OURS, Rank, Rank0, answers, peer, record

from distboot import DistbootError
from distboot.record import Record
from distboot.rollcall import connections
from distboot.rollcall.register import Register
from distboot.rollcall.server import Server
from distboot.rollcall.wire import VERSION, Announcement, Frames, Membership, Session, WireError, canonical, frame
from distboot.roster import Roster, ranges


@pytest.fixture
def rank0() -> Iterator[Callable[..., Rank0]]:
    """Rank 0 of a world of this size."""
    started: list[Rank0] = []

    def start(world_size: int, join_timeout: float = 20, membership: Membership = OURS, **more: Any) -> Rank0:
        started.append(Rank0(record(0, world_size, **more), join_timeout, membership))
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_all_ranks_get_the_same_exact_roster(rank0: Callable[..., Rank0]) -> None:
    first = rank0(5)
    ranks = [Rank(first.port, record(rank, 5, node)) for rank, node in ((4, "b"), (2, "a"), (3, "a"), (1, "b"))]
    assert {rank.met() for rank in (first, *ranks)} == {Roster(("a", "b"), ((0, 2, 3), (1, 4)), "127.0.0.1")}


def test_rank_0_may_come_last() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    rank = Rank(port, record(1, 2))
    with socket.create_server(("127.0.0.1", port)) as listener:
        server = Server(listener, record(0, 2), OURS)
        roster = server.hold(20)
        server.close()
    assert rank.met() == roster


def test_missing_ranks_are_named_on_every_rank(rank0: Callable[..., Rank0]) -> None:
    first = rank0(8, 1.0)
    ranks = [Rank(first.port, record(rank, 8), 1.5) for rank in (1, 2, 4, 5, 6)]
    for error in [rank.failed() for rank in (first, *ranks)]:
        assert error.code == "missing-rank"
        assert "6 of 8 ranks joined within 1 s, missing 3, 7" in error.message


def test_rank_that_has_waited_long_enough_hears_who_is_missing_and_so_does_everybody(
    rank0: Callable[..., Rank0],
) -> None:
    first = rank0(3, 600)
    for error in (Rank(first.port, record(1, 3), 0.5).failed(), first.failed()):
        assert error.code == "missing-rank"
        assert "2 of 3 ranks joined within the join timeout of rank 1, which was over first" in error.message
        assert "missing 2" in error.message


def test_missing_rank_0_is_named_by_every_other() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    error = Rank(port, record(1, 2), 0.5).failed()
    assert error.code == "missing-rank"
    assert f"rank 0 did not answer at 127.0.0.1:{port} within 0.5 s: Connection refused" in error.message
    assert "127.0.0.1 is this very host" in error.hint


def test_second_process_with_the_same_rank_ends_the_job_at_once(rank0: Callable[..., Rank0]) -> None:
    first = rank0(4, 600)
    ranks = [Rank(first.port, record(1, 4)), Rank(first.port, replace(record(1, 4, "b"), pid=77, process="77"))]
    for error in [each.failed() for each in (first, *ranks)]:
        assert error.code == "duplicate-rank"
        for said in ("rank 1 is there twice", "process 1001 on 'a'", "process 77 on 'b'"):
            assert said in error.message


def test_other_world_size_ends_the_job_at_once(rank0: Callable[..., Rank0]) -> None:
    first = rank0(4, 600)
    for error in (Rank(first.port, record(3, 8)).failed(), first.failed()):
        assert error.code == "roster-mismatch"
        assert "rank 0 has a world of 4, but rank 3 on 'a' (process 1003) says 8" in error.message


@pytest.mark.parametrize("device", ["GPU-1", "nvidia0"])
def test_two_ranks_on_one_accelerator_end_the_job_at_once(rank0: Callable[..., Rank0], device: str) -> None:
    first = rank0(4, 600)
    ranks = [Rank(first.port, record(rank, 4, device=device)) for rank in (1, 2)]
    for error in [each.failed() for each in (first, *ranks)]:
        assert error.code == "shared-accelerator"
        assert f"would both use the accelerator '{device}'" in error.message


def test_index_of_an_accelerator_means_its_own_node(rank0: Callable[..., Rank0]) -> None:
    first = rank0(2, device="nvidia0")
    assert Rank(first.port, record(1, 2, "b", device="nvidia0")).met() == first.met()


def test_problem_of_one_rank_reaches_all_and_also_those_that_come_a_little_later(rank0: Callable[..., Rank0]) -> None:
    problem = ("unknown-interface", "GLOO_SOCKET_IFNAME='ib0'", "unset it")
    first = rank0(4, 600)
    early, culprit = Rank(first.port, record(1, 4)), Rank(first.port, record(2, 4, "b", problem=problem))
    assert culprit.failed().code == early.failed().code == "unknown-interface"
    late = Rank(first.port, record(3, 4)).failed()
    for error in (early.failed(), late, first.failed()):
        assert "rank 2 on 'b': GLOO_SOCKET_IFNAME='ib0'" in error.message


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (frame({"distboot": VERSION, "job": "another", "nonce": "0" * 32}), "belongs to another job"),
        (frame({"distboot": "x" * 9000}), "belongs to another job"),
        (b"\x00\xce\xf7\x85\x3c", "looks for torch's store: it runs without distboot, or with DISTBOOT_ROLL_CALL=0"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", "announces a message"),
        (b"\xff" * 100, "announces a message"),
        ((5).to_bytes(4, "big") + b"[1,2]", "sends no JSON object"),
        ((3).to_bytes(4, "big") + b"abc", "sends no JSON"),
        ((4000).to_bytes(4, "big") + b"[" * 4000, "sends no JSON"),
        (HELLO + frame({"roster": None}), "does not send record"),
        (HELLO + frame({"record": None, "mac": ""}), "sends a broken record"),
        (HELLO + frame({"record": {**record(1, 2).as_message(), "rank": "1"}, "mac": ""}), "its rank is no number"),
        (HELLO + frame({"record": {**record(1, 2).as_message(), "rank": True}, "mac": ""}), "its rank is no number"),
        (HELLO + frame({"record": {**record(1, 2).as_message(), "facts": {"a": 1}}, "mac": ""}), "no table of texts"),
        (HELLO + frame({"record": {**record(1, 2).as_message(), "clock": "now"}, "mac": ""}), "its clock is no time"),
        (HELLO + frame({"record": {**record(1, 2).as_message(), "problem": ["x"]}, "mac": ""}), "its problem is no"),
        (HELLO + frame({"record": {**record(1, 2).as_message(), "more": 1}, "mac": ""}), "sends a broken record"),
    ],
)
def test_who_does_not_belong_is_told_so_and_the_job_goes_on(
    rank0: Callable[..., Rank0], capfd: pytest.CaptureFixture[str], data: bytes, why: str
) -> None:
    first = rank0(2)
    said = answers(peer(first.port, data))
    assert why in str(said[-1]["refused"])
    assert Rank(first.port, record(1, 2)).met() == Roster(("a",), ((0, 1),))
    assert why in capfd.readouterr().err


def test_other_version_ends_the_job_at_once(rank0: Callable[..., Rank0]) -> None:
    first = rank0(3, 600)
    early = Rank(first.port, record(1, 3))
    said = answers(peer(first.port, frame({"distboot": 99, "job": OURS.job, "nonce": "0" * 32})))
    assert "speaks version 99 of the protocol, and rank 0 1" in str(said[0]["incompatible"])
    for error in (first.failed(), early.failed()):
        assert (error.code, "speaks version 99" in error.message) == ("version-mismatch", True)


def test_other_version_is_nobodys_word_where_there_is_a_secret(rank0: Callable[..., Rank0]) -> None:
    ours = Membership(OURS.job, "secret")
    first = rank0(2, 600, ours)
    said = answers(peer(first.port, frame({"distboot": 99, "job": OURS.job, "nonce": "0" * 32})))
    assert "speaks version 99" in str(said[0]["refused"])
    assert Rank(first.port, record(1, 2), 20, ours).met() == first.met()


def test_who_does_not_report_in_time_is_sent_away(rank0: Callable[..., Rank0], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_REPORT_LIMIT", 0.3)
    first = rank0(2, 600)
    slow = [peer(first.port, data) for data in (b"", HELLO[:3], HELLO)]
    for each in slow:
        assert "did not report within 0.3 s" in str(answers(each)[-1]["refused"])
    assert Rank(first.port, record(1, 2)).met() == first.met()


def test_rank_that_was_there_and_has_gone_is_said(rank0: Callable[..., Rank0]) -> None:
    first = rank0(3, 1.0)
    gone = peer(first.port, HELLO + frame({"record": record(1, 3, "b").as_message(), "mac": ""}))
    gone.recv(100)
    gone.close()
    assert "missing 1-2; there was, and has gone: rank 1 (process 1001 on 'b')" in first.failed().message


def test_silent_slow_and_vanishing_peers_hold_up_nobody(rank0: Callable[..., Rank0]) -> None:
    first = rank0(2)
    silent = [peer(first.port, b"") for _ in range(20)]
    slow = peer(first.port, HELLO[:3])
    peer(first.port, HELLO).close()
    assert Rank(first.port, record(1, 2), 5).met()
    for each in (*silent, slow):
        each.close()


def test_more_strangers_than_there_is_room_for_do_not_keep_a_rank_out(rank0: Callable[..., Rank0]) -> None:
    first = rank0(2)
    strangers = [peer(first.port, b"") for _ in range(100)]
    assert Rank(first.port, record(1, 2), 5).met()
    for each in strangers:
        each.close()


def test_rank_that_lost_its_connection_may_report_again(rank0: Callable[..., Rank0]) -> None:
    first = rank0(3)
    data = HELLO + frame({"record": record(1, 3).as_message(), "mac": ""})
    lost = peer(first.port, data)
    lost.recv(100)
    lost.close()
    ranks = [Rank(first.port, record(1, 3)), Rank(first.port, record(2, 3))]
    assert all(rank.met() for rank in ranks)


def test_end_of_an_old_connection_does_not_undo_a_newer_one(rank0: Callable[..., Rank0]) -> None:
    first = rank0(3, 600)
    old = peer(first.port, HELLO + frame({"record": record(1, 3).as_message(), "mac": ""}))
    old.recv(100)
    again = Rank(first.port, record(1, 3))
    assert answers(old) == [], "its place was taken"
    assert Rank(first.port, record(2, 3)).met() == again.met()


def test_who_comes_after_the_last_rank_gets_no_roster(rank0: Callable[..., Rank0]) -> None:
    first = rank0(2)
    before = peer(first.port, HELLO)  # has not reported when the roll call ends
    assert Rank(first.port, record(1, 2)).met()
    first.join(20)
    after = peer(first.port, HELLO)
    first.close()
    assert all("roster" not in message for message in answers(before))
    with suppress(ConnectionResetError):
        assert answers(after) == []


def test_secret_is_needed_on_both_sides(rank0: Callable[..., Rank0], capfd: pytest.CaptureFixture[str]) -> None:
    ours, others = Membership(OURS.job, "correct horse"), Membership(OURS.job, "battery staple")
    first = rank0(2, 20, ours)
    for wrong, why in ((others, "the peer has another DISTBOOT_SECRET"), (OURS, "the peer has no DISTBOOT_SECRET")):
        error = Rank(first.port, record(1, 2), 0.3, wrong).failed()
        assert why in error.message
    assert Rank(first.port, record(1, 2), 20, ours).met()
    said = capfd.readouterr().err + repr(ours) + repr(Session("correct horse"))
    assert "horse" not in said
    assert "staple" not in said


def test_accelerator_of_a_rank_that_has_gone_is_free() -> None:
    register = Register(3)
    register.enter(record(1, 3, device="GPU-1"))
    register.leave(1)
    register.enter(record(2, 3, device="GPU-1"))
    with pytest.raises(DistbootError, match="ranks 2 and 1"):
        register.enter(record(1, 3, device="GPU-1"))


def test_rank_0_without_the_secret_is_not_believed(rank0: Callable[..., Rank0]) -> None:
    first = rank0(2, 2.0)
    error = Rank(first.port, record(1, 2), 0.5, Membership(OURS.job, "correct horse")).failed()
    assert "the peer has a DISTBOOT_SECRET, and rank 0 has none" in error.message
    assert "refused: the peer has a DISTBOOT_SECRET, and rank 0 has none" in first.failed().message


def test_what_was_said_once_proves_nothing_anywhere_else() -> None:
    session = Session("secret", "challenge", "nonce")
    (message,) = Frames(1000).feed(session.sealed("record", canonical({"rank": 1})))
    assert session.opened(message, "record") == ("record", {"rank": 1})
    for other in (replace(session, challenge="2"), replace(session, nonce="2"), replace(session, secret="2")):
        with pytest.raises(WireError):
            other.opened(message, "record")
    with pytest.raises(WireError):
        session.opened({"roster": message["record"], "mac": message["mac"]}, "roster")
    with pytest.raises(WireError):
        session.opened({"record": {"rank": 2}, "mac": message["mac"]}, "record")


@pytest.mark.parametrize("length", [10, 100_000])
def test_announcement_is_sealed_for_each_alone(length: int) -> None:
    announcement = Announcement("roster", canonical("x" * length))
    one, other = (Session("secret", challenge=challenge, nonce="nonce") for challenge in ("1", "2"))
    for session, stranger in ((one, other), (other, one), (Session(), one)):
        (message,) = Frames(1 << 20).feed(announcement.sealed(session))
        assert session.opened(message, "roster") == ("roster", "x" * length)
        with pytest.raises(WireError):
            stranger.opened(message, "roster")


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
        register.enter(record(rank, 104, f"n{rank // 8}", **placed))
    assert register.progress() == "96/104 joined, missing 96-103 (node 12)"
    register.enter(record(97, 104, "n12", local_rank=1, local_world_size=1, node_rank=12, num_nodes=13))
    assert register.progress() == "97/104 joined, missing 96, 98-103", "not every node has eight"


def test_file_limit_is_raised_where_it_may_be(rank0: Callable[..., Rank0]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        first = rank0(1000, 0.2)
        assert first.failed().code == "missing-rank"
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1000 + 64 + 64, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


_FEW_FILES = """
import resource
from rollcalls import Rank0, record
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))  # there is no way back from it
first = Rank0(record(0, 200), 600)
print(first.port, flush=True)
print(first.failed().message)
"""


def test_every_rank_hears_of_a_file_limit_that_is_too_low(clean_env: dict[str, str]) -> None:
    env = {**clean_env, "PYTHONPATH": f"{Path(__file__).parent}:{clean_env['PYTHONPATH']}"}
    with subprocess.Popen(
        [sys.executable, "-c", _FEW_FILES], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        ranks = [Rank(port, record(rank, 200), 3) for rank in range(1, 60)]
        said, warned = process.communicate(timeout=60)
    assert "rank 0 may open 40 files, too few for the connections of 200 ranks" in said
    assert "328 open files are needed" in warned
    codes = [rank.failed().code for rank in ranks]
    assert codes.count("too-few-files") > 20
    assert set(codes) <= {"too-few-files", "missing-rank"}, "those for whom there was no room"


def test_record_survives_the_wire() -> None:
    full = Record(
        1, "mpich", "h", "h/b", 7, "p", 9, 1, 2, 3, 4, (("torch", "2.13.0"),), "GPU-1", ("usage", "m", "h"), 1.5, 2.5
    )
    (message,) = Frames(10_000).feed(frame(full.as_message()))
    assert Record.from_message(message) == full
