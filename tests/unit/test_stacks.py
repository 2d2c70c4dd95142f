"""The Python stacks of a process: how they are read, shortened and folded."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from inside import replace

from distboot.agent.hook_reader import HookReader
from distboot.agent.loop import EventLoop
from distboot.agent.stack_reader import StackReader
from distboot.base.process import Process
from distboot.job.messages import Position
from distboot.job.stacks import (
    MOST_FRAMES,
    Stacks,
    frame,
    from_dump,
    lines,
    waits,
    where,
)
from distboot.rendezvous.messages import ShowStacks
from distboot.rendezvous.protocol import BEFORE_AUTHENTICATION, decode, encode
from distboot.script.progress import MOST_GROUPS

_C10D = "/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py"
_TORCH = "/env/lib/python3.12/site-packages/torch"
REDUCES = (
    frame("all_reduce", _C10D, 3252),
    frame("wrapper", _C10D, 83),
    frame("train", "/job/train.py", 84),
)
LOADS = (
    frame("wait", "/usr/lib/python3.12/selectors.py", 415),
    frame("_try_get_data", f"{_TORCH}/utils/data/dataloader.py", 1131),
    frame("__next__", f"{_TORCH}/utils/data/dataloader.py", 630),
    frame("__iter__", "/env/lib/python3.12/site-packages/tqdm/std.py", 1181),
    frame("train", "/job/train.py", 80),
    frame("<module>", "/job/train.py", 99),
)
# In FSDP, and not in a collective operation: the user's own code was called by it.
COMPUTES = (
    frame("forward", "/job/model.py", 7),
    frame("forward", f"{_TORCH}/distributed/fsdp/api.py", 9),
    *LOADS[4:],
)

# Of TensorFlow 2.21: a compiled function, and `fit` of Keras
_PACKAGES = "/env/lib/python3.12/site-packages"
COMPILED = (
    frame("quick_execute", f"{_PACKAGES}/tensorflow/python/eager/execute.py", 53),
    frame("call_function", f"{_PACKAGES}/tensorflow/python/eager/context.py", 1688),
    frame("_call", f"{_PACKAGES}/tensorflow/python/eager/polymorphic_function/a.py", 919),
    frame("__call__", f"{_PACKAGES}/tensorflow/python/eager/polymorphic_function/a.py", 833),
    frame("error_handler", f"{_PACKAGES}/tensorflow/python/util/traceback_utils.py", 164),
)
FITS = (
    *COMPILED,
    frame("fit", f"{_PACKAGES}/keras/src/backend/tensorflow/trainer.py", 377),
    frame("error_handler", f"{_PACKAGES}/keras/src/utils/traceback_utils.py", 117),
)


class Watched:
    """A process that runs a script, with the hooks in it."""

    def __init__(self, script: str, secret: str = "") -> None:
        self._pipe, writing = os.pipe()
        begin = (
            "import os, sys, time\nfrom distboot.script import "
            f"crash_hooks\ncrash_hooks.install({writing})\n"
        )
        said = "def ready():\n    print('ready', flush=True)\n"
        self.process = subprocess.Popen(
            [sys.executable, "-c", begin + said + script],
            pass_fds=[writing],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        os.close(writing)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        self._hooks = HookReader(self._pipe, secret)
        self._hooks.read()

    def read(self, place: str = "", meanwhile: Callable[[], object] = lambda: None) -> Stacks:
        """Its stacks, once it is there: on a busy machine it may take a while."""
        end = time.monotonic() + 30
        found: list[Stacks] = []
        while True:
            found.clear()
            shell = MagicMock(over=lambda now: found or now > end, due=lambda _: end)
            loop = EventLoop(shell)
            StackReader(Process(self.process.pid), self._hooks, loop).read(
                found.append, time.monotonic()
            )
            meanwhile()
            loop.run()
            assert len(found) == 1
            if where(found[0]).startswith(place):
                return found[0]
            assert time.monotonic() < end, found[0]

    def has_term(self) -> bool:
        self._hooks.read()
        return self._hooks.take_dump()

    def end(self) -> None:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self.process.pid, signal.SIGKILL)  # with its workers
        self.process.communicate()
        os.close(self._pipe)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    monkeypatch.setenv("PATH", str(tmp_path))
    started: list[Watched] = []

    def start(*arguments: str) -> Watched:
        started.append(Watched(*arguments))
        return started[-1]

    yield start
    for each in started:
        each.end()


def test_place_in_tensorflow_is_what_the_user_wrote() -> None:
    train = frame("train", "/job/train.py", 17)
    assert where(Stacks((*COMPILED, train))) == "in train (train.py:17)"
    assert where(Stacks((*FITS, train))) == "in fit (train.py:17)"
    assert waits(Stacks((*COMPILED, train)))


def test_stack_of_a_process_is_read_repeatedly(watch: Callable[..., Watched]) -> None:
    watched = watch(
        "def load():\n    ready()\n    time.sleep(60)\ndef train():\n    load()\ntrain()"
    )
    for _ in range(3):
        stacks = watched.read("in load (")
        assert [one.partition(" ")[0] for one in stacks.main] == ["load", "train", "<module>"]
    assert watched.process.poll() is None


# State D: vfork(2) suspends the parent until its child ends.
_IN_THE_KERNEL = """
import ctypes
parent = os.getpid()
ready()
if ctypes.PyDLL(None).vfork() == 0:
    while os.getppid() == parent:
        time.sleep(0.05)
    os._exit(0)
"""


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("import re\nready()\nre.match('(a+)+b', 'a' * 99)", "in match (<string>:8)"),
        ("import signal\nready()\nos.kill(os.getpid(), signal.SIGSTOP)", "stopped by a signal"),
        (
            (
                "import signal\nsignal.signal(signal.SIGURG, "
                "signal.SIG_DFL)\nready()\ntime.sleep(60)"
            ),
            "at a place",
        ),
        ("ready()\nos.execvp('/bin/sleep', ['sleep', '60'])", "at a place"),
        (_IN_THE_KERNEL, "in the kernel, where no signal reaches it"),
    ],
    ids=["holds-the-lock", "stopped", "own-handler", "another-program", "in-the-kernel"],
)
def test_where_a_process_is_that_runs_no_python(
    watch: Callable[..., Watched], script: str, expected: str
) -> None:
    watched = watch(script)
    watched.read(expected)
    assert watched.process.poll() is None, "the signal has not ended it"


@pytest.mark.parametrize("threads", [90, 300])
def test_many_threads_and_a_deep_stack(watch: Callable[..., Watched], threads: int) -> None:
    script = """
import threading
sys.setrecursionlimit(10**7)
threading.stack_size(1 << 16)
for number in range(THREADS):
    threading.Thread(target=time.sleep, args=[60], daemon=True).start()
def deep(number):
    if number:
        return deep(number - 1)
    ready()
    time.sleep(60)
deep(20_000)
"""
    stacks = watch(script.replace("THREADS", str(threads))).read("in deep (")
    assert len(stacks.main) == MOST_FRAMES


def test_busy_threads_are_not_ended_by_reading(watch: Callable[..., Watched]) -> None:
    """faulthandler reads the stacks of other threads while they run, and may read beyond them."""
    script = """
import threading
def work():
    while True:
        [sum(each * each for each in range(number)) for number in range(50)]
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
ready()
time.sleep(60)
"""
    watched = watch(script)
    watched.read("in <module> (<string>:14)")
    for _ in range(300):
        watched.process.send_signal(signal.SIGURG)
        time.sleep(0.002)
    watched.read("in <module> (<string>:14)")
    assert watched.process.poll() is None


_WAITS_FOR_WORKERS = """
import multiprocessing, signal
def work(number):
    if number == 1:
        ready()
        HANGS
def main():
    context = multiprocessing.get_context("fork")
    with context.Pool(3) as pool:
        pool.map(work, range(2), chunksize=1)
main()
"""


@pytest.mark.parametrize(
    ("hangs", "expected"),
    [
        ("time.sleep(60)", "its worker in work (<string>:11)"),
        (
            "re = __import__('re'); re.match('(a+)+b', 'a' * 99)",
            "its worker in match (<string>:11)",
        ),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "its worker stopped by a signal"),
        # It has closed its end of the pipe; and this is another file
        ("os.closerange(3, 4096); time.sleep(60)", ""),
    ],
    ids=["sleeps", "holds-the-lock", "stopped", "closed"],
)
def test_busy_worker_of_a_process_is_shown(
    watch: Callable[..., Watched], hangs: str, expected: str
) -> None:
    watched = watch(_WAITS_FOR_WORKERS.replace("HANGS", hangs))
    place = ", ".join(filter(None, ("in map (<string>:15)", expected)))
    stacks = watched.read(place)
    assert where(stacks).partition(" (do_")[0] == place
    (shown,) = lines({3: stacks})
    calls = "map < main (<string>:15) < <module> (<string>:16)"
    assert shown.startswith(", ".join(filter(None, (f"rank 3: {calls}", expected))))


def test_process_that_reads_a_disk_is_asked(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watch("ready()\ntime.sleep(60)")
    monkeypatch.setattr(Process, "state", "D")
    watched.read("in <module> (<string>:7)")


def test_process_that_ends_while_it_is_read(watch: Callable[..., Watched]) -> None:
    watched = watch("ready()\ntime.sleep(60)")

    def kill() -> None:
        watched.process.kill()
        watched.process.wait()

    watched.read(meanwhile=kill)
    assert watched.read() == Stacks(state="at a place that shows no Python stack")


def test_signal_of_others_is_no_sigterm(watch: Callable[..., Watched]) -> None:
    """Only SIGTERM shows a stack where the hooks write; a dump of it asks the job to stop."""
    watched = watch(
        "import signal\ncrash_hooks.install(crash_hooks._pipe[0], term=True)\n"
        "signal.signal(signal.SIGTERM, lambda *_: ready())\nready()\n"
        "while True:\n    time.sleep(60)"
    )
    for _ in range(3):
        watched.process.send_signal(signal.SIGURG)
    watched.read("in <module> (<string>:11)")
    assert not watched.has_term()
    watched.process.send_signal(signal.SIGTERM)
    assert watched.process.stdout is not None
    assert watched.process.stdout.readline() == "ready\n"
    assert watched.has_term()
    assert not watched.has_term(), "said once"


def test_source_that_is_never_read_delays_no_stack(
    watch: Callable[..., Watched], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()  # a stand-in for a file system that does not answer
    monkeypatch.setattr("distboot.agent.stack_reader._read_line", lambda *_: ends.wait())
    library = tmp_path / "mpi4py.so"
    library.write_bytes(bytes(4096))
    script = f"""
import mmap
with open({str(library)!r}) as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
ready()
time.sleep(60)
"""
    try:
        watch(script).read("in <module> (")
    finally:
        ends.set()


@pytest.mark.parametrize("source", ["file", "pipe", "endless", "another-library"])
def test_call_of_mpi_is_read_in_source(
    watch: Callable[..., Watched], tmp_path: Path, source: str
) -> None:
    path = Path("/dev/zero") if source == "endless" else tmp_path / "a.py"
    library = tmp_path / ("other.so" if source == "another-library" else "mpi4py.so")
    library.write_bytes(bytes(4096))
    if source == "pipe":
        os.mkfifo(path)
    elif source != "endless":
        path.write_text("ready()\nMPI.Barrier(60)")
    script = f"""
import mmap
class MPI:
    Barrier = time.sleep
with open({str(library)!r}) as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
exec(compile("ready()\\nMPI.Barrier(60)", {str(path)!r}, "exec"))
"""
    stacks = watch(script).read(
        f"in {'Barrier' if source == 'file' else '<module>'} ({path.name}:2)"
    )
    assert waits(stacks) == (source == "file")


@pytest.mark.parametrize("before", [True, False])
def test_scripts_signal_handler_stays_in_a_fork(before: bool) -> None:
    sets = "signal.signal(signal.SIGURG, lambda *_: print('own', flush=True))"
    script = f"""
import os, signal
from distboot.script import crash_hooks
{sets if before else ""}
crash_hooks.install(os.pipe()[1])
{"" if before else sets}
signal.raise_signal(signal.SIGURG)
if not os.fork():
    signal.raise_signal(signal.SIGURG)
    os._exit(0)
os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "own\n" * 2


def test_handler_of_a_library_in_c_stays() -> None:
    """Python does not know of it: `signal.getsignal` says SIG_DFL."""
    script = """
import ctypes, os, signal
from distboot.script import crash_hooks
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: print("own", flush=True))
ctypes.CDLL(None).signal(int(signal.SIGURG), handler)
for _ in range(2):
    crash_hooks.install(os.pipe()[1])
    signal.raise_signal(signal.SIGURG)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "own\n" * 2


def test_secret_of_the_job_is_in_no_stack(watch: Callable[..., Watched]) -> None:
    script = "exec(compile('ready()\\ntime.sleep(60)', '/job/top-secret/train.py', 'exec'))"
    assert "secret" not in str(watch(script, "top-secret").read("in <module> (train.py:2)"))


@pytest.mark.parametrize(
    ("stack", "expected", "is_waiting"),
    [
        (REDUCES, "in all_reduce (train.py:84)", True),
        (LOADS, "in __next__ (train.py:80)", False),
        (COMPUTES, "in forward (model.py:7)", False),
        (
            (frame("Barrier", "mpi4py", 0), frame("main", "/job/a.py", 3)),
            "in Barrier (a.py:3)",
            True,
        ),
        (
            (
                frame("cmdloop", "/usr/lib/python3.12/cmd.py", 134),
                frame("trace_dispatch", "/usr/lib/python3.12/bdb.py", 115),
                frame("main", "/job/a.py", 3),
            ),
            *("at a breakpoint (a.py:3)", False),
        ),
        ((frame("load\x1b[2J\n", "/job/\x07da\nta.py", 3),), "in load", False),
        (
            (frame("main", "/env/lib/python3.12/site-packages/tool/cli.py", 3),),
            "in main (cli.py:3)",
            False,
        ),
        (("no frame at all",), "in no frame at all", False),
    ],
)
def test_where_is_in_the_code_of_the_user(
    stack: tuple[str, ...], expected: str, is_waiting: bool
) -> None:
    stacks = Stacks(stack)
    assert where(stacks).startswith(expected)
    assert where(stacks).isprintable()
    assert waits(stacks) == is_waiting


def test_stack_of_a_path_with_quotes() -> None:
    dump = """Stack (most recent call first):
  File "/job/a "b", line 3 in c.py", line 84 in train
  File "/job/train.py", line 99 in <module>
"""
    found = from_dump(dump)
    assert found is not None
    assert found.main == (
        frame("train", '/job/a "b", line 3 in c.py', 84),
        frame("<module>", "/job/train.py", 99),
    )
    assert from_dump(dump.partition("(")[0]) is None


def test_equal_stacks_are_folded_rarest_first() -> None:
    job = {rank: Stacks(LOADS if rank == 95 else REDUCES) for rank in range(104)}
    assert lines(job) == [
        "rank 95: __next__ < train (train.py:80) < <module> (train.py:99)",
        "ranks 0-94, 96-103: all_reduce < train (train.py:84)",
    ]
    each = {rank: Stacks((frame("f", "/job/train.py", rank),)) for rank in range(30)}
    assert lines(each)[-1] == "10 more ranks, at other places"
    assert lines(each, [29])[0] == "rank 29: f (train.py:29)"
    alike = {rank: Stacks((frame("f", _C10D, rank), *REDUCES)) for rank in range(3)}
    assert len(lines(alike)) == 1, "they differ in what is not shown"
    assert lines({0: Stacks(state="stopped by a signal")}) == ["rank 0: stopped by a signal"]
    long = Stacks(tuple(frame("f" * 1000, "/" + "d" * 5000, 1) for _ in range(10**4)))
    assert len(lines({0: long})[0]) < 5000


def test_signal_without_a_handler_is_ignored() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        process.send_signal(signal.SIGURG)
        process.communicate(b"\n")
        assert process.returncode == 0


def _dump(function: str, file: str) -> str:
    """What faulthandler writes of a stack that is as long as it shows one."""
    frames = f'  File "{file}", line 1 in {function}\n' * 100
    return f"Stack (most recent call first):\n{frames}"


@pytest.mark.parametrize("letter", ["x", "ü", "\U0001f600"], ids=ascii)
def test_longest_answer_fits_into_a_message(letter: str) -> None:
    stacks = from_dump(_dump(letter * 100, letter * 400))
    assert stacks is not None
    counts = {f"{group}{letter * 58}": 2**63 for group in range(10, 10 + MOST_GROUPS)}
    answer = Position(
        1,
        1.5,
        counts,
        2**63,
        2**63,
        replace(stacks, state="s" * 200, worker="w" * 400),
        1.5,
    )
    assert len(encode(answer)) <= BEFORE_AUTHENTICATION
    shown = ShowStacks(tuple(lines(dict.fromkeys(range(0, 20_000, 2), stacks))))
    assert len(encode(shown)) <= BEFORE_AUTHENTICATION
    assert decode(encode(shown), ShowStacks) == shown


def test_long_frames_are_read(watch: Callable[..., Watched]) -> None:
    script = """
name = "f" * 100
code = f"def {name}(n, wait):\\n    return {name}(n - 1, wait) if n else wait()\\n"
space = {}
exec(compile(code, "/home/" + "x" * 250 + "/module.py", "exec"), space)
def last():
    ready()
    time.sleep(60)
space[name](95, last)
"""
    stacks = watch(script).read("in last (<string>:13)")
    assert len(stacks.main) > 20
    assert stacks.state == ""
