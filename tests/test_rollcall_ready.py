"""After the roll call: all ranks are ready to start the framework, or all of them hear which one is not, and why."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from rollcalls import HELLO, OURS, Rank, Rank0, answers, peer, record

from distboot.rollcall.ready import Ready
from distboot.rollcall.wire import VERSION, Membership, frame


@pytest.fixture
def rank0() -> Iterator[Callable[..., Rank0]]:
    """Rank 0 of a world of 3, which gets ready."""
    started: list[Rank0] = []

    def start(join_timeout: float = 20, ready: Ready | None = None, membership: Membership = OURS) -> Rank0:
        started.append(Rank0(record(0, 3), join_timeout, membership, ready=ready or Ready()))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.parametrize("membership", [OURS, Membership(OURS.job, "secret")], ids=["open", "secret"])
def test_all_go_when_the_last_one_is_ready(rank0: Callable[..., Rank0], membership: Membership) -> None:
    first, gate = rank0(membership=membership), threading.Event()
    slow = Rank(first.port, record(1, 3), 20, membership, ready=Ready("GPU-1"), gate=lambda _: gate.wait(20))
    quick = Rank(first.port, record(2, 3), 20, membership, ready=Ready("GPU-2"))
    quick.join(0.5)
    assert quick.is_alive(), "it waits for the slow one"
    gate.set()
    assert [each.met() for each in (slow, quick)] == [first.met()] * 2


@pytest.mark.parametrize("membership", [OURS, Membership(OURS.job, "secret")], ids=["open", "secret"])
def test_what_some_ranks_offer_reaches_all(rank0: Callable[..., Rank0], membership: Membership) -> None:
    first = rank0(membership=membership, ready=Ready(offer="10.0.0.4:6000"))
    ranks = [
        Rank(first.port, record(1, 3), 20, membership, ready=Ready()),
        Rank(first.port, record(2, 3), 20, membership, ready=Ready(offer="10.0.0.5:6000")),
    ]
    for each in (first, *ranks):
        assert each.met()
        assert each.offers == {0: "10.0.0.4:6000", 2: "10.0.0.5:6000"}


@pytest.mark.parametrize("offer", ["x" * 301, "two\nlines"])
def test_offer_that_is_too_much_is_refused(rank0: Callable[..., Rank0], offer: str) -> None:
    first = rank0()
    Rank(first.port, record(1, 3), ready=Ready()), Rank(first.port, record(2, 3), ready=Ready(offer=offer))
    assert "ended before the framework could start" in first.failed().message


def test_problem_of_one_is_the_end_of_all(rank0: Callable[..., Rank0]) -> None:
    first = rank0()
    problem = ("framework-not-installed", "torch is not installed in this Python", "pip install torch")
    ranks = [Rank(first.port, record(n, 3), ready=ready) for n, ready in ((1, Ready()), (2, Ready(problem=problem)))]
    for error in [each.failed() for each in (first, *ranks)]:
        assert error.code == "framework-not-installed"
        assert "rank 2 on 'a': torch is not installed in this Python" in error.message
        assert error.hint == "pip install torch"


def test_problem_of_rank_0_is_the_end_of_all(rank0: Callable[..., Rank0]) -> None:
    first = rank0(ready=Ready(problem=("device-failed", "CUDA error", "")))
    for rank in [Rank(first.port, record(rank, 3), ready=Ready()) for rank in (1, 2)]:
        assert (rank.failed().code, "rank 0 on 'a': CUDA error" in rank.failed().message) == ("device-failed", True)


def test_rank_that_ends_before_it_is_ready_is_named(rank0: Callable[..., Rank0]) -> None:
    first = rank0(600)
    patient = Rank(first.port, record(1, 3), ready=Ready())
    gone = Rank(first.port, record(2, 3, "b"), gate=lambda client: client.close())
    assert gone.met()
    for error in (patient.failed(), first.failed()):
        assert error.code == "rank-failed"
        assert "rank 2 (process 1002 on 'b') joined, and ended before the framework could start" in error.message


def test_rank_that_does_not_get_ready_is_named(rank0: Callable[..., Rank0]) -> None:
    first, gate = rank0(2.0), threading.Event()
    ranks = [Rank(first.port, record(1, 3), 4, ready=Ready())]
    ranks.append(Rank(first.port, record(2, 3), 4, gate=lambda _: gate.wait(20)))
    for error in (first.failed(), ranks[0].failed()):
        assert error.code == "missing-rank"
        assert "all ranks joined, and then did not get ready in time: rank 2 (node 0)" in error.message
    gate.set()


def test_rank_0_that_ends_before_it_is_ready_is_named() -> None:
    first = Rank0(record(0, 2), 20)
    rank = Rank(first.port, record(1, 2), ready=Ready(), gate=lambda _: first.close())
    assert rank.failed().code == "rank-failed"
    assert "all ranks joined, and then rank 0 at 127.0.0.1" in rank.failed().message


def test_two_ranks_that_find_themselves_on_one_accelerator(rank0: Callable[..., Rank0]) -> None:
    first = rank0(600, Ready("GPU-0"))
    ranks = [Rank(first.port, record(rank, 3), ready=Ready("GPU-7")) for rank in (1, 2)]
    for error in [each.failed() for each in (first, *ranks)]:
        assert error.code == "shared-accelerator"
        assert "would both use the accelerator 'GPU-7'" in error.message


@pytest.mark.parametrize(
    "said",
    [
        {"ready": None, "mac": ""},
        {"ready": {"device": 1, "problem": None}, "mac": ""},
        {"ready": {"device": None, "problem": ["no-such-code", "", ""]}, "mac": ""},
        {"record": {}, "mac": ""},
    ],
)
def test_nonsense_from_a_rank_is_the_end_of_all(rank0: Callable[..., Rank0], said: dict[str, object]) -> None:
    first = rank0(600)
    patient = Rank(first.port, record(1, 3), ready=Ready())
    with peer(first.port, HELLO + frame({"record": record(2, 3).as_message(), "mac": ""})) as strange:
        while b"roster" not in strange.recv(65536):
            pass
        strange.sendall(frame(said))
        for error in (patient.failed(), first.failed()):
            assert error.code == "rank-failed"


def test_who_comes_while_the_others_get_ready_is_told_that_his_place_is_taken(rank0: Callable[..., Rank0]) -> None:
    first, gate = rank0(600), threading.Event()
    ranks = [Rank(first.port, record(1, 3), ready=Ready(), gate=lambda _: gate.wait(20))]
    ranks.append(Rank(first.port, record(2, 3), ready=Ready()))
    while ranks[1].roster is None:
        ranks[1].join(0.01)
    late = answers(peer(first.port, HELLO + frame({"record": record(1, 3, "b").as_message(), "mac": ""})))
    assert late[0]["distboot"] == VERSION
    assert "rank 1 is there already, as process 1001 on 'a'" in str(late[1]["refused"])
    gate.set()
    assert all(each.met() for each in ranks)
