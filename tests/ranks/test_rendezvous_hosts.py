"""The roll call and real Gloo over three hosts, as networks are: names missing, links down, ports taken.

The hosts are network namespaces (see cluster/README.md); each test sets up the names that they know.
"""

import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from conftest import Run
from hosts import Hosts
from launched import FILES, all_with, hosts_up, json_lines, needs_hosts, needs_torch
from supervised import until

pytestmark = needs_hosts

NAMES = ("nodea", "nodeb", "nodec")
ADDRESSES = dict(zip(NAMES, ("10.77.0.11", "10.77.0.12", "10.77.0.13"), strict=True))
V6 = dict(zip(NAMES, ("fd77::11", "fd77::12", "fd77::13"), strict=True))
UNEVEN = ("nodea", "nodea", "nodeb", "nodec")
CYCLIC = ("nodea", "nodeb", "nodec", "nodea")
NEAR_AND_FAR = ("nodea", "nodeb", "nodea")
WRAPPER = ("-m", "distboot")
SHOW_JOB = ("-m", "distboot", "show", "--job")
Done = subprocess.CompletedProcess[str]


@pytest.fixture
def three() -> Iterator[Hosts]:
    """Three hosts for one test, which may break them."""
    with hosts_up("head", *NAMES) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def hosts3() -> Iterator[Hosts]:
    """Three hosts for the tests that leave them as they are."""
    with hosts_up("head", *NAMES) as hosts:
        yield hosts


def _knows(hosts: Hosts, host: str, names: Mapping[str, str]) -> None:
    """What a host finds in its /etc/hosts: name -> address."""
    text = "".join(f"{address} {name}\n" for name, address in names.items())
    own = f"/tmp/hosts-of-{host}"
    mount = (
        f"umount /etc/hosts; printf %s {shlex.quote(text)} > "
        f"{own}; mount -n --bind {own} /etc/hosts"
    )
    assert hosts.run(host, ["sh", "-c", mount]).returncode == 0


def _job(
    hosts: Hosts,
    layout: Sequence[str],
    *command: str,
    late: Mapping[int, Callable[[], Any]] | None = None,
    absent: Sequence[int] = (),
    each: Mapping[int, Mapping[str, str]] | None = None,
    **variables: str,
) -> dict[int, Done]:
    """One process per rank, started by hand with RANK, WORLD_SIZE and the address; `late` waits before one."""
    base = {"MASTER_ADDR": "nodea", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1", **variables}

    def start(rank: int) -> Done:
        (late or {}).get(rank, lambda: None)()
        env = {
            **base,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(layout)),
            **(each or {}).get(rank, {}),
        }
        return hosts.run(layout[rank], [sys.executable, *command], env, timeout=90)

    ranks = [rank for rank in range(len(layout)) if rank not in absent]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(start, ranks), strict=True))


def _places(done: Mapping[int, Done]) -> list[tuple[object, ...]]:
    lines = [json_lines(each)[0] for each in done.values()]
    return [
        (line["host"], int(str(line["NODE_RANK"])), line["LOCAL_RANK"], line["LOCAL_WORLD_SIZE"])
        for line in lines
    ]


EXACT = {
    UNEVEN: [("nodea", 0, 0, 2), ("nodea", 0, 1, 2), ("nodeb", 1, 0, 1), ("nodec", 2, 0, 1)],
    CYCLIC: [("nodea", 0, 0, 2), ("nodeb", 1, 0, 1), ("nodec", 2, 0, 1), ("nodea", 0, 1, 2)],
    ("nodec", "nodeb", "nodea"): [("nodec", 0, 0, 1), ("nodeb", 1, 0, 1), ("nodea", 2, 0, 1)],
    NEAR_AND_FAR: [("nodea", 0, 0, 2), ("nodeb", 1, 0, 1), ("nodea", 0, 1, 2)],
}
# With Gloo; and without a framework, where it is about who is where.
GLOO = [pytest.mark.all, needs_torch]
WITH_GLOO = pytest.mark.parametrize(
    "command", [("who.py",), (*WRAPPER, "plain.py")], ids=["init", "wrapper"]
)
WITHOUT = [("where.py",), (*WRAPPER, "environment.py")]


@pytest.mark.parametrize(
    ("layout", "command"),
    [
        *(
            # Each layout in one way, and the other one in `make test-all`
            pytest.param(layout, command, marks=() if way == number % 2 else pytest.mark.all)
            for number, layout in enumerate(EXACT)
            for way, command in enumerate(WITHOUT)
        ),
        *(
            pytest.param(CYCLIC, command, marks=GLOO)
            for command in (("who.py",), (*WRAPPER, "plain.py"))
        ),
    ],
    ids="-".join,
)
def test_three_hosts_are_exact(
    hosts3: Hosts, layout: tuple[str, ...], command: tuple[str, ...]
) -> None:
    done = _job(hosts3, layout, *command, MASTER_ADDR=layout[0])
    assert _places(done) == EXACT[layout]


@all_with("torch")
@WITH_GLOO
@pytest.mark.parametrize("own", ["127.0.1.1", None], ids=["127.0.1.1", "nothing"])
def test_host_that_does_not_know_its_own_address(
    three: Hosts, command: tuple[str, ...], own: str | None
) -> None:
    """Debian writes the first into /etc/hosts; either kills Gloo, which looks its own host name up."""
    for host in NAMES:
        others = {name: address for name, address in ADDRESSES.items() if name != host}
        _knows(three, host, others if own is None else {**others, host: own})
    assert _places(_job(three, NEAR_AND_FAR, *command)) == EXACT[NEAR_AND_FAR]


@all_with("torch")
def test_hosts_without_any_names(three: Hosts) -> None:
    for host in NAMES:
        _knows(three, host, {})
    done = _job(three, NEAR_AND_FAR, "who.py", MASTER_ADDR=ADDRESSES["nodea"])
    assert _places(done) == EXACT[NEAR_AND_FAR]


@pytest.mark.parametrize(
    ("command", "given"),
    [
        (("where.py",), "fd77::11"),
        ((*WRAPPER, "environment.py"), "[fd77::11]"),
        pytest.param(("who.py",), "nodea", marks=GLOO),
        pytest.param((*WRAPPER, "plain.py"), "fd77::11", marks=GLOO),
        pytest.param(("who.py",), "[fd77::11]", marks=GLOO),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1],
)
def test_hosts_with_ipv6_only(three: Hosts, command: tuple[str, ...], given: str) -> None:
    for host in NAMES:
        change = f"ip -6 addr add {V6[host]}/64 dev eth0 nodad && ip -4 addr flush dev eth0"
        assert three.run(host, ["sh", "-c", change]).returncode == 0
        _knows(three, host, V6)
    assert _places(_job(three, NEAR_AND_FAR, *command, MASTER_ADDR=given)) == EXACT[NEAR_AND_FAR]


@all_with("torch")
def test_variables_for_interfaces_never_replace_given_ones(hosts3: Hosts) -> None:
    (hosts3.shared / "seen.py").write_text(
        "import json, os, distboot\nwith distboot.init(join_timeout=60):\n"
        "    names = [os.environ[f'{of}_SOCKET_IFNAME'] for of in ('GLOO', 'NCCL', 'TP')]\n"
        "    print(json.dumps(names))\n"
    )
    done = _job(
        hosts3, ("nodea", "nodeb"), "seen.py", each={1: {"NCCL_SOCKET_IFNAME": "^lo,docker"}}
    )
    seen = [json.loads(done[rank].stdout) for rank in (0, 1)]
    assert seen == [["eth0", "=eth0", "eth0"], ["eth0", "^lo,docker", "eth0"]]


# A route into nothing is a firewall that answers nobody.
_NOWHERE = ["neigh", "replace", ADDRESSES["nodec"], "lladdr", "02:00:00:00:00:01", "dev", "eth0"]


@pytest.mark.parametrize(
    ("host", "change", "why"),
    [
        ("nodec", ["link", "set", "eth0", "down"], "Network is unreachable"),
        ("nodea", _NOWHERE, "timed out"),
    ],
    ids=["cut off", "packets dropped"],
)
def test_host_that_reaches_nobody_is_named_everywhere(
    three: Hosts, host: str, change: list[str], why: str
) -> None:
    assert three.run(host, ["ip", *change]).returncode == 0
    done = _job(three, UNEVEN, *SHOW_JOB, DISTBOOT_JOIN_TIMEOUT="4")
    assert {each.returncode for each in done.values()} == {75}
    for rank in (0, 1, 2):
        assert "missing: rank 3" in done[rank].stderr.splitlines()[-2]
    said = (
        "rank 3 on nodec: rank 0 did not answer at nodea:29500 "
        f"(from MASTER_ADDR) within 4 s: {why}"
    )
    assert said in done[3].stderr


def test_host_cut_off_after_joining_is_named_everywhere(three: Hosts) -> None:
    (three.shared / "cut.py").write_text(
        "import subprocess, sys, distboot.agent.session as m\n"
        "ready = m.Session.ready\n"
        "def cut(self, step):\n"
        "    if self.placement.rank == 3: subprocess.run(['ip', 'link', 'set', 'eth0', 'down'], check=True)\n"
        "    return ready(self, step)\n"
        "m.Session.ready = cut\n"
        "import distboot; distboot.init('none', join_timeout=8)\n"
    )
    done = _job(three, UNEVEN, "cut.py")
    for rank in (0, 1, 2):
        assert (
            "all ranks joined, and then did not get ready in time: rank 3 (node 2)"
            in done[rank].stderr
        )
    assert (
        "error[rank-failed]: rank 3 on nodec: all ranks joined, and then rank 0" in done[3].stderr
    )


def test_late_resolving_name_is_waited_for_and_reported(three: Hosts) -> None:
    _knows(three, "nodeb", {})
    # Its errors go to a file, in which they can be seen at once.
    to_file = (
        "import os\nos.dup2(os.open(f'said-{os.environ[\"RANK\"]}', os.O_WRONLY | os.O_CREAT), 2)\n"
    )
    (three.shared / "says.py").write_text(to_file + FILES["where.py"])

    def learn() -> None:
        said = three.shared / "said-1"
        until(
            lambda: (
                said.exists() and "rank 0 does not answer at nodea:29500 yet (" in said.read_text()
            )
        )
        _knows(three, "nodeb", ADDRESSES)

    with ThreadPoolExecutor(1) as pool:
        learning = pool.submit(learn)
        done = _job(three, ("nodea", "nodeb"), "says.py")
        learning.result()
    assert _places(done) == [("nodea", 0, 0, 1), ("nodeb", 1, 0, 1)]
    assert "name resolution" in (three.shared / "said-1").read_text()


def test_what_differs_between_the_ranks_is_said_once(hosts3: Hosts) -> None:
    done = _job(hosts3, UNEVEN, *SHOW_JOB, "--json", each={3: {"NCCL_IB_DISABLE": "1"}})
    said = "rank 3 (node 2): NCCL_IB_DISABLE='1', others not set"
    assert f"distboot: rank 0 on nodea: warning: {said}" in done[0].stderr
    assert json.loads(done[0].stdout)["warnings"] == [said]
    assert all("NCCL" not in done[rank].stderr for rank in (1, 2, 3))


def test_rank_0_on_another_host_is_reported(hosts3: Hosts) -> None:
    done = _job(
        hosts3, ("nodea", "nodeb"), *SHOW_JOB, MASTER_ADDR="nodec", DISTBOOT_JOIN_TIMEOUT="3"
    )
    assert (
        "MASTER_ADDR is nodec, 10.77.0.13, which is not an address of this host" in done[0].stderr
    )
    assert (
        "rank 0 did not answer at nodec:29500 (from MASTER_ADDR) within 3 s: Connection refused"
        in done[1].stderr
    )


def test_two_rank_0_on_hosts_are_duplicates(hosts3: Hosts) -> None:
    ready = threading.Event()

    def first() -> dict[int, Done]:
        ready.set()
        return _job(hosts3, ("nodea", "nodeb"), *SHOW_JOB, absent=[1], DISTBOOT_JOIN_TIMEOUT="30")

    def second() -> dict[int, Done]:
        ready.wait(20)
        hosts3.run("nodea", ["sh", "-c", "until ss -ltn | grep -q :29500; do sleep 0.1; done"])
        return _job(hosts3, ("nodeb", "nodeb"), *SHOW_JOB, absent=[1], DISTBOOT_JOIN_TIMEOUT="30")

    with ThreadPoolExecutor(2) as pool:
        both = [future.result()[0] for future in (pool.submit(first), pool.submit(second))]
    for each in both:
        assert each.returncode == 78
        assert "error[duplicate-rank]" in each.stderr
        assert "two processes are rank 0: " in each.stderr


def test_wrapper_and_inner_init_warn_once(hosts3: Hosts) -> None:
    done = _job(hosts3, CYCLIC, *WRAPPER, "where.py", each={3: {"NCCL_IB_DISABLE": "1"}})
    assert _places(done) == EXACT[CYCLIC]
    assert (
        done[0].stderr.count("warning: rank 3 (node 0): NCCL_IB_DISABLE='1', others not set") == 1
    )


def test_exports_of_env_are_not_a_rendezvous(hosts3: Hosts) -> None:
    script = f'eval "$({sys.executable} -m distboot env)" && {sys.executable} where.py'
    shell = f"import os; os.execlp('sh', 'sh', '-c', {script!r})"
    done = _job(hosts3, ("nodea", "nodeb"), "-c", shell, each={1: {"NCCL_IB_DISABLE": "1"}})
    assert "NCCL_IB_DISABLE" in done[0].stderr
    assert [each.returncode for each in done.values()] == [0, 0]


@all_with("torch")
def test_link_local_address_of_ipv6(hosts3: Hosts) -> None:
    shown = hosts3.run(
        "nodea", ["ip", "-6", "-o", "addr", "show", "dev", "eth0", "scope", "link"]
    ).stdout
    address = shown.split("inet6 ")[1].split("/")[0]
    done = _job(hosts3, ("nodea", "nodeb"), "who.py", MASTER_ADDR=f"{address}%eth0")
    assert _places(done) == [("nodea", 0, 0, 1), ("nodeb", 1, 0, 1)]


def test_hosts_of_one_name_are_separate_nodes(three: Hosts) -> None:
    for host in NAMES:
        # As every container of one image may be called
        assert three.run(host, ["hostname", "pytorch"]).returncode == 0
    done = _job(three, CYCLIC, "where.py", MASTER_ADDR=ADDRESSES["nodea"])
    assert _places(done) == [("pytorch", *place[1:]) for place in EXACT[CYCLIC]]


def test_loopback_that_all_hosts_are_told_is_named(hosts3: Hosts) -> None:
    done = _job(
        hosts3, ("nodea", "nodeb"), *SHOW_JOB, MASTER_ADDR="localhost", DISTBOOT_JOIN_TIMEOUT="2"
    )
    assert "MASTER_ADDR is localhost, which works on one machine only" in done[0].stderr
    assert (
        "hint: rank 0 on nodea: set MASTER_ADDR to the host of rank 0, which is nodea"
        in done[0].stderr
    )
    assert (
        "localhost is this host: if rank 0 is on a different one, set MASTER_ADDR" in done[1].stderr
    )


@pytest.mark.parametrize("own", ["nodeb", ADDRESSES["nodeb"]])
def test_own_address_of_each_host_is_named(hosts3: Hosts, own: str) -> None:
    # Each host has set MASTER_ADDR to its own name
    done = _job(
        hosts3,
        ("nodea", "nodeb"),
        *SHOW_JOB,
        DISTBOOT_JOIN_TIMEOUT="2",
        each={1: {"MASTER_ADDR": own}},
    )
    said = f"{own} is this host: if rank 0 is on a different one, set MASTER_ADDR to its name"
    assert said in done[1].stderr, done[1].stderr


def test_loopback_is_right_with_one_node(distboot: Run, port: int) -> None:
    job = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "DISTBOOT_JOIN_TIMEOUT": "0.5",
    }
    done = distboot(
        "run", "--", "true", env={**job, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    )
    assert "hint: rank 0 on " in done.stderr
    assert "MASTER_ADDR" not in done.stderr
