"""The roll call over real sockets: whoever is missing, twice there or different is named on all, and nobody hangs."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rollcalls import HELLO, OURS, Rank, Rank0, answers, peer, record

from distboot import DistbootError
from distboot.rollcall.register import Register
from distboot.rollcall.server import Server
from distboot.rollcall.wire import frame
from distboot.roster import Roster, ranges


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


def test_rank_that_was_there_and_has_gone_is_said(rank0: Callable[..., Rank0]) -> None:
    first = rank0(3, 1.0)
    gone = peer(first.port, HELLO + frame({"record": record(1, 3, "b").as_message(), "mac": ""}))
    gone.recv(100)
    gone.close()
    assert "missing 1-2; there was, and has gone: rank 1 (process 1001 on 'b')" in first.failed().message


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


def test_accelerator_of_a_rank_that_has_gone_is_free() -> None:
    register = Register(3)
    register.enter(record(1, 3, device="GPU-1"))
    register.leave(1)
    register.enter(record(2, 3, device="GPU-1"))
    with pytest.raises(DistbootError, match="ranks 2 and 1"):
        register.enter(record(1, 3, device="GPU-1"))


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
