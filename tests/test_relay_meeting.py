"""Ranks that meet through the relay of their node: whoever is missing, gone, twice there or a stranger is named."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lifelines import until
from relays import LARGE, needs_linux, relays
from rollcalls import OURS, Rank0, record

from distboot import DistbootError
from distboot.handoff import digest
from distboot.rollcall.client import Client
from distboot.rollcall.node import connected, name_of
from distboot.rollcall.ready import Ready

pytestmark = needs_linux
SHOW = [sys.executable, "-m", "distboot", "show", "--job"]
Begin = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def begin(large: dict[str, str], tmp_path: Path) -> Iterator[Begin]:
    """Starts a rank that only meets the others: `begin(2, DISTBOOT_JOIN_TIMEOUT="1")`."""
    started = []

    def rank_of(rank: int, *command: str, **env: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command or SHOW, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**large, "RANK": str(rank), "LOCAL_RANK": str(rank), **env},
        )  # fmt: skip
        started.append(process)
        return process

    yield rank_of
    for process in started:
        process.kill()
    for process in started:  # not before: a relay has the output of one of them until the others have gone
        process.communicate()


def _wait_for(process: subprocess.Popen[str], said: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if said in line:
            return


def _ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    said, _ = process.communicate(timeout=60)
    return process.returncode, said


def test_relay_that_is_killed_before_the_framework_starts_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = Rank0(record(0, 2), ready=Ready())
    own, ports = record(1, 2, node="b"), [first.port]
    client = Client(["127.0.0.1"], ports, own, OURS)
    way = connected(["127.0.0.1"], ports, own, OURS, join_timeout=20, source="", again=False)
    client.report(20, relay=way)
    (relay,) = relays(tmp_path)
    os.kill(relay, signal.SIGKILL)
    with pytest.raises(DistbootError, match=r"and then the relay of this node to rank 0 at \S+ (closed|has gone)"):
        client.confirm(Ready(), 20)
    assert first.failed().message.startswith("rank 1 (process 1001 on 'b') joined, and ended before the framework")
    first.close()


def test_without_a_python_to_start_there_is_no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", None)
    own = record(1, 2)
    assert connected(["127.0.0.1"], [1], own, OURS, join_timeout=1, source="", again=True) is None


def test_ranks_whose_relay_was_killed_go_to_rank_0_themselves(begin: Begin, tmp_path: Path) -> None:
    others = [begin(rank) for rank in (1, 2, 3)]
    until(lambda: relays(tmp_path))
    (relay,) = relays(tmp_path)
    os.kill(relay, signal.SIGKILL)
    first = begin(0)
    assert [_ended(each)[0] for each in others] == [0, 0, 0]
    code, said = _ended(first)
    assert code == 0
    assert "All 4 ranks are there, on 1 node" in said


def test_rank_that_is_missing_or_has_gone_is_named_on_all(begin: Begin, tmp_path: Path) -> None:
    ranks = [begin(rank, DISTBOOT_JOIN_TIMEOUT="4") for rank in (0, 1)]
    gone = begin(2)
    _wait_for(ranks[0], "3/4 joined")
    gone.kill()
    for each in ranks:
        code, said = _ended(each)
        assert code == 75
        assert "missing 2-3 (node 0); there was, and has gone: rank 2 (process " in said
    until(lambda: not relays(tmp_path), 20)


def test_rank_0_that_does_not_come_is_named_on_all(begin: Begin, port: int) -> None:
    for each in [begin(rank, DISTBOOT_JOIN_TIMEOUT="1") for rank in (1, 2)]:
        code, said = _ended(each)
        assert code == 75
        assert f": rank 0 did not answer at 127.0.0.1:{port} (from MASTER_ADDR) within 1 s" in said
        assert "defect" not in said


def test_duplicate_behind_a_relay_is_named_on_all(begin: Begin) -> None:
    for each in [begin(rank, DISTBOOT_JOIN_TIMEOUT="20") for rank in (0, 1, 2, 2)]:
        code, said = _ended(each)
        assert code == 78
        assert "error[duplicate-rank]: " in said
        assert "rank 2 is there twice: process " in said


def test_rank_with_another_secret_is_refused_by_relay_and_rank_0(begin: Begin) -> None:
    right = [begin(rank, DISTBOOT_SECRET="s3cret", DISTBOOT_JOIN_TIMEOUT="6") for rank in (0, 1, 2)]
    wrong = begin(3, DISTBOOT_SECRET="gue55", DISTBOOT_JOIN_TIMEOUT="3")
    code, said = _ended(wrong)
    assert code == 75
    assert "has another DISTBOOT_SECRET" in said
    for each in right:
        code, said = _ended(each)
        assert code == 75
        assert "missing 3" in said
        assert "s3cret" not in said


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_name_that_another_user_has_taken_is_done_without(begin: Begin, port: int) -> None:
    name = name_of(digest(f"None:{port}"), 4, ["127.0.0.1"], again=False)
    script = f"""
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
os.setuid(65534)
listener.bind({name!r})
listener.listen()
print("listening", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "listening\n"
        ranks = [begin(rank, DISTBOOT_JOIN_TIMEOUT="20") for rank in range(4)]
        assert [_ended(each)[0] for each in ranks] == [0] * 4
        assert stranger.stdin is not None
        stranger.stdin.close()


def test_garbage_at_the_relay_ends_only_its_own_connection(begin: Begin, port: int, tmp_path: Path) -> None:
    others = [begin(rank) for rank in (1, 2, 3)]
    until(lambda: relays(tmp_path))
    for garbage in (b"\xff" * 64, b"\0\0\0\2{}", b"\0\0\0\x04null"):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(name_of(digest(f"None:{port}"), 4, ["127.0.0.1"], again=False))
            stranger.sendall(garbage)
            stranger.settimeout(20)
            assert b"refused" in stranger.recv(1000)
    assert [_ended(each)[0] for each in (*others, begin(0))] == [0] * 4


def test_relay_is_that_of_one_job() -> None:
    names = [
        name_of("5c2f10aa", 4096, ["node-0"], again=False),
        name_of("5c2f10aa", 4096, ["node-0"], again=True),
        name_of("5c2f10aa", 8192, ["node-0"], again=False),
        name_of("5c2f10aa", 4096, ["node-1"], again=False),
    ]
    assert len(set(names)) == 4


def test_without_proc_there_is_no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr("distboot.rollcall.node.os.stat", missing)
    assert connected(["127.0.0.1"], [1], record(1, 2), OURS, join_timeout=1, source="", again=True) is None


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-"])
def test_rank_without_standard_streams_starts_a_relay(begin: Begin, tmp_path: Path, closed: str) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "distboot", "run", "--", "true"]
    first, second = begin(1, *command), begin(2, *command)
    until(lambda: relays(tmp_path))
    ranks = [first, second, begin(3, *command), begin(0, *command)]
    for each in ranks:
        code, said = _ended(each)
        assert code == 0
        assert "relay" not in said


def test_output_of_the_rank_that_started_the_relay_ends_with_that_rank(begin: Begin, tmp_path: Path) -> None:
    starter = begin(1)
    until(lambda: relays(tmp_path))
    first, second = begin(0), begin(2)
    _wait_for(first, "3/4 joined")
    starter.kill()
    assert starter.stdout is not None
    starter.stdout.read()  # until nobody has it any more
    assert len(relays(tmp_path)) == 1
    assert [_ended(each)[0] for each in (begin(1), first, second, begin(3))] == [0] * 4


@pytest.mark.parametrize("many", [2, 4096], ids=["relays", "no relays"])
def test_rank_that_freezes_before_its_lifeline_begins_is_lost(begin: Begin, tmp_path: Path, many: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(LARGE.replace("2", str(many)))
    env = {"DISTBOOT_LIFELINE_TIMEOUT": "2", "DISTBOOT_GRACE": "1"}
    command = [sys.executable, "-m", "distboot", "run", "--", "sleep", "60"]
    first, *others = (begin(rank, *command, **env) for rank in (0, 1, 2))
    _wait_for(first, "3/4 joined")
    os.kill(others[1].pid, signal.SIGSTOP)
    last = begin(3, *command, **env)
    said = [_ended(each)[1] for each in (first, others[0], last)]
    assert all("rank 2 lost first: no answer for 2 s" in text for text in said), said
