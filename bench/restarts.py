"""Restarts: how soon a job trains again when a rank is killed, beside what else starts it again.

    python bench/restarts.py meet 10000     the second meeting of so many agents, at real sockets
    python bench/restarts.py kills 100      so many kills in one job, of scripts and of agents, at random moments

A job has four ranks on this machine, an unmodified script of torch with Gloo, whose rank 1 gets SIGKILL in round 0. The
figures: `make bench`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/lib"), str(ROOT / "bench")]

from measure import PYTHON, Effort, Series, UnmeasuredError, clean_environ  # noqa: E402
from page import Section, Table, promise  # noqa: E402

_RANKS = 4
_LIMIT = 40  # seconds for one job
_SCRIPT = """
import json, os, signal, time
started = time.time()
rank = os.environ["RANK"] if "RANK" in os.environ else os.environ["OMPI_COMM_WORLD_RANK"]
is_first = not os.path.exists("killed")
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.ones(1)
dist.all_reduce(value)
if not is_first:
    open(f"again-{rank}", "w").write(json.dumps([started, time.time()]))
while is_first:
    dist.all_reduce(value)
    time.sleep(0.02)
    if rank == "1" and value[0] > 10**9:
        open("killed.part", "w").write(repr(time.time()))
        os.rename("killed.part", "killed")
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
"""
_MPIRUN = ["mpirun", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE", "-n", str(_RANKS)]
_TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", str(_RANKS)]
# For each round, https://github.com/pytorch/pytorch/issues/135712
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
_OURS = ["-m", "distboot", "--max-restarts", "1", "train.py"]
_SIDES: dict[str, tuple[list[str], bool]] = {  # and whether it is to be started again by hand
    "`--max-restarts`, no launcher": (
        [PYTHON, *_OURS[:2], "--nproc-per-node", str(_RANKS), *_OURS[2:]],
        False,
    ),
    "`--max-restarts` under mpirun": ([*_MPIRUN, PYTHON, *_OURS], False),
    "`--max-restarts` under torchrun": ([*_TORCHRUN, *_OURS], False),
    "`torchrun --max-restarts 1`": ([*_TORCHRUN, "--max-restarts", "1", "train.py"], False),
    f"the same with `--standalone` and `{_OWN_STORE}`": (
        ["env", _OWN_STORE, *_TORCHRUN, "--standalone", "--max-restarts", "1", "train.py"],
        False,
    ),
    "mpirun, started again when it has ended": (
        [*_MPIRUN, PYTHON, "-m", "distboot", "train.py"],
        True,
    ),
}


def _end_of(command: Sequence[str], folder: str) -> None:
    """Wait for the end of a job, or end it when it hangs."""
    with subprocess.Popen(
        command, cwd=folder, env=clean_environ(OMP_NUM_THREADS="1"), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as job:  # fmt: skip
        try:
            job.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            job.terminate()  # which ends its ranks, too


def _run(command: Sequence[str], *, again: bool) -> tuple[float, float]:
    """Seconds from SIGKILL until all scripts have begun once more, and until they have trained together."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(_SCRIPT)
        for _ in range(2 if again else 1):
            _end_of(command, folder)
        times = [Path(folder) / f"again-{rank}" for rank in range(_RANKS)]
        if not all(file.exists() for file in times):
            raise UnmeasuredError("it did not train again")
        killed = float((Path(folder) / "killed").read_text())
        started, trained = zip(*(json.loads(file.read_text()) for file in times), strict=True)
        return max(started) - killed, max(trained) - killed


def section(effort: Effort) -> Section:
    """All sides in turn, and the second meeting of very many agents."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in _SIDES}
    rounds = effort.rounds(4)
    for _ in range(rounds):
        for name in random.sample(list(_SIDES), len(_SIDES)):
            command, again = _SIDES[name]
            with suppress(UnmeasuredError):
                found[name].append(_run(command, again=again))
    empty = Series(why="it did not train again")
    series = {
        name: [Series(values) for values in zip(*pairs, strict=True)] or [empty, empty]
        for name, pairs in found.items()
    }
    rows = [
        (name, f"{len(found[name])} of {rounds}", begun.said(), trained.said())
        for name, (begun, trained) in series.items()
    ]
    head = (
        "what starts it again",
        "trained again",
        "until all scripts begin",
        "until they have trained together",
    )
    of_rank_0, until_all = map(
        Series, zip(*(_measured(10_000) for _ in range(effort.rounds(3))), strict=True)
    )
    limits = [
        promise("from SIGKILL of a rank to the second start of all 4 scripts", begun, 1.0, "≤ 1 s")
        for name, (begun, _) in series.items()
        if name == "`--max-restarts` under mpirun"
    ]
    what = "the second meeting of 10,000 agents, with the end of the first: CPU of rank 0"
    limits.append(promise(what, of_rank_0, 2.0, "≤ 2 s"))
    meaning = (
        "The import of torch, twice on each of two cores, is most of the third column. By itself torchrun lets the "
        "second round have the store of the first, with what is left in it "
        "([pytorch#135712](https://github.com/pytorch/pytorch/issues/135712)). The second meeting of 10,000 agents "
        f"takes {until_all.said()} until all have the membership, where one process is all of them."
    )
    return Section([Table("A job that goes on when a rank is killed", head, rows, meaning)], limits)


def _measured(agents: int) -> tuple[float, float]:
    command = [PYTHON, __file__, "meet", str(agents)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    of_rank_0, until_all = map(float, done.stdout.split())
    return of_rank_0, until_all


def _meet(agents: int) -> tuple[float, float]:
    """From the decision that a round is over until all have the membership of the next: rank 0's CPU, and seconds."""
    import socket

    from simulate_messages import plan
    from simulate_peers import Peers

    from distboot.rendezvous.coordinator import Coordinator

    listener = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
    sides = [Peers(listener.getsockname()[1], agents) for _ in range(2)]
    first = Coordinator(listener, plan(agents))
    sides[0].begin("meet")
    first.wait_for_join()
    sides[0].done()
    begin, own = time.monotonic(), time.process_time()
    for _, connection, _ in first.detach_all():
        connection.close()
    first.close()
    second = Coordinator(listener, plan(agents))
    sides[1].begin("meet")
    second.wait_for_join()
    own = time.process_time() - own
    sides[1].done()
    return own, time.monotonic() - begin


_COUNTING = """
import os, time
import distboot
ctx, round_ = distboot.init("none"), os.environ["DISTBOOT_RESTART_COUNT"]
steps = int(open("steps").read()) if os.path.exists("steps") else 0
open(f"{ctx.rank}.part", "w").write(f"{os.getpid()} {round_}")
os.rename(f"{ctx.rank}.part", f"runs-{ctx.rank}")
while not os.path.exists(f"over-{steps}"):  # the same step on all
    steps += 1
    if ctx.is_main and os.path.exists("stop") and round_ == open("stop").read():
        open(f"over-{steps}", "w").close()
    ctx.barrier()
    if ctx.is_main:
        open("steps.part", "w").write(str(steps))
        os.rename("steps.part", "steps")
    time.sleep(0.01)
"""


def _kills(count: int) -> str:
    """What became of a job of four wrappers, started by hand, in which so many processes were killed."""
    begin, killed, most = time.monotonic(), {"scripts": 0, "agents": 0, "agents of rank 0": 0}, 0.0
    where = {
        "WORLD_SIZE": str(_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29711",
        "DISTBOOT_GRACE": "5",
    }
    with tempfile.TemporaryDirectory() as name, (Path(name) / "output").open("wb") as output:
        folder = Path(name)
        (folder / "train.py").write_text(_COUNTING)

        def started(rank: int) -> subprocess.Popen[bytes]:
            command = [PYTHON, "-m", "distboot", f"--max-restarts={2 * count}", "train.py"]
            env = clean_environ(**where, RANK=str(rank))
            return subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)

        def all_run(round_: int) -> list[int]:
            """The ids of the scripts, once all have begun a round."""
            end = time.monotonic() + _LIMIT
            while time.monotonic() < end:
                said = [(folder / f"runs-{rank}") for rank in range(_RANKS)]
                found = [file.read_text().split() for file in said if file.exists()]
                if [number for _, number in found] == [str(round_)] * _RANKS:
                    return [int(pid) for pid, _ in found]
                time.sleep(0.005)
            raise UnmeasuredError((folder / "output").read_text()[-2000:])

        wrappers = [started(rank) for rank in range(_RANKS)]
        for round_ in range(count):
            pids, rank = all_run(round_), random.randrange(_RANKS)
            time.sleep(random.random() / 4)
            at = time.monotonic()
            if random.random() < 0.7:
                os.kill(pids[rank], 9)
                killed["scripts"] += 1
            else:
                wrappers[rank].kill()
                wrappers[rank].wait()
                wrappers[rank] = started(rank)
                killed["agents" if rank else "agents of rank 0"] += 1
            all_run(round_ + 1)
            most = max(most, time.monotonic() - at)
        (folder / "stop").write_text(str(count))
        codes = [wrapper.wait(_LIMIT) for wrapper in wrappers]
        steps = (folder / "steps").read_text()
    took = f"{time.monotonic() - begin:.0f} s, {most:.2f} s at most until all ran again"
    return f"{killed}; exit codes {codes}; {steps} steps; {took}"


if __name__ == "__main__":
    number = int(sys.argv[2])
    print(*(_meet(number) if sys.argv[1] == "meet" else [_kills(number)]), flush=True)
    os._exit(0)  # thousands of sockets need not be closed one by one
