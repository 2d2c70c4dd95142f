"""Rank 0's job as a table: an event, and what it leads to. This runs such rows against the agent of rank 0.

The job has four ranks on two nodes, one agent a rank. An effect is a line of text:

    rank 2 <- StopAt 44        a message to the agent of a rank; "all" where each other agent gets it
    rank 0 <- Release          an answer to the script of rank 0, which is here
    say: rank 2 failed first   a line of the log
    record: exited 2           an event of the report
    conclude: ranks 2          why the job ends
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from rendezvous_peers import record
from supervised import pair, wait_to_read

from distboot.agent.failure_coordinator import FailureCoordinator
from distboot.agent.heartbeat import HeartbeatConnection
from distboot.base.settings import SupervisionSettings
from distboot.job.keys import Keys
from distboot.job.messages import KINDS, Register, StopAt
from distboot.job.root_cause import ranks_of
from distboot.rendezvous.events import EventLog
from distboot.rendezvous.join_table import JoinTable
from distboot.rendezvous.membership import Membership
from distboot.rendezvous.messages import Arrive, Failed, Ready
from distboot.rendezvous.protocol import Channel, Frames

MEMBERSHIP = Membership(("host-0", "host-1"), ((0, 1), (2, 3)))
SETTINGS = SupervisionSettings(grace=30.0, late_after=60.0)
_RANKS = range(4)
_CHANNEL = Channel()
_MOST = 1 << 20  # bytes of a message


class Take(NamedTuple):
    """A rank says something."""

    rank: int
    message: object


class Lose(NamedTuple):
    """The connection of a rank's agent ends."""

    rank: int


class Wait(NamedTuple):
    """Time passes, in which nothing else happens."""

    seconds: float


Event = Take | Lose | Wait
Row = tuple[Event, Sequence[str]]


class JobOfRank0:
    """The agent of rank 0, over real connections to agents that are only their ends."""

    def __init__(self, *, has_begun: bool = True) -> None:
        self._now = time.monotonic()
        self._effects: list[str] = []
        self._log = EventLog()
        self._recorded = 0
        self._has_concluded = False
        ends = {rank: pair() for rank in _RANKS if rank != 0}
        for ours, _ in ends.values():
            ours.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as the rendezvous does
        self._agents = {rank: theirs for rank, (_, theirs) in ends.items()}
        self._frames = {rank: Frames(_MOST) for rank in ends}
        self._lines = {
            rank: HeartbeatConnection(ours, _CHANNEL) for rank, (ours, _) in ends.items()
        }
        table = JoinTable(len(_RANKS))
        for rank in _RANKS:
            table.add(record(rank, len(_RANKS), f"host-{rank // 2}"))
        keys = Keys(MEMBERSHIP, table, self._say)
        keys.has_begun = has_begun
        self._coordinator = FailureCoordinator(
            ranks_of(MEMBERSHIP),
            self._lines,
            SETTINGS,
            False,
            self._say,
            membership=MEMBERSHIP,
            keys=keys,
            log=self._log,
        )
        self._coordinator.is_starting = not has_begun
        for rank in _RANKS:
            self.after(Take(rank, Register(100 + rank)))

    def after(self, event: Event) -> list[str]:
        """What an event leads to."""
        if isinstance(event, Wait):
            self._now += event.seconds
        elif isinstance(event, Lose):
            self._agents.pop(event.rank).close()
            self._read(event.rank)
        elif event.rank == 0:
            self._take_own(event.message)
        else:
            self._agents[event.rank].sendall(_CHANNEL.sign(event.message, event.rank))
            self._read(event.rank)
        self._coordinator.turn(self._now)
        self._collect()
        found = self._effects
        self._effects = []
        return found

    @property
    def is_over(self) -> bool:
        return self._coordinator.over(self._now)

    def close(self) -> None:
        self._coordinator.close()
        for agent in self._agents.values():
            agent.close()

    def _take_own(self, message: object) -> None:
        if isinstance(message, Arrive | Ready):
            self._coordinator.ask(0, message, self._answer, self._now)
        else:
            self._coordinator.take(0, message, self._now)

    def _answer(self, message: object) -> None:
        self._effects.append(f"rank 0 <- {_said(message)}")

    def _say(self, text: str, *_: object, **__: object) -> None:
        self._effects.append(f"say: {text}")

    def _read(self, rank: int) -> None:
        """Let the agent of rank 0 read, once there is something to read."""
        wait_to_read(self._lines[rank].socket)
        self._coordinator.read(self._lines[rank], self._now)

    def _collect(self) -> None:
        sent: dict[str, list[int]] = {}
        for rank, agent in self._agents.items():
            for name in self._received(rank, agent):
                sent.setdefault(name, []).append(rank)
        for name, ranks in sent.items():
            to = "all" if ranks == list(self._agents) else _ranks(ranks)
            self._effects.append(f"{to} <- {name}")
        for entry in list(self._log)[self._recorded :]:
            whose = "" if entry.rank is None else f" {entry.rank}"
            self._effects.append(f"record: {entry.event}{whose}")
        self._recorded = len(list(self._log))
        cause = self._coordinator.root_cause
        if cause is not None and not self._has_concluded:
            self._has_concluded = True
            self._effects.append(f"conclude: {_ranks(cause.ranks)}")

    def _received(self, rank: int, agent: socket.socket) -> list[str]:
        found = []
        frames = self._frames[rank]
        with suppress(BlockingIOError):
            data = agent.recv(_MOST, socket.MSG_DONTWAIT)
            for frame in frames.feed(data):
                message = _CHANNEL.verify(frame, frames, type(None), *KINDS)
                if message is not None:
                    found.append(_said(message))
        return found


def _said(message: object) -> str:
    """`"Release"`, `"StopAt 44"`, `"Failed no-barrier"`."""
    name = type(message).__name__
    if isinstance(message, Failed):
        return f"{name} {message.problem[0]}"
    if isinstance(message, StopAt):
        return f"{name} {message.read}"
    return name


def _ranks(ranks: Sequence[int]) -> str:
    """`"rank 2"`, `"ranks 0, 1"`."""
    word = "rank" if len(ranks) == 1 else "ranks"
    return f"{word} {', '.join(map(str, ranks))}"
