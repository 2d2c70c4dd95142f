"""The pieces of the lifeline, one by one: a line to a peer, what a rank says of its end, the exit code at the exit."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import PACKAGE
from hypothesis import given
from hypothesis import strategies as st
from lifelines import pair
from rollcalls import OURS, FakeRank0, record, welcome

from distboot.lifeline.ends import End
from distboot.lifeline.last_words import EXCEPTION, without
from distboot.lifeline.line import Line, end_politely
from distboot.lifeline.verdict import Seat, Verdict, failed
from distboot.lifeline.words import Reader
from distboot.rollcall.client import Client
from distboot.rollcall.wire import Session, canonical
from distboot.roster import Roster

DIED = End(signal=9, when=1.0)


def test_peer_that_is_silent_and_whose_kernel_answers_is_frozen() -> None:
    one, other = pair()
    line = Line(one, Session())
    try:
        start = time.monotonic()
        while (complaint := line.complaint(time.monotonic(), 0.3)) is None:
            line.beat(time.monotonic())
            assert time.monotonic() < start + 10
        assert time.monotonic() > start + 0.3
        assert complaint.is_lost
        assert "stopped or frozen" in complaint.why
    finally:
        line.close()
        other.close()


def test_silence_is_noticed_although_no_file_is_left() -> None:
    one, other = pair()
    line = Line(one, Session(), interval=0.1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with open(os.devnull) as next_file:
            lowest = next_file.fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
        while (complaint := line.complaint(time.monotonic(), 0.3)) is None:
            pass
        assert complaint.is_lost
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        line.close()
        other.close()


def test_old_opinion_on_a_silence_that_ended_well_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    probes: list[_Unanswered] = []

    def probe(_: socket.socket) -> _Unanswered:
        probes.append(_Unanswered())
        return probes[-1]

    monkeypatch.setattr("distboot.lifeline.line.Probe", probe)
    one, other = pair()
    line = Line(one, Session(), interval=0.1)
    try:
        for silences in (1, 2):
            _until_suspect(line)
            assert len(probes) == silences
            other.sendall(Session().sealed("beat", "null"))
            one.settimeout(5)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
            one.recv(1, socket.MSG_PEEK)
            one.setblocking(False)
            time.sleep(0.1)  # the interval, in which the kernel of the peer confirms what it got
            line.receive(time.monotonic())
            line.beat(time.monotonic())
            assert line.complaint(time.monotonic(), 0.5) is None
            assert not line.is_suspect
    finally:
        line.close()
        other.close()


class _Unanswered:
    def is_answered(self) -> bool:
        return False

    def close(self) -> None:
        pass


def _until_suspect(line: Line) -> None:
    start = time.monotonic()
    while not line.is_suspect:
        time.sleep(0.1)  # the interval
        line.beat(time.monotonic())
        assert line.complaint(time.monotonic(), 0.5) is None
        assert time.monotonic() < start + 10


def test_last_word_arrives_although_something_is_left_unread() -> None:
    one, other = pair()
    line = Line(one, Session())
    other.sendall(Session().sealed("beat", "null"))
    line.send("end", DIED.as_message())
    reader = threading.Timer(0.1, lambda: other.shutdown(socket.SHUT_WR))
    reader.start()
    end_politely([line], 10)
    line.close()
    reader.join()
    received = b""
    with other:
        while data := other.recv(65536):  # and no reset
            received += data
    assert b'"end"' in received


def test_what_rank_0_says_after_the_roster_is_left_to_the_lifeline() -> None:
    roster = Roster(("a",), ((0, 1),))
    bye = Session().sealed("bye", "null")

    def talk(connection: socket.socket) -> None:
        welcome(connection)
        connection.sendall(Session().sealed("roster", canonical(roster.as_message())) + bye)

    with closing(FakeRank0(talk)) as fake:
        client = Client(["127.0.0.1"], [fake.port], record(1, 2), OURS)
        assert client.report(20) == roster
        (((rank,), connection, _, _),) = client.hand_over()
        with connection:
            connection.settimeout(20)
            assert (rank, connection.recv(65536)) == (0, bye)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from([*End.__slots__, *Verdict.__slots__]), inner),
    )
)
def test_whatever_a_peer_sends_is_taken_or_refused(content: object) -> None:
    content = json.loads(json.dumps(content))
    for kind in (End, Verdict):
        try:
            taken = kind.from_message(content)
        except TypeError:
            continue
        assert isinstance(taken, kind)


@pytest.mark.parametrize(
    ("end", "is_failure", "stopped_by", "said"),
    [
        (End(code=0), False, None, "exit code 0"),
        (End(code=3), True, None, "exit code 3"),
        (End(signal=15), False, 15, "killed by SIGTERM"),
        (End(code=143), False, 15, "exit code 143"),
        (End(code=1, asked=15), False, 15, "exit code 1"),
        (End(signal=9, told=True), False, None, "killed by SIGKILL (by the kernel when memory ran out, or by hand)"),
        (End(signal=11), True, None, "killed by SIGSEGV"),
        (End(signal=40), True, None, "killed by signal 40"),
        (
            End(),
            True,
            None,
            "ended without a word: killed (by the kernel when memory ran out, or by hand), or os._exit",
        ),
    ],
)
def test_ends(end: End, is_failure: bool, stopped_by: int | None, said: str) -> None:
    assert (end.is_failure, end.stopped_by, end.said()) == (is_failure, stopped_by, said)
    assert End.from_message(json.loads(json.dumps(end.as_message()))) == end
    with pytest.raises(TypeError):
        End.from_message({**end.as_message(), "more": 1})
    with pytest.raises(TypeError):
        End.from_message(replace(end, words="x" * 5000).as_message())


_FAREWELL = """
import os, sys
from distboot.lifeline.farewell import tell_at_exit
status, answer = os.pipe(), os.pipe()
tell_at_exit(status[1], answer[0])
os.close(answer[1])
child = os.fork()
if child == 0:
    sys.exit(9)
os.waitpid(child, 0)
os.set_blocking(status[0], False)
try:
    print(os.read(status[0], 10))
except BlockingIOError:
    print("nothing yet", flush=True)
if os.fork():
    {end}
os.close(status[1])
os.set_blocking(status[0], True)
from distboot.lifeline import farewell
print(os.read(status[0], 10), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the guard needs Linux")
@pytest.mark.parametrize(
    ("end", "code"), [("raise SystemExit(7)", 7), ("sys.exit()", 0), ("1 / 0", 1), ("raise SystemExit('no')", 1)]
)
def test_exit_code_is_known_before_the_process_has_ended(end: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FAREWELL.format(end=end)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.decode()) == (code, f"nothing yet\n{bytes([code])!r}\n")


def test_tensorflow_speaks_of_a_peer() -> None:
    """TensorFlow 2.16, when a parameter server was killed."""
    words = "tensorflow.python.framework.errors_impl.UnavailableError: Graph execution error:\n\n"
    words += "failed to connect to all addresses\nAdditional GRPC error information from remote target"
    assert End(code=1, words=words).is_consequence
    assert not End(code=1, words=words.replace("Unavailable", "InvalidArgument")).is_consequence


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


def test_crash_of_many_threads_begins_with_what_it_is() -> None:
    reading, writing = os.pipe()
    try:
        os.write(writing, b"Fatal Python error: Segmentation fault\n\n" + b'  File "train.py", line 1 in f\n' * 200)
        reader = Reader(reading)
        assert reader.read() == []
        assert reader.crash().startswith("Fatal Python error: Segmentation fault\n  File")
    finally:
        os.close(reading)
        os.close(writing)


_DEEP = """
import sys
from distboot.lifeline.last_words import leave_to
leave_to(int(sys.argv[1]))
def one(left): {pad} two(left)
def two(left): one(left - 1) if left else 1 / 0
one(int(sys.argv[2]))
"""


@pytest.mark.parametrize(("depth", "pad"), [(1, ""), (20, ""), (8, f"{'x' * 800!r};")])
def test_traceback_that_does_not_begin_with_its_beginning_says_so(tmp_path: Path, depth: int, pad: str) -> None:
    (tmp_path / "deep.py").write_text(_DEEP.format(pad=pad))
    reading, writing = os.pipe()
    try:
        subprocess.run(
            [sys.executable, "deep.py", str(writing), str(depth)],
            stderr=subprocess.DEVNULL, pass_fds=[writing], cwd=tmp_path, timeout=60, check=False,
        )  # fmt: skip
        text = next(words.text for words in Reader(reading).read() if words.kind == EXCEPTION)
    finally:
        os.close(reading)
        os.close(writing)
    first, *_, last = text.splitlines()
    assert (first, last) == (
        "Traceback (most recent call last):" if depth == 1 else "…",
        "ZeroDivisionError: division by zero",
    )


def _frame(file: str) -> str:
    return f'  File "{file}", line 7, in f\n    f()\n    ^^^\n'


def _shown(words: str) -> list[str]:
    lines = failed(Seat(1, "a", 0, 1), End(words=words), 0.0).text.splitlines()[1:]
    return [line.removeprefix("  | ") for line in lines]


def test_long_traceback_shows_the_script_rather_than_distboot() -> None:
    ours = _frame("/elsewhere/site-packages/distboot/context.py") + _frame(f"{PACKAGE}/rollcall/gate.py")
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
