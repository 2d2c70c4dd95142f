"""How the ranks of a job are stopped, and what scripts do by themselves: handlers, forks, files, children."""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import ROOT, Run
from launched import in_both_ways, in_one_way
from ranks import WRAPPER, RunRanks
from supervised import DEFAULT, FAILING, Start, until

# Blocked in C with Python's lock held, and stopped: no handler of Python's runs there.
BLOCKED = {
    "ignores-TERM": "signal.signal(signal.SIGTERM, signal.SIG_IGN); until('end')",
    "holds-the-lock": (
        "signal.signal(signal.SIGTERM, print)\nimport ctypes\nctypes.PyDLL(None).sleep(60)"
    ),
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
}


@in_one_way("name", BLOCKED)
def test_survivor_that_does_not_stop_is_killed(start: Start, name: str, init: bool) -> None:
    blocked = BLOCKED[name]
    script = """
ready()
if rank == 1:
    until("fail")
    os._exit(5)
if rank == 2:
    exec(%r)
until("end")
"""
    running = start(script % blocked, init=init, DISTBOOT_GRACE="1")
    pids = running.all_ready()
    if "STOP" in blocked:
        until(lambda: Path(f"/proc/{pids[2]}/stat").read_text().split()[2] == "T")
    running.touch("fail")
    codes = running.codes()
    assert codes[:2] == [143 if init else 5, 5]
    # Who was stopped goes on, and is ended by TERM
    assert codes[2] in ((137, 143) if init else (5,))
    assert running.first(2) == running.first(0)


def test_uncaught_keyboard_interrupt_is_from_outside(start_init: Start) -> None:
    running = start_init(FAILING % "raise KeyboardInterrupt", CULPRIT="1")
    running.fail()
    assert running.first(2).startswith("stopped by an external SIGINT: rank 1 got it first, on ")
    assert running.report()["outcome"] == "stopped"


def test_success_after_another_rank_failed_is_failure(start_init: Start) -> None:
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
    running = start_init(script)
    assert running.fail() == [5, 5, 5]
    assert not any("within the grace" in running.output(rank) for rank in (0, 2))
    assert len(list(running.folder.glob("saved-*"))) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="a process namespace needs root")
def test_script_as_process_1_is_stopped(start_init: Start) -> None:
    contained = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    running = start_init(
        FAILING % "sys.exit(3)", ranks=2, before=contained, CULPRIT="1", DISTBOOT_GRACE="1"
    )
    for rank in range(2):
        until((running.folder / f"pid-{rank}").exists)
    running.touch("fail")
    codes = running.codes()
    assert codes[1] == 3
    assert codes[0] != 0
    assert running.first(0).startswith("rank 1 failed first: exit code 3")


def test_term_for_waiting_rank_0_blames_no_other(start: Start) -> None:
    running = start("ready()\nuntil(f'end-{rank}')\n")
    running.all_ready()
    running.touch("end-0")
    until(lambda: not Path(f"/proc/{running.pid(0)}").exists())
    running.processes[0].terminate()
    assert running.processes[0].wait(20) == 0
    for rank in (1, 2):
        running.touch(f"end-{rank}")
    assert running.codes() == [0, 0, 0]
    assert "no failure was seen" in running.summary()


def test_unread_stderr_does_not_keep_a_survivor(start: Start) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 65536)
    os.set_blocking(writing, True)
    running = start(FAILING % "os._exit(5)", stderr=writing, CULPRIT="1")
    assert running.fail() == [5, 5, 5]
    os.close(reading)
    os.close(writing)


@in_both_ways
def test_children_of_a_rank_are_its_own_matter(start: Start, init: bool) -> None:
    """They end in any way, the hook is called for what goes on; and the script finds no child that it did not start."""
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
for leave in (os._exit, sys.exit):
    if os.fork() == 0:
        leave(5)
    os.wait()
import ctypes
libc = ctypes.PyDLL(None)  # which keeps Python's lock: else another thread may have it in the child, for ever
if libc.fork() == 0:
    libc.exit(3)
os.wait()
try:
    raise ValueError("shown, and gone on with")
except ValueError:
    sys.excepthook(*sys.exc_info())
try:
    os.wait()
except ChildProcessError:
    Path(f"alone-{rank}").touch()
"""
    running = start(script + DEFAULT, init=init)
    assert running.finish() == [0, 0, 0]
    assert len(list(running.folder.glob("alone-*"))) == 3
    assert "all ended well" in running.summary()


@in_both_ways
def test_scripts_own_handlers_stay_and_signal_is_known(start: Start, init: bool) -> None:
    script = """
def save(*_):
    Path(f"saved-{rank}").touch()
    sys.exit(7)
signal.signal(signal.SIGTERM, save)
assert signal.getsignal(signal.SIGTERM) is save
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda n, _: Path(f"got-{n}-{rank}").touch())
"""
    running = start(script + DEFAULT, init=init)
    running.all_ready()
    running.processes[1].send_signal(signal.SIGUSR1)
    until((running.folder / f"got-{int(signal.SIGUSR1)}-1").exists)
    # And those that come to the whole group do not end the sidecar.
    os.killpg(running.processes[2].pid, signal.SIGUSR2)
    until((running.folder / f"got-{int(signal.SIGUSR2)}-2").exists)
    running.processes[1].terminate()
    assert running.codes() == [7, 7, 7]
    assert len(list(running.folder.glob("saved-*"))) == 3
    receiver = "rank 1 got it first" if init else "the wrapper of rank 1 got it at"
    assert f"stopped by an external SIGTERM: {receiver}" in running.summary()
    assert running.report()["outcome"] == "stopped"


def test_torchruns_error_file_has_the_exit_text(start_init: Start) -> None:
    running = start_init(
        FAILING % "sys.exit('no dataset')", CULPRIT="1", TORCHELASTIC_ERROR_FILE="error.json"
    )
    running.fail()
    written = json.loads((running.folder / "error.json").read_text())["message"]
    assert written["message"] == "SystemExit: no dataset"
    assert written["extraInfo"]["py_callstack"].startswith("SystemExit: no dataset")
    assert written["extraInfo"]["timestamp"].isdigit()


def test_script_finds_its_python_as_it_was(start: Start, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import builtins\nbuiltins.own_ran = True\n")
    script = """
import sitecustomize
print(own_ran, os.environ["PYTHONPATH"], "DISTBOOT_CRASH_HOOKS" in os.environ, any("injected" in p for p in sys.path))
ready()
"""
    path = f"{own}{os.pathsep}{ROOT}"
    running = start(script, PYTHONPATH=path)
    assert running.codes() == [0, 0, 0]
    assert running.output(1) == f"True {path} False False\n"


# What a sitecustomize of the user may do to the hooks before the script starts.
_SITES = {
    "fails to import": "raise ImportError('user bug')",
    "fails": "1 / 0",
    "has a syntax error": "def f(:",
    "replaces the hook": "import sys\nsys.excepthook = lambda *_: print('mine', file=sys.stderr)",
    "wraps the hook": (
        "import sys\nbefore = sys.excepthook\nsys.excepthook = lambda *a: "
        "(print('mine'), before(*a))"
    ),
}


@pytest.mark.parametrize("site", _SITES)
def test_sitecustomize_of_the_user_leaves_the_hooks_on(
    distboot: Run, tmp_path: Path, site: str
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text(_SITES[site])
    done = distboot(
        *["run", "--framework", "none", "--nproc-per-node", "2", "--"],
        sys.executable,
        "train.py",
        env={"PYTHONPATH": f"{tmp_path / 'own'}{os.pathsep}{ROOT}"},
        train=(
            "import os, time\nif os.environ['RANK'] == '1': raise "
            "ValueError('boom')\ntime.sleep(60)\n"
        ),
    )
    head = "rank 1 failed first: uncaught exception: ValueError: boom, on "
    assert done.stderr.count(head) == 1
    assert ", in <module> (train.py:2)" in done.stderr
    assert done.returncode == 1


def test_sitecustomize_that_crashes_is_reported(distboot: Run, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    crash = "import os\nif os.environ.get('RANK') == '1': import ctypes; ctypes.string_at(0)"
    (tmp_path / "own" / "sitecustomize.py").write_text(crash)
    done = distboot(
        *["run", "--framework", "none", "--nproc-per-node", "2", "--"],
        sys.executable,
        "train.py",
        env={"PYTHONPATH": f"{tmp_path / 'own'}{os.pathsep}{ROOT}"},
        train="import time\ntime.sleep(60)\n",
    )
    assert "rank 1 failed first: killed by SIGSEGV, on " in done.stderr
    assert "in <module> (sitecustomize.py:2)" in done.stderr


@pytest.mark.parametrize("option", ["-I", "-E", "-S", "-uE"])
@pytest.mark.parametrize("inits", [True, False], ids=["init", "plain"])
def test_python_without_hooks_is_warned_of(distboot: Run, option: str, inits: bool) -> None:
    init = f"sys.path.insert(0, {str(ROOT)!r}); import distboot; distboot.init('none')"
    done = distboot(
        *["run", "--framework", "none", "--nproc-per-node", "2", "--"],
        *(sys.executable, option, "train.py"),
        train=f"""
import os, sys, time
{init if inits else ""}
if os.environ["RANK"] == "1": raise ValueError("boom")
time.sleep(60)
""",
    )
    warning = (
        f"warning: python -{option[-1]} runs the script without distboot's "
        "hooks: an uncaught exception"
    )
    assert done.stderr.count(warning) == 1
    how = "uncaught exception: ValueError: boom" if inits else "exit code 1"
    assert f"rank 1 failed first: {how}, on " in done.stderr


def test_hook_in_place_of_ours_loses_nothing(start: Start) -> None:
    # As rich.traceback.install() sets one
    script = FAILING % "sys.excepthook = lambda *_: print('mine'); raise ValueError('boom')"
    running = start(script, CULPRIT="1")
    running.fail()
    assert "rank 1 failed first: uncaught exception: ValueError: boom, on " in running.first(0)
    assert "mine" in running.output(1)


def test_context_made_again_leaves_no_finder(run: Run) -> None:
    script = """
import sys, distboot
counts = []
for _ in range(3):
    distboot.init("none").close()
    counts.append(len(sys.meta_path))
print(len(set(counts)))
"""
    assert run(sys.executable, "-c", script).stdout == "1\n"


def test_script_closing_all_files_finds_them_clean(start: Start) -> None:
    script = """
os.closerange(3, 65536)
files = [open(f"data-{rank}-{n}", "w") for n in range(8)]
"""
    running = start(script + DEFAULT, ranks=2)
    running.finish()
    assert [path.read_text() for path in running.folder.glob("data-*")] == [""] * 16


LEAVES_EARLY = """
import sys
import distboot
for trial in range(2):
    with distboot.init("none", join_timeout=5) as ctx:
        pass
    if ctx.rank == 1:
        sys.exit(0)
"""


@pytest.mark.parametrize("before", [(*WRAPPER, "--"), ()], ids=["wrapper", "init"])
def test_rank_that_leaves_before_another_init_is_named(
    run_ranks: RunRanks, before: tuple[str, ...]
) -> None:
    waits, leaves = run_ranks(LEAVES_EARLY, before=(*before, sys.executable))
    assert "rank 0 failed first" not in waits.err
    assert "rank 1 exited with code 0 before the framework could start" in waits.err
    assert "rank 0 failed first" not in leaves.err


@pytest.mark.parametrize("closed", ["<&- >&-", "<&-", ">&- 2>&-"])
def test_closed_streams_take_no_agent(run_ranks: RunRanks, closed: str) -> None:
    """The agent's files would have their numbers."""
    script = """
import distboot
ctx = distboot.init("none", join_timeout=30)
ctx.barrier()
"""
    before = ("sh", "-c", f'exec {sys.executable} "$0" {closed}')
    assert [rank.code for rank in run_ranks(script, before=before)] == [0, 0]
