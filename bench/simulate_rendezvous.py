"""The roll call as a discrete-event simulation: rank 0's loop, the kernel's queue in front of it, the link, the ranks.

What is simulated is what `distboot/rendezvous` does: rank 0 reads everything that is there, then accepts 64
connections, and so on; who gets no answer in time gives up and tries again with jitter; all are answered at the end.
A line is a rank with its connection.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from simulate_costs import Costs
from simulate_job import Line, Link, Outcome, Setting, lines_of, way
from simulate_messages import RANKS_A_NODE, membership_bytes

from distboot.base.text import with_nodes
from distboot.rendezvous.messages import Failed
from distboot.rendezvous.protocol import Channel

_BACKLOG = 4096  # connections that wait to be accepted (net.core.somaxconn)
# Seconds after the first, where the queue was full (tcp(7): the timeout doubles)
_SYN_AGAIN = (1.0, 3.0, 7.0)
_ACK_AGAIN = 0.2  # seconds, doubled each time: the least that Linux waits to send data again
# As distboot has them.
_ACCEPTED_AT_ONCE = 64
_FIRST_LIMIT, _LAST_LIMIT = 1.0, 10.0
_FIRST_PAUSE, _LAST_PAUSE, _LONGER = 0.01, 0.5, 1.5
_CANDIDATES = 5  # ports, of which the others refuse at once
_ANSWER_LIMIT = 10.0
_GRACE = 0.8


@dataclass(eq=False, slots=True)
class Connection:
    """One attempt of a line."""

    line: Line
    inbox: list[str] = field(default_factory=list)
    is_accepted: bool = False
    is_closed: bool = False
    is_welcome: bool = False


class Rendezvous:
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
        self._lines, self._missing, self.outcome.last_start = lines_of(setting, _FIRST_PAUSE)

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

    def _call(self, at: float, event: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (at, next(self._order), event, arguments))

    # The other ranks

    def _connect(self, now: float, line: Line) -> None:
        if now > line.end:
            return
        self.outcome.messages["connection"] += 1
        limit = min(_FIRST_LIMIT * 2**line.attempt, _LAST_LIMIT)
        self._call(now + self.setting.latency, self._syn, Connection(line), now, limit, 0)

    def _syn(
        self, now: float, connection: Connection, began: float, limit: float, times: int
    ) -> None:
        """The first packet is at rank 0's kernel."""
        latency = self.setting.latency
        if len(self._queue) < _BACKLOG:
            self._call(now + latency, self._connected, connection, limit)
        elif times < len(_SYN_AGAIN) and _SYN_AGAIN[times] < limit:
            self._call(
                began + _SYN_AGAIN[times] + latency, self._syn, connection, began, limit, times + 1
            )
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
        connection.inbox.append("hello")
        self._queue.append(connection)
        self._wake(now)

    def _out_of_patience(self, now: float, connection: Connection) -> None:
        if connection.is_welcome or self._over:
            return
        connection.is_closed = True
        self.outcome.gave_up += 1
        if connection.inbox or connection.is_accepted:
            self._call(now + self.setting.latency, self._arrives, connection, "end")
        self._call(
            now + (_CANDIDATES - 1) * 2 * self.setting.latency, self._once_more, connection.line
        )

    def _once_more(self, now: float, line: Line) -> None:
        pause = line.pause * (0.5 + self._random.random())
        line.pause = min(line.pause * _LONGER, _LAST_PAUSE)
        line.attempt += 1
        self._call(now + pause, self._connect, line)

    def _welcome(self, now: float, connection: Connection) -> None:
        if connection.is_closed:
            return
        connection.is_welcome = True
        at = self._to_0.send(now, self.costs.record_bytes) + self.setting.latency
        self._call(at, self._arrives, connection, "record")

    # Rank 0

    def _arrives(self, now: float, connection: Connection, kind: str) -> None:
        connection.inbox.append(kind)
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
            for kind in connection.inbox:
                end = self._take(connection, kind, end)
            connection.inbox.clear()
        self._spent(end - now)
        self._call(end, self._accept if listens else self._next)

    def _take(self, connection: Connection, kind: str, now: float) -> float:
        """When one message has been dealt with."""
        costs = self.costs
        self.outcome.messages[kind] += 1
        if kind == "hello":
            now += costs.hello
            at = self._from_0.send(now, costs.challenge_bytes) + self.setting.latency
            self._call(at, self._welcome, connection)
        elif kind == "record":
            now += costs.record
            if not connection.is_closed:
                self._at[connection] = None
                self._entered += 1
        elif kind == "ready":
            now += costs.ready
            self._is_ready += 1
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
            now = self._answer_with_membership(now)
        elif self._over and self._is_ready == world_size and self.outcome.go is None:
            self.outcome.go = self._answer(now, self.costs.go_bytes, "go")
        if self._ready or self._queue:
            self._call(now, self._turn)
        else:
            self._idle = True

    def _answer_with_membership(self, now: float) -> float:
        costs, world_size, size = (
            self.costs,
            self.setting.world_size,
            membership_bytes(self.setting.world_size),
        )
        begin = now + costs.membership * world_size
        self._spent(begin - now)
        now, took, reading = (
            begin,
            costs.send + costs.byte * size,
            costs.read_membership * world_size,
        )
        for connection in self._at:
            now += took
            if max(now, self._from_0.free) > begin + _ANSWER_LIMIT:
                self.outcome.unanswered += 1
                continue
            self._spent(took)
            self.outcome.messages["membership"] += 1
            at = self._from_0.send(now, size) + way(size, self.setting.latency) + reading
            self.outcome.membership = max(self.outcome.membership or 0.0, at)
            at = self._to_0.send(at, costs.ready_bytes) + self.setting.latency
            self._call(at, self._arrives, connection, "ready")
        if self.outcome.unanswered:
            self.outcome.membership = None
        self._answered = True
        return min(now, begin + _ANSWER_LIMIT)

    def _answer(self, now: float, size: float, kind: str) -> float:
        """When the last one has a short answer."""
        last = now
        for connection in self._at:
            now += self.costs.send
            self._spent(self.costs.send)
            self.outcome.messages[kind] += 1
            last = max(last, self._from_0.send(now, size) + way(size, self.setting.latency))
            if kind == "error" and last > connection.line.end + _GRACE:
                self.outcome.unanswered += 1
        return last

    def _give_up(self, now: float) -> None:
        """The join timeout is over, and ranks are missing."""
        world_size, timeout = self.setting.world_size, self.setting.join_timeout
        said = with_nodes(self._missing, {rank: rank // RANKS_A_NODE for rank in self._missing})
        self.outcome.text = (
            f"{self._entered} of {world_size} ranks joined within {timeout:g} s, missing {said}"
        )
        size = len(Channel().sign(Failed(("missing-rank", self.outcome.text, "x" * 100))))
        self._over = True
        self.outcome.told = self._answer(now, size, "error")

    def _spent(self, seconds: float) -> None:
        if self._answered:
            self.outcome.cpu_go += seconds
        else:
            self.outcome.cpu += seconds


def simulated(setting: Setting, costs: Costs) -> Outcome:
    """The roll call of a job."""
    return Rendezvous(setting, costs).run()
