"""What one message costs rank 0: CPU time of the real roll call and lifeline at real sockets, one step at a time.

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
    JOB,
    lines_of,
    record,
    verdict,
)
from simulate_peers import GUESTS, Peers, allow_all_files  # noqa: E402

from distboot.lifeline.hub import Hub  # noqa: E402
from distboot.lifeline.settings import Settings  # noqa: E402
from distboot.lifeline.sides import side_of  # noqa: E402
from distboot.lifeline.watcher import Watcher  # noqa: E402
from distboot.rollcall.broadcast import send_to_all  # noqa: E402
from distboot.rollcall.findings import findings, refuse_several_frameworks  # noqa: E402
from distboot.rollcall.handed import Handed  # noqa: E402
from distboot.rollcall.ready import Ready  # noqa: E402
from distboot.rollcall.server import Server  # noqa: E402
from distboot.rollcall.wire import Announcement, Frames, Session, canonical, frame, most_from_rank_0  # noqa: E402
from distboot.roster import Roster, roster_of  # noqa: E402

_LINES = 2000  # with which the costs are measured
_ACCEPTED_AT_ONCE = 64  # as rollcall/connections.py has it
_BIG, _SMALL = 100_000, 5_000  # bytes of two answers
_LARGE = 20_000  # ranks of the roster that is drawn up


@dataclass(frozen=True)
class Costs:
    """Seconds of CPU, and bytes. A line is a connection to rank 0.

    Attributes:
        turn: a look of rank 0's loop at its connections that finds nothing.
        accept: a connection.
        hello: reading a hello, and sending the challenge.
        record: reading and entering a record, of those that a line sends at once.
        drop: noticing that a connection has ended.
        ready: reading that a rank is ready.
        send: a short answer to one line of many.
        byte: each byte of a long one.
        roster: drawing up and writing the roster, a rank.
        prove: writing it for one more line where there is a DISTBOOT_SECRET.
        read_roster: reading it on another rank, a rank of it.
        write_roster: writing it on a relay, a rank of it.
        beat: hearing the beat of a line, answering it and looking whether it is silent.
        wake: what a line adds to each time that the lifeline's loop wakes up.
        watch: beginning to watch a rank.
        end: hearing how a rank ended.
        tell: telling a line who failed first.
        peer: what a simulated line needs to connect and say hello.
        memory, base: of rank 0, a rank and without any, in bytes.
        hello_bytes, challenge_bytes, go_bytes, beat_bytes, verdict_bytes: of a message.
        record_bytes, ready_bytes: of a message, a rank.
    """

    turn: float
    accept: float
    hello: float
    record: float
    drop: float
    ready: float
    send: float
    byte: float
    roster: float
    prove: float
    read_roster: float
    write_roster: float
    beat: float
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


def measured(ranks_a_line: int, runs: int = 3) -> Costs:
    """Medians of so many runs, each in a process of its own."""
    command = [sys.executable, __file__, str(ranks_a_line)]
    rounds = [
        json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout) for _ in range(runs)
    ]
    return Costs(**{name: statistics.median(one[name] for one in rounds) for name in rounds[0]})


class _Steps(Server):
    """Rank 0, one turn of its loop at a time."""

    def turns(self, count: int) -> None:
        for _ in range(count):
            self._connections.turn(0.0)


class _Loop(Watcher):
    """The lifeline's loop, one wake-up at a time."""

    def wake(self) -> None:
        now = time.monotonic()
        self._role.over(now)
        self._look_at_lines()
        self._selector.select(min(self._due(now) - now, 0.0))
        self._role.turn(now)


def _cpu(step: Callable[[], object]) -> float:
    """Seconds of CPU of this process."""
    gc.collect()
    start = time.process_time()
    step()
    return time.process_time() - start


def costs(lines: int, ranks_a_line: int) -> dict[str, float]:
    """What each message costs, with so many lines."""
    world_size = lines * ranks_a_line
    others = world_size - 1
    lines = len(lines_of(world_size, ranks_a_line))
    listener = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
    them = Peers(listener.getsockname()[1], world_size, ranks_a_line)
    allow_all_files()
    server, found = _Steps(listener, record(0, world_size), JOB), dict[str, float]()
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
    them.do("records")
    found["record"] = _cpu(lambda: server.turns(1)) / others
    found["turn"] = _cpu(lambda: server.turns(100)) / 100
    them.begin("read")
    roster = server.hold(60)
    found["memory"] = (resident() - before) / others
    them.done()
    them.do("ready")
    found["ready"] = _cpu(lambda: server.turns(1)) / others
    them.begin("read")
    server.confirm(Ready(), 60)
    them.done()
    handed = server.hand_over()
    found |= _answers(them, [each.connection for each in handed])
    found |= _lifeline(them, handed, roster)
    them.close()
    return found | _by_themselves(world_size, ranks_a_line)


def _answers(them: Peers, connections: list[socket.socket]) -> dict[str, float]:
    """A short answer, and each byte of a long one."""

    def sent(message: bytes) -> float:
        them.begin("read")
        took = _cpu(lambda: send_to_all(dict.fromkeys(connections, lambda: message), 60.0))
        them.done()
        return took / len(connections)

    big, small = (frame({"roster": os.urandom(size).hex()}) for size in (_BIG, _SMALL))
    send = sent(small)
    return {"byte": max(sent(big) - send, 0.0) / (len(big) - len(small)), "send": send}


def _lifeline(them: Peers, handed: list[Handed], roster: Roster) -> dict[str, float]:
    hub = side_of(0, roster, handed, Settings(), held=True)
    assert isinstance(hub, Hub)
    loop = _Loop(hub, interval=1.0, grace=30.0)
    hub.start(os.getpid())
    loop.wake()  # which registers them all
    lines, others = len(handed), len(hub.members) - 1

    def read() -> None:
        for line in list(hub.lines()):
            hub.read(line, time.monotonic())

    def tell() -> None:
        message = verdict().as_message()
        for line in hub.lines():
            line.tell(None, "first", message)

    found: dict[str, float] = {}
    them.do("watch")
    found["watch"] = _cpu(read) / others
    them.do("read")
    beats = []
    for _ in range(5):
        them.do("beat")
        beats.append(_cpu(lambda: hub.tick(time.monotonic())) / lines)
    found["beat"] = statistics.median(beats)
    found["wake"] = statistics.median(_cpu(loop.wake) for _ in range(9)) / lines
    found["tell"] = _cpu(tell) / lines
    them.do("end")
    found["end"] = _cpu(read) / others
    return found


def _by_themselves(world_size: int, ranks_a_line: int) -> dict[str, float]:
    """What needs no socket, and the sizes."""
    records = [record(rank, _LARGE) for rank in range(_LARGE)]
    skews = dict.fromkeys(range(1, _LARGE), 0.01)
    answers: list[bytes] = []

    def draw_up() -> None:
        roster = roster_of(records)
        refuse_several_frameworks(records, roster)
        findings(records, roster, skews)
        answers.append(Session().sealed("roster", canonical(roster.as_message())))

    def read() -> None:
        (message,) = Frames(most_from_rank_0(_LARGE)).feed(answers[0])
        Roster.from_message(message["roster"], _LARGE).place(_LARGE - 1)

    found = {"roster": _cpu(draw_up) / _LARGE, "read_roster": _cpu(read) / _LARGE}
    text = canonical(roster_of(records).as_message())
    answer, session = Announcement("roster", text), Session("secret", challenge="0" * 32, nonce="0" * 32)
    answer.sealed(session)
    found["prove"] = _cpu(lambda: [answer.sealed(session) for _ in range(100)]) / 100
    some = lines_of(world_size, ranks_a_line)[-1]
    return found | {
        "write_roster": _cpu(lambda: Session().sealed("roster", text)) / _LARGE,
        "hello_bytes": len(HELLO),
        "challenge_bytes": len(CHALLENGE),
        "record_bytes": len(some.records) / len(some.ranks),
        "ready_bytes": len(some.ready()) / len(some.ranks),
        "go_bytes": len(Session().sealed("go", canonical([[0, "127.0.0.1:61000"]]))),
        "beat_bytes": len(BEAT),
        "verdict_bytes": len(Session().sealed("first", canonical(verdict().as_message()))),
    }


def resident() -> float:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    print(json.dumps(costs(_LINES, int(sys.argv[1]))), flush=True)
    os._exit(0)  # thousands of sockets need not be closed one by one
