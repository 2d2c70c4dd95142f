"""What scripts with a bare `init` do by themselves, and the lifeline has to bear: handlers, hooks, forks, files."""

from __future__ import annotations

import json
import os
import signal

from launched import needs_torch
from lifelines import DEFAULT, FAILING_TORCH, Start, until

pytestmark = needs_torch


def test_children_of_a_rank_are_its_own_matter(start_init: Start) -> None:
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
    running = start_init(script + DEFAULT)
    running.all_ready()
    running.touch("end")
    assert running.codes() == [0, 0, 0]
    assert len(list(running.folder.glob("alone-*"))) == 3


def test_data_loader_with_workers_goes_on(start_init: Start) -> None:
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
    running = start_init(script, ranks=2)
    running.all_ready()
    running.touch("fail")
    assert running.codes() == [143, 2]
    assert running.first(0).startswith("rank 1 failed first: ")


def test_own_handlers_of_the_script_stay_in_force(start_init: Start) -> None:
    script = """
for number in (signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda n, _: Path(f"got-{n}-{rank}").touch())
"""
    running = start_init(script + DEFAULT)
    running.send(1, signal.SIGUSR1)
    until((running.folder / f"got-{int(signal.SIGUSR1)}-1").exists)
    # And those that come to the whole group do not end the guard.
    os.killpg(running.processes[2].pid, signal.SIGUSR2)
    until((running.folder / f"got-{int(signal.SIGUSR2)}-2").exists)
    running.touch("end")
    assert running.codes() == [0, 0, 0]
    assert "all ended well" in running.summary()


def test_handler_that_the_script_sets_later_is_run_and_what_stopped_it_is_known(start_init: Start) -> None:
    script = """
def save(*_):
    Path(f"saved-{rank}").touch()
    sys.exit(7)
signal.signal(signal.SIGTERM, save)
assert signal.getsignal(signal.SIGTERM) is save
"""
    running = start_init(script + DEFAULT)
    pids = running.all_ready()
    os.kill(pids[1], signal.SIGTERM)
    assert running.codes() == [7, 7, 7]
    assert len(list(running.folder.glob("saved-*"))) == 3
    assert "stopped by SIGTERM from outside: rank 1 got it first" in running.summary()


def test_hook_that_the_script_calls_itself_is_no_end(start_init: Start) -> None:
    script = """
try:
    raise ValueError("shown, and gone on with")
except ValueError:
    sys.excepthook(*sys.exc_info())
"""
    running = start_init(script + DEFAULT)
    running.all_ready()
    running.touch("end")
    assert running.codes() == [0, 0, 0]
    assert "all ended well" in running.summary()


def test_process_forked_in_c_does_not_end_the_rank(start_init: Start) -> None:
    script = """
if rank == 1:
    import ctypes
    libc = ctypes.PyDLL(None)  # which keeps Python's lock: else another thread may have it in the child, for ever
    child = libc.fork()
    if child == 0:
        libc.exit(3)
    os.waitpid(child, 0)
"""
    running = start_init(script + DEFAULT, ranks=2)
    running.all_ready()
    running.touch("end")
    assert running.codes() == [0, 0]
    assert "all ended well" in running.summary()


def test_init_once_more_has_a_lifeline_of_its_own(start_init: Start) -> None:
    script = (
        """
ctx.close()
ctx = distboot.init(join_timeout=60)
"""
        + FAILING_TORCH % "os._exit(4)"
    )
    running = start_init(script, CULPRIT="1")
    running.all_ready()
    running.touch("fail")
    assert running.codes()[1] == 4
    assert running.first(0) == running.first(2)
    assert running.output(0).count("summary") <= 1


def test_torchruns_error_file_gets_what_it_expects(start_init: Start) -> None:
    running = start_init(FAILING_TORCH % "raise ValueError('boom')", CULPRIT="1", TORCHELASTIC_ERROR_FILE="error.json")
    running.all_ready()
    running.touch("fail")
    running.codes()
    written = json.loads((running.folder / "error.json").read_text())["message"]
    assert written["message"] == "ValueError: boom"
    assert written["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last):")
    assert written["extraInfo"]["timestamp"].isdigit()
