"""The check between the roll call and the start: what rank 0 makes of nodes and links, and how a link is probed."""

from __future__ import annotations

import errno
import itertools
import os
import socket
import stat
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from checked_nodes import GIB, Checked
from inside import LAUNCHERS, sample_of
from recorded import lay_out
from supervised import until

from distboot.agent import link_probe
from distboot.host import amd_gpu, environment, node_state, nvidia_smi
from distboot.host.device import Device
from distboot.job.effects import Blame, Reply, Tell
from distboot.job.messages import NodeSeen, Probe, Probeable, Probed
from distboot.job.root_cause import RootCause
from distboot.rendezvous.events import Event
from distboot.rendezvous.messages import Failed, Go, Ready
from distboot.rendezvous.protocol import decode, encode
from distboot.report.all_reduce import all_reduce_of
from distboot.tools.tournament import rounds_of_pairs


def test_ring_of_links_is_probed_and_nothing_found() -> None:
    job = Checked()
    job.see()
    asked = [(rank, probe.host, probe.port, probe.token) for rank, probe in job.probes]
    assert asked == [
        (0, "10.0.0.1", 4001, "token 1"),
        (1, "10.0.0.2", 4002, "token 2"),
        (2, "10.0.0.3", 4003, "token 3"),
        (3, "", 4000, "token 0"),
    ]
    job.answer()
    assert job.findings == []
    assert job.said == []


ODD_LINKS = {
    "slow": (
        Probed(0, 0.0002, 1.1e9 / 8),
        "node-2: 1.1 Gbit/s to node-3, median of the others 96 Gbit/s",
    ),
    "far": (
        Probed(0, 0.05, 12e9),
        "node-2: a round trip of 50 ms to node-3, median of the others 0.2 ms",
    ),
    "broken": (
        Probed(0, problem="no answer from 10.0.0.3:4003 in time"),
        "node-2: does not reach node-3: no answer from 10.0.0.3:4003 in time",
    ),
}


@pytest.mark.parametrize(("link", "finding"), ODD_LINKS.values(), ids=ODD_LINKS)
def test_odd_link_is_probed_again_and_named(link: Probed, finding: str) -> None:
    job = Checked()
    job.see()
    job.answer(node_2=link)
    for _ in range(3):
        assert [rank for rank, _ in job.probes] == [2]
        job.now += 0.7
        job.answer(node_2=link)
    assert job.findings == [finding]
    assert job.said == [f"warning: {finding}"]


def test_link_that_is_slow_once_is_not_named() -> None:
    job = Checked()
    job.see()
    job.answer(node_1=Probed(0, 0.03, 1e6))
    job.answer()
    assert job.findings is None
    job.answer()
    assert job.findings == []


def test_of_two_links_the_slower_one_is_odd() -> None:
    job = Checked(nodes=2)
    job.see()
    for _ in range(3):
        job.now += 0.7
        job.answer(node_1=Probed(0, 0.0002, 1e9))
    assert job.findings == ["node-1: 8 Gbit/s to node-0, median of the others 96 Gbit/s"]


def test_links_of_which_none_works_are_one_finding() -> None:
    job = Checked()
    job.see()
    broken = Probed(0, problem="no answer in time")
    job.answer(node_0=broken, node_1=broken, node_2=broken, node_3=broken)
    assert job.findings == ["node-0: no node reaches the next one; node-1: no answer in time"]
    assert job.blamed == []


ODD_NODES = {
    "memory": (
        NodeSeen({"free memory": 3 * GIB}),
        "node-1: free memory: 3 GiB, median of all nodes 900 GiB",
    ),
    "problem": (
        NodeSeen(problems=("accelerator 3 is slowed down: heat",)),
        "node-1: accelerator 3 is slowed down: heat",
    ),
    "control": (NodeSeen(problems=("\x1b[31m\nred",)), "node-1: \\x1b[31m\\nred"),
}


@pytest.mark.parametrize(("seen", "finding"), ODD_NODES.values(), ids=ODD_NODES)
def test_odd_node_is_named(seen: NodeSeen, finding: str) -> None:
    job = Checked()
    job.see(node_1=seen)
    job.answer()
    assert job.findings == [finding]


def test_host_is_blamed_once_for_all_findings() -> None:
    job = Checked()
    job.see(node_1=NodeSeen(problems=("one", "two")))
    job.answer()
    assert job.blamed == [Blame("node-1", "one; two")]


def test_host_is_not_blamed_after_a_failed_check() -> None:
    job = Checked(nodes=2)
    job.see(node_1=NodeSeen(problems=("accelerator 0 is slowed down: heat",)))
    job.answer()
    assert job.facts.unfit == {1}
    job.facts.is_starting = False
    job.facts.members[1].pid = 1
    job._apply(job.job.lost(1, "it is gone", job.now))
    job.wait(10)
    assert [blame.why for blame in job.blamed] == ["accelerator 0 is slowed down: heat"]
    assert job.facts.cause is not None


def test_host_that_is_lost_is_blamed() -> None:
    job = Checked(nodes=2, mode="off")
    job.facts.is_starting = False
    job.facts.members[1].pid = 1
    job._apply(job.job.lost(1, "it is gone", job.now))
    job.wait(10)
    (blame,) = job.blamed
    assert blame.host == "node-1"
    assert blame.why.startswith("rank 1 became unreachable first: it is gone")


def test_accelerators_of_another_kind_are_named() -> None:
    job = Checked()
    usual = NodeSeen(names={"accelerators": "8 x H100"})
    job.see(
        node_0=usual,
        node_1=usual,
        node_2=NodeSeen(names={"accelerators": "7 x H100"}),
        node_3=usual,
    )
    job.answer()
    assert job.findings == ["node-2: accelerators: 7 x H100, most have 8 x H100"]


def test_table_of_nodes_has_the_odd_ones_first() -> None:
    job = Checked()
    job.see(
        node_2=NodeSeen({"free memory": 3 * GIB, "CPUs": 8.0}, {"accelerators": "1 x T4"}),
        node_3=NodeSeen({"memory that may be locked": 1e17}),
    )
    job.answer()
    odd, other, *_, last = job.details["nodes"]
    assert odd["node_rank"] == 2
    assert odd["findings"] == [
        "accelerators: 1 x T4, most have none",
        "free memory: 3 GiB, median of all nodes 900 GiB",
    ]
    assert odd["seen"] == {
        "accelerators": "1 x T4",
        "free memory": "3 GiB",
        "CPUs": "8",
        "link to the next node": "96 Gbit/s, 0.2 ms to node-3",
    }
    assert (other["host"], other["findings"]) == ("node-0", [])
    assert last["seen"]["memory that may be locked"] == "unlimited"


def test_table_of_nodes_names_a_broken_link() -> None:
    job = Checked(nodes=2)
    job.see()
    broken = Probed(0, problem="no answer in time")
    for _ in range(3):
        job.now += 0.7
        job.answer(node_1=broken)
    odd, _ = job.details["nodes"]
    assert odd["host"] == "node-1"
    assert odd["seen"]["link to the next node"] == "does not reach node-0"


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 7, 8, 15])
def test_each_pair_of_nodes_reduces_once(nodes: int) -> None:
    rounds = rounds_of_pairs(nodes)
    for pairs in rounds:
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
    every = sorted(pair for pairs in rounds for pair in pairs)
    assert every == list(itertools.combinations(range(nodes), 2))


def test_each_of_many_nodes_is_in_fifteen_pairs() -> None:
    rounds = rounds_of_pairs(1000)
    counts = Counter(node for pairs in rounds for pair in pairs for node in pair)
    assert set(counts.values()) == {15}
    assert len(counts) == 1000


def _all_reduce(*pairs: tuple[int, int, float]) -> Any:
    details = {
        "ranks": 8,
        "backend": "nccl",
        "sizes": [[1 << 20, 0.001]],
        "pairs": pairs,
        "median": 8e9,
    }
    return all_reduce_of([Event(0.0, None, "allreduce", details)], ["a", "b", "c\n"])


def test_slow_pair_is_named_by_its_hosts() -> None:
    found = _all_reduce((0, 1, 8e9), (0, 2, 8.1e9), (1, 2, 4e8))
    assert found["findings"] == ["b and c\\n: 400 MB/s, median of all pairs 8 GB/s"]
    assert found["pairs"][0] == {"hosts": ["b", "c\n"], "rate": 4e8}


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    (size,) = _all_reduce()["sizes"]
    assert size == {"bytes": 1 << 20, "seconds": 0.001, "rate": (1 << 20) / 0.001 * 14 / 8}


def test_of_one_pair_nothing_is_odd() -> None:
    assert _all_reduce((0, 1, 1.0))["findings"] == []


def test_hosts_of_one_name_have_numbers() -> None:
    job = Checked(hosts=["a\nb", "a\nb", "c", "d"])
    job.see(node_1=NodeSeen(problems=("bad",)))
    job.answer()
    assert job.findings == ["a\\nb (node 1): bad"]


def test_check_ends_after_three_seconds() -> None:
    job = Checked()
    for rank in range(3):  # nothing is heard of node 3
        job.take(rank, Probeable(4000 + rank, "token"))
    job.take(0, NodeSeen())
    job.take(1, NodeSeen())
    job.wait(0.8)
    assert [rank for rank, _ in job.probes] == [0, 1]
    job.wait(2.3)
    assert job.findings == [
        "node-2: its check did not finish within 3 s",
        "node-3: its check did not finish within 3 s",
        "node-0: no node reaches the next one; node-1: its link probe timed out",
    ]


def test_ranks_start_when_the_check_is_over() -> None:
    job = Checked(nodes=2)
    for rank in range(2):
        job.take(rank, Ready())
    assert job.replies == []
    job.see()
    job.answer()
    assert job.replies == [Go()]


def test_rank_that_ends_meanwhile_fails_the_start() -> None:
    job = Checked(nodes=2)
    job.take(0, Ready())
    job._apply(job.job.left(1, job.now))
    assert [type(reply) for reply in job.replies] == [Reply, Reply]


@pytest.mark.parametrize("number", [1, 2])
def test_links_of_node_that_ends_are_not_named(number: int) -> None:
    reset = Probed(0, problem="Connection reset by peer")
    job = Checked(nodes=4, mode="stop")
    job.facts.is_starting = False
    job.see()
    job.answer(**{f"node_{number - 1}": reset})
    job._apply(job.job.left(number, job.now))
    job.wait(3)
    assert job.findings == []
    assert job.blamed == []
    assert job.replies == []


def test_stop_names_what_a_message_carries() -> None:
    job = Checked(nodes=300, mode="stop")
    job.facts.is_starting = False
    broken = NodeSeen(
        problems=tuple("accelerator is used by another process " * 2 for _ in range(8))
    )
    job.see(**{f"node_{number}": broken for number in range(300)})
    job.answer()
    (told,) = [reply for reply in job.replies if isinstance(reply, Tell)]
    assert decode(encode(told.cause), RootCause) == told.cause


def test_stop_ends_the_start_on_all_ranks() -> None:
    job = Checked(nodes=2, mode="stop")
    for rank in range(2):
        job.take(rank, Ready())
    job.see(node_1=NodeSeen(problems=("accelerator 0 is slowed down: heat",)))
    job.answer()
    replies = [reply for reply in job.replies if isinstance(reply, Reply)]
    assert [reply.rank for reply in replies] == [0, 1]
    for reply in replies:
        assert isinstance(reply.message, Failed)
        code, text, _ = reply.message.problem
        assert code == "node-check"
        assert text == "node-1: accelerator 0 is slowed down: heat"
    assert job.said == []


def test_stop_counts_the_findings_left_out() -> None:
    job = Checked(nodes=2, mode="stop")
    job.take(0, Ready())
    job.see(node_1=NodeSeen(problems=tuple(f"problem {number}" for number in range(22))))
    job.answer()
    (reply, *_) = [reply for reply in job.replies if isinstance(reply, Reply)]
    assert isinstance(reply.message, Failed)
    assert reply.message.problem[1].endswith("; node-1: problem 19; 2 more findings of the check")


def test_stop_ends_scripts_that_call_no_init() -> None:
    job = Checked(nodes=2, mode="stop")
    job.facts.is_starting = False
    job.see(node_1=NodeSeen(problems=("broken",)))
    job.answer()
    (told,) = [reply for reply in job.replies if isinstance(reply, Tell)]
    assert told.cause.headline == "the check before the start failed: node-1: broken"
    assert told.cause.exit_code == 78
    assert told.cause.ranks == (1,)


def test_check_that_is_off_holds_nobody_up() -> None:
    job = Checked(nodes=2, mode="off")
    for rank in range(2):
        job.take(rank, Ready())
    assert job.replies == [Go()]
    job.see(node_1=NodeSeen(problems=("broken",)))
    assert job.findings is None


# Variables


def test_variables_of_one_host_are_named() -> None:
    job = Checked(nodes=3)
    usual = NodeSeen(variables=(("A", "1"), ("B", "2"), ("TOKEN", "")))
    odd = NodeSeen(variables=(("B", "3"), ("C", "4"), ("TOKEN", "")))
    job.see(node_0=usual, node_1=odd, node_2=usual)
    job.answer()
    line = "node-1: variables that differ from those on node-0: A (not set), B (a different value), C (only here)"
    assert job.said == [f"warning: {line}"]
    assert job.findings == []
    assert job.blamed == []


def test_odd_variables_count_the_hosts_left_out() -> None:
    job = Checked(nodes=21)
    usual = {f"node_{node}": NodeSeen(variables=(("A", "usual"),)) for node in range(11)}
    odd = {f"node_{node}": NodeSeen(variables=(("A", "odd"),)) for node in range(11, 21)}
    job.see(**usual, **odd)
    job.answer()
    (line,) = job.said
    assert ", node-18 and 2 more: variables that differ from those on node-0: A" in line


def test_numbers_of_a_launcher_are_not_compared() -> None:
    """They are not the same on all nodes."""
    names = {number for launcher in LAUNCHERS.values() for number in launcher.numbers}
    names |= {launcher.nodes.index_variable for launcher in LAUNCHERS.values() if launcher.nodes}
    for launcher in LAUNCHERS.values():
        first, second = (
            sample_of(launcher.sample, rank=rank, nodes=2, per_node=1) for rank in (0, 1)
        )
        names |= {name for name in first if first[name] != second.get(name)}
    assert list(filter(environment.is_compared, filter(None, names))) == []


def test_digests_tell_no_value_and_no_secret() -> None:
    environ = {"HF_HOME": "/data", "API_TOKEN": "s3cret", "RANK": "1", "SLURM_NODEID": "3"}
    found = environment.digests(environ, "of the job")
    assert [name for name, _ in found] == ["API_TOKEN", "HF_HOME"]
    assert dict(found)["API_TOKEN"] == ""
    assert found != environment.digests({**environ, "HF_HOME": "/other"}, "of the job")
    assert found != environment.digests(environ, "of another job")
    assert found == environment.digests({**environ, "API_TOKEN": "2"}, "of the job")


def test_secret_of_any_bytes_is_a_key() -> None:
    not_utf_8 = os.fsdecode(b"\xff\xfeabc")
    environ = {"HF_HOME": "/data"}
    found = environment.digests(environ, not_utf_8)
    assert found == environment.digests(environ, not_utf_8)
    assert found != environment.digests(environ, "abc")


def test_large_environment_is_bounded() -> None:
    environ = {f"A{number}": "x" * 1000 for number in range(10_000)}
    assert len(environment.digests(environ, "")) == 300
    job = Checked(nodes=2)
    many = tuple((f"A{number}", "1") for number in range(300))
    job.see(node_0=NodeSeen(variables=many), node_1=NodeSeen(variables=(("B\n", "1"),)))
    job.answer()
    assert job.said[0].endswith("A103 (not set), A104 (not set), and 293 more")


# The probe of a link, over real sockets


@pytest.fixture
def server() -> Iterator[link_probe.LinkServer]:
    found = link_probe.LinkServer()
    yield found
    found.close()


def test_link_is_measured(server: link_probe.LinkServer) -> None:
    found = link_probe.probe(Probe(7, "127.0.0.1", server.port, server.token), "")
    assert found.number == 7
    assert found.problem == ""
    assert 0 < found.round_trip < 1
    assert found.rate > 1e6


def test_busy_neighbor_is_asked_until_it_is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "_SLOW", 10.0)
    token = "a" * 32
    pings = []

    def busy_for_six_answers(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(len(token), socket.MSG_WAITALL)
            while (ping := connection.recv(8, socket.MSG_WAITALL)) == bytes(8):
                pings.append(ping)
                threading.Event().wait(0.02 if len(pings) <= 6 else 0)
                connection.sendall(ping)
            while connection.recv(1 << 18):
                pass
            connection.sendall(struct.pack("!QQ", 1, 1))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        neighbor = threading.Thread(target=busy_for_six_answers, args=(listener,))
        neighbor.start()
        found = link_probe.probe(Probe(1, "", listener.getsockname()[1], token), "127.0.0.1")
        neighbor.join()
    assert found.problem == ""
    assert len(pings) > 6


def test_stranger_is_not_answered(server: link_probe.LinkServer) -> None:
    found = link_probe.probe(Probe(1, "127.0.0.1", server.port, "0" * 32), "")
    assert found.rate == 0
    assert "it closed the connection" in found.problem or "reset" in found.problem


class _FailsOnce:
    """A listening socket whose first `accept` finds that this process may open no more files."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._errors = [OSError(errno.EMFILE, "Too many open files")]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def accept(self) -> tuple[socket.socket, Any]:
        if self._errors:
            raise self._errors.pop()
        return self._socket.accept()


def test_failed_accept_does_not_end_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "listening", lambda _: _FailsOnce())
    server = link_probe.LinkServer()
    found = link_probe.probe(Probe(1, "127.0.0.1", server.port, server.token), "")
    server.close()
    assert found.problem == ""


def test_silent_strangers_do_not_keep_a_neighbor_out(server: link_probe.LinkServer) -> None:
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    question = Probe(1, "127.0.0.1", server.port, server.token)
    until(lambda: not link_probe.probe(question, "").problem)
    for stranger in strangers:
        stranger.close()


def test_slow_strangers_do_not_keep_a_neighbor_out(server: link_probe.LinkServer) -> None:
    strangers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
    question = Probe(1, "127.0.0.1", server.port, server.token)
    sent = 0
    while link_probe.probe(question, "").problem:
        for stranger in strangers:
            with suppress(OSError):
                stranger.sendall(b"0")
        sent += 1
        threading.Event().wait(0.1)  # between two bytes
    for stranger in strangers:
        stranger.close()
    assert sent < len(server.token) / 2


def test_neighbor_that_floods_is_read_for_a_moment(server: link_probe.LinkServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as flood:
        flood.settimeout(5)
        flood.sendall(server.token.encode() + bytes(40))
        begin = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() < begin + 5:
                flood.sendall(bytes(1 << 20))
    assert time.monotonic() < begin + 5


def test_closed_port_and_silent_host_are_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        found = link_probe.probe(Probe(1, "", port, "token"), "127.0.0.1")
    assert found.problem == f"no answer from 127.0.0.1:{port} in time"
    found = link_probe.probe(Probe(1, "", port, "token"), "127.0.0.1")
    assert found.problem == f"127.0.0.1:{port}: Connection refused"


# Accelerators, with a stand-in for nvidia-smi: this machine has none

SMI = """\
#!/bin/sh
case "$1" in
--query-gpu=index,uuid,name,memory.total,memory.used) {old};;
--query-gpu*) {devices};;
--query-compute-apps*) echo "GPU-0, {pid}, 41980";;
esac
"""
ROW = "echo '0, GPU-0, NVIDIA H100 80GB HBM3, 81559, {used}, {errors}, {bits}'"


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "nvidia-smi"


def write(program: Path, devices: str, old: str = "exit 2", pid: object = "[N/A]") -> None:
    program.write_text(SMI.format(devices=devices, old=old, pid=pid))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_healthy_accelerators_are_listed(smi: Path) -> None:
    write(smi, ROW.format(used=4, errors=0, bits="0x0000000000000001"))
    seen = node_state.look(os.getpid(), is_rank=False)
    assert seen.names == {"accelerators": "1 x NVIDIA H100 80GB HBM3 (79.6 GiB)"}
    assert seen.problems == []
    assert seen.amounts.keys() >= {"free memory", "CPUs", "memory that may be locked"}


def test_faults_of_accelerators_are_told(smi: Path) -> None:
    write(smi, ROW.format(used=41984, errors=2, bits="0x0000000000000048"), pid=1)
    seen = node_state.look(os.getpid(), is_rank=True)
    *faults, in_use = seen.problems
    assert faults == [
        "accelerator 0 has 2 uncorrected errors of its memory",
        "accelerator 0 is slowed down: hardware and heat",
    ]
    assert in_use.startswith("accelerator 0 has 41 GiB of 79.6 GiB in use, 41 GiB by process 1 (")


def test_memory_without_a_visible_owner_is_told(smi: Path) -> None:
    write(smi, ROW.format(used=41984, errors="[N/A]", bits="[N/A]"))
    in_use = "accelerator 0 has 41 GiB of 79.6 GiB in use, by no process that is visible here"
    assert node_state.look(os.getpid(), is_rank=False).problems == [in_use]
    assert node_state.look(os.getpid(), is_rank=True).problems == []  # it may be a rank's


def test_server_of_mps_is_no_older_job(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_state, "short_command", lambda _: "nvidia-cuda-mps-server")
    write(smi, ROW.format(used=41984, errors=0, bits="0x0"), pid=1)
    assert node_state.look(os.getpid(), is_rank=True).problems == []


def test_memory_of_this_job_is_its_own(smi: Path) -> None:
    write(smi, ROW.format(used=41984, errors=0, bits="0x0"), pid=os.getpid())
    assert node_state.look(os.getpid(), is_rank=True).problems == []


def test_accelerators_of_amd_are_read_from_the_kernel(tmp_path: Path) -> None:
    """Written after Documentation/gpu/amdgpu of the kernel: no machine here has one."""
    devices = "sys/bus/pci/devices/0000"
    files = {
        "sys/class/kfd/kfd/topology/nodes/0/properties": "simd_count 0\n",
        "sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 304\nlocation_id 15104\n",
        "sys/class/kfd/kfd/topology/nodes/2/properties": "simd_count 304\nlocation_id 15360\n",
        f"{devices}:3b:00.0/product_name": "AMD Instinct MI300X OAM\n",
        f"{devices}:3b:00.0/mem_info_vram_total": f"{192 << 30}\n",
        f"{devices}:3b:00.0/mem_info_vram_used": f"{41 << 30}\n",
        f"{devices}:3b:00.0/ras/umc_err_count": "ue: 2\nce: 12\n",
        f"{devices}:3c:00.0/device": "0x74a1\n",
    }
    lay_out(files, tmp_path)
    bad, bare = amd_gpu.devices(tmp_path)
    assert bad == Device(
        "0",
        "kfd1",
        "AMD Instinct MI300X OAM",
        192 << 30,
        41 << 30,
        ["has 2 uncorrected errors of its memory"],
    )
    assert (bare.name, bare.memory, bare.faults) == ("AMD 0x74a1", 0, [])


def test_program_without_a_field_is_asked_for_less(smi: Path) -> None:
    write(smi, "exit 2", old="echo '0, GPU-0, Tesla T4, 15360, 3'")
    assert node_state.look(os.getpid(), is_rank=False).names == {
        "accelerators": "1 x Tesla T4 (15 GiB)"
    }


def test_driver_that_hangs_is_named(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_state, "_LIMIT", 0.2)
    write(smi, "exec sleep 60")
    (problem,) = node_state.look(os.getpid(), is_rank=False).problems
    assert (
        problem == "nvidia-smi has not answered in time: a driver that hangs, or is slow to start"
    )


def test_program_that_is_broken_is_no_problem(smi: Path) -> None:
    smi.write_text("not a program")
    smi.chmod(0o755)
    assert node_state.look(os.getpid(), is_rank=False).problems == []
    assert nvidia_smi.devices(1.0) == []
