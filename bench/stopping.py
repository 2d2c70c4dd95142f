"""A stop that all ranks agree on: what a read of `ctx.preempted` costs, how soon all know, and that they agree.

    python bench/stopping.py runs 200 torchrun mpirun srun plain podman slow   so many jobs under each of these

A job of `runs` has four ranks on two hosts (tests/lib/hosts.py; `slow`: by hand, and a packet between them takes
100 ms, so that there and back are 200), or in two containers of the image of docker/Dockerfile, DDP on Gloo, and the
code of the page on PyTorch. SIGTERM comes to one rank or to all of them at a random moment. The next job loads its
checkpoint. The figures: `make bench`.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/lib")]

import jobs  # noqa: E402
from bad_link import bad_link  # noqa: E402
from hosts import Hosts, Slurm, side_by_side  # noqa: E402 - shared with the tests
from measure import PYTHON, Effort, Series, UnmeasuredError, clean_environ, last_line  # noqa: E402
from page import Section, Table, promise  # noqa: E402
from pages import blocks  # noqa: E402
from podman import Podman  # noqa: E402

from distboot.host import free_port  # noqa: E402

_LIMIT = 150  # seconds for one job
_FIGURES = """
import json, os, random, signal, statistics, threading, time, timeit
import distboot
ctx = distboot.init()
import torch, torch.distributed as dist
value, told = torch.ones(1), []
def timed(count, *calls):
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        for call in calls:
            call()
    return (time.perf_counter() - start) / count
def read():
    return ctx.preempted
def broadcast():
    flag = torch.tensor([len(told)])
    dist.broadcast(flag, src=0)
    return flag.item() == 1
def train():
    dist.all_reduce(value)
def known(is_told, number):
    sent = []
    def tell():
        sent.append(time.time())
        os.kill(os.getpid(), number)
    if ctx.rank == 0:
        threading.Timer(0.2 + random.random() / 50, tell).start()
    while not is_told():
        train()
        time.sleep(0.01)
    ends = [None] * 4
    dist.all_gather_object(ends, (time.time(), sent))
    return max(end for end, _ in ends) - ends[0][1][0]
signal.signal(signal.SIGUSR2, lambda *_: told.append(1))
found = timeit.timeit("ctx.preempted", timer=time.process_time, number=10**6, globals=globals()) / 10**6
steps = [(timed(100, train), timed(100, train, broadcast)) for _ in range(20)]
cost = [statistics.median(step) for step in zip(*steps)]
sides = [(read, signal.SIGTERM), (broadcast, signal.SIGUSR2)]
took = {is_told.__name__: known(is_told, number) for is_told, number in sides[::ORDER]}
if ctx.rank == 0:
    print(json.dumps([found, cost[1] - cost[0], took["read"], took["broadcast"]]), flush=True)
ctx.close()
"""
_JOB = """
import json, os, random, signal, threading, time
import distboot
ctx = distboot.init()
import torch
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
steps, seen = 10**9, []
def weights_now():
    return sum(each.double().sum() for each in model.parameters()).item().hex()
def train(step):
    if not seen:
        seen.extend([step - 1, weights_now()])
    elif step == seen[0] + 3 and ctx.rank in told:  # all have read `ctx.preempted` once: before, SIGTERM ends a script
        threading.Timer(after, os.kill, [os.getpid(), signal.SIGTERM]).start()
    time.sleep(random.random() / 50)
    optimizer.zero_grad()
    (model(torch.full((8, 64), float(step % 7 + ctx.rank))) - 1).square().mean().backward()
    optimizer.step()
"""
_SAY = "\nopen(f'{name}-{ctx.rank}', 'w').write(json.dumps([*seen, step, weights_now()]))\n"


def section(effort: Effort) -> Section:
    """What a read costs, and how soon all ranks know, against a flag that is broadcast in each step."""
    found = [
        Series(values)
        for values in zip(*(_figures() for _ in range(effort.rounds(7))), strict=True)
    ]
    read, broadcast, ours, theirs = found
    rows = [
        ("`ctx.preempted`", read.said("µs", 2), ours.said("ms", 0)),
        (
            "a flag that rank 0 broadcasts on Gloo, as in Lightning",
            broadcast.said("µs", 0),
            theirs.said("ms", 0),
        ),
    ]
    head = (
        "read once a step of 10 ms, 4 ranks on one machine",
        "a step",
        "from SIGTERM until the last rank knows",
    )
    a_million = f"A million steps pay {read.median * 1e6:.1f} s for it, with the flag {broadcast.median * 1e6:.0f} s."
    limit = promise(
        "a read of `ctx.preempted`, while no rank is told to stop",
        read,
        5e-7,
        "≤ 0.5 µs",
        unit="µs",
    )
    return Section([Table("A stop that all ranks agree on", head, rows, a_million)], [limit])


def _figures() -> tuple[float, ...]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(_FIGURES.replace("ORDER", random.choice(["1", "-1"])))
        command = [PYTHON, "-m", "distboot", "--nproc-per-node=4", str(script)]
        ((code, said),) = side_by_side([(command, clean_environ())], _LIMIT)
    lines = [
        line.rpartition("[")[2].rstrip("]") for line in said.splitlines() if line.endswith("]")
    ]
    if code or not lines:
        raise UnmeasuredError(f"exit code {code}: {last_line(said)}")
    return tuple(map(float, lines[0].split(",")))


def _plain(port: str, script: str) -> Sequence[tuple[str, Sequence[str]]]:
    job = ["WORLD_SIZE=4", "MASTER_ADDR=nodea", f"MASTER_PORT={port}"]
    return [
        (f"node{'aabb'[rank]}", ["env", *job, f"RANK={rank}", PYTHON, script]) for rank in range(4)
    ]


_LAUNCHERS = {
    way.name.rpartition(" ")[2]: way.commands
    for way in jobs.WAYS
    if way.name.startswith("distboot")
}
_LAUNCHERS["plain"] = _plain
_LAUNCHERS["slow"] = _plain
_ALL = [*_LAUNCHERS, "podman"]
_DELAY = 0.1  # seconds, each way


_Commands = Sequence[tuple[Sequence[str], Mapping[str, str]]]  # of a job, each with its environment


@contextmanager
def _on_hosts(launcher: str) -> Iterator[tuple[Path, Callable[[str, Path], _Commands]]]:
    """A folder for scripts, and what starts one under a launcher: on two hosts."""
    with ExitStack() as stack:
        hosts = stack.enter_context(Hosts.up())
        if launcher == "srun":
            stack.enter_context(Slurm.up(hosts))
        if launcher == "slow":
            stack.enter_context(bad_link(hosts, "nodeb", delay=_DELAY))
        environ = hosts.environment(
            clean_environ(OMPI_MCA_btl="^ofi", OMPI_MCA_mtl="^ofi", BENCH_CASE="")
        )

        def commands(launcher: str, script: Path) -> _Commands:
            given = _LAUNCHERS[launcher](str(free_port()), str(script))
            return [(hosts.command(*each), environ) for each in given]

        yield hosts.shared, commands


@contextmanager
def _in_containers() -> Iterator[tuple[Path, Callable[[str, Path], _Commands]]]:
    """The same in two containers, which start two ranks each."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch, "job")
        folder.mkdir()
        folder.chmod(0o777)  # the user in the image is another one
        Path(scratch).chmod(0o755)
        podman = Podman(Path(tempfile.mkdtemp(dir=scratch)))
        image, network = (
            podman.build("Dockerfile", PACKAGES=""),
            stack.enter_context(podman.network()),
        )
        of_job = {
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "node0",
            "MASTER_PORT": "29500",
            "OMP_NUM_THREADS": "1",
        }

        def command(node: int, script: Path) -> Sequence[str]:
            own = [f"--env={name}={value}" for name, value in {**of_job, "RANK": str(node)}.items()]
            own += [f"--network={network}", f"--hostname=node{node}", f"--network-alias=node{node}"]
            own += [f"--volume={mount}" for mount in [*podman.mounts, f"{folder}:{folder}"]]
            options = ["--rm", f"--timeout={_LIMIT}", f"--workdir={folder}", *own]
            entry = '--entrypoint=["python", "-m", "distboot", "run", "--nproc-per-node=2", "--"]'
            return ["podman", "run", *options, entry, image, "python", str(script)]

        yield (
            folder,
            lambda _, script: [(command(node, script), podman.environ) for node in range(2)],
        )


def _run(folder: Path, commands: Callable[[Path], _Commands], before: list[object]) -> list[object]:
    """One job, which must begin with step and weights of the one before: its own; empty: it did not end well."""
    told, name = (
        random.choice([[random.randrange(4)], [0, 1, 2, 3]]),
        f"end-{random.randrange(10**9)}",
    )
    (shown,) = (block.text for block in blocks("python") if "dcp.load" in block.text)
    script = folder / "train.py"
    script.write_text(
        f"told, after, name = {told}, {random.random() * 2}, {name!r}\n{_JOB}{shown}{_SAY}"
    )
    try:
        ended = side_by_side(commands(script), _LIMIT)
    except subprocess.TimeoutExpired:
        ended = [(-1, f"not done after {_LIMIT} s")]
    seen = [json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}-*"))]
    if (
        seen
        and not any(code for code, _ in ended)
        and seen == [[*(before or seen[0][:2]), *seen[0][2:]]] * 4
    ):
        return list(seen[0][2:])
    print(f"{told} told:", before, seen, *ended, sep="\n", file=sys.stderr, flush=True)
    return []


def _runs(count: int, launchers: Sequence[str]) -> None:
    for launcher in launchers:
        with (
            _in_containers() if launcher == "podman" else _on_hosts(launcher) as (folder, commands)
        ):
            found: list[object] = []
            start, well = time.monotonic(), 0
            for _ in range(count):
                found = _run(folder, partial(commands, launcher), found)
                well += bool(found)
            took = (time.monotonic() - start) / count
        print(
            f"{launcher}: {well} of {count} ended at one step, exit codes 0; {took:.1f} s a job",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["runs"])
    parser.add_argument("count", type=int)
    parser.add_argument("launchers", nargs="*", default=_ALL, help=", ".join(_ALL))
    options = parser.parse_args()
    _runs(options.count, options.launchers)
