"""What a script reports of the exception that ends it: whose fault it is, and what the headline keeps of it."""

import builtins
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import PACKAGE
from launched import needs_torch
from supervised import exceptions_of, raised

from distboot.job.exit_status import ExitStatus, UncaughtException
from distboot.job.root_cause import RankState, from_exit
from distboot.script.exceptions import describe

HAS_GROUPS = sys.version_info >= (3, 11)
NEEDS_GROUPS = pytest.mark.skipif(not HAS_GROUPS, reason="needs ExceptionGroup")
_ExceptionGroup: Any = getattr(builtins, "ExceptionGroup", None)

# What libraries raise where a peer is gone, or did not answer: type, and message.
SECONDARY = {
    # NCCL by way of torch (2.5 to 2.9)
    "NCCL, remote error": (
        "torch.distributed.DistBackendError",
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was "
            "a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a "
            "remote process exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv from "
            "10.0.0.1<33759> failed : Connection reset by peer"
        ),
    ),
    "NCCL, internal error": (
        "torch.distributed.DistBackendError",
        (
            "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1275, internal error, NCCL version "
            "2.14.3\nncclInternalError: Internal check failed.\nLast error:\n"
            "Net : Connection closed by remote peer node-1<50260>"
        ),
    ),
    "NCCL, its watchdog": (
        "RuntimeError",
        (
            "NCCL communicator was aborted on rank 2.  Original reason for failure was: [Rank 2] Watchdog caught "
            "collective operation timeout: WorkNCCL(SeqNum=10, OpType=BROADCAST, Timeout(ms)=1800000) ran for "
            "1805457 milliseconds before timing out."
        ),
    ),
    "NCCL, its start": (
        "torch.distributed.DistBackendError",
        (
            "[11] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key "
            "'0', but store->get('0') got error: Socket Timeout\nThis may indicate a possible application crash on "
            "rank 0 or a network set up issue."
        ),
    ),
    # torch 2.13, made on one host
    "Gloo, closed": (
        "RuntimeError",
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4515. "
            "This is typically caused by a remote worker crashing."
        ),
    ),
    "Gloo, reset": (
        "RuntimeError",
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:4515: Connection reset "
            "by peer. This is typically caused by a remote worker hanging or bugs in the application."
        ),
    ),
    "Gloo, timeout": (
        "RuntimeError",
        (
            "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv "
            "operation to complete"
        ),
    ),
    "Gloo, monitored barrier": (
        "RuntimeError",
        (
            "Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0."
            " Please check rank 0 logs for faulty rank.\n Original exception: \n[/pytorch/third_party/gloo/gloo/"
            "transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:44688."
        ),
    ),
    "TCPStore, get": (
        "torch.distributed.DistNetworkError",
        "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    ),
    "TCPStore, set": ("torch.distributed.DistNetworkError", "Broken pipe"),
    "TCPStore, wait": (
        "torch.distributed.DistStoreError",
        "wait timeout after 3000ms, keys: /default_pg/0//1//cpu//0/2",
    ),
    "TCPStore, connect": (
        "torch.distributed.DistNetworkError",
        "The client socket has timed out after 2000ms while trying to connect to (127.0.0.1, 30300).",
    ),
    # DeepSpeed raises what torch does, from its own frames; of UCX in its MPI
    "DeepSpeed, MPI": ("mpi4py.MPI.Exception", "MPI_ERR_PROC_FAILED: Process Failure"),
    # Horovod 0.28
    "Horovod": (
        "horovod.common.exceptions.HorovodInternalError",
        (
            "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to "
            "allreduce, allgather or broadcast a tensor after one of the ranks finished execution."
        ),
    ),
    "Horovod, Gloo": (
        "horovod.common.exceptions.HorovodInternalError",
        "[/horovod/third_party/gloo/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.1]:3456",
    ),
    # TensorFlow 2.16, when a parameter server was killed
    "TensorFlow": (
        "tensorflow.python.framework.errors_impl.UnavailableError",
        "Graph execution error:\n\nfailed to connect to all addresses",
    ),
    "the kernel": ("builtins.ConnectionResetError", "[Errno 104] Connection reset by peer"),
    "the kernel, in German": ("builtins.BrokenPipeError", "[Errno 32] Datenübergabe unterbrochen"),
    "the kernel, without a text": ("builtins.ConnectionResetError", ""),
}


def _error(kind: str, message: str) -> Exception:
    """An exception that has this type, as far as a traceback tells it."""
    module, _, name = kind.rpartition(".")
    if module == "builtins":
        found: type[Exception] = getattr(builtins, name)
        return found(message) if message else found()
    return type(name, (RuntimeError,), {"__module__": module or "builtins"})(message)  # type: ignore[no-any-return]


def _caught(error: BaseException) -> BaseException:
    """An exception with a traceback."""
    try:
        raise error
    except type(error) as caught:
        return caught


def _stack(error: Exception) -> BaseException:
    """With a C++ stack, as torch adds it."""
    lines = [
        f"frame #{i}: c10d::ProcessGroup::wait() + 0x7b (0x7f3a in libtorch.so)" for i in range(60)
    ]
    error.args = ("\n".join([str(error), "Exception raised from get at x.cpp:1:", *lines]),)
    return error


def _cause(error: Exception) -> BaseException:
    found = ValueError("step 3 failed")
    found.__cause__ = error
    return found


def _hidden(error: Exception) -> BaseException:
    found = ValueError("step 3 failed")
    found.__context__ = error
    found.__suppress_context__ = True  # raise … from None
    return found


def _deep(error: Exception) -> BaseException:
    """Below more exceptions and frames than an excerpt has."""
    found: BaseException = error
    for number in range(50):
        outer = _caught(ValueError(f"{number}"))
        outer.__context__ = found
        found = outer
    return found


def _group(error: Exception) -> BaseException:
    group: BaseException = _ExceptionGroup(
        "tasks", [error, _ExceptionGroup("more", [_cause(error)])]
    )
    return group


def _of_group(error: Exception) -> BaseException:
    return _cause(_group(error))  # type: ignore[arg-type]


def _note(error: Exception) -> BaseException:
    found = ValueError("step 3 failed")
    found.__notes__ = ["in batch 7", f"{type(error).__qualname__}: {error}"]  # type: ignore[attr-defined]
    return found


SHAPES: dict[str, Callable[[Exception], BaseException]] = {
    "alone": _caught,
    "stack": _stack,
    "cause": _cause,
    "hidden": _hidden,
    "deep": _deep,
    "group": _group,
    "of a group": _of_group,
}


def _described(error: BaseException) -> UncaughtException:
    return UncaughtException.described(describe(error, error.__traceback__))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", SECONDARY)
def test_exception_of_a_peer_is_secondary(case: str, shape: str) -> None:
    if "group" in shape and not HAS_GROUPS:
        pytest.skip("needs ExceptionGroup")
    error = _error(*SECONDARY[case])
    if shape == "stack" and not error.args:
        pytest.skip("no text to add a stack to")
    assert _described(SHAPES[shape](error)).is_secondary


def test_note_about_a_peer_is_secondary() -> None:
    assert _described(_note(_error(*SECONDARY["Gloo, closed"]))).is_secondary


def _primary(case: str) -> BaseException:
    gloo = _error(*SECONDARY["Gloo, closed"])
    if case == "boom":
        return ValueError("the loss is NaN")
    if "group" in case:
        group: Exception = _ExceptionGroup("tasks", [gloo, ValueError("the loss is NaN")])
    if case == "group":
        return group
    if case == "cause is a group":
        return _cause(group)
    if case == "group while a member is handled":  # as asyncio.TaskGroup raises it
        group.__context__ = gloo
        group.__suppress_context__ = True
        return group
    if case == "a worker of a data loader":  # torch 2.13
        error = RuntimeError("DataLoader worker (pid 851) is killed by signal: Killed. ")
        error.__context__ = ConnectionResetError(104, "Connection reset by peer")
        return error
    if case == "invalid argument":
        kind = "tensorflow.python.framework.errors_impl.InvalidArgumentError"
        return _error(kind, "Graph execution error:\n\nfailed to connect to all addresses")
    assert case == "code in a quoted traceback"
    line = "    raise Retry  # connection refused, connection reset by peer"
    return RuntimeError(
        f'Traceback (most recent call last):\n  File "x.py", line 1, in f\n{line}\nKeyError: 3'
    )


@pytest.mark.parametrize(
    "case",
    [
        "boom",
        pytest.param("group", marks=NEEDS_GROUPS),
        pytest.param("cause is a group", marks=NEEDS_GROUPS),
        pytest.param("group while a member is handled", marks=NEEDS_GROUPS),
        "a worker of a data loader",
        "invalid argument",
        "code in a quoted traceback",
    ],
)
def test_exception_with_its_own_cause_is_primary(case: str) -> None:
    assert not _described(_primary(case)).is_secondary


def test_pipe_to_an_own_process_is_primary(tmp_path: Path) -> None:
    script = """
import multiprocessing
reading, writing = multiprocessing.Pipe(duplex=False)
reading.close()
writing.send(1)
"""
    (found,) = exceptions_of(script, tmp_path)
    assert (found.type, found.is_secondary) == ("BrokenPipeError", False)


@pytest.mark.parametrize(
    "script",
    [
        "urllib.request.urlopen(url)",
        """
try:
    urllib.request.urlopen(url)
except OSError as error:
    raise RuntimeError(f"no data: {error}") from None
""",
        "http.client.HTTPConnection('127.0.0.1', 1).request('GET', '/')",
    ],
    ids=["alone", "quoted", "http"],
)
def test_service_that_is_gone_is_no_peer(tmp_path: Path, script: str) -> None:
    begin = "import http.client, urllib.request\nurl = 'http://127.0.0.1:1/'\n"
    (found,) = exceptions_of(begin + script, tmp_path)
    assert "Connection refused" in found.message
    assert not found.is_secondary


@pytest.mark.parametrize(
    "raised",
    [
        "raise ConnectionResetError(104, 'Connection reset by peer')",
        "raise ConnectionRefusedError(111, 'Connection refused')",
        "raise RuntimeError('[/gloo/x.cc:78] Timed out waiting 1800000ms for recv operation')",
    ],
    ids=["other words", "same words", "gloo"],
)
def test_peer_is_gone_while_a_service_is(tmp_path: Path, raised: str) -> None:
    script = """
import urllib.request
try:
    urllib.request.urlopen("http://127.0.0.1:1/")
except OSError:
    %s
"""
    (found,) = exceptions_of(script % raised, tmp_path)
    assert found.is_secondary


def test_output_that_nobody_reads_is_no_peer(tmp_path: Path) -> None:
    script = """
import os
reading, writing = os.pipe()
os.dup2(writing, 1)
os.close(writing)
os.close(reading)
print("lost", flush=True)
"""
    (found,) = exceptions_of(script, tmp_path)
    assert (found.type, found.is_secondary) == ("BrokenPipeError", False)


_OF_TORCH = """
import datetime, os, socket, sys, time
import torch
import torch.distributed as dist
soon = datetime.timedelta(seconds=2)
port, what = int(sys.argv[1]) if len(sys.argv) > 1 else int(os.environ["PORT"]), os.environ["WHAT"]
def peer():  # a process that joins, and is gone
    if os.fork() == 0:
        try:
            if what.startswith("store"):
                dist.TCPStore("127.0.0.1", port, 2, True, soon, wait_for_workers=False)
                time.sleep(1.5)
            else:
                dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", soon, 2, 1)
                time.sleep(6 if what == "late" else 0.5)
        finally:
            os._exit(0)
if what == "store wait":
    store = dist.TCPStore("127.0.0.1", port, 2, True, soon, wait_for_workers=False)
    store.wait(["nothing"], datetime.timedelta(seconds=0.5))
peer()
if what.startswith("store"):
    store = dist.TCPStore("127.0.0.1", port, 2, False, soon)
    if what == "store get":
        store.get("nothing")
    while what == "store set":
        store.set("a", "b")
dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", soon, 2, 0)
if what == "barrier":
    dist.monitored_barrier(timeout=soon)
dist.all_reduce(torch.ones(1000))
"""


@needs_torch
@pytest.mark.parametrize(
    ("what", "waited"),
    [
        ("reduce", False),
        pytest.param("late", True, marks=pytest.mark.all),
        pytest.param("barrier", False, marks=pytest.mark.all),
        pytest.param("store get", False, marks=pytest.mark.all),
        pytest.param("store set", False, marks=pytest.mark.all),
        pytest.param("store wait", True, marks=pytest.mark.all),
    ],
)
def test_real_exceptions_of_torch_are_secondary(
    tmp_path: Path, port: int, what: str, waited: bool
) -> None:
    (found,) = exceptions_of(
        _OF_TORCH, tmp_path, PORT=str(port), WHAT=what, TORCH_SHOW_CPP_STACKTRACES="1"
    )
    assert (found.is_secondary, found.has_waited) == (True, waited), found


# What a script does, and what is kept of it: type, first line, place, other members of the group
HEADLINES = {
    "plain": ("1 / 0", ("ZeroDivisionError", "division by zero", "<module> (train.py:6)", 0)),
    "group": (
        "raise ExceptionGroup('tasks', [ConnectionResetError(), ValueError('NaN'), OSError(2, 'x')])",
        ("ValueError", "NaN", "<module> (train.py:6)", 2),
    ),
    "task group": (
        """import asyncio
async def bad(): raise ValueError("NaN")
async def main():
    async with asyncio.TaskGroup() as group:
        group.create_task(bad())
asyncio.run(main())""",
        ("ValueError", "NaN", "bad (train.py:7)", 0),
    ),
    "state dict": (
        "raise RuntimeError('Error(s) in loading state_dict for Net:' + '\\n\\tsize mismatch' * 20)",
        ("RuntimeError", "Error(s) in loading state_dict for Net:", "<module> (train.py:6)", 0),
    ),
    "200 MB": (
        "raise ValueError('NaN\\n' + 'x' * (200 << 20))",
        ("ValueError", "NaN", "<module> (train.py:6)", 0),
    ),
    "200 MB in one line": (
        "raise ValueError('x' * (200 << 20))",
        ("ValueError", "x" * 299 + "…", "<module> (train.py:6)", 0),
    ),
    "control characters": (
        "raise ValueError('\\x1b[31m\\0\\rNaN\\u202e\\ud800')",
        ("ValueError", r"\x1b[31m\x00", "<module> (train.py:6)", 0),
    ),
    "only control characters": (
        "raise ValueError('\\0' * 100000)",
        ("ValueError", None, "<module> (train.py:6)", 0),
    ),
    "str() fails": (
        "class Bad(Exception):\n    def __str__(self): raise SystemExit(5)\nraise Bad",
        ("Bad", "<its str() failed>", "<module> (train.py:8)", 0),
    ),
    "str() is empty": (
        "class Bad(Exception): pass\nraise Bad",
        ("Bad", "", "<module> (train.py:7)", 0),
    ),
    "first lines are empty": (
        "raise ValueError('\\n \\n  NaN\\nmore')",
        ("ValueError", "NaN", "<module> (train.py:6)", 0),
    ),
    "text of a subclass": (
        (
            "class Text(str):\n    def __getitem__(self, at): raise OSError\n    __len__ = None\n"
            "class Bad(Exception):\n    def __str__(self): return Text('NaN')\nraise Bad"
        ),
        ("Bad", "NaN", "<module> (train.py:11)", 0),
    ),
    "syntax of a module": (
        "open('model.py', 'w').write('a = 1\\ndef f(:\\n')\nimport model",
        ("SyntaxError", "invalid syntax", "<module> (model.py:2)", 0),
    ),
    "syntax of a string": (
        "def load(): exec('def f(:')\nload()",
        ("SyntaxError", "invalid syntax", "load (train.py:6)", 0),
    ),
    "odd module": (
        "class Bad(Exception): __module__ = None\nraise Bad('NaN')",
        ("Bad", "NaN", "<module> (train.py:7)", 0),
    ),
    "odd names": (
        "Bad = type('B\\n' * 500, (Exception,), {'__module__': 'm' * 9000})\nraise Bad('NaN')",
        (None, "NaN", "<module> (train.py:7)", 0),
    ),
    "own module": (
        "class Bad(Exception): __module__ = 'my.data'\nraise Bad('NaN')",
        ("my.data.Bad", "NaN", "<module> (train.py:7)", 0),
    ),
    "notes": (
        "error = ValueError('NaN')\nerror.__notes__ = ['see the wiki', 3]\nraise error",
        ("ValueError", "NaN", "<module> (train.py:8)", 0),
    ),
    "chain in a circle": (
        "a, b = ValueError('a'), ValueError('b')\na.__context__, b.__context__ = b, a\nraise a",
        ("ValueError", "a", "<module> (train.py:8)", 0),
    ),
    "too many files": (
        "files = []\nwhile True: files.append(open('/dev/null'))",
        ("OSError", "[Errno 24] Too many open files: '/dev/null'", "<module> (train.py:7)", 0),
    ),
    "recursion": (
        "def f(): f()\nf()",
        ("RecursionError", "maximum recursion depth exceeded", "f (train.py:6)", 0),
    ),
    "worker of a data loader": (
        (
            "raise ValueError('Caught ValueError in DataLoader worker process 0.\\nOriginal Traceback (most recent "
            "call last):\\n' + '  File \"x.py\", line 1, in f\\n' * 30 + 'ValueError: NaN\\n')"
        ),
        (
            "ValueError",
            "Caught ValueError in DataLoader worker process 0. … ValueError: NaN",
            "<module> (train.py:6)",
            0,
        ),
    ),
    "spawned process": (
        (
            "raise ValueError('\\n\\n-- Process 1 terminated with the following error:\\nTraceback (most recent call "
            'last):\\n  File "x.py", line 1, in f\\nValueError: NaN\\n\')'
        ),
        ("ValueError", "ValueError: NaN", "<module> (train.py:6)", 0),
    ),
    "worker whose lines begin with its rank": (
        (
            "raise ValueError('it failed:\\n[rank1]: Traceback (most recent call last):\\n"
            '[rank1]:   File "x.py", line 1, in f\\n[rank1]: ValueError: NaN\\n\')'
        ),
        ("ValueError", "ValueError: NaN", "<module> (train.py:6)", 0),
    ),
    "spawned process with lines after its error": (
        (
            "raise ValueError('\\n\\n-- Process 1 terminated with the following error:\\nTraceback (most recent call "
            'last):\\n  File "x.py", line 1, in f\\nValueError: NaN\\nhint: look at the data\\n\')'
        ),
        ("ValueError", "ValueError: NaN", "<module> (train.py:6)", 0),
    ),
    "from a library": (
        "import json\ndef load(): json.loads('{')\nload()",
        ("json.decoder.JSONDecodeError", None, "load (train.py:7)", 0),
    ),
    "hook of another": (
        "sys.excepthook = lambda *_: None\n1 / 0",
        ("ZeroDivisionError", "division by zero", "<module> (train.py:7)", 0),
    ),
    "hook that fails": (
        "def fail(*_): raise OSError\nsys.excepthook = fail\n1 / 0",
        ("ZeroDivisionError", "division by zero", "<module> (train.py:8)", 0),
    ),
    "hook that calls ours": (
        "before = sys.excepthook\nsys.excepthook = lambda *a: before(*a)\n1 / 0",
        ("ZeroDivisionError", "division by zero", "<module> (train.py:8)", 0),
    ),
    "secret": (
        "raise ValueError('x' * 290 + 's3cret-word')",
        ("ValueError", "x" * 290 + "***", "<module> (train.py:6)", 0),
    ),
}


@pytest.mark.parametrize("case", HEADLINES)
def test_type_message_and_place_are_kept(tmp_path: Path, case: str) -> None:
    script, (kind, message, place, more) = HEADLINES[case]
    if "group" in case and not HAS_GROUPS:
        pytest.skip("needs ExceptionGroup")
    (found,) = exceptions_of(script, tmp_path)
    assert found.place == place
    assert found.more == more
    assert kind in (None, found.type)
    if message is not None:
        assert found.message.startswith(message)
    head, *lines = _text(found, "a").splitlines()
    assert len(head) <= 160
    assert f", in {place}" in head
    assert len(lines) <= 13
    assert all(line.isprintable() for line in (head, *lines))


@pytest.mark.all
@needs_torch
def test_error_of_torch_keeps_its_first_line(tmp_path: Path) -> None:
    script = "import torch\ntorch.ones(2, 3) @ torch.ones(2, 3)"
    (found,) = exceptions_of(script, tmp_path, TORCH_SHOW_CPP_STACKTRACES="1")
    said = "rank 1 failed first: uncaught exception: RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    assert _text(found, "a").startswith(f"{said} (2x3 and 2x3), on a, in <module> (train.py:7)\n")
    assert "_start from" not in _text(found, "a")


def _text(found: UncaughtException, host: str) -> str:
    return from_exit(RankState(1, host, 0, 1), ExitStatus(exception=found), 0.0).text


@pytest.mark.parametrize("rank", [1, 12345])
@pytest.mark.parametrize("secondary", [False, True])
@pytest.mark.parametrize("host", ["a", "train-worker-of-somebody-17.cluster.example", "h" * 255])
@pytest.mark.parametrize("place", ["load (data.py:41)", "f" * 60 + " (" + "m" * 60 + ".py:12345)"])
def test_headline_is_short_and_has_all_parts(
    rank: int, secondary: bool, host: str, place: str
) -> None:
    found = UncaughtException(
        secondary, False, 7, "torch.cuda.OutOfMemoryError", "CUDA " * 60, place
    )
    head = from_exit(RankState(rank, host, 0, 1), ExitStatus(exception=found), 0.0).headline
    assert len(head) <= 160
    assert re.match(rf"rank {rank} failed first(, because a peer disconnected)?: ", head)
    assert "torch.cuda.OutOfMemoryError" in head
    assert f", on {host[:10]}" in head
    assert head.endswith(place[-15:])
    assert "(and 7 more)" in head


@pytest.mark.parametrize(
    "data",
    [
        "",
        "x",
        "1\n0\n0\nValueError\nNaN\nf (x.py:1)",
        "1\n0\n-1\nValueError\nNaN\n\n",
        "1\n0\nxyz\nValueError\nNaN\n\n",
        f"1\n0\n{'9' * 50}\nValueError\nNaN\n\n",
        f"1\n0\n0\n{'V' * 500}\nNaN\n\n",
        f"1\n0\n0\nValueError\nNaN\n\n{'x' * 5000}",
    ],
)
def test_what_is_not_a_description_is_ignored(data: str) -> None:
    assert UncaughtException.received(data) is None


@pytest.mark.parametrize(("depth", "pad"), [(1, ""), (20, ""), (8, f"{'x' * 800!r};")])
def test_cut_traceback_begins_with_an_ellipsis(tmp_path: Path, depth: int, pad: str) -> None:
    deep = f"def one(left): {pad} two(left)\ndef two(left): one(left - 1) if left else 1 / 0\none({depth})"
    (found,) = exceptions_of(deep, tmp_path)
    first, *_, last = found.excerpt.splitlines()
    begin = "Traceback (most recent call last):" if depth == 1 else "…"
    assert (first, last) == (begin, "ZeroDivisionError: division by zero")


def test_exception_is_told_although_a_handler_raises(tmp_path: Path) -> None:
    script = """
def fail(*_): raise RuntimeError("a worker has died")
class Bad(Exception):
    def __str__(self):
        if not hasattr(self, "told"):
            self.told = True
            signal.raise_signal(signal.SIGCHLD)
        return "boom"
signal.signal(signal.SIGCHLD, fail)
raise Bad
"""
    (found,) = exceptions_of(script, tmp_path)
    assert found.type == "Bad"


def test_exception_that_others_show_is_not_reported(tmp_path: Path) -> None:
    script = """
import code
code.InteractiveInterpreter().runsource("1 / 0")
def check():
    try:
        1 / 0
    except ZeroDivisionError as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
check()
try:
    1 / 0
except ZeroDivisionError as error:  # in the outermost frame, for traceback.print_last()
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
"""
    assert exceptions_of(script, tmp_path) == []


def test_exception_in_a_strict_stream_is_printed(tmp_path: Path) -> None:
    script = f"""
sys.stderr = open({str(tmp_path / "err.log")!r}, "w", encoding="ascii")
raise ValueError(os.fsdecode(b"data-\\xff.bin"))
"""
    exceptions_of(script, tmp_path)
    printed = (tmp_path / "err.log").read_text()
    assert "Traceback (most recent call last)" in printed
    assert "ValueError: data-\\udcff.bin" in printed


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("sys.exit('no data')", ["no data"]),
        ("def main(): raise SystemExit(f'{1 + 1} files')\nmain()", ["2 files"]),
        ("sys.exit(OSError(2, 'no data'))", ["[Errno 2] no data"]),
        ("sys.stderr = Both(sys.stderr)\nsys.exit('no data')", ["no data"]),
        ("sys.exit('of s3cret-word')", ["of ***"]),
        ("sys.exit('\\n'.join('0123456789'))", [*"01234567", "…"]),
        ("sys.exit('€' * 5000)", ["€" * (319 - len("SystemExit: ")) + "…"]),
        ("atexit.register(print, 'saved', file=sys.stderr)\nsys.exit('no data')", ["no data"]),
        ("atexit.register(print, 'saved', file=sys.stderr)\nsys.exit(1)", []),
        (
            "try: sys.exit('caught')\nexcept SystemExit: print('gone on', file=sys.stderr)\nsys.exit(1)",
            [],
        ),
        (
            "one = threading.Thread(target=sys.exit, args=['ended'])\none.start()\none.join()\nsys.exit(1)",
            [],
        ),
        ("def main():\n  fails = Fails()\n  sys.exit(1)\nmain()", []),
        ("if os.fork() == 0: sys.exit('not the rank')\nos.wait()\nsys.exit(1)", []),
        ("sys.exit()", []),
        ("sys.exit('')", []),
    ],
)
def test_text_with_which_a_script_exits_is_sent(
    tmp_path: Path, script: str, said: list[str]
) -> None:
    exits = """
class Both:
    def __init__(self, other): self.other = other
    def write(self, text): return self.other.write(text)
    def flush(self): pass
class Fails:
    def __del__(self): raise ValueError("deleted")
"""
    found = [one.excerpt for one in exceptions_of(exits + script, tmp_path)]
    assert found == (["\n".join([f"SystemExit: {said[0]}", *said[1:]])] if said else [])


def test_text_of_an_exit_is_in_the_headline() -> None:
    def said(text: str) -> str:
        return from_exit(RankState(1, "a", 0, 1), raised(f"SystemExit: {text}"), 0.0).text

    assert said("no data").startswith("rank 1 failed first: exited: no data, on a")
    assert "\n" not in said("no data")
    assert said("no data\nin /data").splitlines()[1:] == ["  | SystemExit: no data", "  | in /data"]
    long = said("x" * 250 + " no space left")
    assert re.fullmatch("rank 1 failed first: exited: x+…x+ no space left, on a", long)
    assert len(long) == 160
    assert len(said("x" * 250)) == 160
    assert "failed first, because a peer disconnected" in said("Connection closed by peer")


def _frame(file: str) -> str:
    return f'  File "{file}", line 7, in f\n    f()\n    ^^^\n'


def _shown(excerpt: str) -> list[str]:
    lines = _text(UncaughtException(type="ValueError", excerpt=excerpt), "a").splitlines()[1:]
    return [line.removeprefix("  | ") for line in lines]


def test_long_traceback_shows_the_script_rather_than_distboot() -> None:
    ours = _frame("/elsewhere/site-packages/distboot/context.py") + _frame(
        f"{PACKAGE}/agent/session.py"
    )
    script = _frame("/home/me/distboot/train.py")
    begin = "Traceback (most recent call last):\n"
    end = "ValueError: boom"
    assert _shown(begin + _frame(f"{PACKAGE}/context.py") + end) == [
        begin.strip(),
        *_frame(f"{PACKAGE}/context.py").splitlines(),
        end,
    ]
    assert _shown(begin + 2 * script + ours + end) == [
        begin.strip(),
        *(2 * script).splitlines(),
        "…",
        end,
    ]
    assert _shown(begin + 4 * script + ours + end) == ["…", *(3 * script).splitlines(), "…", end]


_OUTER = RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")
_KILLED = RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")
# An exception and those from which it was raised, one from the next; what the headline has of them.
_RAISED_FROM = {
    "worker": (
        [_OUTER, _KILLED],
        f"RuntimeError: {_OUTER} (caused by RuntimeError: {str(_KILLED).strip()})",
    ),
    "three": (
        [RuntimeError("training failed"), OSError("disk"), ZeroDivisionError("division by zero")],
        "RuntimeError: training failed (caused by ZeroDivisionError: division by zero)",
    ),
    "said-already": (
        [RuntimeError("load: no file"), OSError("no file")],
        "RuntimeError: load: no file",
    ),
    "announced": (
        [RuntimeError("Error(s) in loading state_dict for Net:\n\tsize mismatch for head.weight")],
        "RuntimeError: Error(s) in loading state_dict for Net: size mismatch for head.weight",
    ),
}


@pytest.mark.parametrize(("raised_from", "said"), _RAISED_FROM.values(), ids=_RAISED_FROM)
def test_headline_has_what_an_exception_was_raised_from(
    raised_from: list[Exception], said: str
) -> None:
    for error, cause in itertools.pairwise(raised_from):
        error.__cause__ = cause
    assert describe(raised_from[0], None).headline == said


def test_causes_in_a_circle_end() -> None:
    error, cause = OSError("a"), OSError("b")
    error.__cause__, cause.__cause__ = cause, error
    assert describe(error, None).headline == "OSError: a (caused by OSError: b)"


_INTERRUPTED_AGAIN = """
import os, signal, sys, threading, time
from distboot.script import crash_hooks
threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
def again(*_):
    os.kill(os.getpid(), signal.SIGINT)
    os.write(2, b"shown\\n")
sys.excepthook = again
crash_hooks.wrap_excepthook()
os.kill(os.getpid(), signal.SIGINT)
"""


def test_second_ctrl_c_interrupts_no_hook() -> None:
    """Where a launcher signals each process of a job, the wrapper passes the same signal on."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_AGAIN],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "shown\n")
