"""The pieces of failure detection, one by one: a connection, what a rank says of its end, the exit code at the exit."""

import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import PACKAGE
from hypothesis import given
from hypothesis import strategies as st
from supervised import pair

from distboot.agent.crash_hooks import EXCEPTION, EXITED, without
from distboot.agent.exit_status import ExitStatus
from distboot.agent.heartbeat import HeartbeatConnection, close_gracefully
from distboot.agent.messages import KINDS, Abort, Done, Exited, Exiting, Terminating
from distboot.agent.monitored_process import HookReader
from distboot.agent.root_cause import RankState, RootCause, from_exit
from distboot.rendezvous.messages import Detach, Go, Leave, Offer
from distboot.rendezvous.protocol import Broadcast, Channel, Frames, ProtocolError, decode, encode


@contextmanager
def connected(interval: float = 1.0) -> Iterator[tuple[HeartbeatConnection, socket.socket]]:
    """A connection, and its raw other end."""
    one, other = pair()
    line = HeartbeatConnection(one, Channel(), interval)
    with closing(line), other:
        yield line, other


def test_silence_is_noticed_although_no_file_is_left() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connected(interval=0.1) as (line, _):
        try:
            with open(os.devnull) as next_file:
                lowest = next_file.fileno()
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
            while (fault := line.liveness_fault(time.monotonic(), 0.3)) is None:
                pass
            assert fault.is_lost
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_old_opinion_on_a_silence_that_ended_well_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = Mock()
    probe.return_value.is_answered.return_value = False
    monkeypatch.setattr("distboot.agent.heartbeat.Probe", probe)
    with connected(interval=0.1) as (line, other):
        for silences in (1, 2):
            start = time.monotonic()
            while not line.suspect:
                time.sleep(0.1)  # the interval
                line.heartbeat(time.monotonic())
                assert line.liveness_fault(time.monotonic(), 0.5) is None
                assert time.monotonic() < start + 10
            assert probe.call_count == silences
            other.sendall(Channel().sign(None))
            line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            assert select.select([line], [], [], 5)[0]
            time.sleep(0.1)  # the interval, in which the kernel of the peer confirms what it got
            line.receive(time.monotonic())
            line.heartbeat(time.monotonic())
            assert line.liveness_fault(time.monotonic(), 0.5) is None
            assert not line.suspect


def test_last_word_arrives_although_something_is_left_unread() -> None:
    with connected() as (line, other):
        other.sendall(Channel().sign(None))
        line.send(Exited(ExitStatus(signal=9, when=1.0)))
        reader = threading.Timer(0.1, lambda: other.shutdown(socket.SHUT_WR))
        reader.start()
        close_gracefully([line], 10)
        line.close()
        reader.join()
        received = b""
        while data := other.recv(65536):  # and no reset
            received += data
        assert b'"Exited"' in received


def test_what_the_kernel_does_not_take_at_once_is_sent_later_and_whole() -> None:
    with connected() as (line, other):
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        go = Go(tuple(Offer(rank, os.urandom(100).hex()) for rank in range(2000)))
        received: list[object] = []
        line.send(Broadcast(go), 1)
        line.heartbeat(time.monotonic())
        line.send(Detach(), 1)
        other.settimeout(0.05)
        frames = Frames(1 << 20)
        while len(received) < 2:
            line.heartbeat(time.monotonic())
            with suppress(TimeoutError):
                received += [
                    Channel().verify(each, frames, Go, type(None), *KINDS) for each in frames.feed(other.recv(1 << 20))
                ]
            received = [each for each in received if each is not None]
        assert received == [go, Detach()]


@pytest.mark.parametrize("message", [Exiting(), Leave(), Done(), Detach(), Terminating(15)], ids=repr)
def test_every_message_but_a_heartbeat_wakes_its_reader(message: object) -> None:
    with connected() as (line, other):
        other.sendall(Channel().sign(None))
        assert select.select([line], [], [], 0.1)[0] == []
        other.sendall(Channel().sign(message, 3))
        assert select.select([line], [], [], 5)[0] == [line]
        assert line.receive(time.monotonic(), *KINDS) == [(3, message)]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.sampled_from([*ExitStatus.__slots__, *RootCause.__slots__]), inner)
        ),
    )
)
def test_whatever_a_peer_sends_is_taken_or_refused(content: object) -> None:
    for kind, field in ((Exited, "end"), (Abort, "root_cause")):
        try:
            taken = decode(json.dumps({"kind": kind.__name__, field: content}).encode(), kind)
        except ProtocolError:
            continue
        assert isinstance(taken, kind)


_KILLED = "killed by SIGKILL (out of memory, or kill -9)"
_UNSEEN = "exited without reporting a status: killed by SIGKILL (out of memory?) or called os._exit"


@pytest.mark.parametrize(
    ("end", "is_failure", "stopped_by", "said"),
    [
        (ExitStatus(code=0), False, None, "exit code 0"),
        (ExitStatus(code=3), True, None, "exit code 3"),
        (ExitStatus(signal=15), False, 15, "killed by SIGTERM"),
        (ExitStatus(code=143), False, 15, "exit code 143"),
        (ExitStatus(code=1, external_signal=15), False, 15, "exit code 1"),
        (ExitStatus(signal=9, stopped_by_us=True), False, None, _KILLED),
        (ExitStatus(signal=11), True, None, "killed by SIGSEGV"),
        (ExitStatus(signal=40), True, None, "killed by signal 40"),
        (ExitStatus(), True, None, _UNSEEN),
    ],
)
def test_ends(end: ExitStatus, is_failure: bool, stopped_by: int | None, said: str) -> None:
    assert (end.is_failure, end.terminated_by, end.describe()) == (is_failure, stopped_by, said)
    assert end.succeeded == (end.code == 0)
    assert not replace(end, stopped_by_us=True).succeeded, "it was stopped for the failure of another rank"
    assert decode(encode(Exited(end)), Exited).end == end
    with pytest.raises(ProtocolError):
        decode(encode(Exited(replace(end, words="x" * 5000))), Exited)


# TensorFlow 2.16, when a parameter server was killed.
_OF_TENSORFLOW = (
    "tensorflow.python.framework.errors_impl.UnavailableError: Graph execution error:\n\n"
    "failed to connect to all addresses\nAdditional GRPC error information from remote target"
)
# torch 2.13, when a worker of a data loader was killed: what it read of that is what the exception was raised from.
_RESET = "ConnectionResetError: [Errno 104] Connection reset by peer"
_OF_LOADER = f"{_RESET}\n\nDuring handling of the above exception, …\nRuntimeError: "
_READ = '  File "/usr/lib/python3.12/multiprocessing/connection.py", line 395, in _recv\n    chunk = read(handle, 4)\n'


@pytest.mark.parametrize(
    ("words", "is_secondary"),
    [
        (_OF_TENSORFLOW, True),
        (_OF_TENSORFLOW.replace("Unavailable", "InvalidArgument"), False),
        (f"{_OF_LOADER}no step", True),
        (f"{_OF_LOADER}DataLoader worker (pid 851) is killed by signal: Killed. ", False),
        (f"{_READ}{_RESET}", False),
    ],
)
def test_loss_of_a_peer_is_known_by_its_words(words: str, is_secondary: bool) -> None:
    assert ExitStatus(code=1, words=words).is_secondary == is_secondary


WRITERS = (repr, ascii, json.dumps, lambda text: json.dumps(text, ensure_ascii=False))


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="<*>\0"), min_size=1),
    st.lists(st.sampled_from(WRITERS), max_size=2),
)
def test_secret_is_recognised_however_it_is_written(secret: str, writers: list[Callable[[str], str]]) -> None:
    text = f"<{secret}>"
    for write in writers:
        text = write(text)
    assert set(without(secret, text)) <= set("<***>'\"\\")  # but for quotes, and what escapes them


@pytest.fixture
def hooks() -> Iterator[tuple[HookReader, int]]:
    """The reader of a pipe, and where to write into it."""
    reading, writing = os.pipe()
    with open(reading), open(writing):
        yield HookReader(reading), writing


Told = Callable[[str], list[list[str]]]
_HOOKED = """
import atexit, os, signal, sys, threading, traceback
from distboot.agent.crash_hooks import install
os.environ["DISTBOOT_SECRET"] = "s3cret-word"
install({pipe})
{script}
"""


@pytest.fixture
def told(hooks: tuple[HookReader, int], tmp_path: Path) -> Told:
    """Runs a script with our hooks in it: the lines of each exception that it has told of."""

    def run(script: str) -> list[list[str]]:
        reader, writing = hooks
        (tmp_path / "train.py").write_text(_HOOKED.format(pipe=writing, script=script))
        command = [sys.executable, "train.py"]
        subprocess.run(command, stderr=subprocess.DEVNULL, pass_fds=[writing], cwd=tmp_path, timeout=60, check=False)
        return [words.text.splitlines() for words in reader.read() if words.kind == EXCEPTION]

    return run


def test_crash_of_many_threads_begins_with_what_it_is(hooks: tuple[HookReader, int]) -> None:
    reader, writing = hooks
    os.write(writing, b"Fatal Python error: Segmentation fault\n\n" + b'  File "train.py", line 1 in f\n' * 200)
    assert reader.read() == []
    assert reader.crash().startswith("Fatal Python error: Segmentation fault\n  File")


def test_thread_that_crashed_is_shown_first_and_our_own_not_at_all(hooks: tuple[HookReader, int]) -> None:
    reader, writing = hooks
    crash = """Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/env/distboot/agent/progress.py", line 79 in _watch
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f02 (most recent call first):
  File "queue.py", line 180 in get

Current thread 0x00007f03 (most recent call first):
  File "train.py", line 3 in load
  File "train.py", line 9 in <module>

Extension modules: numpy.core (total: 1)
"""
    os.write(writing, crash.encode())
    assert reader.read() == []
    assert reader.crash().splitlines() == [
        "Fatal Python error: Segmentation fault",
        "Current thread 0x00007f03 (most recent call first):",
        '  File "train.py", line 3 in load',
        '  File "train.py", line 9 in <module>',
        "Thread 0x00007f02 (most recent call first):",
        '  File "queue.py", line 180 in get',
    ]


@pytest.mark.parametrize(("depth", "pad"), [(1, ""), (20, ""), (8, f"{'x' * 800!r};")])
def test_traceback_that_does_not_begin_with_its_beginning_says_so(told: Told, depth: int, pad: str) -> None:
    deep = f"def one(left): {pad} two(left)\ndef two(left): one(left - 1) if left else 1 / 0\none({depth})"
    ((first, *_, last),) = told(deep)
    begin = "Traceback (most recent call last):" if depth == 1 else "…"
    assert (first, last) == (begin, "ZeroDivisionError: division by zero")


def test_exception_is_told_where_a_signal_handler_raises_meanwhile(told: Told) -> None:
    script = """
def fail(*_): raise RuntimeError("a worker has died")
def formatted(*arguments, before=traceback.format_exception):
    traceback.format_exception = before
    signal.raise_signal(signal.SIGCHLD)
signal.signal(signal.SIGCHLD, fail)
traceback.format_exception = formatted
1 / 0
"""
    assert [lines[-1] for lines in told(script)] == ["ZeroDivisionError: division by zero"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("sys.exit('no data')", ["no data"]),
        ("def main(): raise SystemExit(f'{1 + 1} files')\nmain()", ["2 files"]),
        ("sys.exit(OSError(2, 'no data'))", ["[Errno 2] no data"]),
        ("sys.stderr = Both(sys.stderr)\nsys.exit('no data')", ["no data"]),
        ("sys.exit('of s3cret-word')", ["of ***"]),
        ("sys.exit('1\\n2\\n3\\n4')", ["1", "2", "3"]),
        ("sys.exit('€' * 5000)", ["€" * (300 - len(EXITED)) + "…"]),
        ("atexit.register(print, 'saved', file=sys.stderr)\nsys.exit('no data')", ["no data"]),
        ("atexit.register(print, 'saved', file=sys.stderr)\nsys.exit(1)", None),
        ("try: sys.exit('caught')\nexcept SystemExit: print('gone on', file=sys.stderr)\nsys.exit(1)", None),
        ("one = threading.Thread(target=sys.exit, args=['ended'])\none.start()\none.join()\nsys.exit(1)", None),
        ("def main():\n  fails = Fails()\n  sys.exit(1)\nmain()", None),
        ("if os.fork() == 0: sys.exit('not the rank')\nos.wait()\nsys.exit(1)", None),
        ("sys.exit()", None),
        ("sys.exit('')", None),
    ],
)
def test_text_with_which_a_script_exits_is_sent(told: Told, script: str, said: list[str] | None) -> None:
    exits = """
class Both:
    def __init__(self, other): self.other = other
    def write(self, text): return self.other.write(text)
    def flush(self): pass
class Fails:
    def __del__(self): raise ValueError("deleted")
"""
    assert told(exits + script) == ([] if said is None else [[EXITED + said[0], *said[1:]]])


def test_text_of_an_exit_is_in_the_headline_and_below_it_only_if_there_is_more() -> None:
    def said(words: str) -> str:
        return from_exit(RankState(1, "a", 0, 1), ExitStatus(words=EXITED + words), 0.0).text

    assert said("no data").startswith("rank 1 failed first: exited: no data, on a")
    assert "\n" not in said("no data")
    assert said("no data\nin /data").splitlines()[1:] == ["  | SystemExit: no data", "  | in /data"]
    assert said("x" * 250).endswith("xxx…, on a")
    assert len(said("x" * 250)) == 160
    assert "failed first, because a peer disconnected" in said("Connection closed by peer")


def _frame(file: str) -> str:
    return f'  File "{file}", line 7, in f\n    f()\n    ^^^\n'


def _shown(words: str) -> list[str]:
    lines = from_exit(RankState(1, "a", 0, 1), ExitStatus(words=words), 0.0).text.splitlines()[1:]
    return [line.removeprefix("  | ") for line in lines]


def test_long_traceback_shows_the_script_rather_than_distboot() -> None:
    ours = _frame("/elsewhere/site-packages/distboot/context.py") + _frame(f"{PACKAGE}/rendezvous/job_info.py")
    script = _frame("/home/me/distboot/train.py")
    begin, end = "Traceback (most recent call last):\n", "ValueError: boom"
    assert _shown(begin + _frame(f"{PACKAGE}/context.py") + end) == [
        begin.strip(), *_frame(f"{PACKAGE}/context.py").splitlines(), end,
    ]  # fmt: skip
    assert _shown(begin + 2 * script + ours + end) == [begin.strip(), *(2 * script).splitlines(), "…", end]
    assert _shown(begin + 4 * script + ours + end) == ["…", *(3 * script).splitlines(), "…", end]


def test_long_crash_shows_the_innermost_calls() -> None:
    words = "Fatal Python error: Aborted\n" + "".join(f'  File "train.py", line {line} in f\n' for line in range(40))
    shown = _shown(words)
    assert (shown[0], shown[-1], len(shown)) == ("Fatal Python error: Aborted", "…", 13)
