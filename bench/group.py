"""From the start of the launcher until all ranks are in their group: `init` against every framework's own way.

The clock starts with the launcher, and stops when rank 0 is through the first barrier of all ranks. All ranks are on
this machine, on the CPU, with Gloo. On two cores most of that is the import of torch by every rank.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from measure import (
    PYTHON,
    Contender,
    Effort,
    Series,
    UnmeasuredError,
    clean_environ,
    interleaved,
    last_line,
    program,
)
from page import Limit, Section, Table, promise
from plot import lines

from distboot.host import free_port

_SIZES = {1: 3, 2: 3, 4: 5, 8: 3}  # number of ranks -> rounds
_TIME_LIMIT = 180  # seconds for one start

_READY = """
if rank == 0:
    import time
    print("ready at", time.time(), flush=True)
"""
_INIT = f"""
import distboot
ctx = distboot.init(FRAMEWORK)
ctx.barrier()
rank = ctx.rank
{_READY}
ctx.close()
"""
_TORCH = f"""
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
rank = dist.get_rank()
{_READY}
dist.destroy_process_group()
"""
_BY_HAND = f"""
import os
for name in ("RANK", "LOCAL_RANK"):
    os.environ[name] = os.environ["OMPI_COMM_WORLD_" + name]
os.environ["WORLD_SIZE"] = os.environ["OMPI_COMM_WORLD_SIZE"]
{_TORCH}
"""
_DEEPSPEED = f"""
import os
import deepspeed
deepspeed.init_distributed(distributed_port=int(os.environ["BENCH_PORT"]))
deepspeed.comm.barrier()
rank = deepspeed.comm.get_rank()
{_READY}
deepspeed.comm.destroy_process_group()
"""
_ACCELERATE = f"""
from accelerate import PartialState
state = PartialState(cpu=True)
state.wait_for_everyone()
rank = state.process_index
{_READY}
assert state.num_processes == int(os.environ["BENCH_RANKS"])
state.destroy_process_group()
"""
_FABRIC = f"""
import os
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=int(os.environ["BENCH_RANKS"]), strategy="ddp")
fabric.launch()
fabric.barrier()
rank = fabric.global_rank
{_READY}
"""
_HOROVOD = f"""
import horovod.torch as hvd
hvd.init()
hvd.barrier()
rank = hvd.rank()
{_READY}
hvd.shutdown()
"""
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Way:
    """One way to start a group.

    Attributes:
        name: as the table says it.
        script: what every rank runs.
        command: what is started, with RANKS, PORT and SCRIPT in it; none: the ranks are started by hand.
        sizes: with how many ranks.
        variables: those of the address that the ranks need from outside.
        times: how often in a round with four ranks.
    """

    name: str
    script: str
    command: tuple[str, ...]
    sizes: tuple[int, ...] = tuple(_SIZES)
    variables: tuple[str, ...] = ()
    times: int = 1


def _init(framework: str) -> str:
    return _INIT.replace("FRAMEWORK", repr(framework))


_MPIRUN = ("mpirun", "--map-by", ":OVERSUBSCRIBE", "-n", "RANKS", PYTHON, "SCRIPT")
_TORCHRUN = ("torchrun", "--nproc-per-node", "RANKS", "--master-port", "PORT", "SCRIPT")

OURS = Way("`distboot.init()`, mpirun", _init("torch"), _MPIRUN, times=2)
HAND = Way(
    "torch, environment mapped by hand, mpirun", _BY_HAND, _MPIRUN, variables=_ADDRESS, times=2
)
TORCHRUN = Way("torch, torchrun", _TORCH, _TORCHRUN)
DEEPSPEED = Way("DeepSpeed's `mpi_discovery`, mpirun", _DEEPSPEED, _MPIRUN)
HOROVOD = Way(
    "Horovod, `horovodrun --gloo`",
    _HOROVOD,
    ("horovodrun", "--gloo", "-np", "RANKS", PYTHON, "SCRIPT"),
)
OTHERS = (
    HAND,
    TORCHRUN,
    Way(
        "Accelerate's `PartialState`, mpirun",
        "import os\n" + _ACCELERATE,
        _MPIRUN,
        variables=_ADDRESS,
    ),
    DEEPSPEED,
    Way("Lightning Fabric, its own launcher", _FABRIC, (PYTHON, "SCRIPT")),
    HOROVOD,
)
# Only for their limits.
OURS_TORCHRUN = Way("`distboot.init()`, torchrun", _init("torch"), _TORCHRUN, (4,))
OURS_DEEPSPEED = Way('`distboot.init("deepspeed")`, mpirun', _init("deepspeed"), _MPIRUN, (4,))
OURS_HOROVOD = Way(
    '`distboot.init("horovod.torch")`, Gloo, by hand', _init("horovod.torch"), (), (2,)
)
WAYS = (OURS, *OTHERS, OURS_TORCHRUN, OURS_DEEPSPEED, OURS_HOROVOD)
_LIMITS = (
    (OURS, OURS_TORCHRUN, 4, 0.85),
    (OURS_DEEPSPEED, DEEPSPEED, 4, 0.85),
    (OURS_HOROVOD, HOROVOD, 2, 0.85),
)


def section(effort: Effort) -> Section:
    """All ways with each number of ranks."""
    found = {ranks: _measured(ranks, rounds, effort) for ranks, rounds in _SIZES.items()}
    rows = [_row(way, found) for way in WAYS]
    ours = {ranks: found[ranks][OURS.name].median for ranks in _SIZES}
    hand = found[4][OURS.name].median - found[4][HAND.name].median
    meaning = (
        "Seconds from the start of the launcher until all ranks are through their first barrier, and the ratio to "
        "`distboot.init()` under mpirun. A job of four ranks on this machine, whose time is the import of torch, has "
        f"its group after {ours[4]:.1f} s, {abs(hand):.2f} s {'later' if hand > 0 else 'sooner'} with the roll call, "
        "the checks and failure detection than without them. Accelerate makes a group under mpirun only where "
        "`MASTER_ADDR` is given, as here; "
        "`accelerate launch --cpu --num_processes 2` starts one process and says nothing."
    )
    head = ("way, launcher", *(f"{ranks} rank{'s' * (ranks > 1)}" for ranks in _SIZES))
    limits = [
        *against_hand(1, effort),
        *against_hand(4, effort),
        *(_limit(*each, found) for each in _LIMITS),
        _rendezvous(effort),
    ]
    return Section(
        [Table("Time to a ready group", head, rows, meaning, ("group.svg", _plot(found)))], limits
    )


def _measured(ranks: int, rounds: int, effort: Effort) -> dict[str, Series]:
    contenders = [
        Contender(
            way.name,
            partial(ready, way, ranks),
            way.times if ranks == 4 and not effort.quick else 1,
        )
        for way in WAYS
        if ranks in way.sizes
    ]
    return interleaved(contenders, effort.rounds(rounds), warm=ranks == 1)


def _row(way: Way, found: dict[int, dict[str, Series]]) -> tuple[str, ...]:
    cells = [way.name]
    for series in found.values():
        own = series.get(way.name)
        ratio = own.median / series[OURS.name].median if own is not None else 0
        beside = "" if way is OURS or own is None or not own.values else f", {ratio:.2f} ×"
        cells.append("" if own is None else own.said() + beside)
    return tuple(cells)


def _limit(
    ours: Way, theirs: Way, ranks: int, most: float, found: dict[int, dict[str, Series]]
) -> Limit:
    what = f"{ours.name}, over {theirs.name}, {ranks} ranks"
    return _ratio(what, found[ranks][ours.name], found[ranks][theirs.name], most)


def _ratio(what: str, one: Series, other: Series, most: float) -> Limit:
    limit = f"≤ {most:.2f} ×"
    if why := one.why or other.why:
        return Limit(what, f"not measured: {why}", limit, None)
    ratio = one.median / other.median
    return Limit(what, f"{ratio:.3f} ×: {one.said()} against {other.said()}", limit, ratio <= most)


def against_hand(ranks: int, effort: Effort) -> list[Limit]:
    """`init` against the mapping by hand, in random order: until the first barrier, and until mpirun has ended."""
    ends: dict[str, list[float]] = {OURS.name: [], HAND.name: []}

    def measure(way: Way) -> float:
        until_ready, until_end = started(way, ranks)
        ends[way.name].append(until_end)
        return until_ready

    found = interleaved(
        [Contender(way.name, partial(measure, way)) for way in (OURS, HAND)], effort.rounds(15)
    )
    rounds = len(found[OURS.name].values)  # the one before them counts for nothing
    to_end = {
        name: Series(tuple(values[-rounds:]), found[name].why) for name, values in ends.items()
    }
    what = f"{OURS.name}, over {HAND.name}, {ranks} rank{'s' * (ranks > 1)}, until"
    return [
        _ratio(f"{what} the first barrier", found[OURS.name], found[HAND.name], 1.0),
        _ratio(f"{what} the end of mpirun", to_end[OURS.name], to_end[HAND.name], 1.0),
    ]


def _plot(found: dict[int, dict[str, Series]]) -> str:
    names = (way.name for way in (OURS, *OTHERS))
    points = {
        name: [
            (float(ranks), series[name].median)
            for ranks, series in found.items()
            if series[name].values
        ]
        for name in names
    }
    short = {
        name.replace("`", "").removeprefix("torch, ").replace("environment ", ""): at
        for name, at in points.items()
    }
    return lines(
        "Time to a ready group, one machine, CPU", "ranks", "seconds (median)", short, log_y=False
    )


def ready(way: Way, ranks: int) -> float:
    """Seconds from the start of the first process until all ranks are through the barrier."""
    return started(way, ranks)[0]


def started(way: Way, ranks: int) -> tuple[float, float]:
    """Seconds from the start of the first process until all ranks are through the barrier, and until all have ended."""
    with tempfile.TemporaryDirectory() as folder:
        script, port = Path(folder, "train.py"), str(free_port())
        script.write_text(way.script)
        words = {"SCRIPT": str(script), "PORT": port, "RANKS": str(ranks)}
        command = [words.get(word, word) for word in way.command or (PYTHON, "SCRIPT")]
        command[0] = program(command[0])
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        more = {
            "BENCH_PORT": port,
            "BENCH_RANKS": words["RANKS"],
            **{name: address[name] for name in way.variables},
        }
        places = (
            [more]
            if way.command
            else [more | address | _of_a_rank(rank, ranks) for rank in range(ranks)]
        )
        start = time.time()
        processes = [
            subprocess.Popen(
                command, env=clean_environ(**place), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                stdin=subprocess.DEVNULL, cwd=folder,
            )
            for place in places
        ]  # fmt: skip
        said = _said(processes)
        end = time.time()
    found = re.search(r"ready at ([\d.]+)", said)
    if found is None or any(process.returncode for process in processes):
        sys.stderr.write(f"bench: {way.name}, {ranks} ranks, failed:\n{said}\n")
        raise UnmeasuredError(f"failed with {ranks} ranks: {last_line(said)}")
    return float(found[1]) - start, end - start


def _said(started: list[subprocess.Popen[str]]) -> str:
    try:
        return "".join(process.communicate(timeout=_TIME_LIMIT)[0] for process in started)
    except subprocess.TimeoutExpired:
        return f"not done after {_TIME_LIMIT} s"
    finally:
        for process in started:
            process.terminate()  # if it has not ended
        for process in started:
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)


def _of_a_rank(rank: int, ranks: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {name: str(value) for name, value in numbers.items()}


# All ranks begin at one moment, when all have their imports done.
_TIMED = """
import os, time
from pathlib import Path
import torch.distributed, distboot, distboot.initialize, distboot.frameworks._process_group
rank, ranks = (int(os.environ["OMPI_COMM_WORLD_" + name]) for name in ("RANK", "SIZE"))
Path(f"there-{rank}").touch()
while not all(Path(f"there-{each}").exists() for each in range(ranks)):
    time.sleep(0.005)
start = time.perf_counter()
ctx = distboot.init()
took = time.perf_counter() - start
ctx.barrier()
Path(f"took-{rank}").write_text(str(took))
ctx.close()
"""


def _rendezvous(effort: Effort) -> Limit:
    """What the roll call, and then failure detection, add to `init` at 4 ranks, over the same without both."""

    def once(setting: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            command = [program("mpirun"), *_MPIRUN[1:4], "4", "-x", setting, PYTHON]
            done = subprocess.run(
                [*command, "-c", _TIMED], env=clean_environ(), cwd=folder, check=False, timeout=_TIME_LIMIT,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            if done.returncode:
                raise UnmeasuredError(last_line(done.stdout))
            return max(float(Path(folder, f"took-{rank}").read_text()) for rank in range(4))

    without, alone, both = (
        "DISTBOOT_RENDEZVOUS=0",
        "DISTBOOT_FAILURE_DETECTION=0",
        "DISTBOOT_FAILURE_DETECTION=1",
    )
    found = interleaved(
        [Contender(each, partial(once, each)) for each in (without, alone, both)], effort.rounds(7)
    )
    supervision = found[both].less(found[alone]).said("ms", 0, sign=True)
    what = (
        "the roll call in `init`, 4 ranks under mpirun, the slowest of them, over it switched off"
    )
    what += f" (and failure detection, whose processes start in it: {supervision} on top)"
    return promise(
        what, found[alone].less(found[without]), 50e-3, "≤ 50 ms", unit="ms", digits=1, more=True
    )
