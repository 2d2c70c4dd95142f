"""The agent's end of the sockets of its scripts: who may connect, and what each message does.

The script of a rank whose agent has started it, or which has started its agent, has its connection
from the beginning. Any other process connects to a name (`link_messages`), and has to show the
token of a rank first; `distboot stacks` has no token, and may ask for stacks if the kernel says
that it runs as the same user. A rank is one process: while the one that has got ready runs, and has
not closed its context, any other process that shows the token of its rank is refused.

Every connection is bounded: in the bytes of a message, in their number, and in the time for which
it can keep the agent from other work.
"""

from __future__ import annotations

import os
import select
import socket
import zlib
from array import array
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial

from ..base.dataclass import as_dict, dataclass
from ..base.errors import DistbootError, already_joined, too_few_files
from ..base.process import Process, peer_of
from ..rendezvous.connection_pool import PortInUse, listening
from ..rendezvous.join import Joined
from ..rendezvous.membership import JoinResult
from ..rendezvous.messages import (
    Answer,
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
from ..rendezvous.protocol import Frames, ProtocolError
from .link_messages import (
    FROM_SCRIPT,
    FROM_SCRIPTS,
    OPEN,
    PREFIX,
    UNAUTHENTICATED_MOST,
    AskLog,
    Attach,
    Finish,
    Keep,
    Listen,
    Listening,
    Log,
    Measured,
    StartEnded,
    Written,
    socket_name,
)
from .loop import EventLoop
from .shell import Shell

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .tokens import Tokens

_SEND_LIMIT = 1.0  # seconds for a script to take an answer, which it waits for
_MOST_SESSIONS = 64  # of one rank
# Several turns' worth: a script has the time to show its token
_MOST_UNAUTHENTICATED = 256
_WAITING = 256  # connections that are not accepted yet
_ACCEPTED_AT_ONCE = 64
_PAUSE = 1.0  # seconds without new connections while no file can be opened for one


@dataclass(slots=True, eq=False)
class _ScriptConnection:
    """A connection of a script."""

    socket: socket.socket
    frames: Frames
    rank: int | None  # None until it has shown the token of a rank

    def send(self, message: object, *files: int) -> None:
        """Send a message, with open files."""
        data = OPEN.sign(message)
        sent = 0
        try:
            if files:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", files))
                sent = self.socket.sendmsg([data], [rights])
            self.socket.sendall(data[sent:])
        except OSError:  # it has ended, or does not read: half an answer is of no use
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


class ScriptServer:
    """The connections of the scripts of one agent."""

    def __init__(
        self,
        joined: Joined,
        shell: Shell,
        loop: EventLoop,
    ) -> None:
        assert joined.result is not None
        self._result: JoinResult = joined.result
        self._joined = joined
        self._shell = shell
        self._loop = loop
        self._sessions: list[_ScriptConnection] = []
        # By rank, the connection of the process that has got ready, until it leaves or ends
        self._holders: dict[int, _ScriptConnection] = {}
        self._listener: socket.socket | None = None
        self._name = ""  # at which it listens
        self._tokens: Tokens | None = None  # of scripts that this agent has not connected itself
        # Writes the report of the start, where there is to be one
        self.start_ended: Callable[[StartEnded], object] = lambda _: None

    def serve(self, connection: socket.socket, rank: int | None = None) -> None:
        """Handle the messages that arrive at this socket; None: it has to show a token first."""
        most = FROM_SCRIPTS
        if rank is None:
            most = UNAUTHENTICATED_MOST
        session = _ScriptConnection(connection, Frames(most), rank)
        self._sessions.append(session)
        connection.settimeout(_SEND_LIMIT)  # no script holds up the loop
        self._loop.add_reader(
            connection.fileno(),
            partial(self._read, session),
        )

    def open(self) -> None:
        """Listen, so that the scripts find this agent."""
        plan = self._joined.plan
        parts = [socket_name(plan.name), job_mark(plan.job, self._result.port)]
        job = "-".join(filter(None, parts))
        self._name = f"{PREFIX}{job}-{os.urandom(8).hex()}"
        listener = socket.socket(socket.AF_UNIX)
        self._listener = listener
        listener.bind(f"\0{self._name}")
        listener.listen(_WAITING)
        listener.setblocking(False)
        self._listen()

    def _listen(self) -> None:
        listener = self._listener
        if listener is not None:
            self._loop.add_reader(listener.fileno(), partial(self._accept, listener))

    def variable(self, rank: int) -> str:
        """The value of DISTBOOT_AGENT for the script of a rank; empty before `open`."""
        if not self._name:
            return ""
        if self._tokens is None:
            from .tokens import Tokens  # here, as a sidecar needs none

            self._tokens = Tokens()
        return f"{self._name}:{self._tokens.of(rank)}"

    def close(self) -> None:
        """A script that waits for an answer finds its connection closed."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for session in self._sessions:
            session.socket.close()

    def _accept(self, listener: socket.socket, now: float) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if too_few_files(error) is not None:
                    self._make_room_for_files(listener, now)
                return  # else none is left
            if len(self._unauthenticated) >= _MOST_UNAUTHENTICATED:
                self._drop_oldest(now)
            self.serve(connection)

    def _make_room_for_files(self, listener: socket.socket, now: float) -> None:
        if self._unauthenticated:
            self._drop_oldest(now)
        else:  # others have opened them all
            self._loop.remove_reader(listener.fileno())
            self._loop.call_at(now + _PAUSE, self._listen)

    @property
    def _unauthenticated(self) -> list[_ScriptConnection]:
        """Those without a token, the oldest first."""
        return [each for each in self._sessions if each.rank is None]

    def _drop_oldest(self, now: float) -> None:
        """Drop the connection that has had the most time, unless its token has arrived."""
        oldest = self._unauthenticated[0]
        waiting = select.poll()
        waiting.register(oldest.socket, select.POLLIN)
        if waiting.poll(0):
            self._read(oldest, now)
        if oldest.rank is None:
            self._drop(oldest)

    def _read(self, session: _ScriptConnection, now: float) -> None:
        try:
            data = session.socket.recv(1 << 16, socket.MSG_DONTWAIT)
            for frame in session.frames.feed(data):
                message = OPEN.verify(frame, session.frames, *FROM_SCRIPT)
                self._take(session, message, now)
        except BlockingIOError:  # `_drop_oldest` has read it in this turn
            return
        except (OSError, ProtocolError):
            data = b""
        if not data:
            self._drop(session)

    def _drop(self, session: _ScriptConnection) -> None:
        if session in self._sessions:  # otherwise it was dropped already
            self._sessions.remove(session)
            self._release(session)
            self._loop.remove_reader(session.socket.fileno())
            session.socket.close()

    def _take(
        self,
        session: _ScriptConnection,
        message: object,
        now: float,
    ) -> None:
        if isinstance(message, Attach):
            self._attach(session, message)
        elif isinstance(message, AskStacks):
            self._ask_stacks(session, message, now)
        elif session.rank is None:
            raise ProtocolError("sent a message before authenticating")
        else:
            self._take_from(session.rank, session, message, now)

    def _take_from(
        self,
        rank: int,
        session: _ScriptConnection,
        message: object,
        now: float,
    ) -> None:
        """Handle a message of the script of a rank."""
        holder = self._holder_before(rank, session)
        if holder:
            self._refuse(session, message, holder)
            return
        match message:
            case Ready() | Arrive():
                if self._result.membership.world_size > 1:  # else any process may be the rank
                    self._holders[rank] = session
                reply = partial(self._answer, session)
                self._shell.ask(rank, message, reply, now)
            case Leave():
                self._close_context(rank, session)
                self._shell.take(rank, message, now)
                self._release(session)
            case RequestStop():
                self._shell.take(rank, message, now)
            case Listen():
                self._give_listener(session, rank)
            case Keep():
                self._keep_listener(rank)
            case StartEnded() | AskLog() | Measured():
                self._log(session, message)
            case Finish():
                self._finish(now)

    def _holder_before(self, rank: int, session: _ScriptConnection) -> int:
        """The process that is the rank already, and still runs; 0: there is none but this one."""
        holder = self._holders.get(rank, session)
        if holder is session:
            return 0
        pid, _ = peer_of(holder.socket)
        own, _ = peer_of(session.socket)
        others = {pid} - {0, own}
        # Its child may have the connection, too
        return next(filter(_runs, others), 0)

    def _release(self, session: _ScriptConnection) -> None:
        if session.rank is not None and self._holders.get(session.rank) is session:
            del self._holders[session.rank]

    def _refuse(self, session: _ScriptConnection, message: object, holder: int) -> None:
        """Answer a process that would be the same rank once more; the one that is that goes on."""
        match message:
            case Ready() | Arrive():
                error = already_joined(holder)
                session.send(Failed(as_problem(error), message.key))
            case Leave() | Listen():
                session.send(Listening())
            case StartEnded():
                session.send(Written())
            case AskLog():
                session.send(Log())

    def _log(self, session: _ScriptConnection, message: StartEnded | AskLog | Measured) -> None:
        """Write to what rank 0 has learned of the job, or read it."""
        log = self._joined.log()
        if isinstance(message, StartEnded):
            self.start_ended(message)
            session.send(Written())
        elif isinstance(message, AskLog):
            events = log or ()
            session.send(Log(tuple(events)))
        elif log is not None:  # as on rank 0
            log.add("allreduce", None, ranks=log[0].details["world_size"], **as_dict(message))

    def _attach(self, session: _ScriptConnection, message: Attach) -> None:
        rank = None
        if self._tokens is not None:
            rank = self._tokens.rank_of(message.token)
        if rank is None:
            raise ProtocolError("is not the script of a rank of this agent")
        own = [each for each in self._sessions if each.rank == rank]
        if len(own) >= _MOST_SESSIONS:
            raise ProtocolError("has too many connections")
        session.rank = rank
        session.frames.most = FROM_SCRIPTS
        session.send(self._result)

    def _ask_stacks(
        self,
        session: _ScriptConnection,
        message: AskStacks,
        now: float,
    ) -> None:
        """Show where all ranks are, to a process of the same user."""
        _, user = peer_of(session.socket)
        pids = {0, os.getpid()}
        pids.update(member.pid for member in self._shell.facts.own)
        if user not in (0, os.geteuid()) or message.pid not in pids:
            raise ProtocolError("is not allowed to request stacks")
        self._shell.ask_stacks(
            lambda lines: session.send(ShowStacks(tuple(lines))),
            now,
        )

    def _answer(self, session: _ScriptConnection, message: Answer) -> None:
        """Answer a script; `Go` brings the page on which it counts its reads."""
        page = None
        if isinstance(message, Go):
            page = self._shell.stops.new(session.rank or 0, stops=message.stops)
        if page is None:
            session.send(message)
            return
        session.send(message, page)
        os.close(page)

    def _close_context(self, rank: int, session: _ScriptConnection) -> None:
        if rank == self._shell.facts.own[0].rank:
            self._joined.release_port()
        self._end_wait(rank)
        self._shell.stops.close(rank)
        session.send(Listening())

    def _end_wait(self, rank: int) -> None:
        """Fail the wait of a thread of the script while another one closes the context."""
        wait = self._shell.facts.waits.pop(rank, None)
        if wait is None:
            return
        error = DistbootError(
            "usage",
            f"{wait.key.text}: this rank closed its context while it waited",
            "close it after all threads have left barrier() and main_first()",
        )
        wait.reply(Failed(as_problem(error), wait.key))

    def _give_listener(self, session: _ScriptConnection, rank: int) -> None:
        """Give rank 0's script the listening socket, if the port is not taken by now."""
        listener = None
        if rank == 0:
            listener = self._joined.take_listener()
            if listener is None:  # the wrapper has left the port to its script
                with suppress(PortInUse, OSError):
                    listener = listening(self._result.port)
        if listener is None:
            session.send(Listening())
            return
        with listener:
            session.send(Listening(), listener.fileno())

    def _keep_listener(self, rank: int) -> None:
        coordinator = self._joined.coordinator
        if rank != 0 or self._joined.listener is None:
            return
        if coordinator is not None:
            coordinator.pool.accept_again()

    def _finish(self, now: float) -> None:
        if self._shell.facts.is_held:
            raise ProtocolError("cannot end the agent of a wrapper")
        self._shell.leave()
        self._shell.turn(now)


def _runs(pid: int) -> bool:
    """Whether a process has not ended, also where /proc is that of other processes."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with closing(Process(pid)) as process:
        return not process.has_ended()


def job_mark(job: str, port: int) -> str:
    """What tells a job from others on this host, in the names of its sockets."""
    checksum = zlib.crc32(f"{job}:{port}".encode())
    return f"{checksum:08x}"
