"""A real roll call and a real lifeline at real sockets, whole: what the simulation is held against.

    python bench/simulate_real.py 100000 8    ranks, and how many of them share a connection

All ranks but rank 0, or the relays of all nodes, are sockets of one other process on the same machine.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent), str(Path(__file__).parent)]

from simulate_costs import resident  # noqa: E402 - beside this file, and so are the next
from simulate_job import Setting  # noqa: E402
from simulate_messages import JOB, record  # noqa: E402
from simulate_peers import Peers  # noqa: E402

from distboot.lifeline.hub import Hub  # noqa: E402
from distboot.lifeline.line import interval_of  # noqa: E402
from distboot.lifeline.role import Order  # noqa: E402
from distboot.lifeline.settings import Settings  # noqa: E402
from distboot.lifeline.sides import side_of  # noqa: E402
from distboot.lifeline.watcher import Watcher  # noqa: E402
from distboot.rollcall.ready import Ready  # noqa: E402
from distboot.rollcall.server import Server  # noqa: E402


@dataclass(frozen=True)
class Measured:
    """What rank 0 needed.

    Attributes:
        cpu: seconds, for the roll call until the roster is sent.
        took: seconds, from the first connection until all have it.
        memory: bytes that are resident then.
        go: seconds of CPU for hearing that all are ready, and letting them go.
        beat: seconds of CPU, for one beat of the lifeline on all lines.
        told: seconds from the end of a rank until all know.
    """

    cpu: float
    took: float
    memory: float
    go: float
    beat: float
    told: float


class _Script:
    """The process of rank 0, which goes on whatever happens."""

    def stop(self, order: Order) -> None: ...

    def kill(self) -> None: ...

    def decided(self, now: float) -> None: ...

    def look(self, now: float) -> None: ...


def real(world_size: int, ranks_a_line: int) -> Measured:
    """All of it, in a process of its own."""
    command = [sys.executable, __file__, str(world_size), str(ranks_a_line)]
    return Measured(**json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout))


def _whole(world_size: int, ranks_a_line: int) -> Measured:
    listener = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
    them = Peers(listener.getsockname()[1], world_size, ranks_a_line)
    server = Server(listener, record(0, world_size), JOB)
    them.begin(f"meet {Setting(world_size, ranks_a_line).spread}")
    select.select([listener], [], [])
    cpu = time.process_time()
    roster = server.hold(300)
    cpu = time.process_time() - cpu
    took, memory = them.done(), resident()
    them.do("ready")
    go = time.process_time()
    server.confirm(Ready(), 300)
    go = time.process_time() - go
    them.do("read")
    hub = side_of(0, roster, server.hand_over(), Settings(), held=True)
    assert isinstance(hub, Hub)
    interval = interval_of(roster)
    loop = Watcher(hub, interval=interval, grace=300.0)
    hub.start(os.getpid())
    threading.Thread(target=loop.run, args=(_Script(),), daemon=True).start()
    return Measured(cpu, took, memory, go, *_lifeline(them, hub, interval))


def _lifeline(them: Peers, hub: Hub, interval: float) -> tuple[float, float]:
    """The CPU of one beat, while nothing else happens, and the seconds until all know of an end."""
    them.do("watch")
    them.do("beat")
    while not all(member.start is not None for member in hub.members):
        time.sleep(0.02)
    them.do("answers")
    them.do("beat")
    idle = time.process_time()
    time.sleep(interval)
    beat = time.process_time() - idle
    them.do("beat")
    return beat, them.do("die")


if __name__ == "__main__":
    print(json.dumps(asdict(_whole(*map(int, sys.argv[1:])))), flush=True)
    os._exit(0)  # thousands of sockets need not be closed one by one
