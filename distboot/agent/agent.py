"""The agent of one rank or several, once all have met: it owns their connections, and serves their scripts."""

from __future__ import annotations

import socket
from array import array
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from ..rendezvous.connection_pool import DetachedConnection
from ..rendezvous.coordinator import Coordinator
from ..rendezvous.join import Joined, PortInUse, listening
from ..rendezvous.keys import Keys
from ..rendezvous.membership import Membership
from ..rendezvous.messages import READY, Arrive, Failed, Go, Key, Leave, Ready, Release
from ..rendezvous.protocol import BEFORE_AUTHENTICATION, Frames, ProtocolError, most_from_rank_0
from ..report import EventLog
from ..settings import SupervisionSettings
from ..text import log_line
from .failure_coordinator import FailureCoordinator
from .failure_reporter import FailureReporter
from .heartbeat import HeartbeatConnection, interval_of
from .local import (
    FROM_SCRIPT,
    FROM_STRANGERS,
    MOST,
    OPEN,
    AskLog,
    Attach,
    Finish,
    Keep,
    Listen,
    Listening,
    Log,
    ScriptListener,
)
from .loop import EventLoop
from .report import summarize
from .root_cause import locations

_SEND_LIMIT = 1.0  # seconds for a script to take an answer, which it waits for
_MOST_SESSIONS = 64
_MOST_STRANGERS = 256  # several turns: a script has the time to show its token
_ACCEPTED_AT_ONCE = 64
_LEAST_BEATS = 2  # within the bound, however large the job is


class Agent:
    """The agent of this process.

    Args:
        joined: its part of the rendezvous, which is over.
        settings: of failure detection.
        held: whether the exit of the ranks waits for us, as in the wrapper.
        is_starting: whether all ranks are to get ready before failures are detected.

    Attributes:
        ranks: its own.
        role: its side of failure detection.
        loop: its loop.
    """

    def __init__(
        self,
        joined: Joined,
        settings: SupervisionSettings,
        *,
        held: bool,
        is_starting: bool = False,
    ) -> None:
        assert joined.result is not None
        assert joined.side is not None
        membership = joined.result.membership
        self._joined, self._result = joined, joined.result
        server = joined.side if isinstance(joined.side, Coordinator) else None
        self._log = None if server is None else server.log
        agent = joined.plan.own.rank
        self.ranks = membership.agents[agent]
        self.role = participant_of(agent, membership, joined.side.detach_all(), settings, held=held, log=self._log)
        self.role.is_starting, self.role.reply = is_starting, self._reply
        self.loop = EventLoop(self.role, interval=interval_of(membership), grace=settings.grace)
        if server is not None:
            assert isinstance(self.role, FailureCoordinator)
            self.role.keys = Keys(membership, server.table, self.role.say)
            self.loop.add_reader(server.pool.fileno(), lambda _: server.serve())
        self._sessions: dict[socket.socket, Frames] = {}
        self._rank_of: dict[socket.socket, int] = {}  # of those that have proved that they are our script
        self._askers: dict[int, tuple[socket.socket, Key]] = {}  # who waits, and where
        self._door: ScriptListener | None = None

    def serve(self, session: socket.socket, rank: int | None = None) -> None:
        """Take what the script of a rank says on this socket; None: it has to show its token first."""
        self._sessions[session] = Frames(FROM_STRANGERS if rank is None else MOST)
        if rank is not None:
            self._rank_of[session] = rank
        session.settimeout(_SEND_LIMIT)  # no script holds up the loop
        self.loop.add_reader(session.fileno(), lambda now: self._read(session, now))

    def open(self) -> ScriptListener:
        """Let the scripts find us."""
        self._door = door = ScriptListener(self.ranks)

        def accept(_now: float) -> None:
            with suppress(OSError):
                for _ in range(_ACCEPTED_AT_ONCE):
                    session = door.socket.accept()[0]
                    strangers = [each for each in self._sessions if each not in self._rank_of]
                    if len(strangers) >= _MOST_STRANGERS:  # the oldest one has had most of the time
                        self._drop(strangers[0])
                    self.serve(session)

        self.loop.add_reader(door.socket.fileno(), accept)
        return door

    def close(self) -> None:
        """The loop is over, and who waits for an answer finds the connection closed."""
        for session in [*self._sessions, *([] if self._door is None else [self._door.socket])]:
            session.close()

    def _read(self, session: socket.socket, now: float) -> None:
        try:
            data = session.recv(1 << 16)
            frames = self._sessions[session].feed(data) if data else []
            for frame in frames:
                self._take(session, OPEN.verify(frame, self._sessions[session], *FROM_SCRIPT), now)
        except (OSError, ProtocolError):
            data = b""
        if not data:
            self._drop(session)

    def _drop(self, session: socket.socket) -> None:
        if session not in self._sessions:  # already
            return
        self.loop.remove_reader(session.fileno())
        del self._sessions[session]
        self._rank_of.pop(session, None)
        session.close()

    def _take(self, session: socket.socket, message: object, now: float) -> None:
        rank = self._rank_of.get(session)
        if isinstance(message, Attach):
            self._attach(session, message)
        elif rank is None:
            raise ProtocolError("says something before it has shown the token")
        elif isinstance(message, Ready | Arrive | Leave):
            self._request(session, rank, message, now)
        elif isinstance(message, Listen):
            self._give_listener(session, message.port if rank == 0 else None)
        elif isinstance(message, Keep):
            if rank == 0 and isinstance(self._joined.side, Coordinator) and self._joined.listener is not None:
                self._joined.side.pool.accept_again()
        elif isinstance(message, AskLog):
            events = [list(event) for event in self._log or ()]
            _send(session, Log(tuple(events)))
        elif isinstance(message, Finish):
            self.role.leave()
            self.role.turn(now)

    def _request(self, session: socket.socket, rank: int, message: Arrive | Ready | Leave, now: float) -> None:
        if isinstance(message, Leave):
            if rank == self.ranks[0]:
                self._joined.release_port()
            _send(session, Listening())
        else:
            self._askers[rank] = session, message.key
        self.role.take(rank, message, now)

    def _attach(self, session: socket.socket, message: Attach) -> None:
        rank = None if self._door is None else self._door.rank_of(message)
        if rank is None:
            raise ProtocolError("is not the script of a rank of this agent")
        if sum(other == rank for other in self._rank_of.values()) >= _MOST_SESSIONS:
            raise ProtocolError("has too many connections")
        self._rank_of[session], self._sessions[session].most = rank, MOST
        _send(session, self._result)

    def _give_listener(self, session: socket.socket, port: int | None) -> None:
        listener = None if port is None else self._joined.take_listener()
        if listener is None and port is not None:  # the wrapper has left the port to its script
            with suppress(PortInUse):
                listener = listening(port)
        files = [] if listener is None else [listener.fileno()]
        with suppress(OSError):
            data = OPEN.sign(Listening())
            session.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))] if files else [])
        if listener is not None:
            listener.close()

    def _reply(self, rank: int, message: object) -> None:
        key = message.key if isinstance(message, Failed | Release) else None
        is_over = isinstance(message, Go) or (key is not None and key.name == READY)
        if is_over and isinstance(self._joined.side, Coordinator):
            # What comes now may be for a store of the script, or its next attempt.
            self._joined.side.pool.accept_no_more()
        asker, asked = self._askers.get(rank, (None, None))
        if key is not None and key != asked:  # of a wait that the script has given up
            return
        self._askers.pop(rank, None)
        if asker is not None:
            _send(asker, message)


def _send(session: socket.socket, message: object) -> None:
    try:
        session.sendall(OPEN.sign(message))
    except OSError:  # it has ended, or does not read: half an answer is of no use
        with suppress(OSError):
            session.shutdown(socket.SHUT_RDWR)


def participant_of(
    agent: int,
    membership: Membership,
    connections: Iterable[DetachedConnection],
    settings: SupervisionSettings,
    *,
    held: bool,
    log: EventLog | None = None,
) -> FailureCoordinator | FailureReporter:
    """Rank 0's side, or that of another agent.

    Args:
        agent: the number of this one: its rank, or its node where it has all ranks there.
        membership: of the job.
        connections: of the roll call.
        settings: of this rank.
        held: whether its exit waits for us, as in the wrapper.
        log: of the rendezvous, on rank 0; None: there is to be no report.
    """
    interval = interval_of(membership)
    most = BEFORE_AUTHENTICATION if agent == 0 else most_from_rank_0(membership.world_size)
    lines = {other: HeartbeatConnection(link, channel, interval, most) for other, link, channel in connections}
    settings = settings._replace(bound=max(settings.bound, _LEAST_BEATS * interval))

    places, agents = locations(membership), membership.agents
    unit = f"{'node' if membership.by_node else 'rank'} {agent}"

    def say(text: str, rank: int | None = None) -> None:
        log_line(unit if rank is None else f"rank {rank}", text)

    if agent == 0:
        line_of = {rank: line for other, line in lines.items() for rank in agents[other]}
        return FailureCoordinator(
            places, line_of, settings, held=held, say=say,
            conclude=partial(summarize, membership=membership), log=EventLog() if log is None else log,
        )  # fmt: skip
    return FailureReporter(places[0], [places[rank] for rank in agents[agent]], lines[0], settings, held=held, say=say)
