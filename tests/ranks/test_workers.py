"""Workers that a script has started with multiprocessing, while all processes of its job are told to stop."""

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from inside import proc_stat
from launched import needs, needs_torch
from supervised import Started, until
from tensorflows import ByHand

METHODS = ["fork", "spawn", "forkserver"]
WAYS = ["init", "wrapper"]

# Below `init` a script reads `ctx.preempted`, which shields its workers. Below the wrapper it has a handler of its own,
# and its workers are shielded by DISTBOOT_SHIELD_WORKERS.
_BEGIN = """
import json, os, signal, subprocess, sys, time
import multiprocessing as mp
from pathlib import Path
def blocks(text=None):
    lines = (text or Path("/proc/self/status").read_text()).splitlines()
    mask = int(next(line.split()[1] for line in lines if line.startswith("SigBlk")), 16)
    return bool(mask >> signal.SIGTERM - 1 & 1)
def touch(name, text=""):
    Path(f"{name}.part").write_text(text)
    Path(f"{name}.part").rename(name)
def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
def begin():
    global asked
    told = []
    if sys.argv[1] == "init":
        import distboot
        ctx = distboot.init("none", join_timeout=60)
        asked = lambda: getattr(ctx, "preempted")  # not named, so that the first read matters
    else:
        signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
        asked = lambda: bool(told)
    asked()
def end():
    if sys.argv[1] == "wrapper":
        # The SIGTERM that the wrapper passes on may come after Python has put back the default
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
def until_told():
    touch("ready-" + os.environ["RANK"], str(os.getpid()))
    until(asked)
    until(Path("told").exists)
"""
_WORKERS = """
def answer(asked):
    while True:
        asked.send(asked.recv() ** 2)
def square(number):
    return number ** 2
if __name__ == "__main__":
    begin()
    context = mp.get_context(sys.argv[2])
    ours, its = context.Pipe()
    process, sleeping = context.Process(target=answer, args=(its,)), context.Process(target=time.sleep, args=(3600,))
    process.start(), sleeping.start()
    pool = context.Pool(2)
    def work():
        ours.send(3)
        return [ours.recv() if ours.poll(30) else None, *pool.map_async(square, range(4)).get(30)]
    work()
    until_told()
    touch("checkpoint-" + os.environ["RANK"], json.dumps(work()))
    workers = [process, sleeping, *pool._pool]
    os.kill(sleeping.pid, signal.SIGSTOP)  # so that a signal from elsewhere still waits when ours comes
    until(lambda: Path(f"/proc/{sleeping.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    subprocess.run(["kill", "-TERM", str(sleeping.pid)], check=True)
    sleeping.terminate()
    os.kill(sleeping.pid, signal.SIGCONT)
    process.terminate()
    process.join(), sleeping.join()
    pool.terminate()
    pool.join()
    touch("ended-" + os.environ["RANK"], json.dumps([worker.exitcode for worker in workers]))
    end()
"""
# Told by somebody else, and then by the script, while a worker still starts
_STARTING = """
if __name__ == "__main__":
    begin()
    context = mp.get_context(sys.argv[2])
    codes = []
    for _ in range(5):
        process = context.Process(target=time.sleep, args=(3600,))
        process.start()
        os.kill(process.pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        subprocess.run(["kill", "-TERM", str(process.pid)], check=True)
        process.terminate()
        os.kill(process.pid, signal.SIGCONT)
        process.join(20)
        codes.append(process.exitcode)
        process.kill()
    touch("ended-" + os.environ["RANK"], json.dumps(codes))
    end()
"""
_LOADER = """
import torch
class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000_000
    def __getitem__(self, number):
        return number
if __name__ == "__main__":
    begin()
    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(Numbers(), num_workers=2, multiprocessing_context=sys.argv[2])
    left = 100  # more than are on their way already
    for step, batch in enumerate(loader):
        if step == 4:
            until_told()
        left -= step > 4
        if not left:
            break
    touch("checkpoint-" + os.environ["RANK"], str(step))
    end()
"""

Begin = Callable[..., Started]


@pytest.fixture
def begin(by_hand: ByHand) -> Iterator[Begin]:
    """Starts a script below `init`, as two ranks, or below the wrapper, as one."""
    jobs = []

    def start(script: str, way: str, *arguments: str, shield: str | None = None) -> Started:
        ranks = 2
        wrapper: list[str] = []
        env: dict[str, str] = {}
        if way == "wrapper":
            ranks = 1
            wrapper = ["-m", "distboot", "run", "--", sys.executable]
            env["DISTBOOT_SHIELD_WORKERS"] = "1"
        if shield is not None:
            env["DISTBOOT_SHIELD_WORKERS"] = shield
        arguments = (way, *arguments)
        jobs.append(by_hand(_BEGIN + script, ranks, env=env, wrapper=wrapper, arguments=arguments))
        return jobs[-1]

    yield start
    for job in jobs:
        for pid in everybody(job):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def everybody(job: Started) -> list[int]:
    """The processes of a job that have not ended, without the monitor process beside a rank."""
    found = []
    sessions = {process.pid for process in job.processes}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        stat = proc_stat(pid)
        if stat and stat[0] not in "ZX" and int(stat[3]) in sessions:
            found.append(int(pid))
    return found


def until_ready(job: Started) -> list[int]:
    """Wait until the scripts have asked: their processes."""
    paths = [job.folder / f"ready-{rank}" for rank in range(len(job.processes))]
    until(
        lambda: (
            all(path.exists() for path in paths)
            or any(each.poll() is not None for each in job.processes)
        )
    )
    return [int(path.read_text()) for path in paths]


def tell_everybody(job: Started) -> None:
    until_ready(job)
    for pid in everybody(job):
        os.kill(pid, signal.SIGTERM)
    (job.folder / "told").touch()


def written(job: Started, name: str) -> list[Any]:
    return [
        json.loads((job.folder / f"{name}-{rank}").read_text())
        for rank in range(len(job.processes))
    ]


def still_there(job: Started, seconds: float) -> list[str]:
    """Wait for a job to end: the threads of its processes, with their signals, if it has not by then."""
    with suppress(AssertionError):
        until(lambda: all(each.poll() is not None for each in job.processes), seconds)
        return []
    sessions = {process.pid for process in job.processes}
    found = []
    for path in Path("/proc").glob("[0-9]*/task/*/status"):
        with suppress(OSError):
            stat = proc_stat(path.parts[2])
            if stat is not None and int(stat[3]) in sessions:
                words = (path.parents[2] / "cmdline").read_text().replace("\0", " ")
                found.append(f"{words}: {path.read_text()} {(path.parent / 'wchan').read_text()}")
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_workers_go_on_until_the_script_ends_them(begin: Begin, method: str, way: str) -> None:
    job = begin(_WORKERS, way, method)
    tell_everybody(job)
    left = still_there(job, 25)
    assert not left, "\n".join(left)
    assert set(job.codes()) == {0}, job.output(0)
    assert all(answers == [9, 0, 1, 4, 9] for answers in written(job, "checkpoint"))
    for first, second, *pool in written(job, "ended"):
        assert [first, second] == [-signal.SIGTERM] * 2
        assert len(pool) == 2
        assert {*pool} <= {0, -signal.SIGTERM}, "a pool also lets its workers end"
    until(lambda: not everybody(job))


@pytest.mark.parametrize("method", METHODS)
def test_worker_that_still_starts_can_be_ended(begin: Begin, method: str) -> None:
    job = begin(_STARTING, "wrapper", method, shield="1")
    assert set(job.codes()) == {0}, job.output(0)
    assert written(job, "ended") == [[-signal.SIGTERM] * 5]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_workers_end_with_their_parent(begin: Begin, method: str, way: str) -> None:
    job = begin(_WORKERS, way, method)
    for pid in until_ready(job):
        os.kill(pid, signal.SIGKILL)
    until(lambda: not everybody(job))


_UNSHIELDED = """
if __name__ == "__main__":
    if sys.argv[2] == "reads":
        begin()
    elif sys.argv[1] == "init":
        import distboot
        ctx = distboot.init("none", join_timeout=60)
    worker = mp.get_context("spawn").Process(target=time.sleep, args=(3600,))
    worker.start()
    os.kill(worker.pid, signal.SIGSTOP)  # so that the signal waits until the shell has sent it
    subprocess.run(["kill", "-TERM", str(worker.pid)], check=True)
    os.kill(worker.pid, signal.SIGCONT)
    worker.join(timeout=20)
    worker.kill()
    touch("ended-" + os.environ["RANK"], json.dumps([worker.exitcode]))
"""


@pytest.mark.parametrize(
    ("way", "reads", "shield"),
    [
        pytest.param("init", "", None, id="init, without a read"),
        pytest.param("wrapper", "", "", id="wrapper, not set"),
        pytest.param("init", "reads", "0", id="init, with a read, but turned off"),
    ],
)
def test_workers_are_not_shielded_unasked(
    begin: Begin, way: str, reads: str, shield: str | None
) -> None:
    job = begin(_UNSHIELDED, way, reads, shield=shield)
    assert set(job.codes()) == {0}, job.output(0)
    assert written(job, "ended") == [[-signal.SIGTERM]] * len(job.processes)


# That it always is: WORKERS_RUNS=50 pytest tests/ranks/test_workers.py -n 0 -k "data_loader and fork-wrapper"
@pytest.mark.all
@needs_torch
@pytest.mark.parametrize("run", range(int(os.environ.get("WORKERS_RUNS", "1"))))
@pytest.mark.parametrize("way", ["init", "wrapper"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_checkpoint_with_a_data_loader(begin: Begin, method: str, way: str, run: int) -> None:
    job = begin(_LOADER, way, method)
    tell_everybody(job)
    assert set(job.codes()) == {0}, job.output(0)
    assert written(job, "checkpoint") == [104] * len(job.processes), run
    until(lambda: not everybody(job))


_PROGRAMS = """
SHOW = ["/bin/grep", "SigBlk", "/proc/self/status"]
def in_fork(work):
    reading, writing = os.pipe()
    if not os.fork():
        os.dup2(writing, 1)
        try:
            work()
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as text:
        return text.read()
def started(name):
    def run(**options):
        return subprocess.run(SHOW, stdout=subprocess.PIPE, text=True, **options).stdout
    return {name + " " + how: blocks(text) for how, text in {
        "subprocess": run(), "preexec_fn": run(preexec_fn=print), "os.popen": os.popen(" ".join(SHOW)).read(),
        "fork": in_fork(lambda: os.write(1, Path("/proc/self/status").read_bytes())),
        "fork, exec": in_fork(lambda: os.execv(SHOW[0], SHOW)),
        "system": in_fork(lambda: os.system(" ".join(SHOW))),
        "posix_spawn": in_fork(lambda: os.waitpid(os.posix_spawn(SHOW[0], SHOW, os.environ), 0)),
    }.items()}
def work(say, depth):
    found = {"itself": blocks(), **started("a worker's"), "itself, then": blocks()}
    if depth:
        nested = mp.get_context(sys.argv[2]).Process(target=work, args=(say, 0))
        nested.start()
        nested.join()
        found["itself, at last"] = blocks()
    say.put(found)
def handle():
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
    touch("handles")
    time.sleep(3600)
if __name__ == "__main__":
    begin()
    context = mp.get_context(sys.argv[2])
    say = context.Queue()
    before = {"script": blocks(), **started("the script's")}
    worker = context.Process(target=work, args=(say, 1))
    worker.start()
    nested, found = say.get(timeout=60), say.get(timeout=60)
    worker.join()
    try:
        with open(os.devnull) as file:
            context.Process(target=print, args=(file,)).start()
    except TypeError:  # it cannot be pickled
        pass
    handles = context.Process(target=handle)
    handles.start()
    until(Path("handles").exists)
    handles.terminate()
    handles.join()
    after = {"script": blocks(), **started("the script's")}
    touch("found-0", json.dumps([before, after, nested, found, handles.exitcode]))
"""


@pytest.mark.parametrize("method", METHODS)
def test_only_workers_are_shielded(begin: Begin, method: str) -> None:
    job = begin(_PROGRAMS, "wrapper", method)
    assert job.codes() == [0], job.output(0)
    ((before, after, nested, found, code),) = written(job, "found")
    assert not any(before.values())
    assert not any(after.values())
    assert {how for how, is_blocked in found.items() if is_blocked} == {
        "itself",
        "itself, then",
        "itself, at last",
    }
    assert {how for how, is_blocked in nested.items() if is_blocked} == {"itself", "itself, then"}
    assert code == 7, "its own handler runs at once"


_MISSES_THE_FIRST = """
def handle():
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
    wake = signal.pthread_kill
    def miss(*_):
        signal.pthread_kill = wake
    signal.pthread_kill = miss  # as where it comes just before a system call
    touch("handles")
    time.sleep(3600)
if __name__ == "__main__":
    begin()
    handles = mp.get_context(sys.argv[2]).Process(target=handle)
    handles.start()
    until(Path("handles").exists)
    handles.terminate()
    handles.join(60)
    touch("found-0", json.dumps(handles.exitcode))
    handles.kill()
"""


@pytest.mark.parametrize("method", METHODS)
def test_worker_is_woken_until_its_handler_runs(begin: Begin, method: str) -> None:
    job = begin(_MISSES_THE_FIRST, "wrapper", method)
    assert job.codes() == [0], job.output(0)
    assert written(job, "found") == [7]


@pytest.mark.all
@needs_torch
def test_torch_ends_its_workers_without_a_word(begin: Begin) -> None:
    script = (
        _LOADER.partition("if __name__")[0]
        + """
begin()
batches = iter(torch.utils.data.DataLoader(Numbers(), num_workers=2))  # at the end it is still there
next(batches)
raise ValueError("boom")
"""
    )
    job = begin(script, "wrapper")
    assert job.codes() == [1]
    assert "ValueError: boom" in job.output(0)
    assert "killed by signal" not in job.output(0), "it has to see in the signal who has sent it"
    until(lambda: not everybody(job))


@needs("joblib")
def test_workers_of_others_than_multiprocessing_are_as_ever(begin: Begin) -> None:
    script = """
from joblib import Parallel, delayed
if __name__ == "__main__":
    begin()
    touch("found-0", json.dumps(Parallel(n_jobs=2)(delayed(blocks)() for _ in range(4))))
"""
    job = begin(script, "wrapper")
    assert job.codes() == [0], job.output(0)
    assert written(job, "found") == [[False] * 4]
