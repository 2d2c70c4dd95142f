"""What the roll call costs rank 0, and how soon whoever is missing or there twice is named.

    PYTHONPATH=. python bench/rendezvous.py rank0 18000    seconds, seconds of CPU, and megabytes
    PYTHONPATH=. python bench/rendezvous.py rank0 1250 8   the same with agents that have 8 ranks each
    PYTHONPATH=. python bench/rendezvous.py costs          what the single messages cost

The ranks are simulated, the sockets are real. `join.py` takes it all together.
"""

from __future__ import annotations

import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from distboot import DistbootError
from distboot.base.dataclass import replace
from distboot.rendezvous.coordinator import Coordinator
from distboot.rendezvous.membership import JoinPlan, Membership, build_membership
from distboot.rendezvous.messages import Hello, Members, WorkerInfo
from distboot.rendezvous.plan import environment_facts
from distboot.rendezvous.protocol import (
    HEADER,
    Channel,
    Frames,
    most_from_rank_0,
)
from distboot.rendezvous.worker import Worker

JOB = "5c2f10aa"
_COMPRESSED = 1 << 31  # in the length of a frame: that its body is


class Cost(NamedTuple):
    """What all ranks together cost rank 0.

    Attributes:
        wall: seconds.
        cpu: seconds, of all its threads.
        resident: megabytes at the most.
        more: how many of them are more than before.
    """

    wall: float
    cpu: float
    resident: float
    more: float


class Meter:
    """Measures this process, from `start` to `stop`; made when it is as large as without other ranks."""

    def __init__(self) -> None:
        self._before = _resident("VmRSS")

    def start(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def stop(self) -> Cost:
        wall, cpu, most = (
            time.perf_counter() - self._wall,
            time.process_time() - self._cpu,
            _resident("VmHWM"),
        )
        return Cost(wall, cpu, most, max(most - self._before, 0.0))


def _resident(name: str) -> float:
    status = Path("/proc/self/status").read_text()
    return (
        int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])
        * 1024
        / 1e6
    )


def record(rank: int, world_size: int, **more: object) -> WorkerInfo:
    """A rank on a node of eight, with the facts of this very Python."""
    node = f"node-{rank // 8:05}"
    own = environment_facts({}, 8, "torch")
    return WorkerInfo(
        rank,
        "slurm",
        node,
        f"{node}/boot",
        1000 + rank,
        str(rank),
        world_size,
        facts=own,
        **more,  # type: ignore[arg-type]
    )


def _report(rank: int, world_size: int, ranks: int = 0) -> bytes:
    return Channel().sign(record(rank, world_size, clock=time.time(), ranks=ranks))


def _peers(port: int, world_size: int, ranks: int) -> None:
    """All other ranks, in one loop: each connects, reports, and reads until it has its membership."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    poll, connections, stage = select.epoll(), {}, {}
    hello = Channel().sign(Hello(JOB, "0" * 32))
    messages = [_report(rank, world_size, ranks) for rank in range(world_size)]
    print("ready", flush=True)
    sys.stdin.readline()
    for rank in range(1, world_size):
        connection = socket.create_connection((f"127.0.{rank % 200}.{1 + rank % 250}", port))
        connection.sendall(hello)
        connection.setblocking(False)
        connections[connection.fileno()] = (rank, connection)
        poll.register(connection, select.EPOLLIN)
    left = world_size - 1
    while left:
        for descriptor, _ in poll.poll():
            rank, connection = connections[descriptor]
            data = connection.recv(1 << 20)
            if not data:
                raise SystemExit(f"rank {rank} was dropped")
            if rank not in stage:
                stage[rank] = -1
                connection.send(messages[rank])
                continue
            stage[rank] = (
                int.from_bytes(data[:4], "big") % _COMPRESSED + HEADER - len(data)
                if stage[rank] < 0
                else stage[rank] - len(data)
            )
            if stage[rank] == 0:
                left -= 1


def _rank_0(world_size: int, ranks: int = 0) -> Cost:
    """From the first connection until all have the membership; `ranks`: of each agent, where it is that of a node."""
    listener = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
    peers = subprocess.Popen(
        [sys.executable, __file__, "peers", str(listener.getsockname()[1]), str(world_size), str(ranks)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert peers.stdout is not None
    assert peers.stdin is not None
    peers.stdout.readline()
    server = Coordinator(
        listener, JoinPlan(record(0, world_size, ranks=ranks), JOB, ("127.0.0.1",), (1,), 300.0)
    )
    meter = Meter()
    peers.stdin.write("\n")
    peers.stdin.flush()
    select.select([listener], [], [])
    meter.start()
    server.wait_for_join()
    cost = meter.stop()
    assert peers.wait(60) == 0
    return cost


def naming(join_timeout: float, *ranks: WorkerInfo, world_size: int = 8) -> tuple[list[str], float]:
    """The code that each of these ranks ends with, and the seconds from the last arrival to the last of the errors."""
    listener = socket.create_server(("127.0.0.1", 0))
    port, ends, codes = listener.getsockname()[1], [], []

    def ended(meet: Callable[[], object]) -> None:
        try:
            meet()
        except DistbootError as error:
            codes.append(error.code)
        ends.append(time.perf_counter())

    plans = [
        JoinPlan(each, JOB, ("127.0.0.1",), (port,), join_timeout)
        for each in (record(0, world_size), *ranks)
    ]
    meets = [
        Coordinator(listener, plans[0]).wait_for_join,
        *(Worker(plan).report for plan in plans[1:]),
    ]
    threads = [threading.Thread(target=ended, args=(meet,)) for meet in meets]
    for thread in threads[:-1]:
        thread.start()
    arrived = time.perf_counter()
    if join_timeout > 10:
        time.sleep(0.5)  # for all but the last one, whose arrival ends the roll call, to be there
        arrived = time.perf_counter()
    threads[-1].start()
    for thread in threads:
        thread.join()
    listener.close()
    return codes, max(ends) - arrived


def costs() -> None:
    """What one message costs, and what grows with the square of the ranks: the figures of docs/scale.md."""
    report = _report(7, 100_000)
    start = time.perf_counter()
    for _ in range(1000):
        frames = Frames()
        (frame,) = frames.feed(report)
        Channel().verify(frame, frames, WorkerInfo)
    print(f"report: {len(report)} bytes, {(time.perf_counter() - start) * 1e3:.0f} µs to read one")
    for world_size in (1_000, 10_000, 100_000):
        records = [record(rank, world_size) for rank in range(world_size)]
        start = time.perf_counter()
        membership = build_membership(records)
        made = time.perf_counter() - start
        start = time.perf_counter()
        answer = Channel().sign(membership.as_message())
        sealed = time.perf_counter() - start
        start = time.perf_counter()
        frames = Frames(most_from_rank_0(world_size))
        (frame,) = frames.feed(answer)
        Membership.from_message(Channel().verify(frame, frames, Members), world_size).place(
            world_size - 1
        )
        read = time.perf_counter() - start
        said = f"{made * 1e3:.0f} ms to draw up, {sealed * 1e3:.0f} ms to write, {read * 1e3:.0f} ms to read"
        print(f"{world_size} ranks: membership {len(answer)} bytes, {said}")


CASES: dict[str, tuple[str, float, list[WorkerInfo]]] = {
    "a missing rank (join timeout: 2 s)": (
        "missing-rank", 2.0, [record(rank, 8) for rank in range(1, 7)],
    ),
    "a duplicate rank": ("duplicate-rank", 60.0, [record(1, 8), replace(record(1, 8), pid=7, process="7")]),
    "disagreeing sizes": ("membership-mismatch", 60.0, [record(1, 8), record(2, 16)]),
    "a shared accelerator": ("shared-accelerator", 60.0, [record(1, 8, device="GPU-1"), record(2, 8, device="GPU-1")]),
}  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "costs":
        costs()
    elif sys.argv[1] == "peers":
        _peers(*map(int, sys.argv[2:]))
    else:
        print(*_rank_0(*map(int, sys.argv[2:])), flush=True)
        os._exit(0)  # thousands of sockets need not be closed one by one
