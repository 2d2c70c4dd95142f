"""What late ranks cost rank 0's agent: while none is late, and when all the others wait for one.

    python bench/late_rank0.py 10000 alike    agents of a rank each, whose stacks are alike but for one, or `different`

Rank 0's side is the real one, at real sockets; the other agents are sockets of a second process (simulate_peers.py).
"""

from __future__ import annotations

import gc
import json
import math
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / each) for each in ("bench", "tests/lib"))]

from measure import PYTHON, UnmeasuredError, output_of  # noqa: E402 - beside this file, and so are the next
from simulate_messages import place, plan  # noqa: E402
from simulate_peers import Peers, allow_all_files  # noqa: E402
from simulate_real import shell_of_rank_0  # noqa: E402

from distboot.agent.heartbeat import HeartbeatConnection  # noqa: E402
from distboot.agent.liveness import BEATS, BOUND  # noqa: E402
from distboot.job.job import Job  # noqa: E402
from distboot.job.late import LateService  # noqa: E402
from distboot.job.messages import Locate, Position, Register  # noqa: E402
from distboot.job.stacks import lines  # noqa: E402
from distboot.rendezvous.coordinator import Coordinator  # noqa: E402
from distboot.rendezvous.messages import Ready  # noqa: E402

_AFTER = 60.0  # seconds
_BEATS = 5
_INTERVAL = int(BEATS * BOUND)  # seconds


@dataclass(frozen=True)
class Cost:
    """Seconds of CPU of rank 0's agent.

    Attributes:
        sent: messages but for heartbeats, while no rank is late.
        beat, beat_without: for a heartbeat of all, with and without that which waits for late ranks.
        interval: seconds between two heartbeats.
        stalled: for hearing from all that their ranks have stalled.
        episode: from the question how far they are until it is said who is late.
        fold: of that, for folding the stacks, and the lines that show them.
        line: the first one that is said.
    """

    sent: int
    beat: float
    beat_without: float
    interval: float
    stalled: float
    episode: float
    fold: float
    line: str


def cost(agents: int, *, alike: bool) -> Cost:
    """All of it, in a process of its own."""
    said = output_of([PYTHON, __file__, str(agents), "alike" if alike else "different"])
    found = Cost(**json.loads(said.splitlines()[-1]))
    if not found.line.startswith(f"waiting for rank {agents - 1} "):
        raise UnmeasuredError(f"it said {found.line[:80]!r}")
    return found


class _Rank0:
    """Rank 0's side of failure detection in a job that trains, one step at a time, with a clock of its own."""

    def __init__(self, agents: int) -> None:
        self.now = time.monotonic()
        listener = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
        self.them = Peers(listener.getsockname()[1], agents)
        server = Coordinator(listener, plan(agents))
        self.them.begin("meet")
        select.select([listener], [], [])
        membership = server.wait_for_join()
        self.them.done()
        self.side = shell_of_rank_0(server, membership, _AFTER)
        job = self.side.job
        assert isinstance(job, Job)
        self.late = next(one for one in job.services if isinstance(one, LateService))
        self.them.do("ready")
        self.read()
        self.side.take(0, Ready(), self.now)
        self.them.do("read")  # that they may go
        self.them.do("watch")
        self.read()
        self.them.do("read")  # that they are watched
        self.side.take(0, Register(os.getpid()), self.now)
        self.them.do("read")

    def read(self) -> None:
        for line in list(self.side.peers.members):
            self.side.peers.read(line, self.now)

    def turn(self) -> None:
        self.side.turn(self.now)

    def beat(self) -> None:
        for _ in range(_INTERVAL):
            self.side.tick(self.now)
        self.turn()
        self.side.due(self.now)


def _cpu(step: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    step()
    return time.process_time() - start


def _still(rank0: _Rank0) -> tuple[int, float, float]:
    """Messages sent, and the cost of a beat with and without."""
    took: dict[bool, list[float]] = {True: [], False: []}
    with patch.object(HeartbeatConnection, "send", autospec=True) as send:
        for number in range(2 * _BEATS):
            rank0.them.do("beat")
            with (
                nullcontext()
                if number % 2
                else patch.multiple(LateService, tick=lambda *_: None, due=lambda _: math.inf)
            ):
                took[bool(number % 2)].append(_cpu(rank0.beat))
    return send.call_count, min(took[True]), min(took[False])


def _episode(rank0: _Rank0, kind: str) -> tuple[float, float, float, str]:
    said: list[str] = []
    where = place(0, alike=kind == "alike")
    rank0.side.say = lambda text, *_, **__: said.append(text)

    def locate(question: Locate, _: float) -> None:
        stacks = where if question.stacks else None
        rank0.side.take(0, Position(question.number, 60.0, {"0": 1968}, 0, 0, stacks), rank0.now)

    vars(rank0.side)["locate"] = locate
    rank0.them.do("stall")
    stalled, episode = _cpu(rank0.read), 0.0
    for answer in ("position", kind):
        rank0.them.begin("read")
        episode += _cpu(rank0.turn)  # the question
        rank0.them.done()
        rank0.them.do(answer)
        episode += _cpu(rank0.read)
    episode += _cpu(rank0.turn)
    rank0.now = rank0.late.due()  # whether it is over meanwhile
    episode += _cpu(rank0.turn)
    found = {rank: one.stacks for rank, one in vars(rank0.late)["_positions"].items()}
    return stalled, episode, _cpu(lambda: lines(found)), said[0].partition("\n")[0]


def _whole(agents: int, kind: str) -> Cost:
    allow_all_files()
    rank0 = _Rank0(agents)
    sent, beat, without = _still(rank0)
    return Cost(sent, beat, without, _INTERVAL, *_episode(rank0, kind))


if __name__ == "__main__":
    print(json.dumps(asdict(_whole(int(sys.argv[1]), sys.argv[2]))), flush=True)
    os._exit(0)  # thousands of sockets need not be closed one by one
