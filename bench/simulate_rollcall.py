"""The roll call as a discrete-event simulation: rank 0's loop, the kernel's queue in front of it, the link, the ranks.

What is simulated is what `distboot/rollcall` does: rank 0 reads everything that is there, then accepts 64 connections,
and so on; a rank that gets no answer in time gives up and tries again with jitter; all are answered at the end. A line
is one connection: of one rank ("flat"), or of all ranks of a node, one of which speaks for the others ("tree").
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from simulate_costs import Costs

from distboot.rollcall.wire import Session, canonical
from distboot.roster import with_nodes

RANKS_A_NODE = 8
_BACKLOG = 4096  # connections that wait to be accepted (net.core.somaxconn)
_SYN_AGAIN = (1.0, 3.0, 7.0)  # seconds after the first, where the queue was full (tcp(7): the timeout doubles)
_ACK_AGAIN = 0.2  # seconds, doubled each time: the least that Linux waits to send data again
_SEGMENT, _HEADERS = 1448, 78  # bytes of data in a packet, and what Ethernet, IP and TCP add
_FIRST_WINDOW = 10 * _SEGMENT  # bytes that a new connection may send before it is acknowledged; doubles each time
# As distboot has them.
_ACCEPTED_AT_ONCE = 64
_FIRST_LIMIT, _LAST_LIMIT = 1.0, 10.0
_FIRST_PAUSE, _LAST_PAUSE, _LONGER = 0.01, 0.5, 1.5
_CANDIDATES = 5  # ports, of which the others refuse at once
_ANSWER_LIMIT = 10.0
_GRACE = 0.8


@dataclass(frozen=True)
class Setting:
    """A job and its network.

    Attributes:
        ranks_a_line: 1 is flat, more is a tree.
        latency: one way, in seconds.
        link: of rank 0's host, in bits a second.
        pace: seconds between the starts of one rank and the next; 0: all at once.
        slow: part of the ranks that start up to `slow_by` seconds later than the others.
        dead: part of the ranks that never start.
        silence: seconds without another rank after which the speaker of a node sends what it has.
    """

    world_size: int
    ranks_a_line: int = 1
    latency: float = 1e-4
    link: float = 10e9
    pace: float = 0.0
    slow: float = 0.0
    slow_by: float = 10.0
    dead: float = 0.0
    join_timeout: float = 300.0
    silence: float = 0.05
    seed: int = 0


@dataclass
class Outcome:
    """What came of it. Times are in seconds, from the start of the first rank; None: it did not come to that.

    Attributes:
        last_start: when the last rank started.
        roster: when the last rank had the roster.
        go: when the last rank had the word to go.
        told: when the last rank knew who is missing.
        text: what it knew.
        unanswered: ranks that rank 0 could not answer within its time limit.
        gave_up: connections that a rank ended because rank 0 did not answer.
        cpu: of rank 0, until all had the roster.
        cpu_go: of rank 0 from then on.
        on_the_link: seconds for which the link of rank 0 is sending or receiving, whichever is more.
        messages: by kind, at rank 0.
    """

    last_start: float = 0.0
    roster: float | None = None
    go: float | None = None
    told: float | None = None
    text: str = ""
    unanswered: int = 0
    gave_up: int = 0
    cpu: float = 0.0
    cpu_go: float = 0.0
    bytes_in: float = 0.0
    bytes_out: float = 0.0
    on_the_link: float = 0.0
    files: int = 0
    memory: float = 0.0
    messages: Counter[str] = field(default_factory=Counter)


class Link:
    """One direction of rank 0's link: one message after the other."""

    def __init__(self, bits_a_second: float) -> None:
        self._rate = bits_a_second / 8
        self.free = self.busy = self.bytes = 0.0

    def send(self, now: float, size: float) -> float:
        """When the last byte has left."""
        took = (size + math.ceil(size / _SEGMENT) * _HEADERS) / self._rate
        self.busy += took
        self.bytes += size
        self.free = max(self.free, now) + took
        return self.free


@dataclass(eq=False, slots=True)
class Connection:
    """One attempt of a line."""

    line: Line
    inbox: list[tuple[str, int]] = field(default_factory=list)
    is_accepted: bool = False
    is_closed: bool = False
    is_welcome: bool = False


@dataclass(eq=False, slots=True)
class Line:
    """Whoever connects: a rank, or the speaker of a node.

    Attributes:
        start: when it first connects.
        batches: when it has how many more ranks to report.
    """

    start: float
    batches: list[tuple[float, int]]
    attempt: int = 0
    pause: float = _FIRST_PAUSE

    @property
    def ranks(self) -> int:
        """How many it speaks for."""
        return sum(number for _, number in self.batches)


class RollCall:
    """One roll call."""

    def __init__(self, setting: Setting, costs: Costs) -> None:
        self.setting, self.costs = setting, costs
        self.outcome = Outcome()
        self._random = random.Random(setting.seed)
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._order = count()
        self._to_0, self._from_0 = Link(setting.link), Link(setting.link)
        self._queue: deque[Connection] = deque()
        self._ready: dict[Connection, None] = {}
        self._at: dict[Connection, None] = {}  # that have reported
        self._entered = self._is_ready = 1  # rank 0 itself
        self._idle, self._over, self._answered = True, False, False
        self._end = setting.join_timeout
        self._missing: list[int] = []
        self._lines = self._started()

    def run(self) -> Outcome:
        """Until all have the word to go, or know who is missing."""
        for line in self._lines:
            self._call(line.start, self._connect, line)
        if self._missing:
            self._call(self._end, self._give_up)
        while self._events:
            now, _, event, arguments = heapq.heappop(self._events)
            event(now, *arguments)
        done = self.outcome
        done.bytes_in, done.bytes_out = self._to_0.bytes, self._from_0.bytes
        done.on_the_link = max(self._to_0.busy, self._from_0.busy)
        done.memory = self.costs.base + self.costs.memory * self.setting.world_size
        return done

    def _started(self) -> list[Line]:
        """The lines, with the starts of their ranks; rank 0 is there from the beginning."""
        setting, lines = self.setting, list[Line]()
        starts: list[float] = []
        for rank in range(1, setting.world_size + 1):
            if rank == setting.world_size or (rank % setting.ranks_a_line == 0 and starts):
                lines += [Line(min(starts), self._batches(sorted(starts)))] if starts else []
                starts = []
            if rank == setting.world_size:
                break
            if self._random.random() < setting.dead:
                self._missing.append(rank)
                continue
            late = self._random.uniform(0.0, setting.slow_by) if self._random.random() < setting.slow else 0.0
            starts.append(rank * setting.pace + late)
            self.outcome.last_start = max(self.outcome.last_start, starts[-1])
        return lines

    def _batches(self, starts: list[float]) -> list[tuple[float, int]]:
        """What a speaker sends at once: what comes without a pause, or all that there can be."""
        found: list[tuple[float, int]] = []
        here, alone = 0, self.setting.ranks_a_line == 1
        for number, start in enumerate(starts, 1):
            here += 1
            is_last = number == len(starts)
            complete = alone or number >= self.setting.ranks_a_line
            if is_last or starts[number] - start > self.setting.silence:
                found.append((start if complete else start + self.setting.silence, here))
                here = 0
        return found

    def _call(self, at: float, event: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (at, next(self._order), event, arguments))

    # The ranks

    def _connect(self, now: float, line: Line) -> None:
        if now > line.start + self.setting.join_timeout:
            return
        self.outcome.messages["connection"] += 1
        limit = min(_FIRST_LIMIT * 2**line.attempt, _LAST_LIMIT)
        self._call(now + self.setting.latency, self._syn, Connection(line), now, limit, 0)

    def _syn(self, now: float, connection: Connection, began: float, limit: float, times: int) -> None:
        """The first packet is at rank 0's kernel."""
        latency = self.setting.latency
        if len(self._queue) < _BACKLOG:
            self._call(now + latency, self._connected, connection, limit)
        elif times < len(_SYN_AGAIN) and _SYN_AGAIN[times] < limit:
            self._call(began + _SYN_AGAIN[times] + latency, self._syn, connection, began, limit, times + 1)
        else:
            self._call(began + limit, self._once_more, connection.line)

    def _connected(self, now: float, connection: Connection, limit: float) -> None:
        at = self._to_0.send(now, self.costs.hello_bytes) + self.setting.latency
        self._call(at, self._hello, connection, 0)
        self._call(now + limit, self._out_of_patience, connection)

    def _hello(self, now: float, connection: Connection, times: int) -> None:
        """The last packet of the connection is at rank 0's kernel, and with it the hello."""
        if connection.is_closed:
            return
        if len(self._queue) >= _BACKLOG:
            self._call(now + _ACK_AGAIN * 2**times, self._hello, connection, times + 1)
            return
        connection.inbox.append(("hello", 1))
        self._queue.append(connection)
        self._wake(now)

    def _out_of_patience(self, now: float, connection: Connection) -> None:
        if connection.is_welcome or self._over:
            return
        connection.is_closed = True
        self.outcome.gave_up += 1
        if connection.inbox or connection.is_accepted:
            self._call(now + self.setting.latency, self._arrives, connection, "end", 1)
        self._call(now + (_CANDIDATES - 1) * 2 * self.setting.latency, self._once_more, connection.line)

    def _once_more(self, now: float, line: Line) -> None:
        pause = line.pause * (0.5 + self._random.random())
        line.pause = min(line.pause * _LONGER, _LAST_PAUSE)
        line.attempt += 1
        self._call(now + pause, self._connect, line)

    def _welcome(self, now: float, connection: Connection) -> None:
        if connection.is_closed:
            return
        connection.is_welcome = True
        for at, ranks in connection.line.batches:
            self._call(max(now, at), self._report, connection, ranks)

    def _report(self, now: float, connection: Connection, ranks: int) -> None:
        at = self._to_0.send(now, self.costs.record_bytes * ranks) + self.setting.latency
        self._call(at, self._arrives, connection, "record", ranks)

    # Rank 0

    def _arrives(self, now: float, connection: Connection, kind: str, ranks: int) -> None:
        connection.inbox.append((kind, ranks))
        if connection.is_accepted:
            self._ready[connection] = None
            self._wake(now)

    def _wake(self, now: float) -> None:
        if self._idle:
            self._idle = False
            self._call(now, self._turn)

    def _turn(self, now: float) -> None:
        """Read all that is there."""
        batch, listens = list(self._ready), bool(self._queue)
        self._ready.clear()
        end = now + self.costs.turn
        for connection in batch:
            for kind, ranks in connection.inbox:
                self.outcome.messages[kind] += 1
                end = self._take(connection, kind, ranks, end)
            connection.inbox.clear()
        self._spent(end - now)
        self._call(end, self._accept if listens else self._next)

    def _take(self, connection: Connection, kind: str, ranks: int, now: float) -> float:
        """When one message has been dealt with."""
        costs = self.costs
        if kind == "hello":
            now += costs.hello
            at = self._from_0.send(now, costs.challenge_bytes) + self.setting.latency
            self._call(at, self._welcome, connection)
        elif kind == "record":
            now += costs.record + (ranks - 1) * costs.entry
            if not connection.is_closed:
                self._at[connection] = None
                self._entered += ranks
                self._end = min(self._end, connection.line.start + self.setting.join_timeout)
        elif kind == "ready":
            now += costs.ready - costs.send + (ranks - 1) * costs.entry * (costs.ready - costs.send) / costs.record
            self._is_ready += ranks
        else:
            now += costs.drop
        return now

    def _accept(self, now: float) -> None:
        for _ in range(min(_ACCEPTED_AT_ONCE, len(self._queue))):
            connection = self._queue.popleft()
            connection.is_accepted = True
            if connection.inbox:
                self._ready[connection] = None
            now += self.costs.accept
            self._spent(self.costs.accept)
            self.outcome.files += 1
        self._call(now, self._next)

    def _next(self, now: float) -> None:
        world_size = self.setting.world_size
        if self._entered == world_size and not self._over:
            self._over = True
            now = self._answer_with_roster(now)
        elif self._over and self._is_ready == world_size and self.outcome.go is None:
            self.outcome.go = self._answer(now, self.costs.go_bytes, "go")
        if self._ready or self._queue:
            self._call(now, self._turn)
        else:
            self._idle = True

    def _answer_with_roster(self, now: float) -> float:
        costs, size = self.costs, self.costs.roster_bytes * self.setting.world_size
        begin = now + costs.roster * self.setting.world_size
        self._spent(begin - now)
        now = begin
        reading = costs.read_roster * self.setting.world_size
        for connection in self._at:
            ranks, took = connection.line.ranks, costs.send + costs.byte * size
            now += took
            if max(now, self._from_0.free) > begin + _ANSWER_LIMIT:
                self.outcome.unanswered += ranks
                continue
            self._spent(took)
            self.outcome.messages["roster"] += 1
            sent = self._from_0.send(now, size)
            handed_on = (ranks - 1) * (costs.send + costs.byte * size)
            at = sent + self._way(size) + handed_on + reading
            self.outcome.roster = max(self.outcome.roster or 0.0, at)
            at = self._to_0.send(at, costs.ready_bytes * ranks) + self.setting.latency
            self._call(at, self._arrives, connection, "ready", ranks)
        if self.outcome.unanswered:
            self.outcome.roster = None
        self._answered = True
        return min(now, begin + _ANSWER_LIMIT)

    def _answer(self, now: float, size: float, kind: str) -> float:
        """When the last one has a short answer."""
        last = now
        for connection in self._at:
            now += self.costs.send
            self._spent(self.costs.send)
            self.outcome.messages[kind] += 1
            handed_on = (connection.line.ranks - 1) * self.costs.send
            last = max(last, self._from_0.send(now, size) + self._way(size) + handed_on)
            if kind == "error" and last > connection.line.start + self.setting.join_timeout + _GRACE:
                self.outcome.unanswered += connection.line.ranks
        return last

    def _give_up(self, now: float) -> None:
        """The join timeout is over, and ranks are missing."""
        if now < self._end:  # never: the first rank's is over first
            return
        world_size, timeout = self.setting.world_size, self.setting.join_timeout
        said = with_nodes(self._missing, {rank: rank // RANKS_A_NODE for rank in self._missing})
        self.outcome.text = f"{self._entered} of {world_size} ranks joined within {timeout:g} s, missing {said}"
        size = len(Session().sealed("error", canonical(["missing-rank", self.outcome.text, "x" * 100])))
        self._over = True
        self.outcome.told = self._answer(now, size, "error")

    def _way(self, size: float) -> float:
        """Seconds from rank 0's link to a rank: a new connection begins with a small window."""
        rounds = math.ceil(math.log2(size / _FIRST_WINDOW + 1))
        return self.setting.latency * (1 + 2 * max(rounds - 1, 0))

    def _spent(self, seconds: float) -> None:
        if self._answered:
            self.outcome.cpu_go += seconds
        else:
            self.outcome.cpu += seconds


def simulated(setting: Setting, costs: Costs) -> Outcome:
    """The roll call of a job."""
    return RollCall(setting, costs).run()
