"""The agent of one rank or several, once all have met: it owns their connections, and serves their scripts."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import threading
import time
from array import array
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from ..base.errors import DistbootError
from ..base.settings import SupervisionSettings
from ..base.text import log_line
from ..job.keys import Keys
from ..job.root_cause import ranks_of
from ..rendezvous.coordinator import Coordinator
from ..rendezvous.join import Joined, PortInUse, listening
from ..rendezvous.membership import Membership
from ..rendezvous.messages import (
    Arrive,
    AskStacks,
    Failed,
    Go,
    Leave,
    Ready,
    RequestStop,
    ShowStacks,
    as_problem,
)
from ..rendezvous.protocol import (
    BEFORE_AUTHENTICATION,
    Frames,
    ProtocolError,
    most_from_rank_0,
)
from ..rendezvous.worker import Worker
from . import link as local
from .failure_coordinator import FailureCoordinator
from .failure_reporter import FailureReporter
from .heartbeat import HeartbeatConnection
from .launcher_process import LauncherProcess
from .loop import Answer, EventLoop
from .returning import Returning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .claims import Claims

_EXPLANATION = 1.0  # seconds for rank 0 to say why all stop, once our launcher is gone
_POLL_INTERVAL = 1.0  # seconds, where the kernel does not tell that a process has ended
_SEND_LIMIT = 1.0  # seconds for a script to take an answer, which it waits for
_MOST_SESSIONS = 64  # of one rank
_MOST_STRANGERS = 256  # several turns: a script has the time to show its token
_LONGEST_NOTICE = 200  # bytes
_WAITING = 256  # connections that it has not accepted yet
_ACCEPTED_AT_ONCE = 64
CREDENTIALS = struct.Struct("3i")  # struct ucred, unix(7): pid, uid, gid


@dataclass(slots=True, eq=False)
class _Session:
    """A connection of a script; its rank is known once it has proved that it is ours."""

    socket: socket.socket
    frames: Frames
    rank: int | None

    def send(self, message: object, *files: int) -> None:
        """Send a message, with open files."""
        try:
            data, sent = local.OPEN.sign(message), 0
            if files:
                sent = self.socket.sendmsg(
                    [data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))]
                )
            self.socket.sendall(data[sent:])
        except OSError:  # it has ended, or does not read: half an answer is of no use
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


class Agent:
    """The agent of this process; `held`: the exit of its ranks waits for it, as in the wrapper."""

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
        self._coordinator = joined.side if isinstance(joined.side, Coordinator) else None
        self.ranks = membership.agents[joined.plan.own.rank]
        self.role = participant_of(
            joined.plan.own.rank, membership, joined.side, settings, held=held
        )
        self.role.is_starting = is_starting
        self.role.may_restart = held and membership.round < membership.max_restarts
        self._claims: Claims | None = None
        self.role.claim = self._claim
        self.loop = EventLoop(self.role)
        if isinstance(self.role, FailureReporter):
            self._let_return(self.role, membership)
        if self._coordinator is not None:
            server = self._coordinator
            assert isinstance(self.role, FailureCoordinator)
            server.resume = self.role.take_back
            server.greeted = self.role.expect_return
            self.loop.add_reader(server.pool.fileno(), lambda _: server.serve())
        if settings.stop_at is not None:
            self.loop.call_at(
                time.monotonic() + max(settings.stop_at - time.time(), 0.0), self._request_stop
            )
        self._over = threading.Event()  # set once this agent needs no more notices
        if settings.stop_notice and self.ranks[0] in {node[0] for node in membership.nodes}:
            self._watch_notices(settings)
        self._sessions: list[_Session] = []
        self._listener: socket.socket | None = None
        self._name = ""  # at which it listens
        self._tokens = {rank: os.urandom(16).hex() for rank in self.ranks}

    def _claim(self, topic: str) -> bool:
        """Whether this agent is the one of its node that prints what all of them know."""
        if self._claims is None:
            from .claims import Claims  # here, as most jobs end well

            membership = self._result.membership
            node = membership.node_of()[self.ranks[0]]
            self._claims = Claims(f"{self._job_mark()}-{membership.round}-{node}")
        return self._claims.claim(topic)

    def _job_mark(self) -> str:
        """What tells this job from others on this host."""
        job = f"{self._joined.plan.job}:{self._result.port}"
        return hashlib.sha256(job.encode()).hexdigest()[:8]

    def _let_return(self, role: FailureReporter, membership: Membership) -> None:
        """Let this agent come back to rank 0's over another connection, where that takes it back."""
        connection = next(iter(role.peers), None)
        if connection is None or not membership.resume_port:
            return
        with suppress(OSError):  # it has ended already
            host, _ = socket.getnameinfo(
                connection.socket.getpeername(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
            )
            plan = self._joined.plan
            role.returning = returning = Returning(plan, host, membership.resume_port)
            role.round = membership.round
            self.loop.add_reader(returning.woken.fileno(), lambda _: None)  # `turn` looks

    def serve(self, connection: socket.socket, rank: int | None = None) -> _Session:
        """Take what the script of a rank says on this socket; None: it has to show its token first."""
        session = _Session(
            connection, Frames(local.FROM_STRANGERS if rank is None else local.FROM_SCRIPTS), rank
        )
        self._sessions.append(session)
        connection.settimeout(_SEND_LIMIT)  # no script holds up the loop
        self.loop.add_reader(connection.fileno(), partial(self._read, session))
        return session

    def watch_launcher(self, launcher: LauncherProcess) -> None:
        """End our ranks if the process of the launcher above them ends before them."""
        if launcher.file is None:
            self._poll_launcher(launcher)
        else:
            self.loop.add_reader(launcher.file, partial(self._launcher_ended, launcher))

    def _poll_launcher(self, launcher: LauncherProcess) -> None:
        now = time.monotonic()
        if launcher.has_ended():
            self._launcher_ended(launcher, now)
        else:
            self.loop.call_at(now + _POLL_INTERVAL, partial(self._poll_launcher, launcher))

    def _launcher_ended(self, launcher: LauncherProcess, now: float) -> None:
        if launcher.file is not None:
            self.loop.remove_reader(launcher.file)
        if launcher.has_left_rank():
            self.role.orphaned(launcher.text, now)
            self.loop.call_at(now + _EXPLANATION, partial(self.role.stop_orphans, launcher.text))

    def open(self) -> None:
        """Let the scripts find us."""
        plan = self._joined.plan
        job = "-".join(filter(None, (local.socket_name(plan.name), self._job_mark())))
        self._name = f"{local.PREFIX}{job}-{os.urandom(8).hex()}"
        self._listener = listener = socket.socket(socket.AF_UNIX)
        listener.bind(f"\0{self._name}")
        listener.listen(_WAITING)
        listener.setblocking(False)
        self.loop.add_reader(listener.fileno(), partial(self._accept, listener))

    def variable(self, rank: int) -> str:
        """What lets the script of a rank find us, once we are open."""
        return self._name and f"{self._name}:{self._tokens[rank]}"

    def close(self) -> None:
        """The loop is over, and who waits for an answer finds the connection closed."""
        self._over.set()
        if self._claims is not None:
            self._claims.close()
        for each in (self._listener, *(session.socket for session in self._sessions)):
            if each is not None:
                each.close()

    def _request_stop(self, why: str = "the job ends soon") -> None:
        self.role.take(self.ranks[0], RequestStop(why), time.monotonic())

    def _watch_notices(self, settings: SupervisionSettings) -> None:
        """Ask for notices that this machine will be taken away; one agent of each node does."""
        from ..script.stop_notices import watch  # here, as few jobs do

        ours, its = socket.socketpair()
        ours.setblocking(False)

        def receive(_now: float) -> None:
            self.loop.remove_reader(ours.fileno())
            with ours:
                self._request_stop(ours.recv(_LONGEST_NOTICE).decode())

        def ask(why: str) -> None:
            with its:
                its.sendall(why.encode())

        self.loop.add_reader(ours.fileno(), receive)
        watch(settings.stop_notice, settings.notice_address, ask, self.role.say, self._over)

    def _accept(self, listener: socket.socket, _now: float) -> None:
        with suppress(OSError):
            for _ in range(_ACCEPTED_AT_ONCE):
                connection = listener.accept()[0]
                strangers = [each for each in self._sessions if each.rank is None]
                if len(strangers) >= _MOST_STRANGERS:  # the oldest one has had most of the time
                    self._drop(strangers[0])
                self.serve(connection)

    def _read(self, session: _Session, now: float) -> None:
        try:
            data = session.socket.recv(1 << 16)
            for frame in session.frames.feed(data):
                self._take(
                    session, local.OPEN.verify(frame, session.frames, *local.FROM_SCRIPT), now
                )
        except (OSError, ProtocolError):
            data = b""
        if not data:
            self._drop(session)

    def _drop(self, session: _Session) -> None:
        if session in self._sessions:  # else it was dropped already
            self._sessions.remove(session)
            self.loop.remove_reader(session.socket.fileno())
            session.socket.close()

    def _take(self, session: _Session, message: object, now: float) -> None:
        rank = session.rank
        if isinstance(message, local.Attach):
            self._attach(session, message)
        elif isinstance(message, AskStacks):
            self._ask_stacks(session, message, now)
        elif rank is None:
            raise ProtocolError("says something before it has shown the token")
        else:
            self._take_from(rank, session, message, now)

    def _take_from(self, rank: int, session: _Session, message: object, now: float) -> None:
        match message:
            case Ready() | Arrive():
                self.role.ask(rank, message, partial(self._answer, session), now)
            case Leave():
                self._close_context(rank, session)
                self.role.take(rank, message, now)
            case RequestStop():
                self.role.take(rank, message, now)
            case local.Listen():
                self._give_listener(session, rank)
            case local.Keep():
                self._keep_listener(rank)
            case local.AskLog():
                session.send(local.Log(tuple(self._joined.log() or ())))
            case local.Finish():
                self._finish(now)

    def _close_context(self, rank: int, session: _Session) -> None:
        if rank == self.ranks[0]:
            self._joined.release_port()
        self._end_wait(rank)
        self.role.stops.close(rank)
        session.send(local.Listening())

    def _keep_listener(self, rank: int) -> None:
        if rank == 0 and self._coordinator is not None and self._joined.listener is not None:
            self._coordinator.pool.accept_again()

    def _finish(self, now: float) -> None:
        if self.role.held:
            raise ProtocolError("cannot end the agent of a wrapper")
        self.role.leave()
        self.role.turn(now)

    def _end_wait(self, rank: int) -> None:
        """Fail the wait of a thread of the script while another one closes the context."""
        wait = self.role.waiting.pop(rank, None)
        if wait is not None:
            problem = f"{wait.key.text}: this rank closed its context while it waited"
            error = DistbootError("usage", problem, "close it once no thread waits any more")
            wait.reply(Failed(as_problem(error), wait.key))

    def _answer(self, session: _Session, message: Answer) -> None:
        """Answer a script; one that begins gets the page in which it says how far it is."""
        page = (
            self.role.stops.new(session.rank or 0, stops=message.stops)
            if isinstance(message, Go)
            else None
        )
        if page is None:
            session.send(message)
        else:
            session.send(message, page)
            os.close(page)

    def _attach(self, session: _Session, message: local.Attach) -> None:
        given = message.token.encode(errors="replace")
        found = (
            rank
            for rank, token in self._tokens.items()
            if hmac.compare_digest(given, token.encode())
        )
        rank = next(found, None)
        if rank is None:
            raise ProtocolError("is not the script of a rank of this agent")
        if sum(other.rank == rank for other in self._sessions) >= _MOST_SESSIONS:
            raise ProtocolError("has too many connections")
        session.rank = rank
        session.frames.most = local.FROM_SCRIPTS
        session.send(self._result)

    def _ask_stacks(self, session: _Session, message: AskStacks, now: float) -> None:
        """Say where all ranks are, to a process of the same user."""
        peer = session.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        _, user, _ = CREDENTIALS.unpack(peer)
        pids = {0, os.getpid(), *(member.pid for member in self.role.own)}
        if user not in (0, os.geteuid()) or message.pid not in pids:
            raise ProtocolError("wants to know what is not for it")
        self.role.ask_stacks(lambda lines: session.send(ShowStacks(tuple(lines))), now)

    def _give_listener(self, session: _Session, rank: int) -> None:
        listener = self._joined.take_listener() if rank == 0 else None
        if listener is None and rank == 0:  # the wrapper has left the port to its script
            with suppress(PortInUse):
                listener = listening(self._result.port)
        session.send(local.Listening(), *([] if listener is None else [listener.fileno()]))
        if listener is not None:
            listener.close()


def participant_of(
    agent: int,
    membership: Membership,
    side: Coordinator | Worker,
    settings: SupervisionSettings,
    *,
    held: bool,
) -> FailureCoordinator | FailureReporter:
    """Rank 0's side of failure detection, or that of another agent, on the connections of the rendezvous."""
    bound, agents, ranks = membership.heartbeat_timeout, membership.agents, ranks_of(membership)
    most = BEFORE_AUTHENTICATION if agent == 0 else most_from_rank_0(membership.world_size)
    connection_of: dict[int, HeartbeatConnection] = {}
    for other, link, channel in side.detach_all():
        # What was said in another one is refused
        of_round = replace(channel, round=membership.round)
        connection_of |= dict.fromkeys(
            agents[other], HeartbeatConnection(link, of_round, bound, most)
        )
    unit = f"{'node' if membership.by_node else 'rank'} {agent}"

    def say(text: str, rank: int | None = None, event: str = "", **more: object) -> None:
        who = unit if rank is None else f"rank {rank}"
        if text.startswith(f"{who} failed first"):
            text = text.removeprefix(f"{who} ")  # the line begins with it
        log_line(who, text, event, **more)

    if isinstance(side, Coordinator):
        return FailureCoordinator(
            ranks, connection_of, settings, held, say, bound=bound, membership=membership, log=side.log,
            keys=Keys(membership, side.table, say),
            # What comes then may be for a store of the script, or its next attempt
            started=side.pool.accept_no_more,
        )  # fmt: skip
    known = [ranks[rank] for rank in (0, *agents[agent])]
    return FailureReporter(known, connection_of, settings, held, say, bound=bound)
