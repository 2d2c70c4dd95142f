"""The roll call over real sockets: all meet and get ready, or all hear who is missing, twice there or different."""

import resource
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import StartRank0
from rendezvous_peers import HELLO, OPEN, Rank, altered, answers, framed, peer, plan_for, record

from distboot import DistbootError
from distboot.base.text import ranges
from distboot.rendezvous.coordinator import Coordinator
from distboot.rendezvous.join_table import JoinTable
from distboot.rendezvous.membership import Membership
from distboot.rendezvous.messages import (
    Ready,
    Refused,
    Welcome,
    WorkerInfo,
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
    assert "rank 1 is there already, as process 1001 on 'a'" in late[1].why
    gate.set()
    assert all(each.met() for each in ranks)
