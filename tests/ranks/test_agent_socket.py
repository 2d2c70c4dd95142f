"""The socket between a script and the agent of its wrapper: who is let in, and what becomes of garbage."""

import os
import re
import socket
import sys
import threading
from pathlib import Path

import pytest
from conftest import Run
from ranks import BEGIN, Ranks
from rendezvous_peers import framed

from distboot.agent.link import AgentLink, attached
from distboot.agent.link_messages import Attach, Listening, Log
from distboot.base.errors import DistbootError
from distboot.rendezvous.messages import (
    BARRIER,
    Arrive,
    Failed,
    Key,
    Release,
)
from distboot.rendezvous.protocol import Channel

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="the abstract namespace of Unix sockets is Linux's"
)

_MEET = """
ctx = distboot.init("none", join_timeout=60)
ctx.barrier()
ctx.close()
"""


@pytest.fixture
def wrapped(ranks: Ranks) -> Ranks:
    """Ranks below wrappers."""
    return lambda script, count=2, **env: ranks(script, count, "-m", "distboot", **env)


def test_strangers_take_no_files_from_scripts(run: Run, tmp_path: Path) -> None:
    script = """
import os, resource, socket
import distboot
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 1000), most))
name = os.environ["DISTBOOT_AGENT"].partition(":")[0]
strangers = []
for _ in range(100):
    strangers.append(socket.socket(socket.AF_UNIX))
    strangers[-1].connect("\\0" + name)
with distboot.init("none", join_timeout=20) as ctx:
    ctx.barrier()
"""
    (tmp_path / "train.py").write_text(script)
    command = 'ulimit -Sn 64; exec "$@"'
    wrapper = (sys.executable, "-m", "distboot", "--nproc-per-node", "2", "train.py")
    done = run("sh", "-c", command, "sh", *wrapper)
    assert done.returncode == 0, done.stderr


def test_unauthenticated_peers_in_the_queue_only_delay(wrapped: Ranks) -> None:
    script = """
import signal
def is_stopped():
    return ") T " in Path(f"/proc/{os.getppid()}/stat").read_text()
if os.environ["RANK"] == "1":
    name = os.environ["DISTBOOT_AGENT"].partition(":")[0]
    os.kill(os.getppid(), signal.SIGSTOP)
    while not is_stopped():
        time.sleep(0.01)
    strangers, failed = [], 0
    while not failed:
        strangers.append(socket.socket(socket.AF_UNIX))
        strangers[-1].setblocking(False)
        failed = strangers[-1].connect_ex("\\0" + name)
    subprocess.Popen(["sh", "-c", f"sleep 2; kill -CONT {os.getppid()}"])
"""
    assert wrapped(script + _MEET.replace("60", "20")) == [("", 0)] * 2


def test_unauthenticated_peers_and_garbage_are_rejected(wrapped: Ranks) -> None:
    """They get nothing without the token, and take neither memory nor the place of the script, nor hold up anything."""
    garbage = """
name, _, token = os.environ["DISTBOOT_AGENT"].partition(":")
from distboot.rendezvous.messages import Leave, Ready
from distboot.rendezvous.protocol import Channel
from distboot.agent.link_messages import Attach, Finish
def stranger(*said):
    one = socket.socket(socket.AF_UNIX)
    one.connect("\\0" + name)
    one.settimeout(20)
    try:
        for each in said:
            one.sendall(each if isinstance(each, bytes) else Channel().sign(each))
        one.shutdown(socket.SHUT_WR)
        return len(one.recv(100000))
    except (BrokenPipeError, ConnectionResetError):  # it may close before it has been told everything
        return 0
idle = [socket.socket(socket.AF_UNIX) for _ in range(300)]
for one in idle:
    one.connect("\\0" + name)
say([stranger(*said) for said in (
    (b"",), (b"GET / HTTP/1.0\\r\\n\\r\\n" * 9,), ((1 << 27).to_bytes(4, "big") + bytes(1 << 20),),
    (Attach("wrong"),), (Attach("\\u00e9"),), (Attach("\\ud800"),),
    (Leave(),), (Attach("wrong"), Leave()), (Finish(), Leave()),
)])
stranger(Attach(token), b"x" * 100)
deaf = socket.socket(socket.AF_UNIX)
deaf.connect("\\0" + name)
deaf.settimeout(20)
try:
    for _ in range(20_000):
        deaf.sendall(Channel().sign(Attach(token)))
except OSError:
    say("dropped")
"""
    outputs = wrapped(garbage + _MEET)
    assert outputs == [(f"{[0] * 9}\ndropped\n", 0)] * 2, outputs


@pytest.mark.parametrize(
    "how",
    [
        "subprocess.run(['bash', '-c', f'{sys.executable} inner.py'], check=True)",
        "subprocess.run([sys.executable, 'inner.py'], close_fds=True, check=True)",
        "os.closerange(3, 4096); os.execv(sys.executable, [sys.executable, 'inner.py'])",
        "os.waitpid(os.fork() or os.execv(sys.executable, [sys.executable, 'inner.py']), 0)",
    ],
    ids=["shell", "subprocess", "closes-all-files", "fork"],
)
def test_script_finds_its_agent_however_it_is_started(
    wrapped: Ranks, tmp_path: Path, how: str
) -> None:
    (tmp_path / "inner.py").write_text(
        BEGIN + "ctx = distboot.init('none')\nctx.barrier()\nsay(ctx.rank)\n"
    )
    outputs = wrapped(f"import subprocess\n{how}\n")
    assert [output.split()[0] for output, _ in outputs] == ["0", "1"], outputs


def test_stale_or_foreign_variable_is_not_used() -> None:
    for value in ("", "x", "x:", f"distboot-agent-{os.urandom(4).hex()}:token"):
        assert attached({"DISTBOOT_AGENT": value}) is None


@pytest.mark.parametrize("waiting", [0, 9], ids=["full queue", "silence"])
def test_wrapper_that_does_not_answer_is_an_error(
    monkeypatch: pytest.MonkeyPatch, waiting: int
) -> None:
    monkeypatch.setattr("distboot.agent.link._ATTACH", 0.5)
    name = f"distboot-test-{os.urandom(4).hex()}"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as stranger:
        listener.bind(f"\0{name}")
        listener.listen(waiting)
        stranger.connect(f"\0{name}")
        with pytest.raises(
            DistbootError, match="the wrapper around this process does not answer"
        ) as refusal:
            attached({"DISTBOOT_AGENT": f"{name}:token"})
    assert refusal.value.code == "rank-failed"


def test_agent_with_a_wrong_answer_is_not_trusted() -> None:
    name = f"distboot-test-{os.urandom(4).hex()}"
    answers = (b"", framed({"kind": "Release"}), b"\xff" * 99, Channel().sign(Attach("x")))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()

        def talk() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(answer)

            thread = threading.Thread(target=talk)
            thread.start()
            assert attached({"DISTBOOT_AGENT": f"{name}:token"}) is None
            thread.join(20)


def test_late_answer_is_skipped_but_not_a_failure() -> None:
    ours, its = socket.socketpair()
    with ours, its:
        for answer in (Release(Key(BARRIER)), Failed(("rank-failed", "no disk", ""))):
            its.sendall(Channel().sign(answer))
        with pytest.raises(DistbootError, match="no disk"):
            AgentLink(ours).arrive(Arrive(Key(BARRIER, None, 2), 20.0))


def test_late_answer_of_another_kind_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, its = socket.socketpair()
    link = AgentLink(ours)
    with ours, its:
        with monkeypatch.context() as patch:
            patch.setattr("distboot.agent.link._ATTACH", 0.05)
            assert link.log() is None
        its.sendall(Channel().sign(Log()))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            socket.send_fds(its, [Channel().sign(Listening())], [listener.fileno()])
        taken = link.take_listener()  # its file came with it, not with the late answer
        assert taken is not None
        with taken:
            assert taken.getsockname()[1] == port


def test_late_file_is_closed_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, its = socket.socketpair()
    link = AgentLink(ours)
    with ours, its:
        with monkeypatch.context() as patch:
            patch.setattr("distboot.agent.link._ATTACH", 0.05)
            with pytest.raises(DistbootError, match="does not answer"):
                link.take_listener()
        with socket.socket() as late:
            socket.send_fds(its, [Channel().sign(Listening())], [late.fileno()])
        for answer in (Log(), Listening(), Log()):
            its.sendall(Channel().sign(answer))
        assert link.log() is None
        assert link.take_listener() is None
        with pytest.raises(DistbootError, match="does not send the expected Listening"):
            link.take_listener()


def test_answer_of_another_kind_is_refused() -> None:
    ours, its = socket.socketpair()
    with ours, its:
        its.sendall(Channel().sign(Log()))
        with pytest.raises(DistbootError, match="does not send the expected Listening"):
            AgentLink(ours).take_listener()


def test_contexts_below_one_wrapper_leave_nothing_open(
    wrapped: Ranks,
) -> None:
    script = """
kept, files = [], []
for round in range(3):
    ctx = distboot.init("none", join_timeout=60)
    with ctx.main_first():
        if ctx.is_main:
            time.sleep(0.3)
        kept.append((ctx, time.time()))
    ctx.close()
    files.append(len(os.listdir("/proc/self/fd")))
say(*[at for _, at in kept], files[1] == files[2])
"""
    rank_0, rank_1 = (output.split() for output, _ in wrapped(script))
    assert [first <= second for first, second in zip(rank_0[:3], rank_1[:3], strict=True)] == [
        True
    ] * 3
    assert (rank_0[3], rank_1[3]) == ("True", "True")


def test_init_works_after_a_failed_one_below_wrapper(wrapped: Ranks) -> None:
    script = """
try:
    distboot.init("none" if os.environ["RANK"] == "0" else "mpi", join_timeout=60)
except distboot.DistbootError as error:
    say(error.code, error.message)
"""
    said = (
        r"^membership-mismatch .*rank \d starts \w+, but rank \d starts "
        r"\w+$|^framework-not-installed .*mpi4py"
    )
    for output, code in wrapped(script + _MEET):
        assert re.search(said, output), output
        assert code == 0


def test_script_that_closes_all_files_keeps_new_ones(wrapped: Ranks) -> None:
    script = """
ctx = distboot.init("none", join_timeout=60)
os.closerange(3, 4096)
pairs = [socket.socketpair() for _ in range(8)]
try:
    ctx.barrier()
except distboot.DistbootError as error:
    say(error.message)
for one in (each for pair in pairs for each in pair):
    one.setblocking(False)
    try:
        say(one.recv(100))
    except BlockingIOError:
        pass
os._exit(0)
"""
    why = "the monitor process of this rank gave no answer: the script has closed its socket\n"
    assert wrapped(script) == [(why, 0)] * 2


def test_listening_socket_of_rank_0_is_not_inherited(wrapped: Ranks) -> None:
    script = """
from distboot.agent.link import attached
link, result = attached(os.environ)
listener = link.take_listener()
say(listener and os.get_inheritable(listener.fileno()))
"""
    assert wrapped(script) == [("False\n", 0), ("None\n", 0)]
