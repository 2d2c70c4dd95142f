"""The relay of a node: a process that starts with the roll call of a large job, and ends with the last rank there.

In the lifeline it passes on what its ranks say, and what rank 0 says to them, beats to both sides, and says who of its
ranks has gone. A rank that has lost it stops; when it has lost rank 0 it says so to all of them, and they stop.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from ..detached import leave_signals_to_the_job, let_go_of_output
from ..errors import first_line, tell
from ..rollcall.broadcast import send_to_all
from ..rollcall.handed import Handed
from ..rollcall.relay import Relay
from ..rollcall.relayed import MOST_FROM_A_LOCAL_RANK, batches, fitting
from ..rollcall.wire import Membership, WireError, canonical, most_from_rank_0
from ..roster import Roster
from .line import FOR_OTHERS, KINDS, Line, LineEndedError, end_politely, interval_of
from .settings import DEFAULT_BOUND, settings
from .trunk import said_to
from .verdict import lost, seats
from .watcher import ASLEEP

_LAST_WORD = 2.0  # seconds for rank 0 to take our last word
_ANSWER_LIMIT = 10.0  # seconds for the ranks to take what rank 0 says to all


class LocalLines:
    """The relay once the ranks have met.

    Args:
        roster: of the job.
        trunk: the connection to rank 0.
        ranks: those to the ranks of this node.
        bound: seconds for which any of them may be silent.
        starter: the rank that has started the relay, in whose output its lines are.
    """

    def __init__(self, roster: Roster, trunk: Handed, ranks: Iterable[Handed], bound: float, starter: int) -> None:
        self._interval = interval_of(roster)
        self._bound = max(bound, 2 * self._interval)
        self._starter = starter
        all_seats = seats(roster)
        self._rank_0, most = all_seats[0], most_from_rank_0(len(all_seats))
        kinds = (*KINDS, *FOR_OTHERS)
        self._trunk: Line | None = Line(trunk.connection, trunk.session, self._interval, most, kinds)
        self._lines: dict[int, Line] = {}
        for (rank, *_), connection, session, _ in ranks:
            self._lines[rank] = Line(connection, session, self._interval, MOST_FROM_A_LOCAL_RANK, kinds)
        self._watched: set[int] = set()  # ranks whose lifeline has begun
        self._ended: set[int] = set()  # those that have said how they end
        self._up: list[str] = []  # for rank 0
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Until no rank of this node is left."""
        for rank, line in self._lines.items():
            self._selector.register(line, selectors.EVENT_READ, partial(self._hear, rank))
        assert self._trunk is not None
        self._selector.register(self._trunk, selectors.EVENT_READ, self._hear_rank_0)
        beat = time.monotonic() + self._interval
        while self._lines:
            for key, _ in self._selector.select(max(beat - time.monotonic(), 0.0)):
                if key.fd in self._selector.get_map():  # else it has gone in this very round
                    key.data(time.monotonic())
            now = time.monotonic()
            if now > beat + ASLEEP:
                for line in (*self._lines.values(), *filter(None, [self._trunk])):
                    line.forgive(now)
            if now >= beat:
                beat = now + self._interval
                self._tick(now)
            self._pass_on()
        if self._trunk is not None:
            end_politely([self._trunk], _LAST_WORD)

    def _hear(self, rank: int, now: float) -> None:
        """What a rank says."""
        try:
            for kind, content in self._lines[rank].receive(now):
                if kind == "watch":
                    self._begin(rank, now)
                elif kind in ("end", "bye"):
                    self._ended.add(rank)
                self._up.append(fitting([rank, kind, content]))
        except LineEndedError:
            self._gone(rank, "the connection ended without a word")
        except WireError as error:
            self._leave(rank, str(error))

    def _begin(self, rank: int, now: float) -> None:
        """The lifeline of a rank begins, perhaps minutes after the roll call: silence counts from now on."""
        self._lines[rank].forgive(now)
        if not self._watched:
            for line in (*self._lines.values(), *filter(None, [self._trunk])):
                line.forgive(now)
        self._watched.add(rank)

    def _gone(self, rank: int, why: str) -> None:
        line = self._lines.pop(rank)
        self._selector.unregister(line)
        line.close()
        self._watched.discard(rank)
        if rank == self._starter:
            let_go_of_output()
        if rank not in self._ended:
            self._up.append(fitting([rank, "gone", why]))

    def _leave(self, rank: int, why: str) -> None:
        """Go on without the lifeline of a rank."""
        tell(f"rank {rank}", f"warning: this rank {why}; it is not watched any more")
        self._lines[rank].send("bye", None)
        self._up.append(fitting([rank, "bye", None]))
        self._ended.add(rank)
        self._gone(rank, "")

    def _hear_rank_0(self, now: float) -> None:
        assert self._trunk is not None
        try:
            for kind, content in self._trunk.receive(now):
                self._take(kind, content)
        except LineEndedError:
            self._lose("the connection ended without a word")
        except (WireError, TypeError) as error:
            self._leave_rank_0(str(error))

    def _take(self, kind: str, content: object) -> None:
        if kind in ("go", "error"):
            text = canonical(content)
            lines = self._lines.values()
            send_to_all({line.socket: partial(line.sealed, kind, text) for line in lines}, _ANSWER_LIMIT)
        elif kind == "bye":
            self._tell(None, kind, content)
        elif kind == "to":
            self._tell(*said_to(content))
        else:
            raise WireError(f"sends a broken {kind}")

    def _tell(self, rank: int | None, kind: str, content: object) -> None:
        if kind == "bye" and rank is None:
            self._ended.update(self._lines)  # rank 0 does not watch them any more
        for each, line in self._lines.items():
            if rank in (None, each):
                line.send(kind, content)

    def _leave_rank_0(self, why: str) -> None:
        """Go on without the lifeline, all ranks of this node."""
        for rank in sorted(self._watched - self._ended):
            tell(f"rank {rank}", f"warning: rank 0 {why}; this rank goes on without the lifeline")
            self._up.append(fitting([rank, "bye", None]))
        self._pass_on()
        self._tell(None, "bye", None)
        self._lose("")

    def _lose(self, why: str) -> None:
        """Rank 0 has gone."""
        assert self._trunk is not None
        verdict = lost([self._rank_0], why).as_message()
        for rank in self._watched - self._ended:
            self._lines[rank].send("first", verdict)
        self._selector.unregister(self._trunk)
        self._trunk.close()
        self._trunk = None
        for rank in list(self._lines):
            self._ended.add(rank)
            self._gone(rank, "")

    def _tick(self, now: float) -> None:
        for rank in list(self._lines):
            self._hear(rank, now)
        if self._trunk is not None:
            self._hear_rank_0(now)
        # Once one of them is watched all of them may go, and are to be heard of.
        running = (self._lines.keys() if self._watched else set()) - self._ended
        for rank in running:
            self._lines[rank].beat(now)
            complaint = self._lines[rank].complaint(now, self._bound)
            if complaint is not None:
                self._gone(rank, complaint.why)
        if running and self._trunk is not None:
            self._trunk.beat(now)
            complaint = self._trunk.complaint(now, self._bound)
            if complaint is not None:
                (self._lose if complaint.is_lost else self._leave_rank_0)(complaint.why)

    def _pass_on(self) -> None:
        if self._up and self._trunk is not None:
            for batch in batches(self._trunk.sealed, "of", self._up):
                self._trunk.send_sealed(batch)
        self._up.clear()


def main(listener: int, control: int) -> None:
    """Be the relay of a node; what for comes through the control socket."""
    leave_signals_to_the_job()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection for each rank of the node
    with socket.socket(fileno=control) as told, told.makefile() as file:
        text = file.readline()
    if not text:  # who started us has ended
        return
    plan = json.loads(text)
    try:
        _serve(listener, plan)
    except Exception as error:  # noqa: BLE001 - a defect of ours: the ranks go to rank 0 themselves, or stop
        who, said = f"rank {plan['starter']}", f"{type(error).__name__}: {first_line(error)}"
        tell(who, f"warning: the relay of this node has a defect: {said}")


def _serve(listener: int, plan: dict[str, Any]) -> None:
    relay = Relay(
        socket.socket(fileno=listener),
        plan["hosts"],
        plan["ports"],
        plan["starter"],
        Membership(plan["job"], plan["secret"]),
        source=plan["source"],
        join_timeout=plan["join_timeout"],
        world_size=plan["world_size"],
    )
    met = relay.meet()
    if met is not None:
        given = settings(os.environ)
        LocalLines(*met, DEFAULT_BOUND if given is None else given.bound, plan["starter"]).run()
