"""A stop reaches a script in whatever thread it reads `ctx.preempted`, and before its first read."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from inside import StopPages, ends_at
from launched import in_one_way, needs_torch
from ranks import Ranks
from supervised import Start, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="agents share pages on Linux only")

WRAPPER = ("-m", "distboot")
BOTH = pytest.mark.parametrize("before", [(), WRAPPER], ids=["init", "wrapper"])
# Rank 1 is asked at its tenth step; `TARGET` is the process that gets the signal.
IN_A_THREAD = """
import signal, threading
def train():
    ctx = distboot.init("none", join_timeout=60)
    step = 0
    while not ctx.preempted:
        step += 1
        assert step < 1000
        if step == 10 and ctx.rank == 1:
            target = os.getppid() if os.environ["TARGET"] == "wrapper" else os.getpid()
            os.kill(target, getattr(signal, os.environ["NUMBER"]))
        ctx.barrier()
        time.sleep(0.01)
    ctx.barrier()
    touch(f"{ctx.rank}-stopped-{step}")
    ctx.close()
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


@pytest.mark.parametrize("number", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize(
    ("before", "target"),
    [((), "script"), (WRAPPER, "script"), (WRAPPER, "wrapper")],
    ids=["init", "below-the-wrapper", "wrapper"],
)
def test_init_in_a_thread_stops_with_all(
    ranks: Ranks, tmp_path: Path, before: tuple[str, ...], target: str, number: str
) -> None:
    env = {"TARGET": target, "NUMBER": number, "DISTBOOT_STOP_SIGNALS": "USR1"}
    ended = ranks(IN_A_THREAD, 2, *before, **env)
    assert [code for _, code in ended] == [0, 0], ended
    stopped = sorted(path.name.partition("-stopped-") for path in tmp_path.glob("*-stopped-*"))
    assert [rank for rank, _, _ in stopped] == ["0", "1"]
    assert len({step for _, _, step in stopped}) == 1


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("class Job:\n    def __init__(self): self.preempted = False\nJob()", -signal.SIGTERM),
        ("preempted = False\ndef note(*_): global preempted; preempted = True", -signal.SIGTERM),
        ("def train(): return ctx.preempted", 0),
    ],
    ids=["attribute", "global", "read"],
)
def test_variable_of_this_name_is_no_read(ranks: Ranks, script: str, code: int) -> None:
    ends = """
import signal
ctx = distboot.init("none")
os.kill(os.getpid(), signal.SIGTERM)
"""
    ((output, ended_with),) = ranks(f"{script}{ends}", 1)
    assert ended_with == code, output


FIRST_STEP = """
import signal
ctx = distboot.init("none", join_timeout=60)
def ask():
    if str(ctx.rank) in os.environ["ASKED"]:
        os.kill(os.getppid() if os.environ["TARGET"] == "wrapper" else os.getpid(), signal.SIGTERM)
if ctx.rank == 1:
    until("read")
    ask()
    time.sleep(0.8)  # its first step, which lasts until after the agreement
step = 0
while not ctx.preempted:
    step += 1
    if step == 1 and ctx.rank == 0:
        touch("read")
        ask()
    assert step < 1000
    ctx.barrier()
say("stopped after", step)
"""


@in_one_way("asked", ["0", "1", "01"])
def test_stop_in_the_first_step_is_agreed(ranks: Ranks, asked: str, init: bool) -> None:
    before = () if init else WRAPPER
    target = "script" if init else "wrapper"
    ended = ranks(FIRST_STEP, 2, *before, ASKED=asked, TARGET=target)
    assert [code for _, code in ended] == [0, 0], ended
    assert all("stopped after 1\n" in output for output, _ in ended), ended


HANDLED = """
import signal
ctx = distboot.init("none", join_timeout=60)
ctx.preempted
signal.signal(signal.SIGTERM, lambda *_: touch(f"handled-{ctx.rank}"))
touch(f"up-{ctx.rank}")
until("up-0", "up-1")
if ctx.is_main:
    os.kill(os.getppid(), signal.SIGTERM)
"""


def test_wrapper_holds_back_term_from_who_reads(ranks: Ranks, tmp_path: Path) -> None:
    script = """
while not ctx.preempted:
    time.sleep(0.01)
time.sleep(0.5)  # the checkpoint
"""
    ended = ranks(HANDLED + script, 2, *WRAPPER)
    assert [code for _, code in ended] == [0, 0], ended
    assert not list(tmp_path.glob("handled-*"))


ENDED_BY = """
import signal, sys
ctx = distboot.init("none", join_timeout=60)
step = 0
while not ctx.preempted:
    step += 1
    if step == 3:
        touch(f"up-{ctx.rank}")
        until("up-0", "up-1", "up-2")
    if step == 5 and ctx.rank == 1:
        exec(os.environ["END"])
    time.sleep(0.02)
time.sleep(2)  # the checkpoint: longer than a second, after which KILL follows a late TERM
print("saved", flush=True)
"""


@in_one_way(
    "end",
    [
        "os.kill(os.getpid(), signal.SIGHUP)",
        "os.kill(os.getpid(), signal.SIGINT)",
        "os.kill(os.getpid(), signal.SIGQUIT)",
        "sys.exit(143)",
    ],
)
def test_ranks_left_after_any_signal_are_told(ranks: Ranks, end: str, init: bool) -> None:
    before = () if init else WRAPPER
    ended = ranks(ENDED_BY, 3, *before, END=end, DISTBOOT_GRACE="12")
    codes = [code for _, code in ended]
    assert codes[0] == codes[2] == 0, ended
    assert codes[1] != 0, ended
    assert ["saved\n" in output for output, _ in ended] == [True, False, True], ended
    assert "killed" not in ended[0][0], ended
    assert "all ranks stop at read" in ended[0][0], ended


def test_term_comes_after_the_grace_and_then_kill(ranks: Ranks, tmp_path: Path) -> None:
    ended = ranks(HANDLED + "time.sleep(50)\n", 2, *WRAPPER, DISTBOOT_GRACE="1")
    assert [code for _, code in ended] == [143, 143], ended
    assert len(list(tmp_path.glob("handled-*"))) == 2
    assert "within the grace (DISTBOOT_GRACE): killed" in ended[0][0]
    assert "never came to that read" not in ended[0][0]


def test_read_that_is_never_reached_is_named(ranks: Ranks) -> None:
    script = """
import signal
ctx = distboot.init("none", join_timeout=60)
def train():
    return ctx.preempted
if ctx.rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
elif ctx.rank == 2:
    signal.signal(signal.SIGTERM, lambda *_: None)
elif ctx.rank == 3:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
ctx.barrier()
if ctx.is_main:
    os.kill(os.getppid(), signal.SIGTERM)
time.sleep(50)
"""
    ended = ranks(script, 4, *WRAPPER, DISTBOOT_GRACE="2")
    said = "killed; SIGTERM did not end it, as its code reads ctx.preempted, but it never came to"
    assert all("within the grace (DISTBOOT_GRACE): killed" in output for output, _ in ended), ended
    # The others had another reason
    assert [said in output for output, _ in ended] == [True, False, False, False], ended


@BOTH
def test_term_ends_a_script_that_never_reads(ranks: Ranks, before: tuple[str, ...]) -> None:
    script = """
import signal
ctx = distboot.init("none", join_timeout=60)
ctx.barrier()
if ctx.is_main:
    os.kill(os.getppid() if os.environ["TARGET"] == "wrapper" else os.getpid(), signal.SIGTERM)
time.sleep(50)
"""
    target = "wrapper" if before else "script"
    ended = ranks(script, 2, *before, TARGET=target, DISTBOOT_GRACE="40")
    assert [code for _, code in ended] == [-15, -15] or [code for _, code in ended] == [143, 143]
    assert "killed" not in ended[0][0], ended


def test_stop_of_an_unmodified_script_names_no_read(start: Start) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: until("end") or sys.exit(5))
ready()
until("never")
"""
    job = start(script, ranks=2, DISTBOOT_FAILURE_DETECTION="0", DISTBOOT_REPORT="job.jsonl")
    job.all_ready()
    job.processes[0].send_signal(signal.SIGTERM)
    journal = job.folder / "job.jsonl"
    until(lambda: '"stop_agreed"' in journal.read_text())
    job.processes[1].send_signal(signal.SIGTERM)
    job.touch("end")
    assert job.codes(20) == [5, 5]
    assert "ctx.preempted" not in job.output(0)


FAILED_WHILE = """
import ctypes, signal, threading
def lock_in_c(library):
    lock = ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)  # as a signal does not interrupt it
def lock():
    lock = threading.Lock()
    with lock:
        lock.acquire()
def save():
    while not ctx.preempted:
        time.sleep(0.01)
    time.sleep(5)
    touch("saved")
def handle():
    def handler(*_):
        time.sleep(5)
        touch("saved")
        sys.exit(7)
    signal.signal(signal.SIGTERM, handler)
    time.sleep(50)
def work():
    end = time.monotonic() + 6
    while time.monotonic() < end:
        pass
    save()
ctx = distboot.init("none", join_timeout=60)
ctx.barrier()
if ctx.rank == 1:
    time.sleep(0.3)  # until the other one is there
    raise ValueError("boom")
"""


# What a rank does while another one fails, and its exit code.
WAITING = {
    "lock_in_c(ctypes.CDLL(None))": 143,
    "lock_in_c(ctypes.PyDLL(None))": 137,  # no thread of Python runs
    "lock()": 143,
    "time.sleep(50)": 143,
}
SAVING = ("save()", "handle()", "work()")


@in_one_way("does", WAITING)
def test_failed_job_does_not_wait_for_who_waits(ranks: Ranks, does: str, init: bool) -> None:
    code = WAITING[does]
    begun = time.monotonic()
    before = () if init else WRAPPER
    first, second = ranks(FAILED_WHILE + does, 2, *before, DISTBOOT_GRACE="45")
    assert time.monotonic() - begun < 35, first
    assert second[1] == 1, second
    assert first[1] == (128 - code if init else 1), first
    assert ("waits in a call that TERM does not end: killed" in first[0]) == (code == 137), first


@in_one_way("does", SAVING)
def test_failed_job_waits_for_who_saves(
    ranks: Ranks, tmp_path: Path, does: str, init: bool
) -> None:
    before = () if init else WRAPPER
    first, second = ranks(FAILED_WHILE + does, 2, *before, DISTBOOT_GRACE="15")
    assert (tmp_path / "saved").exists(), first
    assert [first[1], second[1]] == [1, 1], first


# A store that takes 8 kB every 0.1 s; the processor is idle meanwhile
UPLOAD = """
import socket
def store(server):
    connection, _ = server.accept()
    while connection.recv(8192):
        time.sleep(0.1)
def upload(seconds):
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    child = os.fork()
    if not child:
        client.close()
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        store(server)
        os._exit(0)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        client.sendall(bytes(8192))
    client.close()
    touch("saved")
"""
_SLEEPS = "likely waits for another rank: ended before the end of the grace (DISTBOOT_GRACE)"


@BOTH
def test_failed_job_waits_for_an_upload(
    ranks: Ranks, tmp_path: Path, before: tuple[str, ...]
) -> None:
    script = UPLOAD + FAILED_WHILE + "ctx.preempted\nupload(9)\nwhile not ctx.preempted: pass"
    first, second = ranks(script, 2, *before, DISTBOOT_GRACE="15")
    assert (tmp_path / "saved").exists(), first
    assert [first[1], second[1]] == [1, 1], first
    assert "before the end of the grace" not in first[0]


@BOTH
def test_script_that_is_ended_early_is_named(ranks: Ranks, before: tuple[str, ...]) -> None:
    first, _ = ranks(FAILED_WHILE + "time.sleep(50)", 2, *before, DISTBOOT_GRACE="9")
    named = re.findall(r"rank 0 .*: the main thread has not run for (\d+) s after TERM, ", first[0])
    assert len(named) == 1, first
    assert 3 <= int(named[0]) < 9
    assert _SLEEPS in first[0]
    assert "killed" not in first[0]


def test_term_ends_a_script_with_closed_context(start: Start) -> None:
    script = """
import distboot
ctx = distboot.init("none", join_timeout=60)
ctx.preempted
ctx.close()
ready()
time.sleep(50)
"""
    job = start(script, ranks=2, DISTBOOT_GRACE="40")
    job.all_ready()
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.codes(20) == [143, 143]


CLOSED = """
import signal, threading
def train():
    ctx = distboot.init("none", join_timeout=60)
    assert not ctx.preempted
    if not os.environ["CLOSER"]:
        ctx.close()
    return ctx
def run(step):
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
if os.environ["TRAINER"]:
    run(train)
else:
    run(train().close) if os.environ["CLOSER"] else train()
touch(f"up-{os.environ['RANK']}")
until("up-0", "up-1")
os.kill(os.getpid(), int(os.environ["NUMBER"]))
time.sleep(20)
"""


@pytest.mark.parametrize(
    ("trainer", "closer"),
    [("", ""), ("thread", ""), ("", "thread")],
    ids=["main", "all-in-a-thread", "closed-in-a-thread"],
)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_script_after_close(
    ranks: Ranks, number: int, trainer: str, closer: str
) -> None:
    where = {"TRAINER": trainer, "CLOSER": closer}
    ended = ranks(CLOSED, 2, NUMBER=str(number), DISTBOOT_STOP_SIGNALS="INT", **where)
    assert [code for _, code in ended] == [-number, -number], ended


@BOTH
def test_handlers_of_the_script_return_at_close(ranks: Ranks, before: tuple[str, ...]) -> None:
    script = """
import signal
def handle(*_):
    handled.append(1)
handled = []
signal.signal(signal.SIGTERM, handle)
for _ in range(2):
    with distboot.init("none", join_timeout=60) as ctx:
        assert not ctx.preempted
        assert signal.getsignal(signal.SIGTERM) is not handle
        ctx.barrier()
    assert signal.getsignal(signal.SIGTERM) is handle
    assert not ctx.preempted  # a read of a closed context takes no signal
    assert signal.getsignal(signal.SIGTERM) is handle
own = lambda *_: None
with distboot.init("none", join_timeout=60) as ctx:
    assert not ctx.preempted
    signal.signal(signal.SIGTERM, own)
    ctx.barrier()
assert signal.getsignal(signal.SIGTERM) is own
signal.signal(signal.SIGTERM, handle)
os.kill(os.getpid(), signal.SIGTERM)
assert handled
"""
    ended = ranks(script, 1, *before)
    assert [code for _, code in ended] == [0], ended


def test_notice_ends_no_script_after_close(ranks: Ranks) -> None:
    script = """
import signal
with distboot.init("none", join_timeout=60) as ctx:
    assert not ctx.preempted
os.kill(os.getpid(), signal.SIGUSR1)
with distboot.init("none", join_timeout=60) as ctx:
    assert ctx.preempted
"""
    ended = ranks(script, 1, DISTBOOT_STOP_SIGNALS="USR1")
    assert [code for _, code in ended] == [0], ended


@BOTH
def test_next_context_in_a_thread_survives_term(ranks: Ranks, before: tuple[str, ...]) -> None:
    script = """
import signal, threading
def train():
    ctx = distboot.init("none", join_timeout=60)
    assert not ctx.preempted
    ctx.close()
    ctx = distboot.init("none", join_timeout=60)
    child = os.fork()
    if not child:  # which is not the rank
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(50)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGTERM
    assert not ctx.preempted
    ctx.barrier()
    if ctx.is_main:
        os.kill(os.getpid(), signal.SIGTERM)
    while not ctx.preempted:
        time.sleep(0.01)
    say("stopped")
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""
    ended = ranks(script, 2, *before)
    assert [code for _, code in ended] == [0, 0], ended
    assert all("stopped\n" in output for output, _ in ended), ended


def test_two_threads_that_read_are_warned_of(ranks: Ranks) -> None:
    script = """
import threading
ctx = distboot.init("none", join_timeout=60)
for _ in range(3):
    ctx.preempted
    thread = threading.Thread(target=lambda: ctx.preempted)
    thread.start()
    thread.join()
"""
    ((output, code),) = ranks(script, 1)
    said = "two threads read ctx.preempted: it turns true at the same read on all ranks"
    assert (output.count(said), code) == (1, 0), output


@BOTH
def test_what_a_script_writes_harms_no_other(ranks: Ranks, before: tuple[str, ...]) -> None:
    """It may write any number there, and cannot cut the page short, which would end its agent by SIGBUS."""
    script = """
ctx = distboot.init("none", join_timeout=60)
if ctx.rank == 1:
    maps = Path("/proc/self/map_files")
    for name in os.listdir(maps):
        if "memfd:distboot" in os.readlink(maps / name):
            with open(maps / name, "r+b") as page:
                try:
                    page.truncate(0)
                except OSError as error:
                    say(error.strerror)
    for value in (0, 1, 2**63, 2**64 - 1):
        for index in range(512):
            ctx._preemption._page[index] = value
        time.sleep(0.3)
    ctx._preemption._page[1] = 1
ctx.barrier()
if ctx.is_main:
    ctx.request_stop()
while not ctx.preempted:
    time.sleep(0.01)
say("stopped")
"""
    if os.geteuid():
        script = script.replace("os.listdir(maps)", "[]")  # only root may open them
    first, second = ranks(script, 2, *before, DISTBOOT_GRACE="6")
    for output, code in (first, second):
        assert ("stopped\n" in output, code) == (True, 0), output


def test_agent_sees_in_pages_who_needs_signals() -> None:
    pages = StopPages(limit=60.0)
    assert pages.is_read(0) is False
    file = pages.new(0, stops=False)
    assert file is not None
    os.close(file)
    assert pages.is_read(0) is None
    pages.stop_at(1)  # no rank has read it
    assert pages.is_read(0) is False
    second = StopPages(limit=60.0)
    file = second.new(0, stops=False)
    assert file is not None
    os.close(file)
    second.stop_at(2)
    assert second.is_read(0) is True
    second.close(0)
    assert second.is_read(0) is False


def test_which_signals_end_a_process_is_known() -> None:
    script = "import signal; signal.signal(10, print); signal.signal(1, signal.SIG_IGN); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        until(lambda: not ends_at(process.pid, signal.SIGHUP))
        found = [ends_at(process.pid, number) for number in (10, 12, 1)]
        process.kill()
    assert found == [False, True, False]
    assert not ends_at(process.pid, 12)  # it is gone


@pytest.mark.all
@needs_torch
@pytest.mark.parametrize("handled", ["", "--signals-to-handle=SIGTERM,SIGUSR1"])
def test_signal_that_ends_torchrun_is_warned_of(
    clean_env: dict[str, str], tmp_path: Path, handled: str
) -> None:
    (tmp_path / "train.py").write_text("import distboot\ndistboot.init('none')\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, *([handled] if handled else []), "train.py"],
        env={**clean_env, "DISTBOOT_STOP_SIGNALS": "USR1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "unrecognized arguments" in done.stderr:
        pytest.skip("this torchrun has no --signals-to-handle")
    said = "warning: DISTBOOT_STOP_SIGNALS: SIGUSR1 would end torchrun (process "
    assert (done.stderr.count(said), done.returncode) == (0 if handled else 1, 0), done.stderr
