"""What is said at a roll call: frames in any pieces, records, and seals that are good for one connection alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distboot.record import Record
from distboot.rollcall.wire import Announcement, Frames, Session, WireError, canonical, frame


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


def test_record_survives_the_wire() -> None:
    full = Record(
        1, "mpich", "h", "h/b", 7, "p", 9, 1, 2, 3, 4, (("torch", "2.13.0"),), "GPU-1", ("usage", "m", "h"), 1.5, 2.5
    )
    (message,) = Frames(10_000).feed(frame(full.as_message()))
    assert Record.from_message(message) == full
