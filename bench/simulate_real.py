"""What rank 0 needs for up to 10,000 ranks: a real roll call and real failure detection at real sockets.

    python bench/simulate_real.py          all sizes; prints the tables of docs/explanation/scale.md
    python bench/simulate_real.py 10000    one size, as JSON

All ranks but rank 0 are sockets of one other process on the same machine.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / each) for each in ("bench", "tests/lib"))]

from simulate_messages import plan  # noqa: E402 - beside this file, and so is the next
from simulate_peers import Peers  # noqa: E402

from distboot.agent.agent import shell_of  # noqa: E402
from distboot.agent.liveness import BEATS, BOUND  # noqa: E402
from distboot.agent.loop import EventLoop  # noqa: E402
from distboot.agent.shell import Shell  # noqa: E402
from distboot.base.settings import SupervisionSettings  # noqa: E402
from distboot.job.messages import Register  # noqa: E402
from distboot.rendezvous.coordinator import Coordinator  # noqa: E402
from distboot.rendezvous.events import EventLog  # noqa: E402
from distboot.rendezvous.membership import Membership  # noqa: E402
from distboot.rendezvous.messages import Ready  # noqa: E402

SIZES = (1024, 4000, 10_000)


@dataclass(frozen=True)
class Measured:
    """What rank 0 needed.

    Attributes:
        cpu: seconds, for the roll call until the membership is sent.
        took: seconds, from the first connection until all have it.
        memory: bytes that are resident then.
        go: seconds of CPU for hearing that all are ready, and letting them go.
        beat: seconds of CPU of failure detection in the time of its bound, while nothing happens.
        told: seconds from the end of a rank until all know.
    """

    cpu: float
    took: float
    memory: float
    go: float
    beat: float
    told: float


def real(world_size: int) -> Measured:
    """All of it, in a process of its own."""
    command = [sys.executable, __file__, str(world_size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(**json.loads(done.stdout))


def tables() -> str:
    """Those of docs/explanation/scale.md."""
    from page import table  # here, as its imports would count as memory of rank 0

    jobs = {size: real(size) for size in SIZES}
    met = [
        (
            f"{size:,}",
            f"{found.cpu:.2f} s",
            f"{found.go:.2f} s",
            f"{found.took:.2f} s",
            f"{found.memory / 1e6:.0f} MB",
        )
        for size, found in jobs.items()
    ]
    watched = [
        (f"{size:,}", f"{100 * found.beat / BOUND:.2f} %", f"{found.told:.2f} s")
        for size, found in jobs.items()
    ]
    head = (
        "ranks",
        "CPU until the membership is sent",
        "CPU until all may go",
        "all have the membership after",
        "resident",
    )
    failures = ("ranks", "of a core while nothing happens", "a death known to all after")
    return f"{table(head, met)}\n\n{table(failures, watched)}"


def shell_of_rank_0(server: Coordinator, membership: Membership, late_after: float = 0.0) -> Shell:
    """What rank 0's agent goes on with once all have met."""
    settings = SupervisionSettings(grace=30.0, late_after=late_after)
    gc.freeze()  # as rank 0's agent does
    shell = shell_of(0, membership, server.detach_all(), server, settings, held=True)
    shell.facts.is_starting = True
    return shell


def resident() -> float:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _whole(world_size: int) -> Measured:
    listener = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
    them = Peers(listener.getsockname()[1], world_size)
    server = Coordinator(listener, plan(world_size))
    them.begin("meet")
    select.select([listener], [], [])
    cpu = time.process_time()
    membership = server.wait_for_join()
    cpu = time.process_time() - cpu
    took, memory = them.done(), resident()
    shell = shell_of_rank_0(server, membership)
    them.do("ready")
    go = time.process_time()
    for line in list(shell.peers.members):
        shell.peers.read(line, time.monotonic())
    shell.take(0, Ready(), time.monotonic())
    go = time.process_time() - go
    them.do("read")
    loop = EventLoop(shell)
    shell.take(0, Register(os.getpid()), time.monotonic())
    threading.Thread(target=loop.run, daemon=True).start()
    return Measured(cpu, took, memory, go, *_supervision(them, server.log, world_size))


def _supervision(them: Peers, log: EventLog, world_size: int) -> tuple[float, float]:
    """The CPU in the time of the bound, while nothing else happens, and the seconds until all know of an end."""
    them.do("watch")
    them.do("beat")
    while sum(one.event == "registered" for one in log) < world_size:
        time.sleep(0.02)
    them.do("read")
    time.sleep(BEATS * BOUND)  # until all that has come is read
    idle = 0.0
    for _ in range(3):
        them.do("beat")
        idle = idle or time.process_time()
        time.sleep(BEATS * BOUND)
    beat = (time.process_time() - idle) / 3 / BEATS
    them.do("beat")
    return beat, them.do("die")


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(tables())
        sys.exit()
    print(json.dumps(asdict(_whole(int(sys.argv[1])))), flush=True)
    os._exit(0)  # thousands of sockets need not be closed one by one
