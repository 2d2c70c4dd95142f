"""The lifeline of a bare `init`, which a guard beside the script keeps: real torch, real Gloo, real signals."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from launched import needs_torch
from lifelines import DEFAULT, Job, job, until

pytestmark = needs_torch
Start = Callable[..., Job]

# The survivors wait in a collective operation of Gloo, which no handler written in Python interrupts.
FAILING = """
import torch, torch.distributed as dist
ready()
if rank == int(os.environ["CULPRIT"]):
    until("fail")
    %s
dist.all_reduce(torch.ones(1))
until("end")
"""


@pytest.fixture
def start(clean_env: dict[str, str], port: int, tmp_path: Path) -> Iterator[Start]:
    """Starts a job: `start(script, ranks=3, DISTBOOT_GRACE="1")`."""
    with ExitStack() as stack:

        def begin(script: str = DEFAULT, ranks: int = 3, before: Sequence[str] = (), **env: str) -> Job:
            opened: AbstractContextManager[Job] = job(
                {**clean_env, **env}, port, tmp_path, script, ranks, init=True, before=before
            )
            return stack.enter_context(opened)

        yield begin


ENDS = {
    "exception": ("raise ValueError('boom')", 1, "uncaught exception: ValueError: boom"),
    "sys.exit": ("sys.exit(3)", 3, "exit code 3"),
    "SystemExit": ("raise SystemExit(7)", 7, "exit code 7"),
    "os._exit": ("os._exit(4)", 4, "exit code 4"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL"),
    "SIGSEGV": ("import ctypes; ctypes.string_at(0)", 139, "killed by SIGSEGV"),
}
UNSEEN = "ended without a word"  # where the kernel is older than 6.15, and the parent was quicker than the guard


@pytest.mark.parametrize(("way", "culprit"), [(way, 2) for way in ENDS] + [("exception", 0), ("SIGKILL", 0)])
def test_first_failure_is_known_to_all_and_all_stop(start: Start, way: str, culprit: int) -> None:
    statement, code, said = ENDS[way]
    running = start(FAILING % statement, CULPRIT=str(culprit))
    pids = running.all_ready()
    running.touch("fail")
    codes = running.codes()
    assert codes[culprit] == code
    # Gloo's exception of a lost peer may come before our TERM.
    assert all(code in (1, 143) for rank, code in enumerate(codes) if rank != culprit)
    survivors = {running.first(rank) for rank in range(3) if rank != culprit}
    assert len(survivors) == 1
    (line,) = survivors
    assert any(line.startswith(f"rank {culprit} failed first: {text}") for text in (said, UNSEEN))
    assert f"process {pids[culprit]})" in line
    report = running.report()
    assert (report["outcome"], report["first_failure"]["rank"]) == ("failed", culprit)


@pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "raise SystemExit", "ctx.close(); sys.exit()"])
def test_ends_in_good_order_are_no_failures(start: Start, end: str) -> None:
    running = start(f"ready()\nuntil(f'end-{{rank}}')\n{end}\n")
    running.all_ready()
    for rank in (2, 1, 0):
        running.touch(f"end-{rank}")
        assert running.processes[rank].wait(20) == 0
    assert running.output(1) == running.output(2) == ""
    assert running.summary().endswith("all ended well; exit codes: 0 (ranks 0-2)")


def test_early_end_of_rank_0_is_none(start: Start) -> None:
    running = start("ready()\nuntil(f'end-{rank}')\n")
    running.all_ready()
    running.touch("end-0")
    assert running.processes[0].wait(30) == 0
    for rank in (1, 2):
        running.touch(f"end-{rank}")
        assert running.processes[rank].wait(30) == 0
        assert running.first(rank) == "rank 0 has ended: from now on no rank is told how another one ends"


def test_children_of_a_rank_are_its_own_matter(start: Start) -> None:
    """Forked and other processes end in any way; and the script finds no child that it did not start."""
    script = """
import subprocess, multiprocessing
def fail():
    raise ValueError("not mine")
children = [multiprocessing.get_context("fork").Process(target=fail) for _ in range(2)]
for child in children:
    child.start()
children[0].terminate()
for child in children:
    child.join()
subprocess.run([sys.executable, "-c", "raise ValueError"], stderr=subprocess.DEVNULL)
if os.fork() == 0:
    os._exit(5)
os.wait()
try:
    os.wait()
except ChildProcessError:
    Path(f"alone-{rank}").touch()
"""
    running = start(script + DEFAULT)
    running.all_ready()
    running.touch("end")
    assert running.codes() == [0, 0, 0]
    assert len(list(running.folder.glob("alone-*"))) == 3


def test_data_loader_with_workers_goes_on(start: Start) -> None:
    script = """
import torch
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return index
if __name__ == "__main__":
    for _ in range(2):
        assert sum(int(n) for n in torch.utils.data.DataLoader(Numbers(), num_workers=2)) == 28
    ready()
    if rank == 1:
        until("fail")
        os._exit(2)
    workers = iter(torch.utils.data.DataLoader(Numbers(), num_workers=1))
    until("end")
"""
    running = start(script, ranks=2)
    running.all_ready()
    running.touch("fail")
    assert running.codes() == [143, 2]
    assert running.first(0).startswith("rank 1 failed first: ")


def test_term_from_outside_ends_all_at_once_and_is_no_failure(start: Start) -> None:
    running = start(FAILING % "pass", CULPRIT="1")
    pids = running.all_ready()
    os.kill(pids[0], signal.SIGTERM)  # blocked in a collective operation
    assert running.codes() == [143, 143, 143]
    assert running.first(2).startswith("stopped by SIGTERM from outside: rank 0 got it first, on ")
    assert running.report()["outcome"] == "stopped"


def test_preempted_is_for_scripts_that_ask(start: Start) -> None:
    script = """
assert not ctx.preempted
ready()
while not ctx.preempted:
    time.sleep(0.02)
Path(f"saved-{rank}").touch()
sys.exit(0 if rank else 12)
"""
    running = start(script)
    pids = running.all_ready()
    os.kill(pids[2], signal.SIGTERM)
    assert running.codes() == [12, 0, 0]
    assert len(list(running.folder.glob("saved-*"))) == 3
    assert "stopped by SIGTERM from outside: rank 2 got it first" in running.summary()


def test_success_after_the_failure_of_another_rank_is_none(start: Start) -> None:
    script = """
asked = ctx.preempted
ready()
if rank == 1:
    until("fail")
    os._exit(5)
while not ctx.preempted:
    time.sleep(0.02)
Path(f"saved-{rank}").touch()
"""
    running = start(script)
    running.all_ready()
    running.touch("fail")
    codes = running.codes()
    assert codes[1] == 5
    assert codes[0] == codes[2] == 137
    assert len(list(running.folder.glob("saved-*"))) == 2


def test_script_that_ignores_term_is_killed_after_the_grace(start: Start) -> None:
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FAILING % "os._exit(5)"
    running = start(script.replace("dist.all_reduce(torch.ones(1))", ""), CULPRIT="1", DISTBOOT_GRACE="1")
    running.all_ready()
    running.touch("fail")
    assert running.codes() == [137, 5, 137]


def test_own_handlers_of_the_script_stay_in_force(start: Start) -> None:
    script = """
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda n, _: Path(f"got-{n}-{rank}").touch())
"""
    running = start(script + DEFAULT)
    running.send(1, signal.SIGUSR1)
    until((running.folder / f"got-{int(signal.SIGUSR1)}-1").exists)
    # And those that come to the whole group do not end the guard.
    os.killpg(running.processes[2].pid, signal.SIGUSR2)
    until((running.folder / f"got-{int(signal.SIGUSR2)}-2").exists)
    running.touch("end")
    assert running.codes() == [0, 0, 0]
    assert "all ended well" in running.summary()


def test_script_that_was_stopped_or_held_the_lock_for_a_while_is_no_failure(start: Start) -> None:
    script = """
ready()
if rank == 1:
    import ctypes
    ctypes.PyDLL(None).sleep(4)  # with Python's lock
until("end")
"""
    running = start(script, DISTBOOT_LIFELINE_TIMEOUT="2")
    pids = running.all_ready()
    os.kill(pids[2], signal.SIGSTOP)
    import time

    time.sleep(1)  # shorter than the bound: what is tested is that nothing happens
    os.kill(pids[2], signal.SIGCONT)
    time.sleep(4)
    running.touch("end")
    assert running.codes() == [0, 0, 0]
    assert "all ended well" in running.summary()


def test_script_that_is_stopped_for_ever_is_a_failure(start: Start) -> None:
    running = start(DISTBOOT_LIFELINE_TIMEOUT="2", DISTBOOT_GRACE="1")
    running.send(1, signal.SIGSTOP)
    assert running.codes()[2] == 143
    assert running.first(2).startswith("rank 1 failed first: stopped by a signal (SIGSTOP?) for 2 s")


def test_handler_that_the_script_sets_later_is_run_and_what_stopped_it_is_known(start: Start) -> None:
    script = """
def save(*_):
    Path(f"saved-{rank}").touch()
    sys.exit(7)
signal.signal(signal.SIGTERM, save)
assert signal.getsignal(signal.SIGTERM) is save
"""
    running = start(script + DEFAULT)
    pids = running.all_ready()
    os.kill(pids[1], signal.SIGTERM)
    assert running.codes() == [7, 7, 7]
    assert len(list(running.folder.glob("saved-*"))) == 3
    assert "stopped by SIGTERM from outside: rank 1 got it first" in running.summary()


def test_hook_that_the_script_calls_itself_is_no_end(start: Start) -> None:
    script = """
try:
    raise ValueError("shown, and gone on with")
except ValueError:
    sys.excepthook(*sys.exc_info())
"""
    running = start(script + DEFAULT)
    running.all_ready()
    running.touch("end")
    assert running.codes() == [0, 0, 0]
    assert "all ended well" in running.summary()


def test_script_that_closes_all_files_gets_nothing_written_into_its_own(start: Start) -> None:
    script = """
os.closerange(3, 65536)
files = [open(f"data-{rank}-{n}", "w") for n in range(8)]
"""
    running = start(script + DEFAULT, ranks=2)
    running.all_ready()
    running.touch("end")
    running.codes()
    assert [path.read_text() for path in running.folder.glob("data-*")] == [""] * 16


def test_process_forked_in_c_does_not_end_the_rank(start: Start) -> None:
    script = """
if rank == 1:
    import ctypes
    libc = ctypes.CDLL(None)
    child = libc.fork()
    if child == 0:
        libc.exit(3)
    os.waitpid(child, 0)
"""
    running = start(script + DEFAULT, ranks=2)
    running.all_ready()
    running.touch("end")
    assert running.codes() == [0, 0]
    assert "all ended well" in running.summary()


def test_init_once_more_has_a_lifeline_of_its_own(start: Start) -> None:
    script = (
        """
ctx.close()
ctx = distboot.init(join_timeout=60)
"""
        + FAILING % "os._exit(4)"
    )
    running = start(script, CULPRIT="1")
    running.all_ready()
    running.touch("fail")
    assert running.codes()[1] == 4
    assert running.first(0) == running.first(2)
    assert running.output(0).count("summary") <= 1


def test_script_with_init_under_the_wrapper_has_the_wrappers_lifeline(
    clean_env: dict[str, str], port: int, tmp_path: Path
) -> None:
    script = (
        "import distboot\nctx = distboot.init(join_timeout=60)\nassert not ctx.preempted\n" + FAILING % "os._exit(4)"
    )
    with job({**clean_env, "CULPRIT": "1"}, port, tmp_path, script) as running:
        running.all_ready()
        running.touch("fail")
        codes = running.codes()
        assert codes[1] == 4
        assert running.first(0) == running.first(2)
        assert running.first(0).startswith("rank 1 failed first: exit code 4")


_UNSHARE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.skipif(os.geteuid() != 0, reason="a process namespace needs root")
def test_script_that_is_process_1_of_a_container_is_stopped(start: Start) -> None:
    running = start(FAILING % "sys.exit(3)", ranks=2, before=_UNSHARE, CULPRIT="1", DISTBOOT_GRACE="1")
    for rank in range(2):
        until((running.folder / f"pid-{rank}").exists)
    running.touch("fail")
    codes = running.codes()
    assert codes[1] == 3
    assert codes[0] != 0
    assert running.first(0).startswith("rank 1 failed first: exit code 3")


def test_torchruns_error_file_gets_what_it_expects(start: Start) -> None:
    running = start(FAILING % "raise ValueError('boom')", CULPRIT="1", TORCHELASTIC_ERROR_FILE="error.json")
    running.all_ready()
    running.touch("fail")
    running.codes()
    written = json.loads((running.folder / "error.json").read_text())["message"]
    assert written["message"] == "ValueError: boom"
    assert written["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last):")
    assert written["extraInfo"]["timestamp"].isdigit()


def test_alone_there_is_nobody_to_watch(start: Start) -> None:
    running = start("", ranks=1)
    assert running.codes() == [0]
    assert running.output(0) == ""


@pytest.mark.parametrize("rank", [0, 1])
def test_guard_that_cannot_start_is_said_and_the_training_goes_on(
    clean_env: dict[str, str], port: int, tmp_path: Path, rank: int
) -> None:
    begin = f"import os, sys\nif os.environ['RANK'] == '{rank}': sys.executable = '/nonexistent'\n"
    (tmp_path / "sitecustomize.py").write_text(begin)
    env = {**clean_env, "PYTHONPATH": f"{tmp_path}{os.pathsep}{clean_env.get('PYTHONPATH', '')}"}
    with job(env, port, tmp_path, init=True) as running:
        running.all_ready()
        running.touch("end")
        assert running.codes() == [0, 0, 0]
        assert "warning: this rank has no lifeline: " in running.output(rank)
