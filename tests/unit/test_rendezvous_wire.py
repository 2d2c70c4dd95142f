"""Frames come in any pieces, messages are what their fields accept, and a proof is good for one connection alone."""

from typing import Any

import pytest
from rendezvous_peers import record

from distboot.job.exit_status import ExitStatus, UncaughtException
from distboot.job.messages import Exited
from distboot.rendezvous.messages import (
    Detach,
    Failed,
    Members,
    Ready,
    Refused,
    WorkerInfo,
)
from distboot.rendezvous.protocol import (
    Broadcast,
    Channel,
    Frames,
    ProtocolError,
    decode,
    encode,
)

OF_RANK_0 = {"secret": "secret", "us": "rank 0", "challenge": "challenge", "nonce": "nonce"}


def _channel(**more: Any) -> Channel:
    """A new connection as rank 0 has it; `us="this rank"`: as the rank has it."""
    return Channel(**{**OF_RANK_0, **more})


def _taken(channel: Channel, data: bytes, *kinds: type) -> Any:
    frames = Frames(1 << 20)
    (frame,) = frames.feed(data)
    return channel.verify(frame, frames, *kinds)


def test_what_was_said_once_proves_nothing_anywhere_else() -> None:
    data = _channel(us="this rank").sign(record(1, 2))
    assert _taken(_channel(), data, WorkerInfo) == record(1, 2)
    with pytest.raises(ProtocolError, match="has another DISTBOOT_SECRET"):
        _taken(_channel(us="this rank"), data, WorkerInfo)  # which it has sent itself
    others: list[dict[str, Any]] = [
        {"challenge": "2"},
        {"nonce": "2"},
        {"secret": "2"},
        {"secret": ""},
    ]
    for other in others:
        with pytest.raises(ProtocolError):
            _taken(_channel(**other), data, WorkerInfo)
    with pytest.raises(ProtocolError, match="speaks of round 0 of the job, and this is round 1"):
        _taken(_channel(round=1), data, WorkerInfo)
    with pytest.raises(ProtocolError):
        _taken(_channel(), data.replace(b"openmpi", b"openmpj"), WorkerInfo)
    with pytest.raises(ProtocolError, match="another DISTBOOT_SECRET"):
        _taken(_channel(round=1), data[:4] + b"\0\0\0\1" + data[8:], WorkerInfo)


@pytest.mark.parametrize(
    "order", [[0, 0], [0, 2], [0, 1, 0], [0, 1, 2, 2]], ids=("repeated", "left out", "again", "end")
)
def test_frame_out_of_its_order_is_refused(order: list[int]) -> None:
    theirs = _channel(us="this rank")
    ours = _channel()
    sent = [theirs.sign(message) for message in (record(1, 2), None, Detach())]
    kinds = (WorkerInfo, type(None), Detach)
    *before, last = order
    for number in before:
        _taken(ours, sent[number], *kinds)
    with pytest.raises(ProtocolError, match="changed, repeated or reordered on its way"):
        _taken(ours, sent[last], *kinds)


@pytest.mark.parametrize("length", [10, 100_000])
def test_broadcast_is_authenticated_for_each_alone(length: int) -> None:
    hosts = ("x" * 1000,) * (length // 1000)
    broadcast = Broadcast(Members(hosts, (), None))
    one = {"challenge": "1"}
    other = {"challenge": "2"}
    for its, of_stranger in ((one, other), (other, one), ({"secret": ""}, one)):
        data = broadcast.sign(_channel(**its))
        assert len(data) < 5000, "it is compressed"
        assert _taken(_channel(us="this rank", **its), data, Members).hosts == hosts
        with pytest.raises(ProtocolError):
            _taken(_channel(us="this rank", **of_stranger), data, Members)


def test_frames_come_in_any_pieces() -> None:
    messages = [Refused("x" * 900), Detach(ended=True), Members(("y" * 999,) * 9, (), "z")]
    data = b"".join(map(Channel().sign, messages))
    for step in (1, 3, 4096):
        frames = Frames()
        found = [
            each
            for start in range(0, len(data), step)
            for each in frames.feed(data[start : start + step])
        ]
        assert [
            decode(frames.inflated(frame), Refused, Detach, Members) for frame in found
        ] == messages
    with pytest.raises(ProtocolError):
        Frames(100).feed((101).to_bytes(4, "big"))


def test_messages_survive_the_wire() -> None:
    whole = WorkerInfo(
        1,
        "mpich",
        "h",
        "h/b",
        7,
        "p",
        9,
        1,
        2,
        3,
        4,
        (("torch", "2.13.0"),),
        "GPU-1",
        ("usage", "m", "h"),
        1.5,
        2.5,
    )
    for message in (
        whole,
        Exited(ExitStatus(signal=9, exception=UncaughtException(message="w"), when=1.5)),
        Ready(),
        Failed(("usage", "a", "b")),
    ):
        assert decode(encode(message), type(message)) == message


def test_equal_facts_of_ranks_are_one_object() -> None:
    facts = [(("torch", f"2.{number}"),) for number in (13, 14, 13)]
    records = [record(rank, 3, facts=each) for rank, each in enumerate(facts)]
    first, other, third = (decode(encode(each), WorkerInfo).facts for each in records)
    assert (first, other) == (facts[0], facts[1])
    assert third is first


def test_field_of_a_field_is_named() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode(encode(Exited(ExitStatus(code="7"))), Exited)  # type: ignore[arg-type]
    assert "broken Exited: end.code is not a valid number" in str(caught.value)
