"""The ports at which the ranks try to meet, who is kept away from them, and which interface leads to the others."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from captured import one
from conftest import Run
from inside import replace
from rendezvous_peers import plan_for, record
from supervised import Start, until

from distboot import DistbootError, detect
from distboot.cli.run_options import run_parser
from distboot.host import command_line, free_port, network, sockets
from distboot.rendezvous import join
from distboot.rendezvous.connection_pool import PortInUse, listening
from distboot.rendezvous.join import PortLease
from distboot.rendezvous.plan import candidate_ports

SHOW_JOB = [sys.executable, "-m", "distboot", "show", "--job"]


def _plain(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    job = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    return {**job, "DISTBOOT_JOIN_TIMEOUT": "30", **more}


def test_ports_agree_and_begin_with_the_given() -> None:
    ports = [candidate_ports(detect(_plain(rank, 4, 29500))) for rank in range(4)]
    assert ports[0][0] == 29500
    assert len(set(ports[0])) == 5
    assert ports == [ports[0]] * 4
    assert not set(ports[0]) & set(candidate_ports(detect(_plain(0, 4, 29501))))


def test_port_of_another_job_is_not_free(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distboot.host.DERIVED_PORTS", range(port, port + 1))
    lease = PortLease(port, plan_for(record(0, 2), port))
    with closing(lease), pytest.raises(DistbootError, match="none of 100 ports"):
        free_port()
    assert free_port() == port


def test_port_of_torchruns_agent_is_left_alone() -> None:
    placement = detect(one("torchrun-2.13.0/1node_4procs", 2))
    assert placement.master_port not in candidate_ports(placement)
    assert len(candidate_ports(placement)) == 5


def test_listener_serves_both_families_and_frees_its_port(port: int) -> None:
    with listening(port) as listener:
        for host in ("127.0.0.1", "::1"):
            client = socket.create_connection((host, port))
            connection, _ = listener.accept()
            connection.close()  # the side that closes first waits in TIME_WAIT
            client.close()
    listening(port).close()


@pytest.mark.skipif(sys.platform != "linux", reason="the names are Linux's")
def test_hold_keeps_others_away_until_it_is_closed(port: int) -> None:
    ours = plan_for(record(0, 2))
    others = replace(ours, job="a0a0a0a0")
    with closing(PortLease(port, ours)):
        listening(port).close()  # it holds a name, not the port
        with pytest.raises(PortInUse):
            PortLease(port, others)
        here, there = socket.socketpair()
        if os.fork() == 0:  # a data loader, which outlives us
            there.send(b"up")
            there.recv(1)
            os._exit(0)
        here.recv(2)
    PortLease(port, others).close()
    here.send(b"!")
    os.wait()
    here.close()
    there.close()


def test_lease_registers_no_callback_of_its_own(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_for(record(0, 2))
    PortLease(port, plan).close()
    registered: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **each: registered.append(each))
    PortLease(port, plan).close()
    assert registered == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize(("user", "is_same"), [(0, True), (65534, False)])
def test_name_counts_if_this_user_has_it(port: int, user: int, is_same: bool) -> None:
    plan = plan_for(record(0, 2))
    here, there = socket.socketpair()
    with here, there:
        holder = os.fork()
        if holder == 0:
            os.setuid(user)
            lease = PortLease(port, plan)
            there.send(b"1")
            there.recv(1)
            lease.close()
            os._exit(0)
        here.recv(1)
        with pytest.raises(PortInUse) as refused:
            PortLease(port, plan)
        here.send(b"1")
        os.waitpid(holder, 0)
    assert (refused.type is not PortInUse) == is_same


def test_wrapper_keeps_other_jobs_from_its_port(
    run: Run, clean_env: dict[str, str], port: int
) -> None:
    script = "import os, sys; print(os.environ['MASTER_PORT'], flush=True); sys.stdin.read()"
    command = [sys.executable, "-m", "distboot", "run", "--", sys.executable, "-c", script]
    environs = [{**clean_env, **_plain(rank, 2, port)} for rank in range(2)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env=environ, **pipes) for environ in environs]
    try:
        assert [int(process.stdout.readline()) for process in started if process.stdout] == [
            port,
            port,
        ]
        with ThreadPoolExecutor() as pool:  # another job, while nobody listens there
            second = [_plain(rank, 2, port, DISTBOOT_SECRET="another") for rank in range(2)]
            done = list(pool.map(lambda env: run(*SHOW_JOB, "--json", env=env), second))
        assert (
            json.loads(done[0].stdout)["master_port"]
            == candidate_ports(detect(_plain(0, 2, port)))[1]
        )
        assert f"port {port} is taken (another job holds it" in done[0].stderr
    finally:
        for process in started:
            process.communicate("")


def test_second_rank_0_is_a_duplicate(run: Run, port: int) -> None:
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda _: run(*SHOW_JOB, env=_plain(0, 2, port)), range(2)))
    for each in done:
        assert each.returncode == 78
        assert "error[duplicate-rank]" in each.stderr
        assert re.search(r"two processes are rank 0: \d+ and \d+, both on ", each.stderr)


def test_rank_0_may_start_again_at_once(start_init: Start, run: Run, port: int) -> None:
    variables = _plain(0, 2, port, DISTBOOT_JOIN_TIMEOUT="3")
    first = start_init("", 1, **variables)
    until(lambda: "missing: rank 1" in first.output(0))
    first.processes[0].terminate()  # its agent has the port a little longer
    first.processes[0].wait()
    done = run(sys.executable, "-m", "distboot", "run", "--", "true", env=variables)
    assert done.returncode == 75
    assert "error[missing-rank]" in done.stderr


def test_rank_0_of_a_running_job_is_refused(start: Start, run: Run, port: int) -> None:
    job = start("ready()\nuntil('done')\n", 2, **_plain(0, 2, port))
    job.all_ready()
    done = run(*SHOW_JOB, env=_plain(0, 2, port))
    job.touch("done")
    assert done.returncode == 78
    assert re.search(r"error\[duplicate-rank\]: .* is rank 0 of this very job already", done.stderr)
    assert job.codes() == [0, 0]


def test_all_ports_taken(run: Run) -> None:
    with socket.create_server(("", 0)) as first:
        port = first.getsockname()[1]
        others = [
            socket.create_server(("", each))
            for each in candidate_ports(detect(_plain(0, 2, port)))[1:]
        ]
        result = run(*SHOW_JOB, env=_plain(0, 2, port))
        for each in others:
            each.close()
    assert result.returncode == 75
    assert "error[port-taken]" in result.stderr
    assert f"{port}: Address already in use by process {os.getpid()}: " in result.stderr
    assert result.stderr.count(str(port)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel is asked")
def test_process_that_holds_a_port_is_named(port: int) -> None:
    assert sockets.listener(port) == ""
    with socket.create_server(("127.0.0.1", port)):
        assert sockets.listener(port).startswith(f"process {os.getpid()}: ")
    script = "import socket; s = socket.create_server(('', 0)); print(s.getsockname()[1]); input()"
    command = [sys.executable, "-uc", script, "--token=secret"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout is not None
        found = sockets.listener(int(other.stdout.readline()))
        other.communicate("\n")
    assert found == f"process {other.pid}: {sys.executable} -uc …"
    for words, shown in (
        ([sys.executable, "-u", "-", "--token=secret"], f"{sys.executable} -u"),
        (["sleep", "30", "7"], "sleep 30"),
        (["tail", "--lines=7", "-f", "/dev/null"], "tail"),
    ):
        with subprocess.Popen(words, stdin=subprocess.PIPE) as other:
            until(lambda: command_line.short_command(other.pid) == shown)  # noqa: B023 - it is called here
            other.kill()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("python -c token=1 2", "python -c …"),
        ("/usr/bin/python3.11 -Ictoken=1 2", "/usr/bin/python3.11 -Ic …"),
        (
            "python -W ignore -Xutf8 -X dev train.py token",
            "python -W ignore -Xutf8 -X dev train.py",
        ),
        ("python -X dev -c token", "python -X dev -c …"),
        (
            "python --check-hash-based-pycs always -um http.server 8000",
            "python --check-hash-based-pycs always -um http.server",
        ),
        ("python -mhttp.server 8000", "python -mhttp.server"),
        ("python -m distboot --log-dir logs train.py token", "python -m distboot train.py"),
        (
            "python -m distboot run --log-prefix --nproc-per-node 2 ./train.py token.py",
            "python -m distboot ./train.py",
        ),
        ("/x/bin/python /x/bin/distboot try train.py", "/x/bin/python /x/bin/distboot train.py"),
        ("python -m distboot -- bash -lc token\xa0train.py a.py", "python -m distboot -- bash"),
        ("python -m distboot run -- bash -c token.py", "python -m distboot -- bash"),
        ("python -m distboot --no-python sh -ec token.py", "python -m distboot"),
        ("python -m distboot -- python -c token.py train.py", "python -m distboot -- python"),
        ("python -m distboot -- token\xa0train.py", "python -m distboot"),
        ("python -m distboot -- /token/sleep 5", "python -m distboot -- sleep"),
        ("python -m distboot --", "python -m distboot"),
        ("python -m distboot -- env KEY=token.py python -u a.py b.py", "python -m distboot a.py"),
        ("python -m distboot -- env KEY=token.py ./run", "python -m distboot -- env"),
        ("python -m distboot -t3 --standalone ./run --keys token.py", "python -m distboot"),
        ("python -m distboot -- python --keys token.py", "python -m distboot -- python"),
        ("python -m distboot -m package.train --keys token.py", "python -m distboot"),
        ("/opt/python/bin/redis-server *:6379 token", "/opt/python/bin/redis-server *:6379"),
        ("/opt/python3/bin/python3 train.py token", "/opt/python3/bin/python3 train.py"),
        ("sudo KEY=token python", "sudo"),
        ("watch curl\xa0token", "watch"),
        ("bash -c token", "bash"),
        ("perl -ne token", "perl"),
        ("-bash", "-bash"),
        ("", ""),
        (f"python {'a' * 99}.py", f"python {'a' * 92}…"),
    ],
)
def test_command_of_a_process_has_no_arguments(
    words: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_line, "command", lambda _: words.split(" "))
    assert command_line.short_command(1) == shown


def test_options_of_the_wrapper_are_skipped() -> None:
    actions = run_parser()._option_string_actions
    for option in actions.keys() - {"-h", "--help"}:
        words = ["python", "-m", "distboot", option, "a.py", "b.py"]
        script = "b.py" if actions[option].nargs is None else "a.py"
        assert command_line.without_arguments(words) == [*words[:3], script], option


def test_foreign_port_is_named_by_its_answer(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Whose files cannot be seen
    monkeypatch.setattr(sockets, "listener", lambda _: "")
    with socket.create_server(("127.0.0.1", port)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.recv(1024)
                connection.send(b"SSH-2.0-x\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        assert join._describe_holder(port) == (
            ": the process that listens there is an SSH server ('SSH-2.0-x')"
        )
        thread.join()
    assert join._describe_holder(port) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel is asked")
def test_interface_of_an_address() -> None:
    found = network.addresses()
    assert ("lo", "127.0.0.1") in found
    assert network.interface_of("127.0.0.1") is None, "it leads nowhere"
    for name, address in found:
        if name != "lo":
            assert network.interface_of(address) == name
    assert network.interface_of("192.0.2.99") is None


@pytest.mark.parametrize(
    ("variable", "there", "not_there"),
    [
        ("GLOO_SOCKET_IFNAME", ("lo", "lo,lo"), ("lo,ib9", "l")),
        ("TP_SOCKET_IFNAME", ("lo",), ("ib9",)),
        ("NCCL_SOCKET_IFNAME", ("", "l", "=lo", "ib,lo", "^ib"), ("=l", "ib,mlx")),
    ],
)
def test_missing_interface_is_refused(
    variable: str, there: tuple[str, ...], not_there: tuple[str, ...]
) -> None:
    for value in there:
        network.refuse_unknown({variable: value})
    for value in not_there:
        with pytest.raises(DistbootError, match=f"{variable}='{value}'"):
            network.refuse_unknown({variable: value})


def test_nothing_is_left_open_by_a_rendezvous(run: Run, port: int) -> None:
    script = """
import os, distboot
before = set(os.listdir("/proc/self/fd"))
try: distboot.init(join_timeout=0.2)
except distboot.DistbootError as error: print(error.code, len(set(os.listdir("/proc/self/fd")) - before))
"""
    for rank in (0, 1):
        result = run(sys.executable, "-W", "error", "-c", script, env=_plain(rank, 2, port))
        assert result.stdout == "missing-rank 0\n", result.stderr
