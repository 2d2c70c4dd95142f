"""Rank 0's job as a table: an event, and what it leads to.

`PureJob` runs such rows against the job alone, without a socket or a clock; `JobOfRank0` against the agent of rank 0,
over real connections. Unless its `Setup` says otherwise, the job has four ranks on two nodes, one agent a rank, and
all ranks are ready. An effect is a line of text:

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

from inside import replace
from rendezvous_peers import record
from supervised import pair, shell_of_ranks, wait_to_read

from distboot.agent.agent import connect
from distboot.agent.heartbeat import HeartbeatConnection
from distboot.agent.peer_watch import DISCONNECTED
from distboot.agent.rank_connections import RankConnections
from distboot.agent.stop_pages import StopPages
from distboot.base.settings import RestartSettings, SupervisionSettings
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
from distboot.job.exit_status import ExitStatus
from distboot.job.facts import Facts
from distboot.job.first_failure import GATHERING
from distboot.job.job import Job
from distboot.job.keys import GONE, Keys
from distboot.job.messages import KINDS, Failing, Register, StopAt
from distboot.job.restarts import RestartPolicy
from distboot.job.root_cause import Circumstances, RankState, RootCause, ranks_of
from distboot.rendezvous.events import EventLog
from distboot.rendezvous.join_table import JoinTable
from distboot.rendezvous.membership import Membership
from distboot.rendezvous.messages import Arrive, Detach, Failed, Go, Ready
from distboot.rendezvous.protocol import Channel, Frames

SETTINGS = SupervisionSettings(grace=30.0, late_after=60.0)
AFTER_A_CUT = 3.0  # seconds for an agent to return; else GATHERING
GREETED = 1.0  # seconds for an agent that has greeted
_RANKS = range(4)
_MOST_TURNS = 10  # of the loop at one time
_CHANNEL = Channel()
_MOST = 1 << 20  # bytes of a message


class Take(NamedTuple):
    """A rank says something."""

    rank: int
    message: object


class Lose(NamedTuple):
    """The connection of a rank's agent ends."""

    rank: int
    gave_up: bool = False  # whether this host stopped sending to it, after a cut


class Greet(NamedTuple):
    """A process greets rank 0's agent: it may be one whose connection has ended."""


class Return(NamedTuple):
    """The agent of a rank goes on over another connection."""

    rank: int


class Cut(NamedTuple):
    """The agent of a rank does not answer any more, though its host does."""

    rank: int


class Mend(NamedTuple):
    """The agent of a rank answers again."""

    rank: int


class Abandon(NamedTuple):
    """The agent of a rank has sent what it must not send."""

    rank: int


class Orphan(NamedTuple):
    """The launcher of a rank is gone."""

    rank: int


class Wait(NamedTuple):
    """Time passes, in which nothing else happens."""

    seconds: float


Event = Take | Lose | Greet | Return | Cut | Mend | Abandon | Orphan | Wait
Row = tuple[Event, Sequence[str]]


class Setup(NamedTuple):
    """What a job is like before its first event."""

    nodes: tuple[tuple[int, ...], ...] = ((0, 1), (2, 3))  # the ranks of each
    is_by_node: bool = False  # whether one agent has all ranks of a node
    has_begun: bool = True  # whether all ranks have once been ready
    is_starting: bool = False  # whether a failure until then is one of the start
    has_registered: bool = True  # whether all ranks are watched
    settings: SupervisionSettings = SETTINGS
    is_held: bool = False
    is_served: bool = False
    has_launcher: bool = False
    most_restarts: int | None = None  # None: the ranks are not started again

    @property
    def membership(self) -> Membership:
        hosts = [f"host-{number}" for number in range(len(self.nodes))]
        return Membership(tuple(hosts), self.nodes, by_node=self.is_by_node)

    def keys(self) -> Keys:
        membership = self.membership
        table = JoinTable(membership.world_size)
        node_of = membership.node_of()
        for rank in range(membership.world_size):
            table.add(record(rank, membership.world_size, f"host-{node_of[rank]}"))
        keys = Keys(membership, table)
        keys.has_begun = self.has_begun
        return keys


USUAL = Setup()
STARTING = Setup(has_begun=False, is_starting=True)


class Connected:
    """Stands in for the connection to an agent, which answers."""

    def __init__(self) -> None:
        self.is_silent = False


def members_of(membership: Membership, own: Collection[int]) -> dict[int, RankState]:
    """All ranks, as the agent of these knows them while all agents are connected."""
    members = {member.rank: member for member in ranks_of(membership)}
    for ranks in membership.agents:
        connection = Connected()
        for rank in ranks:
            is_local = rank in own
            members[rank].is_local = is_local
            members[rank].connection = None if is_local else connection
    return members


class Rounds:
    """Stands in for what the wrapper of rank 0 knows of all rounds: whether another one follows."""

    def __init__(self, most: int) -> None:
        self.round = 0
        self._most = most
        self._policy = RestartPolicy(RestartSettings(most=most), of_launcher=False)

    def begin(self) -> None:
        """Another round begins."""
        self.round += 1
        self._policy.begin(self.round, self._most)

    def decided(
        self,
        cause: RootCause,
        end: ExitStatus | None,
        now: float,
        circumstances: Circumstances,
        pids: list[int],  # noqa: ARG002
    ) -> tuple[RootCause, str | None]:
        decision = self._policy.decide(
            cause,
            end,
            now,
            circumstances,
            has_mpi=False,
        )
        return replace(cause, restarts=decision.restarts), decision.text


class PureJob:
    """The job of rank 0, and what its agent would make of its effects."""

    def __init__(
        self, setup: Setup = USUAL, rounds: Rounds | None = None, now: float = 0.0
    ) -> None:
        self.now = now
        self.effects: list[Effect] = []  # of the last event
        membership = setup.membership
        self._agents = membership.agents
        self.members = members_of(membership, self._agents[0])
        facts = Facts(
            self.members,
            setup.settings,
            is_held=setup.is_held,
            is_starting=setup.is_starting,
            is_served=setup.is_served,
            has_launcher=setup.has_launcher,
            restarts=rounds,
        )
        self.job = Job(facts, setup.keys(), is_by_node=setup.is_by_node)
        # By the first rank of an agent: until when it may return, and whether it does not answer
        self._returning: dict[int, float] = {}
        self._unreachable: set[int] = set()
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
        self._happens: dict[type, Callable[[Any], list[Effect]]] = {
            Take: self._take,
            Wait: self._wait,
            Lose: self._lose,
            Greet: self._greet,
            Return: self._return,
            Cut: self._cut,
            Mend: self._mend,
            Abandon: self._abandon,
            Orphan: self._orphan,
        }
        if setup.has_registered:
            for rank in self.members:
                self.after(Take(rank, Register(100 + rank)))

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to happen."""
        return self.job.due() == inf

    def after(self, event: Event) -> list[str]:
        """What an event leads to."""
        effects = self._happens[type(event)](event) + self._tick()
        turns = 1
        while self.job.due() <= self.now:  # a question that no rank is to answer, for example
            assert turns < _MOST_TURNS, "the loop of the agent cannot sleep"
            turns += 1
            effects += self._tick()
        self.effects = effects
        return self._lines(effects)

    def ranks_with(self, rank: int) -> tuple[int, ...]:
        """The ranks of the agent of a rank."""
        return next(ranks for ranks in self._agents if rank in ranks)

    def seconds_to_return(self, rank: int) -> float:
        """For the agent of a rank whose connection ends now."""
        if self.ranks_with(rank)[0] in self._unreachable:
            return AFTER_A_CUT
        return GATHERING

    def close(self) -> None:
        """Nothing is open."""

    def _tick(self) -> list[Effect]:
        effects = self.job.tick(self.now)
        files = [isinstance(effect, Blame) for effect in effects]
        assert files == sorted(files), "all are told before a file is written"
        return effects

    # Events, as `agent/rank_connections` tells them to the job

    def _take(self, event: Take) -> list[Effect]:
        if isinstance(event.message, Detach):
            return self._leave(event.rank)
        connection = self.members[event.rank].connection
        if connection is not None:
            connection.is_silent = False
        return self.job.take(event.rank, event.message, self.now)

    def _wait(self, event: Wait) -> list[Effect]:
        self.now += event.seconds
        effects = []
        for rank, end in list(self._returning.items()):
            if self.now >= end:
                del self._returning[rank]
                effects += self._leave(rank)
        return effects

    def _lose(self, event: Lose) -> list[Effect]:
        ranks = self.ranks_with(event.rank)
        running = [rank for rank in ranks if self.members[rank].end is None]
        if not running:
            return self._leave(event.rank)
        if event.gave_up:
            return []
        seconds = self.seconds_to_return(event.rank)
        self._returning[ranks[0]] = self.now + seconds
        effects = []
        for rank in running:
            if self.job.facts.is_detected(self.members[rank]):
                effects += self.job.lost(rank, DISCONNECTED, self.now, gathering=seconds)
        return effects

    def _greet(self, _: Greet) -> list[Effect]:
        due = self.now + GREETED
        for first, end in self._returning.items():
            self._returning[first] = max(end, due)
            for rank in self.ranks_with(first):
                self.job.postpone(rank, due)
        return []

    def _return(self, event: Return) -> list[Effect]:
        ranks = self.ranks_with(event.rank)
        effects = []
        if ranks[0] in self._unreachable:
            effects += self._mend(Mend(event.rank))
        if self._returning.pop(ranks[0], None) is not None:
            for rank in ranks:
                effects += self.job.returned(rank, self.now)
        return effects

    def _cut(self, event: Cut) -> list[Effect]:
        effects = []
        ranks = self.ranks_with(event.rank)
        self._unreachable.add(ranks[0])
        for rank in ranks:
            self.members[rank].connection.is_silent = True
            effects += self.job.unreachable(rank, self.now, "gave no answer", self.now)
        return effects

    def _mend(self, event: Mend) -> list[Effect]:
        effects = []
        ranks = self.ranks_with(event.rank)
        self._unreachable.discard(ranks[0])
        for rank in ranks:
            self.members[rank].connection.is_silent = False
            effects += self.job.reachable(rank, self.now)
        return effects

    def _abandon(self, event: Abandon) -> list[Effect]:
        return self._leave(event.rank, "disconnected (it sent no JSON)")

    def _orphan(self, event: Orphan) -> list[Effect]:
        if self.members[event.rank].is_local:
            self.job.facts.is_orphaned = True
        effects = []
        for rank in self.ranks_with(event.rank):
            if self.members[rank].end is None:
                end = ExitStatus(cause="its launcher is gone: mpirun", when=1.0)
                effects += self.job.take(rank, Failing(end), self.now)
        return effects

    def _leave(self, rank: int, why: str = GONE) -> list[Effect]:
        effects = []
        ranks = self.ranks_with(rank)
        for each in ranks:
            self.members[each].connection = None
        for each in ranks:
            effects += self.job.left(each, self.now, why)
        return effects

    # Effects

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
        self._note("Abort", self.members)

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
        return [rank for rank, member in self.members.items() if member.connection is not None]

    def _note(self, name: str, ranks: Collection[int]) -> None:
        to = [rank for rank in self._connected() if rank in ranks]
        if to:
            self._sent.setdefault(name, []).extend(to)

    def _to(self, ranks: list[int]) -> str:
        return "all" if sorted(ranks) == self._connected() else _ranks(sorted(ranks))


class _NoScript(StopPages):
    """No script of rank 0 runs here, so its `Reads` is an event, as those of other ranks."""

    def ask(self, now: float) -> None:
        pass


class JobOfRank0:
    """The agent of rank 0, over real connections to agents that are only their ends."""

    def __init__(self, setup: Setup = USUAL) -> None:
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
        ranks = ranks_of(setup.membership)
        peers = connect(ranks, self._lines)
        self._shell = shell_of_ranks(ranks, setup.settings, self._say, is_held=setup.is_held)
        self._shell.stops = _NoScript(setup.settings.grace / 3)
        self._shell.use(
            RankConnections(self._shell, peers, setup.membership, setup.keys(), self._log)
        )
        self._shell.facts.is_starting = setup.is_starting
        self._shell.facts.has_launcher = setup.has_launcher
        for rank in _RANKS:
            self.after(Take(rank, Register(100 + rank)))

    def after(self, event: Event) -> list[str]:
        """What an event leads to."""
        if isinstance(event, Wait):
            self._now += event.seconds
        elif isinstance(event, Lose):
            self._agents.pop(event.rank).close()
            self._read(event.rank)
        elif not isinstance(event, Take):
            raise NotImplementedError(event)
        elif event.rank == 0:
            self._take_own(event.message)
        else:
            self._agents[event.rank].sendall(_CHANNEL.sign(event.message, event.rank))
            self._read(event.rank)
        self._shell.turn(self._now)
        for _ in range(_MOST_TURNS):
            if self._shell.job.due() > self._now:
                break
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
