"""One agent's side of failure detection: what rank 0's and all others have in common.

It holds what this agent knows: its own ranks and their processes, the ranks at the other ends of
its connections (`peer_watch`), and the root cause of the end of the job, once that is known. Rank
0's side (`failure_coordinator`) decides; the side of any other agent (`failure_reporter`) reports
to it, and executes what it decides. `loop` calls both.

A *key* is a place where ranks wait for each other. A script of this agent that waits there is in
`waiting` until rank 0 answers, or until this side answers for it.

An *order* is for one process: stop, at this time. The loop executes it (`execute_stops`) when its
time has come; an earlier one for the same rank wins. An order for a rank whose process does not run
yet waits for the process.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from ..base.settings import SupervisionSettings
from ..job.exit_status import ExitStatus
from ..job.facts import Facts
from ..job.messages import CountReads, Done, Failing, Locate, Probe, Reads, StopAt
from ..job.root_cause import RankState, RootCause, from_exit
from ..rendezvous.messages import (
    Arrive,
    Detach,
    Failed,
    Go,
    Key,
    Ready,
    Release,
    ShowStacks,
)
from .heartbeat import BOUND, HeartbeatConnection
from .peer_watch import PeerWatch
from .stop_pages import StopPages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .monitored_process import MonitoredProcess
    from .restarts import Restarts

# Seconds; torchrun polls 10 times a second which ranks have ended, and lists them in that order
AFTER_THE_FIRST = 0.15
_LATER = 2.0  # seconds beyond the timeout of a key for the answer of rank 0
# Seconds for a rank to end by the key of a terminal that has reached it, too: a busy host is slow
_OWN_END = 2.0
_OF_KEYS = (128 + signal.SIGINT, 128 + signal.SIGQUIT)  # exit codes
CAUSE = "cause"  # the topic of the line that says why the job ends
Answer = Go | Release | Failed  # to a script that waits at a key


class Terminate(NamedTuple):
    """An order to stop the process of a rank."""

    at: float
    # Whether another rank has failed; else an external signal stops the job
    is_failure: bool
    is_done: bool = False  # neither: its work is done, and it has ended well


class Wait(NamedTuple):
    """A script of this agent that waits at a key."""

    key: Key
    until: float  # for rank 0 to answer
    reply: Callable[[Answer], object]


def _is_of_key(cause: RootCause) -> bool:
    """Whether the job ends for a signal that a key of a terminal sends to all processes there."""
    return not cause.is_failure and cause.exit_code in _OF_KEYS


@dataclass
class Participant(PeerWatch):
    """One side of failure detection. All times are those of `time.monotonic`."""

    ranks: Iterable[RankState]  # of this agent, and at the other ends
    connection_of: Mapping[int, HeartbeatConnection]  # by rank of other agents
    settings: SupervisionSettings
    held: bool  # whether the exit of our ranks waits for this agent, as in the wrapper
    # Prints a text, as the agent or as a rank, of an event with its details
    say: Callable[..., None]
    # Of the loop
    add_reader: Callable[[int | HeartbeatConnection, Callable[[float], None]], None] = (
        lambda _file, _ready: None
    )
    remove_reader: Callable[[int | HeartbeatConnection], None] = lambda _: None
    # Whether this agent is the one of its node that prints what all of them know of a topic
    claim: Callable[[str], bool] = lambda _: True
    probe: Callable[[Probe], object] = lambda _: None  # probes the link to a neighbor
    bound: float = BOUND  # seconds for which a host may give no sign
    shares_keys: bool = False  # whether the keys of our terminal reach the ranks, too
    may_restart: bool = False  # whether another round can follow when a rank fails
    restarts: Restarts | None = None  # what the wrapper knows of all rounds
    orders: dict[int, Terminate] = field(default_factory=dict)  # by rank of our own

    def __post_init__(self) -> None:
        self.members = {member.rank: member for member in self.ranks}
        self.facts = Facts(self.members, self.settings, self.held)
        peers: dict[HeartbeatConnection, list[RankState]] = {}
        for rank, connection in self.connection_of.items():
            remote = self.members.get(rank)
            if remote is not None:
                remote.connection = connection
                remote.is_local = False
                peers.setdefault(connection, []).append(remote)
        super().__init__(peers)
        self.own: list[RankState] = []
        self._own_ranks: set[int] = set()
        for member in self.members.values():
            if member.is_local:
                self.own.append(member)
                self._own_ranks.add(member.rank)
        self.watched: dict[int, MonitoredProcess] = {}  # by rank, once it runs
        self.waiting: dict[int, Wait] = {}  # by rank
        self.stops = StopPages(self.settings.grace / 3)
        self.lost_at: dict[int, float] = {}  # by rank of other agents; seconds since the epoch
        # What waits for the stacks of all ranks
        self._shows: list[Callable[[Sequence[str]], object]] = []
        # What rank 0's job asks of every agent; each gets the rank, the message and the time
        self._executors: dict[type, Callable[[int, Any, float], object]] = {
            ShowStacks: lambda _rank, message, _: self._show(message.lines),
            CountReads: lambda _rank, _message, now: self.stops.ask(now),
            Done: lambda _rank, _message, now: self._end_served(now),
            Locate: lambda _rank, message, now: self.locate(message, now),
            Probe: lambda _rank, message, _: self.probe(message),
            StopAt: lambda _rank, message, _: self.stops.stop_at(message.read),
        }
        self._has_left = False
        self._hurried = False
        self._has_announced = False  # whether it was printed why the job ends
        self._is_told = True  # whether our processes were told of the root cause
        # From when on ranks that failed of a peer need not wait for the one that failed first
        self.release_at = inf
        self._stopped: set[int] = set()  # ranks whose order was executed
        self._ended_at = 0.0
        self._concluded_at = 0.0

    def take(
        self,
        rank: int,
        message: object,
        now: float,
    ) -> None:
        """Handle a message of a rank of ours, as one is sent to rank 0."""
        raise NotImplementedError

    def ask(
        self,
        rank: int,
        message: Arrive | Ready,
        reply: Callable[[Answer], object],
        now: float,
    ) -> None:
        """Let the script of a rank wait at a key; `reply` is called with the answer."""
        self.waiting[rank] = Wait(
            key=message.key,
            until=now + message.limit + _LATER,
            reply=reply,
        )
        self._pass_key(rank, now)
        self.take(rank, message, now)

    def ask_stacks(
        self,
        reply: Callable[[Sequence[str]], object],
        now: float,
    ) -> None:
        """Call `reply` with lines that show where all ranks are."""
        raise NotImplementedError

    def tick(self, now: float) -> None:
        """Once a second: poll our processes and peers, and send heartbeats."""
        for watched in self.watched.values():
            watched.poll(now)
        self._tick_peers(now)

    def turn(self, now: float) -> None:
        """In each turn of the loop: do what is due."""
        self._poll_suspects(now)
        if now >= self.stops.due:
            self._report_reads(now)

    def _report_reads(self, now: float) -> None:
        """Report how often each script has read `ctx.preempted`; warn of those that are late."""
        counted = self.stops.counted(self._own_ranks, now)
        for rank, reads in counted.items():
            self.take(rank, Reads(reads), now)
        running = {member.rank for member in self._running()}
        late = self.stops.late(running, now)
        for rank, text in late.items():
            self.say(text, rank)

    def due(self, now: float) -> float:
        """When `turn` and `execute_stops` are to be called next."""
        due = min(
            self._suspects_due(now),
            self.stops.due,
            max(self._over_at(), now),
        )
        for rank in self._pending_orders():
            due = min(due, self.orders[rank].at)
        return due

    def execute_stops(self, now: float) -> None:
        """Tell our processes of the root cause, and stop those whose time has come."""
        if not self._is_told and self.watched:
            self._is_told = True
            for watched in self.watched.values():
                watched.decided()
        for rank in self._pending_orders():
            order = self.orders[rank]
            if now >= order.at:
                self._stopped.add(rank)
                self.watched[rank].stop(order, now)
        for watched in self.watched.values():
            watched.pass_on_term(now)

    def _pending_orders(self) -> set[int]:
        """The ranks with an order that is not executed, whose processes run."""
        ordered = self.orders.keys()
        running = self.watched.keys()
        return (ordered & running) - self._stopped

    def locate(
        self,
        question: Locate,
        now: float,
    ) -> None:
        """Let our ranks report how far they are."""
        for watched in self.watched.values():
            watched.locate(question, now)

    def _show(self, lines: Sequence[str]) -> None:
        """Answer all that wait for the stacks of all ranks."""
        shows = self._shows
        self._shows = []
        for reply in shows:
            reply(lines)

    def orphaned(self, why: str, now: float) -> None:
        """The launcher's process above our ranks is gone: they fail, and do not start again."""
        self.facts.is_orphaned = True
        self.may_restart = False
        for member in self._running():
            end = ExitStatus(
                cause=why,
                when=time.time(),
            )
            self.take(member.rank, Failing(end), now)
        if not self.detects:
            self.stop_orphans(why)

    def stop_orphans(self, why: str) -> None:
        """Stop our ranks without an answer of rank 0, if there is none."""
        running = self._running()
        if running and self.root_cause is None:
            end = ExitStatus(cause=why)
            cause = from_exit(running[0], end, 0.0)
            now = time.monotonic()
            self._stop_own(cause, now)

    def leave(self) -> None:
        """The ranks of this agent leave the job, which is no failure."""
        self._send(Detach())
        self._has_left = True

    def hurry(self) -> None:
        """Do not wait for other ranks any more."""
        self._hurried = True

    def over(self, now: float) -> bool:
        """Whether this side is done."""
        if self._has_left or self._hurried:
            return True
        return now >= self._over_at()

    def _over_at(self) -> float:
        is_leaving = any(watched.is_leaving for watched in self.watched.values())
        if is_leaving or not self._has_ended:
            return inf
        return self._limit()

    def finish(self) -> None:
        """The loop ends: say goodbye to the peers."""
        raise NotImplementedError

    @property
    def root_cause(self) -> RootCause | None:
        """Why the job ends, once that is known."""
        return self.facts.cause

    @property
    def detects(self) -> bool:
        """Whether all ranks are told of a failure, now."""
        return self.facts.detects

    def _running(self) -> list[RankState]:
        """Those of our ranks that have not ended."""
        found = []
        for member in self.own:
            if member.end is None:
                found.append(member)
        return found

    @property
    def _has_ended(self) -> bool:
        return not self._running()

    def _limit(self) -> float:
        """Until when this side waits for other ranks, once our own have ended."""
        raise NotImplementedError

    def _is_own(self, cause: RootCause) -> bool:
        return not self._own_ranks.isdisjoint(cause.ranks)

    def _words_for(self, cause: RootCause) -> str:
        """What this agent prints of a root cause; empty: nothing."""
        raise NotImplementedError

    def _end_served(self, now: float) -> None:
        """Rank 0's script has ended well: stop our own ranks, which only serve it."""
        order = Terminate(
            at=now,
            is_failure=False,
            is_done=True,
        )
        for member in self._running():
            self.orders.setdefault(member.rank, order)

    def _answer(self, rank: int, message: Answer) -> None:
        """Answer the script of a rank, unless it has given up the wait that this is for."""
        wait = self.waiting.get(rank)
        if wait is None:
            return
        is_for_wait = isinstance(message, Go) or message.key in (wait.key, None)
        if is_for_wait:
            del self.waiting[rank]
            now = time.monotonic()
            self._pass_key(rank, now)
            wait.reply(message)

    def _pass_key(self, rank: int, now: float) -> None:
        """Note that a script moves: it begins to wait at a key, or goes on there."""
        watched = self.watched.get(rank)
        if watched is not None:
            watched.pass_key(now)

    def _stop_own(
        self,
        cause: RootCause,
        now: float,
    ) -> None:
        """Stop our own ranks, and print why, once."""
        for member in self._running():
            at = now + cause.until_stop(member)
            if self.shares_keys and _is_of_key(cause):
                at += _OWN_END
            before = self.orders.get(member.rank)
            if before is not None:
                at = min(at, before.at)
            self.orders[member.rank] = Terminate(
                at=at,
                is_failure=cause.is_failure,
            )
        self.facts.cause = cause  # a second time with the exit code, once that is known
        if not self._has_announced:
            self._has_announced = True
            self._concluded_at = now
            self._announce(cause)
        self.release_at = min(self.release_at, now + max(cause.delay, AFTER_THE_FIRST))
        self._is_told = False

    def _announce(self, cause: RootCause) -> None:
        text = self._words_for(cause)
        if text:
            self.say(
                text,
                event="root_cause",
                ranks=cause.ranks,
                is_failure=cause.is_failure,
            )
        if cause.is_failure and not cause.restarts:
            from . import platform_log  # here, as most jobs end well

            platform_log.write(cause.text, replaces=True)
