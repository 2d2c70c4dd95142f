"""`doctor --job`: the findings of all ranks at rank 0."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import pytest
from rollcalls import record

from distboot import detect
from distboot.doctor.finding import Finding, ok, problem, warning
from distboot.doctor.together import gathered, grouped
from distboot.rollcall.handed import Handed
from distboot.rollcall.meeting import Meeting
from distboot.rollcall.wire import Session, canonical

Ended = subprocess.CompletedProcess[str]
JOB = ["doctor", "--job"]


def _job(env: dict[str, str], port: int, *commands: Sequence[str], rank_1: dict[str, str]) -> list[Ended]:
    """Each command as a rank of one job, started by hand; `rank_1` are variables of that rank only."""
    size, started = str(len(commands)), []
    for rank, command in enumerate(commands):
        its = {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": size}
        its |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DISTBOOT_JOIN_TIMEOUT": "60"}
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "distboot", *command],
                env={**env, **its, **(rank_1 if rank == 1 else {})},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        return [Ended(each.args, each.wait(120), *each.communicate(timeout=120)) for each in started]
    finally:
        for each in started:
            each.kill()


def test_rank_0_prints_what_is_odd_and_on_which_ranks(clean_env: dict[str, str], port: int) -> None:
    rank_0, rank_1 = _job(clean_env, port, JOB, JOB, rank_1={"NCCL_SOCKET_IFNAME": "nosuch0"})
    headline, empty, *lines = rank_0.stdout.splitlines()
    assert (headline.startswith("Not ready: "), headline.endswith("(2 ranks on 1 node)."), empty) == (True, True, "")
    host = os.uname().nodename
    seen = f"interfaces: rank 1 on {host}: NCCL_SOCKET_IFNAME='nosuch0', and this host has no interface 'nosuch0'"
    (index,) = (index for index, line in enumerate(lines) if line.startswith(f"problem  {seen}"))
    assert lines[index + 1].startswith("           remedy: name one of these, or unset NCCL_SOCKET_IFNAME")
    assert not [line for line in lines if line.startswith("ok")]
    assert (rank_0.returncode, rank_1.returncode, rank_1.stdout) == (78, 0, ""), rank_0.stderr + rank_1.stderr


def test_json_of_all_ranks(clean_env: dict[str, str], port: int) -> None:
    secret = clean_env | {"DISTBOOT_SECRET": "of this job", "NCCL_P2P_DISABLE": "1"}
    rank_0, rank_1 = _job(secret, port, [*JOB, "--json"], [*JOB, "--json"], rank_1={"NCCL_SHM_DISABLE": "1"})
    said = json.loads(rank_0.stdout)
    about = {
        finding["seen"].partition("=")[0]: finding["ranks"] for finding in said["findings"] if "=1:" in finding["seen"]
    }
    assert about == {"NCCL_P2P_DISABLE": [0, 1], "NCCL_SHM_DISABLE": [1]}
    assert (said["hosts"], rank_1.stdout) == ([os.uname().nodename], "")
    assert rank_0.returncode == (0 if said["ready"] else 78)


def test_rank_that_runs_something_else_is_named(clean_env: dict[str, str], port: int) -> None:
    rank_0, _ = _job(clean_env, port, JOB, ["show", "--job"], rank_1={})
    host = os.uname().nodename
    assert f"unknown  doctor: rank 1 on {host}: the findings of this rank did not come: " in rank_0.stdout


def test_alike_is_what_has_one_name_and_one_remedy() -> None:
    small, other = problem("shared-memory", "64 MiB", "more"), problem("shared-memory", "32 MiB", "more")
    slow = warning("cpus", "2 CPUs", "fewer threads")
    assert grouped({0: [slow], 1: [small], 2: [slow, other]}) == [(small, [1, 2]), (slow, [0, 2])]


def _sent(content: str) -> list[Finding]:
    """What rank 0 makes of a rank that sends this."""
    here, there = socket.socketpair()
    session = Session("secret", "rank 0", "c" * 32, "n" * 32)
    meeting = Meeting(detect({"RANK": "0", "WORLD_SIZE": "2"}), 10.0)
    meeting.own = record(0, 2)
    meeting.hand_over = lambda: [Handed((1,), here, session)]  # type: ignore[method-assign]
    with there:
        there.sendall(session.sealed("doctor", content))
        there.shutdown(socket.SHUT_WR)
        return gathered(meeting, [ok("cpus", "2 CPUs")])[1]


def test_findings_of_a_peer_are_checked_and_made_printable() -> None:
    (found,) = _sent(canonical([{"name": "cpus", "status": "problem", "seen": "a\x1b[31m\nb", "remedy": "c\nd\r"}]))
    assert (found.seen, found.remedy) == ("a\\x1b[31m\\nb", "c\nd\\r")


@pytest.mark.parametrize(
    "content",
    [
        '"x"',
        "[1]",
        "[{}]",
        '[{"name":"a","status":"fine","seen":"b","remedy":"c"}]',
        '[{"name":"a","status":"ok"}]',
        "nul",
    ],
)
def test_what_is_no_finding_is_one(content: str) -> None:
    (found,) = _sent(content)
    assert (found.name, found.status) == ("doctor", "unknown")
