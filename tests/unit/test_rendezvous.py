"""The roll call over real sockets: all meet and get ready, or all hear who is missing, twice there or different.

At the end its wire: frames come in any pieces, and a proof is good for one connection alone.
"""

import resource
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import StartRank0
from inside import replace
from rendezvous_peers import HELLO, OPEN, Rank, altered, answers, framed, peer, plan_for, record

from distboot import DistbootError
from distboot.base.text import ranges
from distboot.job.exit_status import ExitStatus, UncaughtException
from distboot.job.messages import Exited
from distboot.rendezvous.coordinator import Coordinator
from distboot.rendezvous.events import clock_time, own_clock
from distboot.rendezvous.join_table import JoinTable
from distboot.rendezvous.membership import Membership
from distboot.rendezvous.messages import (
    Detach,
    Failed,
    Members,
    Ready,
    Refused,
    Welcome,
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


def test_all_ranks_get_the_same_exact_membership(rank0: StartRank0) -> None:
    first = rank0(5)
    ranks = [
        Rank(first.port, record(rank, 5, node))
        for rank, node in ((4, "b"), (2, "a"), (3, "a"), (1, "b"))
    ]
    assert {rank.met() for rank in (first, *ranks)} == {
        Membership(("a", "b"), ((0, 2, 3), (1, 4)), "127.0.0.1")
    }


def test_rank_0_may_come_last() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    rank = Rank(port, record(1, 2))
    with socket.create_server(("127.0.0.1", port)) as listener:
        server = Coordinator(listener, plan_for(record(0, 2)))
        membership = server.wait_for_join()
        server.close()
    assert rank.met() == membership


def test_missing_ranks_are_named_everywhere_after_waiting(
    rank0: StartRank0,
) -> None:
    first = rank0(3, 600)
    said = (
        "2 of 3 ranks joined within the join timeout of rank 1, which was over "
        "first; missing: rank 2"
    )
    for error in (Rank(first.port, record(1, 3), 0.5).failed(), first.failed()):
        assert (error.code, said in error.message) == ("missing-rank", True), error.message


# Two containers may both have process 1
_TWICE = [record(1, 4), replace(record(1, 4, "b"), process="77")]


@pytest.mark.parametrize(
    ("records", "code", "said"),
    [
        (
            _TWICE,
            "duplicate-rank",
            "two processes are rank 1: 1001 on a and 1001 on b",
        ),
        (
            [record(3, 8)],
            "membership-mismatch",
            "the world size is 4 on rank 0 but 8 on rank 3 (a, process 1003)",
        ),
        *(
            (
                [record(rank, 4, device=device) for rank in (1, 2)],
                "shared-accelerator",
                f"the accelerator '{device}'",
            )
            for device in ("GPU-1", "nvidia0")
        ),
    ],
)
def test_what_does_not_fit_ends_the_job(
    rank0: StartRank0, records: list[WorkerInfo], code: str, said: str
) -> None:
    first = rank0(4, 600)
    ranks = [Rank(first.port, each) for each in records]
    for error in [each.failed() for each in (first, *ranks)]:
        assert error.code == code
        # Of the two either may be the first.
        assert said in error.message.replace("1001 on b and 1001 on a", "1001 on a and 1001 on b")


@pytest.mark.parametrize(
    ("other", "hint"),
    [
        (record(0, 2, "b", ranks=4), "give each node its own --node-rank"),
        (record(1, 3, "b", ranks=4), "give the same --nnodes"),
    ],
)
def test_hints_for_nodes_name_their_options(other: WorkerInfo, hint: str) -> None:
    table = JoinTable(2, by_node=True)
    table.add(record(0, 2, ranks=4))
    with pytest.raises(DistbootError) as raised:
        table.add(other)
    assert raised.value.hint.startswith(hint)


def test_index_of_an_accelerator_means_its_own_node(rank0: StartRank0) -> None:
    first = rank0(2, device="nvidia0")
    assert Rank(first.port, record(1, 2, "b", device="nvidia0")).met() == first.met()


def test_problem_of_one_rank_reaches_even_latecomers(
    rank0: StartRank0,
) -> None:
    problem = ("unknown-interface", "GLOO_SOCKET_IFNAME='ib0'", "unset it")
    first = rank0(4, 600)
    early = Rank(first.port, record(1, 4))
    culprit = Rank(first.port, record(2, 4, "b", problem=problem))
    assert culprit.failed().code == early.failed().code == "unknown-interface"
    late = Rank(first.port, record(3, 4)).failed()
    for error in (early.failed(), late, first.failed()):
        assert "rank 2 on 'b': GLOO_SOCKET_IFNAME='ib0'" in error.message


def test_rank_that_joined_and_left_is_reported(rank0: StartRank0) -> None:
    first = rank0(3, 1.0)
    gone = peer(first.port, HELLO + OPEN.sign(record(1, 3, "b")))
    gone.recv(100)
    gone.close()
    assert (
        "missing: ranks 1-2; joined and disconnected: rank 1 (process 1001 on 'b')"
        in first.failed().message
    )


def test_end_of_old_connection_keeps_the_new(rank0: StartRank0) -> None:
    first = rank0(3, 600)
    old = peer(first.port, HELLO + OPEN.sign(record(1, 3)))
    old.recv(1000)
    again = Rank(first.port, record(1, 3))
    assert answers(old) == [], "its place was taken"
    assert Rank(first.port, record(2, 3)).met() == again.met()


def test_accelerator_of_a_gone_rank_is_free() -> None:
    register = JoinTable(3)
    register.add(record(1, 3, device="GPU-1"))
    register.remove(1)
    register.add(record(2, 3, device="GPU-1"))
    with pytest.raises(DistbootError, match="ranks 2 and 1"):
        register.add(record(1, 3, device="GPU-1"))


def test_missing_ranks_are_ranges_with_proved_nodes() -> None:
    assert ranges([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert ranges(range(0, 100, 2)).endswith("and 30 more")
    register = JoinTable(104)
    for rank in range(96):
        placed = {
            "local_rank": rank % 8,
            "local_world_size": 8,
            "node_rank": rank // 8,
            "num_nodes": 13,
        }
        register.add(record(rank, 104, f"n{rank // 8}", **placed))
    assert register.progress() == "96/104 ranks joined; missing: ranks 96-103 (node 12)"
    register.add(
        record(
            97,
            104,
            "n12",
            local_rank=1,
            local_world_size=1,
            node_rank=12,
            num_nodes=13,
        )
    )
    assert register.progress() == "97/104 ranks joined; missing: ranks 96, 98-103", (
        "not every node has eight"
    )


def test_file_limit_is_raised_where_it_may_be(rank0: StartRank0) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        first = rank0(1000, 0.2)
        assert first.failed().code == "missing-rank"
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1000 + 64 + 64, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_every_rank_receives_a_low_file_limit(clean_env: dict[str, str]) -> None:
    script = """
import resource
from rendezvous_peers import Rank0, record
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))  # there is no way back from it
first = Rank0(record(0, 200), 600)
print(first.port, flush=True)
print(first.failed().message)
"""
    env = {**clean_env, "PYTHONPATH": f"{Path(__file__).parents[1]}/lib:{clean_env['PYTHONPATH']}"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], env=env, **pipes) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        ranks = [Rank(port, record(rank, 200), 3) for rank in range(1, 60)]
        said, warned = process.communicate(timeout=60)
    assert "rank 0 may open 40 files, too few for the connections of 200 ranks" in said
    assert "328 open files are needed" in warned
    codes = [rank.failed().code for rank in ranks]
    assert codes.count("too-few-files") > 20
    assert set(codes) <= {"too-few-files", "missing-rank"}, "those for whom there was no room"


@pytest.mark.parametrize("secret", ["", "secret"])
def test_all_go_with_the_last_and_its_offers(rank0: StartRank0, secret: str) -> None:
    first = rank0(3, secret=secret, ready=Ready(offer="10.0.0.4:6000"))
    gate = threading.Event()
    slow = Rank(
        first.port, record(1, 3), 20, secret, ready=Ready("GPU-1"), gate=lambda _: gate.wait(20)
    )
    quick = Rank(first.port, record(2, 3), 20, secret, ready=Ready("GPU-2", offer="10.0.0.5:6000"))
    quick.join(0.5)
    assert quick.is_alive(), "it waits for the slow one"
    gate.set()
    assert [each.met() for each in (slow, quick)] == [first.met()] * 2
    assert [each.offers for each in (first, slow, quick)] == [
        {0: "10.0.0.4:6000", 2: "10.0.0.5:6000"}
    ] * 3


def test_ranks_ready_with_one_accelerator_are_refused(rank0: StartRank0) -> None:
    first = rank0(3, ready=Ready("GPU-0"))
    ranks = [Rank(first.port, record(rank, 3), ready=Ready("GPU-7")) for rank in (1, 2)]
    for error in [each.failed() for each in (first, *ranks)]:
        assert (error.code, "both use the accelerator 'GPU-7'" in error.message) == (
            "shared-accelerator",
            True,
        )


@pytest.mark.parametrize(
    "said",
    [
        framed({"kind": "Ready"}),
        altered(Ready(), device=1),
        altered(Ready(), offer="x" * 301),
        altered(Ready(), offer="two\nlines"),
        altered(Ready(), problem=["no-such-code", ""]),
        OPEN.sign(record(2, 3)),
    ],
)
def test_nonsense_from_a_rank_ends_all(rank0: StartRank0, said: bytes) -> None:
    first = rank0(3, 600, ready=Ready())
    patient = Rank(first.port, record(1, 3), ready=Ready())
    with peer(first.port, HELLO + OPEN.sign(record(2, 3))) as strange:
        while b"Members" not in strange.recv(65536):
            pass
        strange.sendall(said[:8] + (2).to_bytes(4, "big") + said[12:])  # in the name of rank 2
        for error in (patient.failed(), first.failed()):
            assert error.code == "rank-failed"
            assert "ended before the framework could start" in error.message


def test_latecomer_is_told_its_place_is_taken(
    rank0: StartRank0,
) -> None:
    first = rank0(3, 600, ready=Ready())
    gate = threading.Event()
    ranks = [Rank(first.port, record(1, 3), ready=Ready(), gate=lambda _: gate.wait(20))]
    ranks.append(Rank(first.port, record(2, 3), ready=Ready()))
    while ranks[1].membership is None:
        ranks[1].join(0.01)
    late = answers(peer(first.port, HELLO + OPEN.sign(record(1, 3, "b"))))
    assert isinstance(late[0], Welcome)
    assert isinstance(late[1], Refused)
    assert "joined after the roll call; rank 1 is already process 1001 on 'a'" in late[1].why
    gate.set()
    assert all(each.met() for each in ranks)


def test_latecomer_beyond_the_job_is_told_so(rank0: StartRank0) -> None:
    first = rank0(1)
    first.met()
    with ThreadPoolExecutor(1) as pool:
        hello = HELLO + OPEN.sign(record(9, 10))
        late = pool.submit(lambda: answers(peer(first.port, hello))[-1])
        while not late.done():
            first.server.serve(0.01)
    why = "the connecting process joined after the roll call, and the job has no rank 9"
    assert late.result() == Refused(why)


def test_latecomer_of_a_node_hears_of_that_node(rank0: StartRank0) -> None:
    first = rank0(3, 600, ranks=2)
    nodes = [first, *(Rank(first.port, record(node, 3, ranks=2)) for node in (1, 2))]
    assert all(each.met().world_size == 6 for each in nodes)
    with ThreadPoolExecutor(1) as pool:
        hello = HELLO + OPEN.sign(record(2, 3, "b", ranks=2))
        late = pool.submit(lambda: answers(peer(first.port, hello))[-1])
        while not late.done():
            first.server.serve(0.01)
    refused = late.result()
    assert isinstance(refused, Refused)
    assert "after the roll call; node 2 is already process 1002" in refused.why


# The wire

OF_RANK_0 = {"secret": "secret", "is_rank_0": True, "challenge": "challenge", "nonce": "nonce"}


def _channel(**more: Any) -> Channel:
    """A new connection as rank 0 has it; `is_rank_0=False`: as the rank has it."""
    return Channel(**{**OF_RANK_0, **more})


def _taken(channel: Channel, data: bytes, *kinds: type) -> Any:
    frames = Frames(1 << 20)
    (frame,) = frames.feed(data)
    return channel.verify(frame, frames, *kinds)


def test_what_was_said_once_proves_nothing_anywhere_else() -> None:
    data = _channel(is_rank_0=False).sign(record(1, 2))
    assert _taken(_channel(), data, WorkerInfo) == record(1, 2)
    with pytest.raises(ProtocolError, match="has a different DISTBOOT_SECRET"):
        _taken(_channel(is_rank_0=False), data, WorkerInfo)  # which it has sent itself
    others: list[dict[str, Any]] = [
        {"challenge": "2"},
        {"nonce": "2"},
        {"secret": "2"},
        {"secret": ""},
    ]
    for other in others:
        with pytest.raises(ProtocolError):
            _taken(_channel(**other), data, WorkerInfo)
    with pytest.raises(ProtocolError, match="sent a message for round 0; the job is in round 1"):
        _taken(_channel(round=1), data, WorkerInfo)
    with pytest.raises(ProtocolError):
        _taken(_channel(), data.replace(b"openmpi", b"openmpj"), WorkerInfo)
    with pytest.raises(ProtocolError, match="a different DISTBOOT_SECRET"):
        _taken(_channel(round=1), data[:4] + b"\0\0\0\1" + data[8:], WorkerInfo)


@pytest.mark.parametrize(
    "order", [[0, 0], [0, 2], [0, 1, 0], [0, 1, 2, 2]], ids=("repeated", "left out", "again", "end")
)
def test_frame_out_of_its_order_is_refused(order: list[int]) -> None:
    theirs = _channel(is_rank_0=False)
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
        assert _taken(_channel(is_rank_0=False, **its), data, Members).hosts == hosts
        with pytest.raises(ProtocolError):
            _taken(_channel(is_rank_0=False, **of_stranger), data, Members)


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


@pytest.mark.parametrize("now", [-5.0, 1e10])
def test_time_of_any_clock_may_be_sent(monkeypatch: pytest.MonkeyPatch, now: float) -> None:
    monkeypatch.setattr("time.time", lambda: now)
    monkeypatch.setattr(own_clock, "booted", own_clock.booted)
    own_clock.read()
    sent = replace(record(1, 2), clock=clock_time())
    assert decode(encode(sent), WorkerInfo) == sent


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
