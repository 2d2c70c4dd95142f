"""Whoever does not belong to a roll call, or is silent or slow, is sent away, and the ranks meet all the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from rollcalls import HELLO, OURS, Rank, Rank0, answers, peer, record

from distboot.rollcall import connections
from distboot.rollcall.wire import VERSION, Membership, Session, frame
from distboot.roster import Roster


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


def test_rank_0_without_the_secret_is_not_believed(rank0: Callable[..., Rank0]) -> None:
    first = rank0(2, 2.0)
    error = Rank(first.port, record(1, 2), 0.5, Membership(OURS.job, "correct horse")).failed()
    assert "the peer has a DISTBOOT_SECRET, and rank 0 has none" in error.message
    assert "refused: the peer has a DISTBOOT_SECRET, and rank 0 has none" in first.failed().message
