"""The pieces of failure detection, one by one: a connection, what a rank says of its end, the exit code at the exit."""

import errno
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
from itertools import pairwise
from math import inf
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inside import replace
from rendezvous_peers import plan_for, record
from supervised import pair

from distboot.agent import child, launcher_process, link_probe
from distboot.agent.claims import Claims
from distboot.agent.event_files import EventFiles
from distboot.agent.heartbeat import HeartbeatConnection
from distboot.agent.hook_reader import HookReader
from distboot.agent.host_signs import Probe
from distboot.agent.job_record import JobRecord
from distboot.agent.liveness import LOST, SILENT, UNREACHABLE, Finding
from distboot.agent.log_file import LogFile
from distboot.agent.loop import EventLoop
from distboot.agent.node_check import NodeCheck
from distboot.agent.peer_connection import close_gracefully
from distboot.agent.peer_watch import PeerWatch
from distboot.agent.rank_start import RankStart
from distboot.agent.returning import Returning
from distboot.base.errors import DistbootError
from distboot.base.settings import SupervisionSettings
from distboot.base.text import without_secret
from distboot.job.effects import Blame
from distboot.job.exit_status import ExitStatus
from distboot.job.messages import (
    KINDS,
    Abort,
    Done,
    Exited,
    Exiting,
    NodeSeen,
    Terminating,
)
from distboot.job.root_cause import RankState, RootCause, from_exit, from_late, ranks_of
from distboot.rendezvous.connection_pool import listening
from distboot.rendezvous.events import Event
from distboot.rendezvous.membership import Membership
from distboot.rendezvous.messages import (
    Detach,
    Go,
    Leave,
    Offer,
)
from distboot.rendezvous.protocol import (
    Broadcast,
    Channel,
    Frames,
    ProtocolError,
    decode,
    encode,
)
from distboot.rendezvous.worker import UnreachableError
from distboot.script import stop_notices


def test_hang_with_many_stacks_can_be_sent() -> None:
    stacks = [f"rank {number}: step (train.py:{number}) {'x' * 200}" for number in range(200)]
    cause = from_late([1], "rank 1 has held up the job for 600 s", stacks)
    assert decode(encode(cause), RootCause) == cause
    first = cause.text.splitlines()
    assert first[0] == "rank 1 has held up the job for 600 s"
    assert "rank 0: step (train.py:0)" in first[1]
    assert first[-1] == f"  | … {200 - (len(first) - 2)} more lines"


@contextmanager
def connected(bound: float = 15.0) -> Iterator[tuple[HeartbeatConnection, socket.socket]]:
    """A connection, and its raw other end."""
    one, other = pair()
    line = HeartbeatConnection(one, Channel(), bound)
    with closing(line), other:
        yield line, other


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets for how many seconds the kernel of the peer has given no sign: no real one is so silent on one host."""
    return lambda seconds: monkeypatch.setattr(
        HeartbeatConnection, "silence", lambda _: (seconds, True)
    )


def test_silence_is_noticed_although_no_file_is_left(silence: Callable[[float], None]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    silence(11.3)
    with connected() as (line, _):
        try:
            with open(os.devnull) as next_file:
                lowest = next_file.fileno()
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
            assert line.fault(100.0) is None
            fault = line.fault(104.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert fault == Finding(LOST, "no answer for 15 s: the host, or the network to it, is down")


def test_old_probe_of_an_ended_silence_is_dropped(
    silence: Callable[[float], None],
) -> None:
    with connected() as (line, _):
        now = time.monotonic()
        for seconds, after in ((11.3, 0.0), (1.0, 1.0), (11.3, 4.0)):
            silence(seconds)
            assert line.fault(now + after) is None
        fault = line.fault(now + 8.0)
        assert fault == Finding(
            UNREACHABLE, "gave no answer for 15 s, though its host answers (a firewall?)"
        )


def files_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_answer_of_a_host_holds_no_file(silence: Callable[[float], None]) -> None:
    with connected() as (line, _):
        silence(11.3)
        before = files_open()
        for tenth in range(5):
            line.fault(100.0 + tenth / 10)
        assert line.liveness.is_suspect
        assert files_open() == before


def test_question_takes_no_older_answer(
    silence: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with connected() as (line, _):
        silence(11.3)
        line.fault(100.0)
        line.fault(100.1)  # the host has refused by now
        monkeypatch.setattr(Probe, "_attempt", lambda *_: errno.EINPROGRESS)
        line.question(100.2)
        assert line.fault(100.25) is None
        found = line.fault(100.3)
    assert found == Finding(SILENT, "it did not answer any more when SIGTERM arrived")


class Told:
    """Hears what a `PeerWatch` finds."""

    def __init__(self) -> None:
        self.runs = True  # whether it matters that the peers are there
        self.lost: list[str] = []
        self.watch: PeerWatch

    def is_running(self, _: HeartbeatConnection) -> bool:
        return self.runs

    def lose_silent(self, _: HeartbeatConnection, why: str, __: float) -> None:
        self.lost.append(why)

    def lose(self, line: HeartbeatConnection, why: str, _: float) -> None:
        self.watch.forget(line)
        self.lost.append(why)

    def __getattr__(self, name: str) -> object:
        return lambda *_: pytest.fail(name)


@pytest.mark.parametrize(
    ("node", "later", "count"),
    [(1, 11.3, 2), (1, 14.5, 2), (2, 11.3, 1)],
    ids=["same host", "at once", "another host"],
)
def test_peers_of_a_dead_host_are_lost_together(
    monkeypatch: pytest.MonkeyPatch, node: int, later: float, count: int
) -> None:
    monkeypatch.setattr(Probe, "_attempt", lambda *_: errno.EINPROGRESS)
    nodes = ((0,), (1, 2)) if node == 1 else ((0,), (1,), (2,))
    members = ranks_of(Membership(tuple("abc"[: len(nodes)]), nodes))
    told = Told()
    with connected() as (first, _), connected() as (second, _):
        silent = {first: 14.5, second: later}  # seconds
        monkeypatch.setattr(HeartbeatConnection, "silence", lambda line: (silent[line], True))
        watch = PeerWatch({first: [members[1]], second: [members[2]]}, told, 15.0)  # type: ignore[arg-type]
        told.watch = watch
        watch.tick(100.0)
        assert not told.lost
        watch.tick(101.0)
        assert told.lost == ["no answer for 15 s: the host, or the network to it, is down"] * count
        watch.tick(110.0)
        watch.poll_suspects(111.0)
        assert len(told.lost) == 2  # each once


@pytest.mark.parametrize("leaves_at", range(8))
def test_heartbeats_keep_their_interval_when_peers_leave(
    silence: Callable[[float], None], monkeypatch: pytest.MonkeyPatch, leaves_at: int
) -> None:
    silence(0.0)
    beats: list[tuple[HeartbeatConnection, int]] = []
    with connected() as (first, _), connected() as (second, _), connected() as (third, _):
        watch = PeerWatch({first: [], second: [], third: []}, Told(), 15.0)  # type: ignore[arg-type]
        for tick in range(40):
            if tick == leaves_at:
                watch.forget(first)
            monkeypatch.setattr(
                HeartbeatConnection, "heartbeat", lambda line, tick=tick: beats.append((line, tick))
            )
            watch.tick(100.0 + tick)
    for line in (second, third):
        ticks = [tick for beaten, tick in beats if beaten is line]
        intervals = {after - before for before, after in pairwise(ticks)}
        assert len(intervals) == 1


def test_question_is_judged_in_time_and_anyway(
    silence: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Probe, "_attempt", lambda *_: errno.EINPROGRESS)
    told = Told()
    with connected() as (line, _):
        watch = PeerWatch({line: []}, told, 15.0)  # type: ignore[arg-type]
        silence(9.0)
        watch.question_all(100.0)
        told.runs = False  # our own ranks have ended since
        watch.poll_suspects(100.06)  # something else has waked the loop
        assert watch.due(100.06) == pytest.approx(100.1)
        assert not told.lost
        watch.poll_suspects(watch.due(100.06))
        assert told.lost == ["it did not answer any more when SIGTERM arrived"]
        assert watch.due(100.1) == inf


@pytest.mark.parametrize("answers", [True, False])
def test_host_of_a_given_up_connection_is_asked(
    monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    result = errno.ECONNREFUSED if answers else errno.EINPROGRESS
    monkeypatch.setattr(Probe, "_attempt", lambda *_: result)
    told = Told()
    with connected() as (line, _):
        watch = PeerWatch({line: []}, told, 15.0)  # type: ignore[arg-type]
        now = time.monotonic()
        told.watch = watch
        line.liveness.unreachable_since = now
        watch.end(line)
        for seconds in range(60):
            watch.tick(now + seconds)
            watch.poll_suspects(now + seconds)
    down = ["no answer for 15 s: the host, or the network to it, is down"]
    assert told.lost[:1] == ([] if answers else down)


def test_ended_connection_wakes_nobody(silence: Callable[[float], None]) -> None:
    with connected() as (line, _):
        watch = PeerWatch({line: []}, Told(), 15.0)  # type: ignore[arg-type]
        silence(9.0)
        line.is_closed = True  # until its agent answers over another one
        watch.question_all(100.0)
        watch.poll_suspects(100.05)
        assert watch.due(100.05) == inf


def test_peer_without_heartbeat_is_frozen_despite_its_kernel() -> None:
    with connected() as (line, other):
        other.sendall(Channel().sign(None))
        now = time.monotonic() + 20
        line.receive(now)
        assert line.fault(now + 34) is None
        fault = line.fault(now + 35)
        assert fault == Finding(
            LOST, "no answer for 34 s, though the host answers: stopped or frozen"
        )


def test_peer_that_has_to_confirm_is_asked_often(silence: Callable[[float], None]) -> None:
    with connected() as (line, _):
        silence(3.0)
        line.fault(line.heard)
        line.heartbeat()
        assert line.liveness.no_fault_before == 0.0


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


@pytest.mark.parametrize("reads", [True, False])
def test_unsent_bytes_are_sent_before_the_end(reads: bool) -> None:
    with connected() as (line, other), connected() as (quick, its):
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        go = Go(tuple(Offer(rank, os.urandom(100).hex()) for rank in range(2000)))
        line.send(Broadcast(go), 1)
        line.send(Detach(), 1)
        received: list[object] = []

        def read() -> None:
            frames = Frames(1 << 20)
            while data := other.recv(1 << 16):
                received.extend(
                    Channel().verify(each, frames, Go, Detach) for each in frames.feed(data)
                )
            other.close()

        reader = threading.Thread(target=read)
        if reads:
            reader.start()
        its.shutdown(socket.SHUT_WR)
        begin = time.monotonic()
        close_gracefully([line, quick], 10 if reads else 0.2)
        assert time.monotonic() - begin < 5
        assert its.recv(1) == b""
        if reads:
            reader.join(10)
            assert received == [go, Detach()]


def test_unsent_bytes_follow_later_and_whole() -> None:
    with connected() as (line, other):
        line.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        go = Go(tuple(Offer(rank, os.urandom(100).hex()) for rank in range(2000)))
        received: list[object] = []
        line.send(Broadcast(go), 1)
        line.heartbeat()
        line.send(Detach(), 1)
        other.settimeout(0.05)
        frames = Frames(1 << 20)
        while len(received) < 2:
            line.flush()
            with suppress(TimeoutError):
                received += [
                    Channel().verify(each, frames, Go, type(None), *KINDS)
                    for each in frames.feed(other.recv(1 << 20))
                ]
            received = [each for each in received if each is not None]
        assert received == [go, Detach()]


@pytest.mark.parametrize(
    "message", [Exiting(), Leave(), Done(), Detach(), Terminating(15)], ids=repr
)
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
            st.lists(inner)
            | st.dictionaries(st.sampled_from([*ExitStatus.__slots__, *RootCause.__slots__]), inner)
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
        (
            ExitStatus(signal=10),
            True,
            None,
            "killed by SIGUSR1 (no handler; see DISTBOOT_STOP_SIGNALS)",
        ),
        (
            ExitStatus(signal=24),
            True,
            None,
            "killed by SIGXCPU (CPU time limit; see DISTBOOT_STOP_SIGNALS)",
        ),
        (ExitStatus(signal=40), True, None, "killed by signal 40"),
        (ExitStatus(), True, None, _UNSEEN),
    ],
)
def test_ends(end: ExitStatus, is_failure: bool, stopped_by: int | None, said: str) -> None:
    assert (end.is_failure, end.terminated_by, end.describe()) == (is_failure, stopped_by, said)
    assert end.succeeded == (end.code == 0)
    assert not replace(end, stopped_by_us=True).succeeded, (
        "it was stopped for the failure of another rank"
    )
    assert decode(encode(Exited(end)), Exited).end == end
    with pytest.raises(ProtocolError):
        decode(encode(Exited(replace(end, crash="x" * 5000))), Exited)


WRITERS = (repr, ascii, json.dumps, lambda text: json.dumps(text, ensure_ascii=False))


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="<*>\0"), min_size=1),
    st.lists(st.sampled_from(WRITERS), max_size=2),
)
def test_secret_is_recognized_however_it_is_written(
    secret: str, writers: list[Callable[[str], str]]
) -> None:
    text = f"<{secret}>"
    for write in writers:
        text = write(text)
    # But for quotes, and what escapes them
    assert set(without_secret(text, secret)) <= set("<***>'\"\\")


@pytest.fixture
def hooks() -> Iterator[tuple[HookReader, int]]:
    """The reader of a pipe, and where to write into it."""
    reading, writing = os.pipe()
    with open(reading), open(writing):
        yield HookReader(reading), writing


def test_many_events_at_once_are_all_read(hooks: tuple[HookReader, int]) -> None:
    reader, writing = hooks
    for number in range(30):
        os.write(writing, b"\0exception %d\n%s\0" % (number, b"x" * 2000))
    assert [pid for _, pid, _ in reader.read()] == list(range(30))


def test_crash_of_many_threads_begins_with_its_kind(hooks: tuple[HookReader, int]) -> None:
    reader, writing = hooks
    os.write(
        writing,
        b"Fatal Python error: Segmentation fault\n\n" + b'  File "train.py", line 1 in f\n' * 200,
    )
    assert reader.read() == []
    assert reader.crash().startswith("Fatal Python error: Segmentation fault\n  File")


def test_crashed_thread_comes_first_without_our_own(
    hooks: tuple[HookReader, int],
) -> None:
    reader, writing = hooks
    crash = """Fatal Python error: Segmentation fault

Thread 0x00007f01 (most recent call first):
  File "/env/distboot/script/progress.py", line 79 in _watch
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


def test_long_crash_shows_the_innermost_calls() -> None:
    crash = "Fatal Python error: Aborted\n" + "".join(
        f'  File "train.py", line {line} in f\n' for line in range(40)
    )
    shown = from_exit(RankState(1, "a", 0, 1), ExitStatus(crash=crash), 0.0).text.splitlines()[1:]
    assert (shown[0], shown[-1], len(shown)) == ("  | Fatal Python error: Aborted", "  | …", 13)


def test_claim_is_for_one_agent_until_it_ends() -> None:
    scope = os.urandom(4).hex()
    with (
        closing(Claims(scope)) as first,
        closing(Claims(scope)) as second,
        closing(Claims(f"{scope}-of-another-node")) as elsewhere,
    ):
        claimed = [first.claim("cause"), second.claim("cause"), first.claim("cause")]
        assert claimed == [True, False, True]
        assert second.claim("another topic")
        assert elsewhere.claim("cause")
        first.close()
        assert second.claim("cause")


def test_cpus_that_have_gone_are_named() -> None:
    command = child.Command(["true"], os.environ, cpus={5000, 5001})
    with pytest.raises(DistbootError, match="cannot be bound to the CPUs 5000,5001") as refused:
        child.start(command, set(), own_group=True, open_files=None)
    assert refused.value.code == "command-not-executable"


def test_full_disk_leaves_no_log_file_open() -> None:
    def opened() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = opened()
    with pytest.raises(DistbootError, match="No space left on device"):
        LogFile("/dev/full", 0, None)
    assert opened() == before


def test_start_of_a_rank_leaves_no_file_open() -> None:
    before = files_open()
    start = RankStart("")
    start.close_hooks()
    start.close_hooks()  # also where its process never ran
    os.close(start.reports)
    assert files_open() == before


def test_launcher_that_has_ended_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before = files_open()
    program = Path(sys.executable).resolve().name
    monkeypatch.setattr(launcher_process._Identity, "runs", lambda _: False)
    with subprocess.Popen(["sleep", "30"]) as rank:
        assert launcher_process.find(rank.pid, (program,)) is None
        rank.kill()
    assert files_open() == before


def test_stalled_file_system_delays_one_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends = threading.Event()  # a stand-in for such a file system
    monkeypatch.setattr("distboot.agent.bad_hosts.append", lambda *_: ends.wait(30))
    said: list[str] = []
    shell = MagicMock(say=said.append)
    shell.facts.settings.bad_hosts = "/stalled/bad-hosts"
    record = JobRecord(shell, Membership(("a",), ((0,),)), MagicMock())
    try:
        record.appliers[Blame](Blame("a", "lost"), 0.0)
    finally:
        ends.set()
    assert said == [
        "warning: the file of bad hosts was not written: /stalled/bad-hosts does not answer"
    ]


def test_time_while_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("distboot.agent.loop._ASLEEP", -1.0)  # so that the first turn is as late
    skipped: list[float] = []
    shell = MagicMock(over=lambda _: skipped, due=lambda _: inf)
    shell.own.watched = {0: MagicMock(skip=skipped.append)}
    EventLoop(shell).run()
    assert len(skipped) == 1


# Where this user may start no more threads


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.usefixtures("no_threads")
def test_event_files_need_threads_and_the_job_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.json"
    metrics = tmp_path / "job.prom"
    kubeflow = ("https://10.0.0.1/status", "ca.crt", "token")
    settings = SupervisionSettings(5, report=str(report), metrics=str(metrics), kubeflow=kubeflow)
    open_before = os.listdir("/dev/fd")
    files = EventFiles(settings, "rank 0")
    files.record(Event(0.0, None, "all_joined", {"findings": []}))
    files.close()
    assert os.listdir("/dev/fd") == open_before
    few = "the system does not let this process start another thread; raise the limit of processes"
    warnings = capsys.readouterr().err.splitlines()
    whats = [
        f"warning: there will be no journal {str(tmp_path / 'report.jsonl')!r}: {few}",
        f"warning: no more metrics are written to {str(metrics)!r}: {few}",
        f"warning: the status of the TrainJob at {kubeflow[0]!r} was not updated: {few}",
    ]
    for warning, what in zip(warnings, whats, strict=True):
        assert what in warning


@pytest.mark.usefixtures("no_threads")
def test_node_without_threads_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    listeners: list[socket.socket] = []

    def listen(port: int) -> socket.socket:
        listeners.append(listening(port))
        return listeners[-1]

    monkeypatch.setattr(link_probe, "listening", listen)
    shell = MagicMock()
    check = NodeCheck(shell, MagicMock(), 0, "", "127.0.0.1")
    with closing(check):
        check.begin(os.getpid(), is_rank=True, has_neighbors=True)
        check._calls.take(0.0)
    shell.take.assert_called_once_with(0, NodeSeen(problems=("its check has failed",)), 0.0)
    assert [each.fileno() for each in listeners] == [-1]


@pytest.mark.usefixtures("no_threads")
def test_attempt_to_return_without_threads_is_repeated() -> None:
    returning = Returning()
    returning.aim(plan_for(record(1, 2)), "127.0.0.1", 1)
    with closing(returning):
        for now in (0.0, 10.0):
            returning.start(now)
            assert returning.poll(now) is None
            assert select.select([returning.woken], [], [], 5)[0]
            outcome = returning.poll(now)
            assert isinstance(outcome, UnreachableError)
            assert returning.due == now + 2.0


@pytest.mark.usefixtures("no_threads")
def test_notices_without_threads_are_warned_of() -> None:
    warnings: list[str] = []
    stop_notices.watch("azure", "127.0.0.1:1", list, warnings.append, threading.Event())
    (warning,) = warnings
    assert warning.startswith(
        "warning: DISTBOOT_STOP_NOTICE=azure: no notice will stop this job: the system does not let"
    )
