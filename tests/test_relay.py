"""Large jobs: the ranks of a node share one connection to rank 0, that of their relay. Real processes, real relays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lifelines import Job, job, until
from relays import connections, needs_linux, relays

pytestmark = needs_linux
FAILING = """
ready()
if rank == 3:
    until("fail")
    raise ValueError("boom")
until("end")
"""


@pytest.fixture
def running(large: dict[str, str], port: int, tmp_path: Path) -> Iterator[Job]:
    """Four ranks under the wrapper, of which three have a relay; the last one can be made to fail."""
    with job(large, port, tmp_path, FAILING, ranks=4) as started:
        yield started


def test_ranks_of_a_node_share_one_connection(running: Job) -> None:
    running.all_ready()
    (relay,) = relays(running.folder)
    assert [connections(each.pid) for each in running.processes] == [1, 0, 0, 0]
    assert connections(relay) == 1
    running.touch("fail")
    running.touch("end")
    assert running.codes()[3] == 1
    until(lambda: not relays(running.folder))


def test_job_that_ends_well_leaves_no_relay(large: dict[str, str], port: int, tmp_path: Path) -> None:
    with job(large, port, tmp_path, "ready()\n", ranks=4, init=True) as running:
        assert running.codes() == [0] * 4
        assert running.summary().endswith("all ended well; exit codes: 0 (ranks 0-3)")
        until(lambda: not relays(tmp_path))


def test_first_failure_reaches_all(running: Job) -> None:
    pids = running.all_ready()
    running.touch("fail")
    assert running.codes() == [143, 143, 143, 1]
    said = {running.first(rank) for rank in range(3)}
    assert len(said) == 1
    line = said.pop()
    assert line.startswith("rank 3 failed first: uncaught exception: ValueError: boom, on ")
    assert f"local rank 3, process {pids[3]})" in line


def test_script_that_calls_init_in_the_wrapper_meets_again(large: dict[str, str], port: int, tmp_path: Path) -> None:
    script = "import distboot\nctx = distboot.init('none', join_timeout=60)\nctx.barrier()\nready()\n"
    with job(large, port, tmp_path, script, ranks=4) as running:
        assert running.codes() == [0] * 4
        until(lambda: not relays(tmp_path))


def test_without_the_lifeline_the_relay_ends_with_the_roll_call(
    large: dict[str, str], port: int, tmp_path: Path
) -> None:
    with job({**large, "DISTBOOT_LIFELINE": "0"}, port, tmp_path, ranks=4) as running:
        running.all_ready()
        until(lambda: not relays(tmp_path))
        running.touch("end")
        assert running.codes() == [0] * 4


def test_job_that_was_frozen_as_a_whole_goes_on(large: dict[str, str], port: int, tmp_path: Path) -> None:
    with job({**large, "DISTBOOT_LIFELINE_TIMEOUT": "2"}, port, tmp_path, ranks=4) as running:
        pids = [*running.all_ready(), *(each.pid for each in running.processes), *relays(tmp_path)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5)  # longer than the bound: what is tested is that nothing happens
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        time.sleep(3)
        running.touch("end")
        assert running.codes() == [0] * 4


@pytest.mark.parametrize("rank", [1, 3])
def test_wrapper_that_is_killed_is_a_lost_rank(running: Job, rank: int) -> None:
    running.all_ready()
    running.processes[rank].kill()
    assert running.processes[2].wait(30) == 143
    assert running.first(2).startswith(f"rank {rank} lost first: the connection ended without a word, on ")


def test_loss_of_rank_0_reaches_all(running: Job) -> None:
    running.all_ready()
    running.processes[0].kill()
    assert running.codes()[1:] == [143] * 3
    for rank in (1, 2, 3):
        assert running.first(rank).startswith("rank 0 lost first: the connection ended without a word, on ")


def test_relay_that_is_killed_is_a_lost_node(running: Job) -> None:
    running.all_ready()
    (relay,) = relays(running.folder)
    os.kill(relay, signal.SIGKILL)
    assert running.codes() == [143] * 4
    assert running.first(0).startswith("ranks 1-3 lost first: the connection ended without a word, on ")
    for rank in (1, 2, 3):
        assert running.first(rank).startswith("this rank is cut off from the others: the relay of its node has gone (")
