"""What one message costs rank 0: CPU time of the real roll call and supervision at real sockets, one step at a time.

The other ranks are sockets of a second process, which does a step when it is told to. So everything that rank 0 is to
read is there before it begins, and the CPU time of the step, divided by the number of lines or of ranks, is the cost.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from simulate_messages import (  # noqa: E402 - beside this file
    BEAT,
    CHALLENGE,
    HELLO,
    lines_of,
    plan,
    record,
    verdict,
)
from simulate_peers import GUESTS, Peers, allow_all_files  # noqa: E402

from distboot.agent.agent import participant_of  # noqa: E402
from distboot.agent.failure_coordinator import FailureCoordinator  # noqa: E402
from distboot.agent.heartbeat import BEATS, BEATS_OF_RANK_0, BOUND  # noqa: E402
from distboot.agent.loop import EventLoop  # noqa: E402
from distboot.base.settings import SupervisionSettings  # noqa: E402
from distboot.job.messages import Abort, Register  # noqa: E402
from distboot.rendezvous.connection_pool import send_to_all  # noqa: E402
from distboot.rendezvous.coordinator import (  # noqa: E402
    Coordinator,
    consistency_warnings,
    refuse_several_frameworks,
)
from distboot.rendezvous.membership import Membership, build_membership  # noqa: E402
from distboot.rendezvous.messages import (  # noqa: E402
    Go,
    Members,
    Offer,
    Ready,
)
from distboot.rendezvous.protocol import (  # noqa: E402
    Broadcast,
    Channel,
    Frames,
    most_from_rank_0,
)

_LINES = 2000  # with which the costs are measured
_ACCEPTED_AT_ONCE = 64  # as rendezvous/connection_pool.py has it
_BIG, _SMALL = 100_000, 5_000  # bytes of two answers
_HEARTBEAT = int(BEATS * BOUND)  # ticks of a second
# As many: then rank 0 has sent its own as often as it does
_HEARTBEATS = int(BEATS_OF_RANK_0 * BOUND)
_LARGE = 20_000  # ranks of the membership that is drawn up


@dataclass(frozen=True)
class Costs:
    """Seconds of CPU, and bytes. A line is a connection to rank 0.

    Attributes:
        turn: a look of rank 0's loop at its connections that finds nothing.
        accept: a connection.
        hello: reading a hello, and sending the challenge.
        record: reading and entering a record.
        drop: noticing that a connection has ended.
        ready: reading that a rank is ready.
        send: a short answer to one line of many.
        byte: each byte of a long one.
        membership: drawing up and writing the membership, a rank.
        prove: writing it for one more line where there is a DISTBOOT_SECRET.
        read_membership: reading it on another rank, a rank of it.
        idle: failure detection of a line, for each second in which nothing happens.
        wake: what a line adds to each time that failure detection's loop wakes up.
        watch: beginning to watch a rank.
        end: hearing how a rank ended.
        tell: telling a line who failed first.
        peer: what a simulated line needs to connect and say hello.
        memory, base: of rank 0, a rank and without any, in bytes.
        hello_bytes, challenge_bytes, record_bytes, ready_bytes, go_bytes, beat_bytes, verdict_bytes: of a message.
    """

    turn: float
    accept: float
    hello: float
    record: float
    drop: float
    ready: float
    send: float
    byte: float
    membership: float
    prove: float
    read_membership: float
    idle: float
    wake: float
    watch: float
    end: float
    tell: float
    peer: float
    memory: float
    base: float
    hello_bytes: float
    challenge_bytes: float
    record_bytes: float
    ready_bytes: float
    go_bytes: float
    beat_bytes: float
    verdict_bytes: float


def measured(runs: int = 3) -> Costs:
    """Medians of so many runs, each in a process of its own."""
    command = [sys.executable, __file__]
    rounds = [
        json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        for _ in range(runs)
    ]
    return Costs(**{name: statistics.median(one[name] for one in rounds) for name in rounds[0]})


class _Steps(Coordinator):
    """Rank 0, one turn of its loop at a time."""

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.pool.poll(0.0)


class _Loop(EventLoop):
    """Failure detection's loop, one wake-up at a time."""

    def wake(self) -> None:
        now = time.monotonic()
        self._role.over(now)
        self._selector.select(min(self._due(now) - now, 0.0))
        self._role.turn(now)


def _cpu(step: Callable[[], object]) -> float:
    """Seconds of CPU of this process."""
    gc.collect()
    start = time.process_time()
    step()
    return time.process_time() - start


def costs(lines: int) -> dict[str, float]:
    """What each message costs, with so many lines."""
    world_size = lines + 1
    listener = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
    them = Peers(listener.getsockname()[1], world_size)
    allow_all_files()
    server, found = _Steps(listener, plan(world_size)), dict[str, float]()
    found["peer"] = them.do("connect") / lines
    before = found["base"] = resident()
    found["accept"] = _cpu(lambda: server.turns(math.ceil(lines / _ACCEPTED_AT_ONCE))) / lines
    them.do("visit")
    server.turns(1)
    them.do("leave")
    found["drop"] = _cpu(lambda: server.turns(1)) / GUESTS
    found["peer"] += them.do("hello") / lines
    found["hello"] = _cpu(lambda: server.turns(1)) / lines
    them.do("read")
    them.do("record")
    found["record"] = _cpu(lambda: server.turns(1)) / lines
    found["turn"] = _cpu(lambda: server.turns(100)) / 100
    them.begin("read")
    membership = server.wait_for_join()
    found["memory"] = (resident() - before) / lines
    them.done()
    coordinator = coordinator_of(server, membership)

    def read() -> None:
        for line in list(coordinator.peers):
            coordinator.read(line, time.monotonic())

    them.do("ready")
    found["ready"] = _cpu(read) / lines
    them.begin("read")
    coordinator.take(0, Ready(), time.monotonic())
    them.done()
    found |= _answers(them, [line.socket for line in coordinator.peers])
    found |= _supervision(them, coordinator, read)
    them.close()
    return found | _by_themselves()


def _answers(them: Peers, connections: list[socket.socket]) -> dict[str, float]:
    """A short answer, and each byte of a long one."""

    def sent(message: bytes) -> float:
        them.begin("read")
        took = _cpu(lambda: send_to_all(dict.fromkeys(connections, lambda: message), 60.0))
        them.done()
        return took / len(connections)

    big, small = (Channel().sign(Members(_hosts(size), (), None)) for size in (_BIG, _SMALL))
    send = sent(small)
    return {"byte": max(sent(big) - send, 0.0) / (len(big) - len(small)), "send": send}


def _hosts(size: int) -> tuple[str, ...]:
    """Names of so many random bytes together, which cannot be compressed below that."""
    return tuple(os.urandom(500).hex() for _ in range(size // 500))


def coordinator_of(
    server: Coordinator, membership: Membership, late_after: float = 0.0
) -> FailureCoordinator:
    """What rank 0's agent goes on with once all have met."""
    settings = SupervisionSettings(grace=30.0, late_after=late_after)
    coordinator = participant_of(0, membership, server, settings, held=True)
    assert isinstance(coordinator, FailureCoordinator)
    coordinator.is_starting = True
    return coordinator


def _supervision(
    them: Peers, coordinator: FailureCoordinator, read: Callable[[], None]
) -> dict[str, float]:
    loop = _Loop(coordinator)
    coordinator.take(0, Register(os.getpid()), time.monotonic())
    lines = len(coordinator.peers)

    def tell() -> None:
        for line in coordinator.peers:
            line.send(Abort(verdict()))

    def tick() -> None:
        for _ in range(_HEARTBEAT):
            coordinator.tick(time.monotonic())
            coordinator.turn(time.monotonic())

    found: dict[str, float] = {}
    them.do("watch")
    found["watch"] = _cpu(read) / lines
    them.do("read")
    took = 0.0
    for _ in range(_HEARTBEATS):
        them.do("beat")
        took += _cpu(tick)
    found["idle"] = took / _HEARTBEATS / _HEARTBEAT / lines
    found["wake"] = statistics.median(_cpu(loop.wake) for _ in range(9)) / lines
    found["tell"] = _cpu(tell) / lines
    them.do("end")
    found["end"] = _cpu(read) / lines
    return found


def _by_themselves() -> dict[str, float]:
    """What needs no socket, and the sizes."""
    records = [record(rank, _LARGE) for rank in range(_LARGE)]
    skews = dict.fromkeys(range(1, _LARGE), 0.01)
    answers: list[bytes] = []

    def draw_up() -> None:
        membership = build_membership(records)
        refuse_several_frameworks(records, membership)
        consistency_warnings(records, membership, skews)
        answers.append(Channel().sign(membership.as_message()))

    def read() -> None:
        frames = Frames(most_from_rank_0(_LARGE))
        (frame,) = frames.feed(answers[0])
        Membership.from_message(Channel().verify(frame, frames, Members), _LARGE).place(_LARGE - 1)

    found = {"membership": _cpu(draw_up) / _LARGE, "read_membership": _cpu(read) / _LARGE}
    answer = Broadcast(build_membership(records).as_message())
    channel = Channel("secret", challenge="0" * 32, nonce="0" * 32)
    found["prove"] = _cpu(lambda: [answer.sign(channel) for _ in range(100)]) / 100
    some = lines_of(_LINES)[-1]
    return found | {
        "hello_bytes": len(HELLO),
        "challenge_bytes": len(CHALLENGE),
        "record_bytes": len(some.record),
        "ready_bytes": len(some.ready()),
        "go_bytes": len(Channel().sign(Go((Offer(0, "127.0.0.1:61000"),)))),
        "beat_bytes": len(BEAT),
        "verdict_bytes": len(Channel().sign(Abort(verdict()))),
    }


def resident() -> float:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    print(json.dumps(costs(_LINES)), flush=True)
    os._exit(0)  # thousands of sockets need not be closed one by one
