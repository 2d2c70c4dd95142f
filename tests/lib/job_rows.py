"""Rank 0's job as a table: an event, and what it leads to.

`PureJob` runs such rows against the job alone, without a socket or a clock; `JobOfRank0` against the agent of rank 0,
over real connections. The job has four ranks on two nodes, one agent a rank. An effect is a line of text:

    rank 2 <- StopAt 44        a message to the agent of a rank; "all" where each other agent gets it
    rank 0 <- Release          an answer to the script of rank 0, which is here
    say: rank 2 failed first   a line of the log
    record: exited 2           an event of the report
    conclude: ranks 2          why the job ends
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple

from rendezvous_peers import record
from supervised import pair, shell_of_ranks, wait_to_read

from distboot.agent.agent import connect
from distboot.agent.heartbeat import HeartbeatConnection
from distboot.agent.peer_watch import DISCONNECTED
from distboot.agent.rank_connections import RankConnections
from distboot.base.settings import SupervisionSettings
from distboot.job.effects import (
    Blame,
    Effect,
    QuestionPeers,
    Record,
    Remind,
    Reply,
    Say,
    Send,
    Tell,
)
from distboot.job.facts import Facts
from distboot.job.first_failure import GATHERING
from distboot.job.job import Job
from distboot.job.keys import Keys
from distboot.job.messages import KINDS, Register, StopAt
from distboot.job.root_cause import RankState, ranks_of
from distboot.rendezvous.events import EventLog
from distboot.rendezvous.join_table import JoinTable
from distboot.rendezvous.membership import Membership
from distboot.rendezvous.messages import Arrive, Detach, Failed, Go, Ready
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


def _keys(*, has_begun: bool) -> Keys:
    table = JoinTable(len(_RANKS))
    for rank in _RANKS:
        table.add(record(rank, len(_RANKS), f"host-{rank // 2}"))
    keys = Keys(MEMBERSHIP, table)
    keys.has_begun = has_begun
    return keys


class Connected:
    """Stands in for the connection to an agent, which answers."""

    is_silent = False


def members_of(membership: Membership, own: Collection[int]) -> dict[int, RankState]:
    """All ranks, as the agent of these knows them while all agents are connected."""
    members = {member.rank: member for member in ranks_of(membership)}
    for member in members.values():
        member.is_local = member.rank in own
        member.connection = None if member.is_local else Connected()
    return members


class PureJob:
    """The job of rank 0, and what its agent would make of its effects."""

    def __init__(self, *, has_begun: bool = True) -> None:
        self._now = 0.0
        self._members = members_of(MEMBERSHIP, [0])
        facts = Facts(self._members, SETTINGS, is_held=False, is_starting=not has_begun)
        self.job = Job(facts, _keys(has_begun=has_begun))
        self._returning: dict[int, float] = {}  # rank -> until when its agent may return
        self._has_concluded = False
        self._printed: list[str] = []
        self._sent: dict[str, list[int]] = {}  # name of a message -> to which ranks
        self._recorded: list[str] = []
        self._appliers: dict[type, Callable[[Any], None]] = {
            Say: self._say,
            Record: self._record,
            Tell: self._tell,
            Remind: self._remind,
            Reply: self._reply,
            Send: self._send,
            QuestionPeers: lambda _: None,
            Blame: lambda _: None,
        }
        for rank in _RANKS:
            self.after(Take(rank, Register(100 + rank)))

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to happen."""
        return self.job.due() == inf

    def after(self, event: Event) -> list[str]:
        """What an event leads to."""
        if isinstance(event, Wait):
            self._now += event.seconds
            effects = self._give_up()
        elif isinstance(event, Lose):
            effects = self._lose(event.rank)
        elif isinstance(event.message, Detach):
            effects = self._leave(event.rank)
        else:
            effects = self.job.take(event.rank, event.message, self._now)
        return self._lines(effects + self.job.tick(self._now))

    def close(self) -> None:
        """Nothing is open."""

    def _lose(self, rank: int) -> list[Effect]:
        member = self._members[rank]
        if member.end is not None or not self.job.facts.is_detected(member):
            return self._leave(rank)
        self._returning[rank] = self._now + GATHERING
        return self.job.lost(rank, DISCONNECTED, self._now)

    def _give_up(self) -> list[Effect]:
        effects = []
        for rank, end in list(self._returning.items()):
            if self._now >= end:
                del self._returning[rank]
                effects += self._leave(rank)
        return effects

    def _leave(self, rank: int) -> list[Effect]:
        self._members[rank].connection = None
        return self.job.left(rank, self._now)

    def _lines(self, effects: Sequence[Effect]) -> list[str]:
        """The effects as lines: first what is said, then messages, then records."""
        self._printed, self._sent, self._recorded = [], {}, []
        for effect in effects:
            self._appliers[type(effect)](effect)
        messages = [f"{self._to(ranks)} <- {name}" for name, ranks in self._sent.items()]
        lines = [*self._printed, *messages, *self._recorded]
        cause = self.job.facts.cause
        if cause is not None and not self._has_concluded:
            self._has_concluded = True
            lines.append(f"conclude: {_ranks(cause.ranks)}")
        return lines

    def _say(self, effect: Say) -> None:
        self._printed.append(f"say: {effect.text}")

    def _record(self, effect: Record) -> None:
        whose = "" if effect.rank is None else f" {effect.rank}"
        self._recorded.append(f"record: {effect.event}{whose}")

    def _tell(self, effect: Tell) -> None:
        if not self._has_concluded:
            self._printed.append(f"say: {effect.cause.headline}")
        self._note("Abort", self._members)

    def _remind(self, effect: Remind) -> None:
        self._note("Abort", [effect.rank])

    def _reply(self, effect: Reply) -> None:
        if effect.rank == 0:
            self._printed.append(f"rank 0 <- {_said(effect.message)}")
        else:
            self._note(_said(effect.message), [effect.rank])

    def _send(self, effect: Send) -> None:
        if isinstance(effect.message, Go):
            self._printed.append("rank 0 <- Go")
        self._note(_said(effect.message), effect.ranks)

    def _connected(self) -> list[int]:
        return [rank for rank, member in self._members.items() if member.connection is not None]

    def _note(self, name: str, ranks: Collection[int]) -> None:
        to = [rank for rank in self._connected() if rank in ranks]
        if to:
            self._sent.setdefault(name, []).extend(to)

    def _to(self, ranks: list[int]) -> str:
        return "all" if sorted(ranks) == self._connected() else _ranks(sorted(ranks))


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
        ranks = ranks_of(MEMBERSHIP)
        peers = connect(ranks, self._lines)
        self._shell = shell_of_ranks(ranks, SETTINGS, self._say)
        keys = _keys(has_begun=has_begun)
        RankConnections(self._shell, peers, MEMBERSHIP, keys, self._log)
        self._shell.facts.is_starting = not has_begun
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
        self._shell.turn(self._now)
        self._collect()
        found = self._effects
        self._effects = []
        return found

    @property
    def is_over(self) -> bool:
        return self._shell.over(self._now)

    def close(self) -> None:
        self._shell.close()
        for agent in self._agents.values():
            agent.close()

    def _take_own(self, message: object) -> None:
        if isinstance(message, Arrive | Ready):
            self._shell.ask(0, message, self._answer, self._now)
        else:
            self._shell.take(0, message, self._now)

    def _answer(self, message: object) -> None:
        self._effects.append(f"rank 0 <- {_said(message)}")

    def _say(self, text: str, *_: object, event: str = "", **__: object) -> None:
        if event == "root_cause":
            text = text.partition("\n")[0]  # without the traceback, which not every agent prints
        self._effects.append(f"say: {text}")

    def _read(self, rank: int) -> None:
        """Let the agent of rank 0 read, once there is something to read."""
        wait_to_read(self._lines[rank].socket)
        self._shell.peers.read(self._lines[rank], self._now)

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
        cause = self._shell.root_cause
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
