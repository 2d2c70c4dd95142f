"""The loop of an agent, in a thread of the wrapper or in the sidecar of `init`, and what both sides of it share."""

from __future__ import annotations

import os
import selectors
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import NamedTuple

from ..base.settings import SupervisionSettings
from ..base.text import first_line
from ..job.exit_status import ExitStatus
from ..job.messages import (
    KINDS,
    Failing,
    Locate,
    Reads,
)
from ..job.root_cause import RankState, RootCause, from_exit
from ..rendezvous.messages import (
    Arrive,
    Detach,
    Failed,
    Go,
    Key,
    Ready,
    Release,
)
from ..rendezvous.protocol import Channel, ProtocolError
from .heartbeat import (
    BEATS,
    BOUND,
    DisconnectedError,
    HeartbeatConnection,
    Probe,
)
from .stop_pages import StopPages

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .failure_coordinator import FailureCoordinator
    from .failure_reporter import FailureReporter
    from .monitored_process import MonitoredProcess
    from .restarts import Restarts

# Seconds; torchrun looks 10 times a second who has ended, and lists them in that order
AFTER_THE_FIRST = 0.15
_ASLEEP = 2.0  # seconds by which we are late when we were stopped ourselves, or starved
_LATER = 2.0  # seconds beyond the limit of a key for rank 0 to say what has become of it
_TICK = 1.0  # seconds between two looks at what no file tells
# Seconds for a host to answer that was silent when a signal arrived; mpirun gives us 0.24 to live
_HOST_ANSWERS = 0.1
_LOOKS = 0.1  # seconds between two looks at a peer that is suspect
_FEW = 32  # peers, each of which is looked at every time
DISCONNECTED = "the connection closed without an exit report"
Answer = Go | Release | Failed  # to a script that waits at a key


class StopRequest(NamedTuple):
    """That the process of a rank has to stop."""

    at: float
    # Whether it is for the failure of a rank; else an external signal stops the job
    is_failure: bool
    is_done: bool = False  # whether it is for neither: its work is done, and it has ended well


class Wait(NamedTuple):
    """A script of ours that waits at a key."""

    key: Key
    until: float  # for rank 0 to answer
    reply: Callable[[Answer], object]


@dataclass
class Participant:
    """One side of failure detection, as the loop drives it. All times are those of `time.monotonic`."""

    ranks: Iterable[RankState]  # of this agent, and at the other ends
    connection_of: Mapping[int, HeartbeatConnection]  # of the ranks of other agents
    settings: SupervisionSettings
    held: bool  # whether the exit of our ranks waits for us, as in the wrapper
    # Prints a text, as the agent or as a rank, of an event with its details
    say: Callable[..., None]
    # Of the loop
    add_reader: Callable[[int | HeartbeatConnection, Callable[[float], None]], None] = (
        lambda _file, _ready: None
    )
    remove_reader: Callable[[int | HeartbeatConnection], None] = lambda _: None
    bound: float = BOUND  # seconds for which a host may give no sign
    may_restart: bool = False  # whether another round can follow when a rank fails
    restarts: Restarts | None = None  # decides on rank 0 whether one does
    # Whether all ranks are to get ready first; until then a failure is that of the start
    is_starting: bool = False
    is_orphaned: bool = False  # whether the launcher's process above our ranks is gone
    root_cause: RootCause | None = None  # why the job ends, once that is known
    orders: dict[int, StopRequest] = field(default_factory=dict)  # by rank of our own

    def __post_init__(self) -> None:
        self.members = {member.rank: member for member in self.ranks}
        self._backlog: set[HeartbeatConnection] = set()  # those that have something to send yet
        # Those at the other ends of open connections
        self.peers: dict[HeartbeatConnection, list[RankState]] = {}
        for rank, connection in self.connection_of.items():
            if rank in self.members:
                self.members[rank].connection, self.members[rank].is_local = connection, False
                self.peers.setdefault(connection, []).append(self.members[rank])
                connection.backlog = self._backlog
        self.own = [member for member in self.members.values() if member.is_local]
        self.watched: dict[int, MonitoredProcess] = {}  # by rank, once it runs
        self.waiting: dict[int, Wait] = {}  # by rank
        self.stops = StopPages(self.settings.grace / 3)
        self._doubtful: set[HeartbeatConnection] = set()  # from which nothing came lately
        # Those that were silent when a signal arrived, until their hosts have answered
        self._questioned: dict[HeartbeatConnection, Probe] = {}
        # Ticks between two heartbeats
        self._ticks, self._between = 0, max(int(BEATS * self.bound), 1)
        # Open: their end would be an alarm over there
        self._abandoned: list[HeartbeatConnection] = []
        self._has_left = self._hurried = self._has_decided = False
        self.lost_at: dict[int, float] = {}  # by rank of another agent; seconds since the epoch
        self._stopped: set[int] = set()  # ranks whose order is executed
        self._ended_at = self._concluded_at = 0.0

    def take(self, rank: int, message: object, now: float) -> None:
        """Take a message of a rank of ours, as one is sent to rank 0."""
        raise NotImplementedError

    def ask(
        self, rank: int, message: Arrive | Ready, reply: Callable[[Answer], object], now: float
    ) -> None:
        """Let the script of a rank wait at a key, until it is answered through `reply`."""
        self.waiting[rank] = Wait(message.key, now + message.limit + _LATER, reply)
        self._pass_key(rank, now)
        self.take(rank, message, now)

    def read(self, connection: HeartbeatConnection, now: float) -> None:
        """Take what another agent says."""
        try:
            for rank, message in connection.receive(now, *KINDS):
                if connection in self.peers:  # else it has detached just now
                    self._take_from(connection, rank, message, now)
        except DisconnectedError as error:
            self._disconnected(connection, error, now)
        except ProtocolError as error:
            self._abandon(connection, str(error), now)

    def tick(self, now: float) -> None:
        """Once a second: look after our processes, send heartbeats, and look which have not come."""
        for watched in self.watched.values():
            watched.look(now)
        for connection in list(self._backlog):
            self._backlog.discard(connection)
            connection.flush()
        self._ticks += 1
        peers = list(self.peers)
        every = 1 if len(peers) <= _FEW else max(int(BEATS * self.bound), 1)
        for connection in {*peers[self._ticks % every :: every], *self._doubtful}:
            self._look(connection, now)
        # Last: they are confirmed later
        for connection in peers[self._ticks % self._between :: self._between]:
            if self._is_running(connection):
                connection.heartbeat()

    def turn(self, now: float) -> None:
        for connection in [each for each in self._doubtful if each.is_suspect]:
            self._look(connection, now)
        for connection in [each for each, probe in self._questioned.items() if now >= probe.end]:
            self._judge_silent(connection, now)
        for rank, reads in self.stops.counted((member.rank for member in self.own), now).items():
            self.take(rank, Reads(reads), now)
        for rank, text in self.stops.late(
            [member.rank for member in self.own if member.end is None], now
        ).items():
            self.say(text, rank)

    def due(self, now: float) -> float:
        orders = (
            order.at
            for rank, order in self.orders.items()
            if rank in self.watched.keys() - self._stopped
        )
        look = now + _LOOKS if any(connection.is_suspect for connection in self._doubtful) else inf
        questioned = [probe.end for probe in self._questioned.values()]
        end = max(self._limit(), now) if self._has_ended else inf
        return min([look, self.stops.due, end, *questioned, *orders])

    def execute_stops(self, now: float) -> None:
        """Let our processes know of the root cause, and those stop whose time has come."""
        if self.root_cause is not None and self.watched and not self._has_decided:
            self._has_decided = True
            for watched in self.watched.values():
                watched.decided(now)
        for rank in self.watched.keys() - self._stopped:
            order = self.orders.get(rank)
            if order is not None and now >= order.at:
                self._stopped.add(rank)
                self.watched[rank].stop(order, now)
        for watched in self.watched.values():
            watched.pass_on_term(now)

    def locate(self, question: Locate, now: float) -> None:
        """Let our ranks say where they are."""
        for watched in self.watched.values():
            watched.locate(question, now)

    def orphaned(self, why: str, now: float) -> None:
        """The launcher's process above our ranks is gone: they fail for it, and no other round follows here."""
        self.is_orphaned = True
        self.may_restart = False
        for member in self.own:
            if member.end is None:
                self.take(member.rank, Failing(ExitStatus(cause=why, when=time.time())), now)
        if not self.detects:
            self.stop_orphans(why)

    def stop_orphans(self, why: str) -> None:
        """Stop our ranks without an answer of rank 0, if there is none."""
        left = [member for member in self.own if member.end is None]
        if left and self.root_cause is None:
            self._stop_own(from_exit(left[0], ExitStatus(cause=why), 0.0), time.monotonic())

    def leave(self) -> None:
        """The ranks of this agent leave the job, in good order."""
        self._send(Detach())
        self._has_left = True

    def hurry(self) -> None:
        self._hurried = True

    def over(self, now: float) -> bool:
        return self._has_left or self._hurried or (self._has_ended and now >= self._limit())

    def close(self) -> None:
        for connection in (*self.peers, *self._abandoned):
            connection.close()
        for probe in self._questioned.values():
            probe.close()

    @property
    def detects(self) -> bool:
        """Whether a failure is to be told to all, now."""
        return self.settings.detects and not self.is_starting

    @property
    def is_cut_off(self) -> bool:
        """Whether no other agent can be reached, for now."""
        return all(connection.unreachable_since is not None for connection in self.peers)

    @property
    def _has_ended(self) -> bool:
        return all(member.end is not None for member in self.own)

    def _limit(self) -> float:
        """When we stop waiting for other ranks, once our own have ended."""
        raise NotImplementedError

    def _is_own(self, cause: RootCause) -> bool:
        return any(member.rank in cause.ranks for member in self.own)

    def _words_for(self, cause: RootCause) -> str:
        """What we print of it: one line, if any."""
        first = [member for member in self.own if member.rank in cause.ranks]
        # By our rank
        is_said = any(not cause.is_failure or member.failing or member.end for member in first)
        return "" if is_said and len(self.own) == 1 and not cause.restarts else cause.headline

    def _end_served(self, now: float) -> None:
        """Let our own ranks end, which only serve rank 0's script: that has ended well."""
        for member in self.own:
            if member.end is None:
                self.orders.setdefault(
                    member.rank, StopRequest(now, is_failure=False, is_done=True)
                )

    def _is_running(self, connection: HeartbeatConnection) -> bool:
        """Whether a connection is ours, and has ranks that are to end yet."""
        return any(member.end is None for member in self.peers.get(connection, ()))

    def _take_from(
        self, connection: HeartbeatConnection, rank: int, message: object, now: float
    ) -> None:
        """Take a message of another agent; `ProtocolError`: it may not send that."""
        raise NotImplementedError

    def _lose(self, connection: HeartbeatConnection, why: str, how: str, now: float) -> None:
        """An agent is unreachable, and its ranks with it; `how` the connection ended, as far as is known."""
        raise NotImplementedError

    def _send(self, message: object, rank: int = 0) -> None:
        for connection in self.peers:
            connection.send(message, rank)

    def _answer(self, rank: int, message: Answer) -> None:
        """Answer the script of a rank, unless that has given up the wait that this is for."""
        wait = self.waiting.get(rank)
        if wait is not None and (isinstance(message, Go) or message.key in (wait.key, None)):
            del self.waiting[rank]
            self._pass_key(rank, time.monotonic())
            wait.reply(message)

    def _pass_key(self, rank: int, now: float) -> None:
        """Note that a rank moves: it comes to a key, or goes on there."""
        watched = self.watched.get(rank)
        if watched is not None:
            watched.pass_key(now)

    def _disconnected(
        self, connection: HeartbeatConnection, error: DisconnectedError, now: float
    ) -> None:
        """A connection has ended: its peer may have, too."""
        self._lose(connection, DISCONNECTED, str(error), now)

    def _end_connection(self, connection: HeartbeatConnection) -> None:
        """A connection has ended, and its peer may come back over another one."""
        self.remove_reader(connection)
        self._doubtful.discard(connection)
        connection.end()

    def _drain(self, connection: HeartbeatConnection, now: float) -> bool:
        """Take all that came over a connection before another one is used; whether it is still one of ours."""
        for rank, message in connection.drain(now, *KINDS):
            if connection in self.peers:
                self._take_from(connection, rank, message, now)
        return connection in self.peers

    def _use(self, connection: HeartbeatConnection, new: socket.socket, channel: Channel) -> None:
        """Go on over a new connection."""
        self.remove_reader(connection)
        connection.replace(new, channel)
        self.add_reader(connection, partial(self.read, connection))

    def _look(self, connection: HeartbeatConnection, now: float) -> None:
        """Read what has come without waking us up, and where nothing has, whether the peer is still there."""
        if connection.is_closed:
            return
        Participant.read(self, connection, now)  # replies are sent later in this turn
        since = connection.unreachable_since
        is_heard = connection.is_closed or (since is None and connection.heard == now)
        if is_heard or not self._is_running(connection):
            self._doubtful.discard(connection)
            return
        self._doubtful.add(connection)
        fault = connection.fault(now)
        if fault is not None and fault.is_lost:
            self._lose(connection, fault.why, fault.why, now)
        elif fault is not None:
            self._unreachable(connection, fault.why, now)
        elif since is not None and connection.unreachable_since is None:
            self._reachable(connection, now - since)

    def _unreachable(self, connection: HeartbeatConnection, why: str, now: float) -> None:
        """A peer gives no sign, though its host answers: go on, and forget nothing, until it does."""
        raise NotImplementedError

    def _reachable(self, connection: HeartbeatConnection, seconds: float) -> None:
        """A peer answers again, after so many seconds; the kernels send what was said meanwhile."""
        raise NotImplementedError

    def _question(self, connection: HeartbeatConnection, now: float) -> None:
        """A signal has arrived, which may be what the launcher answers to the end of a silent host."""
        if connection.is_unusually_silent():
            self._questioned[connection] = Probe(connection.socket, now + _HOST_ANSWERS)

    def _judge_silent(self, connection: HeartbeatConnection, now: float) -> None:
        probe = self._questioned.pop(connection)
        is_answered = probe.is_answered()
        probe.close()
        if not is_answered and connection in self.peers and connection.is_unusually_silent():
            self._lose_silent(connection, now)

    def _lose_silent(self, connection: HeartbeatConnection, now: float) -> None:
        """A host was silent when a signal arrived."""
        raise NotImplementedError

    def _abandon(self, connection: HeartbeatConnection, why: str, now: float) -> None:  # noqa: ARG002 - said by others
        """Go on without failure detection to an agent, for good."""
        connection.send(Detach())
        self._abandoned.append(connection)
        self._forget(connection)

    def _forget(self, connection: HeartbeatConnection) -> list[RankState]:
        """The ranks of an agent, whose connection is not ours any more."""
        self.remove_reader(connection)
        self._doubtful.discard(connection)
        members = self.peers.pop(connection)
        for member in members:
            member.connection = None
        return members

    def _stop_own(self, cause: RootCause, now: float) -> None:
        """Let our own ranks stop, and say why, once."""
        for member in self.own:
            if member.end is None:
                rank, before = member.rank, self.orders.get(member.rank)
                at = now + cause.until_stop(member)
                self.orders[rank] = StopRequest(
                    at if before is None else min(at, before.at), cause.is_failure
                )
        if self.root_cause is None:
            self._concluded_at = now
            words = self._words_for(cause)
            if words:
                self.say(words, event="root_cause", ranks=cause.ranks, is_failure=cause.is_failure)
            if cause.is_failure and not cause.restarts:
                from . import platform_log  # here, as most jobs end well

                platform_log.write(cause.text, replaces=True)
        self.root_cause = cause  # also again: with the exit code, once that is known


class EventLoop:
    """Drives one side of failure detection."""

    def __init__(self, role: FailureCoordinator | FailureReporter) -> None:
        self._role = role
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        role.add_reader, role.remove_reader = self.add_reader, self.remove_reader
        for connection in role.peers:
            self.add_reader(connection, partial(role.read, connection))

    def add_reader(self, file: int | HeartbeatConnection, ready: Callable[[float], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, ready)

    def remove_reader(self, file: int | HeartbeatConnection) -> None:
        """Stop calling for a file, if we do, before it is closed."""
        with suppress(KeyError, ValueError):  # ValueError: it is closed
            self._selector.unregister(file)

    def call_at(self, at: float, call: Callable[[], None]) -> None:
        self._timers.append((at, call))

    def run(self) -> None:
        tick = time.monotonic() + _TICK
        try:
            while not self._role.over(now := time.monotonic()):
                ready = self._selector.select(max(min(tick, self._due(now)) - now, 0.0))
                now = time.monotonic()
                if now > tick + _ASLEEP:
                    for connection in self._role.peers:
                        connection.heard = now
                for key, _ in ready:
                    # Else it was removed in this very round
                    if self._selector.get_map().get(key.fd) is key:
                        key.data(now)
                if now >= tick:
                    tick = now + _TICK
                    self._role.tick(now)
                self._role.turn(now)
                self._role.execute_stops(now)
                self._call_timers(now)
                self._role.stops.publish()
            self._role.finish()
        except Exception as error:  # noqa: BLE001 - a defect of ours must not end the training
            frames = traceback.extract_tb(error.__traceback__)
            where = [frame for frame in frames if "distboot" in frame.filename][-1]
            said = f"{type(error).__name__}: {first_line(error)} ({os.path.basename(where.filename)}:{where.lineno})"
            self._role.say(
                f"warning: this rank continues without failure detection, because of a bug in it: {said}"
            )
            self._role.leave()
        finally:
            self._role.close()
            self._selector.close()

    def _due(self, now: float) -> float:
        return min([self._role.due(now), *(at for at, _ in self._timers)])

    def _call_timers(self, now: float) -> None:
        for timer in [timer for timer in self._timers if now >= timer[0]]:
            self._timers.remove(timer)
            timer[1]()
