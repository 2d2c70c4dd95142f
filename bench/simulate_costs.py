"""What one message costs rank 0: CPU time of the real roll call and lifeline at real sockets, one step at a time.

The other ranks are sockets of a second process, which does a step when it is told to. So everything that rank 0 is to
read is there before it begins, and the CPU time of the step divided by the number of ranks is the cost of one message.
"""

from __future__ import annotations

import gc
import json
import math
import os
import resource
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from rollcall import JOB, record  # noqa: E402 - beside this file

from distboot.lifeline.ends import End  # noqa: E402
from distboot.lifeline.hub import Hub  # noqa: E402
from distboot.lifeline.line import Line, interval_of  # noqa: E402
from distboot.lifeline.settings import Settings  # noqa: E402
from distboot.lifeline.verdict import Verdict, lost, seats  # noqa: E402
from distboot.lifeline.watcher import Watcher  # noqa: E402
from distboot.record import Record  # noqa: E402
from distboot.rollcall.broadcast import send_to_all  # noqa: E402
from distboot.rollcall.findings import findings, refuse_several_frameworks  # noqa: E402
from distboot.rollcall.ready import Ready  # noqa: E402
from distboot.rollcall.register import Register  # noqa: E402
from distboot.rollcall.server import Server  # noqa: E402
from distboot.rollcall.wire import (  # noqa: E402
    MOST_FROM_RANK_0,
    VERSION,
    Frames,
    Session,
    canonical,
    frame,
)
from distboot.roster import Roster, roster_of  # noqa: E402

_T = TypeVar("_T")
_RANKS = 2000  # with which the costs are measured
_ACCEPTED_AT_ONCE = 64  # as rollcall/connections.py has it
_BIG, _SMALL = 100_000, 5_000  # bytes of two answers
_GUESTS = 60  # for whom there is room beside the ranks
_LARGE = 20_000  # ranks of the roster that is drawn up


@dataclass(frozen=True)
class Costs:
    """Seconds of CPU, and bytes.

    Attributes:
        turn: a look of rank 0's loop at its connections that finds nothing.
        accept: a connection.
        hello: reading a hello, and sending the challenge.
        record: reading a record, and entering it.
        entry: of that, what remains for each record where one message has several.
        drop: noticing that a connection has ended.
        ready: reading that a rank is ready, and telling it to go.
        send: a short answer to one of many.
        byte: each byte of a long one.
        roster: drawing up and writing the roster, a rank.
        read_roster: reading it on another rank, a rank.
        beat: hearing the beat of a line, answering it and looking whether it is silent.
        wake: what a line adds to each time that the lifeline's loop wakes up.
        watch: beginning to watch a line.
        end: hearing how a rank ended.
        tell: telling a line who failed first.
        peer: what a simulated rank of `measured_roll_call` needs to connect and say hello.
        memory, base: of rank 0, a rank and without any, in bytes.
        hello_bytes, challenge_bytes, record_bytes, ready_bytes, go_bytes, beat_bytes, verdict_bytes: of a message.
        roster_bytes: of the roster, a rank.
    """

    turn: float
    accept: float
    hello: float
    record: float
    entry: float
    drop: float
    ready: float
    send: float
    byte: float
    roster: float
    read_roster: float
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
    roster_bytes: float


@dataclass(frozen=True)
class Measured:
    """A real roll call: seconds of rank 0's CPU, seconds from the first connection to the end, and peak memory."""

    cpu: float
    took: float
    memory: float


def measured(sizes: Sequence[int], runs: int = 3) -> tuple[Costs, dict[int, Measured]]:
    """The costs, and real flat roll calls of these sizes with all simulated ranks in one process; medians.

    Interleaved, so that what else the machine does falls on both alike.
    """
    rounds = [
        (json.loads(_run("costs", _RANKS)), {size: json.loads(_run("rollcall", size)) for size in sizes})
        for _ in range(runs)
    ]

    def median(found: Sequence[dict[str, float]], kind: type[_T]) -> _T:
        return kind(**{name: statistics.median(one[name] for one in found) for name in found[0]})

    of_sizes = {size: median([calls[size] for _, calls in rounds], Measured) for size in sizes}
    return median([found for found, _ in rounds], Costs), of_sizes


def _run(what: str, ranks: int) -> str:
    command = [sys.executable, __file__, what, str(ranks)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


HELLO = frame({"distboot": VERSION, "job": JOB.job, "nonce": "0" * 32})
BEAT = Session().sealed("beat", "null")
WATCH = Session().sealed("watch", canonical({"pid": 4711}))
END = Session().sealed("end", canonical(End(signal=15, told=True).as_message()))


def report(rank: int, world_size: int) -> bytes:
    """What a rank says of itself."""
    return Session().sealed("record", canonical(record(rank, world_size, clock=time.time()).as_message()))


def ready(rank: int) -> bytes:
    """That it is ready, with the accelerator that it has."""
    return Session().sealed("ready", canonical(Ready(device=f"0000:{rank % 8:02}:00.0").as_message()))


def verdict() -> Verdict:
    """A usual one."""
    roster = roster_of([record(rank, 16) for rank in range(16)])
    return lost(seats(roster)[8:9], "the connection ended without a word")


class _Peers:
    """The process with all other ranks, as rank 0 drives it."""

    def __init__(self, port: int, world_size: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "peers", str(world_size), str(port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def do(self, step: str) -> float:
        """Let them do a step: CPU seconds that it took them."""
        self.begin(step)
        return self.done()

    def begin(self, step: str) -> None:
        """Let them begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(step + "\n")
        self._process.stdin.flush()

    def done(self) -> float:
        """Wait until they have done it."""
        assert self._process.stdout is not None
        return float(self._process.stdout.readline())

    def close(self) -> None:
        """End them."""
        self._process.kill()
        self._process.communicate()


def peers(world_size: int, port: int) -> None:
    """All other ranks: each line on stdin is a step that all of them take."""
    _allow_all_files()
    connections: list[socket.socket] = []
    guests: list[socket.socket] = []
    reports = [report(rank, world_size) for rank in range(1, world_size)]
    messages = {"hello": lambda _: HELLO, "watch": lambda _: WATCH, "beat": lambda _: BEAT, "end": lambda _: END}
    messages |= {"record": lambda rank: reports[rank - 1], "ready": ready}
    for line in sys.stdin:
        step = line.strip()
        start = time.process_time()
        if step == "begin":
            connections = []
        elif step == "connect":
            connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(1, world_size)]
        elif step == "visit":
            guests = [socket.create_connection(("127.0.0.1", port)) for _ in range(_GUESTS)]
        elif step == "leave":
            for guest in guests:
                guest.close()
        elif step == "read":
            for connection in connections:
                _read_message(connection)
        else:
            for rank, connection in enumerate(connections, 1):
                connection.sendall(messages[step](rank))
        print(time.process_time() - start, flush=True)


def _read_message(connection: socket.socket) -> None:
    frames, found = Frames(MOST_FROM_RANK_0), False
    while not found:
        data = connection.recv(min(frames.missing, 1 << 20))
        if not data:
            raise SystemExit("rank 0 has dropped a rank")
        found = bool(frames.feed(data))


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


class _TellingHub(Hub):
    """Rank 0's side, which tells when we want it to."""

    def tell(self) -> None:
        self._tell(verdict(), time.monotonic())


def _cpu(step: Callable[[], object]) -> float:
    """Seconds of CPU of this process."""
    gc.collect()
    start = time.process_time()
    step()
    return time.process_time() - start


def costs(world_size: int) -> dict[str, float]:
    """What each message costs, in a job of this size."""
    others = world_size - 1
    listener = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
    them = _Peers(listener.getsockname()[1], world_size)
    them.do("begin")  # they are up
    _allow_all_files()
    server, found = _Steps(listener, record(0, world_size), JOB), dict[str, float]()
    found["peer"] = them.do("connect") / others
    before = found["base"] = _resident()
    found["accept"] = _cpu(lambda: server.turns(math.ceil(others / _ACCEPTED_AT_ONCE))) / others
    them.do("visit")
    server.turns(1)
    them.do("leave")
    found["drop"] = _cpu(lambda: server.turns(1)) / _GUESTS
    found["peer"] += them.do("hello") / others
    found["hello"] = _cpu(lambda: server.turns(1)) / others
    them.do("read")
    them.do("record")
    found["record"] = _cpu(lambda: server.turns(1)) / others
    found["memory"] = (_resident() - before) / others
    found["turn"] = _cpu(lambda: server.turns(100)) / 100
    them.begin("read")
    roster = server.hold(60)
    them.done()
    them.do("ready")
    them.begin("read")
    found["ready"] = _cpu(lambda: server.confirm(Ready(), 60)) / others
    them.done()
    lines = server.hand_over()
    found |= _answers(them, [connection for connection, _ in lines.values()])
    found |= _lifeline(them, lines, roster, others)
    them.close()
    return found | _by_themselves(world_size)


def _answers(them: _Peers, connections: list[socket.socket]) -> dict[str, float]:
    """A short answer, and each byte of a long one."""

    def sent(size: int) -> float:
        message = frame({"roster": "x" * size})
        them.begin("read")
        took = _cpu(lambda: send_to_all(dict.fromkeys(connections, lambda: message), 60.0))
        them.done()
        return took / len(connections)

    small = sent(_SMALL)
    return {"byte": max(sent(_BIG) - small, 0.0) / (_BIG - _SMALL), "send": small}


def _lifeline(
    them: _Peers, connections: dict[int, tuple[socket.socket, Session]], roster: Roster, others: int
) -> dict[str, float]:
    interval = interval_of(others + 1)
    lines = {rank: Line(each, session, interval) for rank, (each, session) in connections.items()}
    hub = _TellingHub(seats(roster), lines, Settings(), held=True, say=lambda _: None)
    loop = _Loop(hub, world_size=others + 1, grace=30.0)
    hub.start(os.getpid())
    loop.wake()  # which registers them all

    def read() -> None:
        for line in hub.lines():
            hub.read(line, time.monotonic())

    found: dict[str, float] = {}
    them.do("watch")
    found["watch"] = _cpu(read) / others
    them.do("read")
    beats = []
    for _ in range(5):
        them.do("beat")
        beats.append(_cpu(lambda: hub.tick(time.monotonic())) / others)
    found["beat"] = statistics.median(beats)
    found["wake"] = statistics.median(_cpu(loop.wake) for _ in range(9)) / others
    found["tell"] = _cpu(hub.tell) / others
    them.do("end")
    found["end"] = _cpu(read) / others
    return found


def _by_themselves(world_size: int) -> dict[str, float]:
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
        (message,) = Frames(MOST_FROM_RANK_0).feed(answers[0])
        Roster.from_message(message["roster"]).place(_LARGE - 1)

    return {
        "roster": _cpu(draw_up) / _LARGE,
        "read_roster": _cpu(read) / _LARGE,
        "entry": _entry(world_size),
        "hello_bytes": len(HELLO),
        "challenge_bytes": len(frame({"distboot": VERSION, "challenge": "0" * 32})),
        "record_bytes": len(report(world_size - 1, world_size)),
        "ready_bytes": len(ready(0)),
        "go_bytes": len(Session().sealed("go", canonical([[0, "127.0.0.1:61000"]]))),
        "beat_bytes": len(BEAT),
        "verdict_bytes": len(Session().sealed("first", canonical(verdict().as_message()))),
        "roster_bytes": len(answers[0]) / _LARGE,
    }


def _entry(world_size: int) -> float:
    """Of reading a record what is not the frame's, the socket's or the loop's."""
    texts = [canonical(record(rank, world_size).as_message()) for rank in range(world_size)]
    register = Register(world_size)

    def enter() -> None:
        for text in texts:
            register.enter(Record.from_message(json.loads(text)))

    return _cpu(enter) / world_size


def roll_call(world_size: int) -> Measured:
    """One real roll call, whose ranks come as fast as their one process can let them."""
    listener = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
    them = subprocess.Popen(
        [sys.executable, str(ROOT / "bench" / "rollcall.py"), "peers", str(listener.getsockname()[1]), str(world_size)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert them.stdin is not None
    assert them.stdout is not None
    them.stdout.readline()
    server = Server(listener, record(0, world_size), JOB)
    them.stdin.write("\n")
    them.stdin.flush()
    select.select([listener], [], [])
    start, cpu = time.perf_counter(), time.process_time()
    server.hold(300)
    done = Measured(time.process_time() - cpu, time.perf_counter() - start, _resident())
    assert them.wait(60) == 0
    return done


def _allow_all_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _resident() -> float:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    what, ranks = sys.argv[1], int(sys.argv[2])
    if what == "peers":
        peers(ranks, int(sys.argv[3]))
    else:
        print(json.dumps(costs(ranks) if what == "costs" else asdict(roll_call(ranks))), flush=True)
        os._exit(0)  # thousands of sockets need not be closed one by one
