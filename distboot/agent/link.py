"""The one socket between a script and its agent: what both sides say there, and the script's side of it.

The agent of `init` has the other end of a pair of sockets. That of the wrapper listens at a name in the abstract
namespace of Unix sockets, which ends with the process and is not seen from another network namespace; DISTBOOT_AGENT
has the name, and a token that a process of another user cannot read.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ..base.errors import CODES, DistbootError
from ..base.settings import SupervisionSettings
from ..rendezvous.events import EventLog
from ..rendezvous.membership import JoinPlan, JoinResult
from ..rendezvous.messages import (
    Arrive,
    AskStacks,
    Failed,
    Go,
    Leave,
    Ready,
    Release,
    RequestStop,
    as_error,
)
from ..rendezvous.protocol import (
    Channel,
    Frame,
    Frames,
    ProtocolError,
    both,
    nested,
    number,
    of,
    several,
    text,
)

VARIABLE = "DISTBOOT_AGENT"
# Of the name of a socket; the name of the job, a mark of it, and a random number follow
PREFIX = "distboot-agent-"
FROM_STRANGERS = 1000  # bytes of a message before it is known who says it
FROM_SCRIPTS = 1 << 20  # bytes of a message of a script
MOST = 1 << 28  # bytes of one message of an agent to its script, or of the first one to that
OPEN = Channel()  # a socket that no other process has needs no proof
_MARGIN = 5.0  # seconds beyond a limit for the agent to say that it is over
_ATTACH = 10.0  # seconds for an agent to answer
_PAUSE = 0.002  # seconds until the queue of an agent is tried again
_LONG = 1 << 20  # characters
_LONGEST_NAME = 107  # bytes of that of a socket, unix(7)


def socket_name(job: str) -> str:
    """What the launcher calls a job, as it stands in the name of a socket."""
    return re.sub(r"[^\w.-]", "_", job, flags=re.ASCII)[:60]


def _as_it_is(value: object) -> object:
    return value


_SETTINGS = len(SupervisionSettings._fields)
_settings = both(
    several(_as_it_is, _SETTINGS, _SETTINGS, "list of settings"), SupervisionSettings._make
)
_events = several(several(_as_it_is, 4, 4, "event"))


@dataclass(frozen=True, slots=True)
class Begin:
    """The first message to the agent of `init`: join, and then watch this process."""

    plan: JoinPlan = of(nested(JoinPlan))
    pid: int = of(number)
    settings: SupervisionSettings = of(_settings)


@dataclass(frozen=True, slots=True)
class Attach:
    """The first message to the agent of the wrapper, which answers with a `JoinResult`."""

    token: str = of(text(100))


@dataclass(frozen=True, slots=True)
class Raised:
    """The ranks have not met."""

    code: str = of(text(100))
    message: str = of(text(_LONG))
    hint: str = of(text(_LONG))
    events: tuple[Any, ...] = of(_events, default=())


@dataclass(frozen=True, slots=True)
class Listen:
    """The script wants rank 0's listening socket. It comes with `Listening`, if it is there."""


@dataclass(frozen=True, slots=True)
class Listening:
    """The answer, with one file or none; also to `Leave`, when the port is free."""


@dataclass(frozen=True, slots=True)
class Keep:
    """The script does not need rank 0's listening socket: the agent is to answer there."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The script needs this agent no more."""


@dataclass(frozen=True, slots=True)
class AskLog:
    """The script writes the report of a start that fails."""


@dataclass(frozen=True, slots=True)
class Log:
    """The events so far."""

    events: tuple[Any, ...] = of(_events, default=())


FROM_SCRIPT = (Attach, AskStacks, Ready, Arrive, RequestStop, Leave, Listen, Keep, AskLog, Finish)


class AgentLink:
    """The script's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._inode = connection, os.fstat(connection.fileno()).st_ino
        self._process, self._lock = os.getpid(), threading.Lock()
        self._frames = Frames(MOST)
        self._come: deque[Frame] = deque()
        self._files: list[int] = []
        self._events: tuple[Any, ...] = ()
        self._ends_with_context = False  # as below the wrapper, whose agent stays
        # That came with the last Go, for `ctx.preempted`; a file descriptor
        self.page: int | None = None

    def tell(self, content: object) -> None:
        with self._lock, suppress(OSError):
            self._send(content)

    def joined(self, limit: float) -> JoinResult:
        """Wait until it has; `DistbootError`: the ranks have not met."""
        with _answering():
            answer: JoinResult | Raised = self._next(limit + 2 * _ATTACH, JoinResult, Raised)
        if isinstance(answer, Raised):
            self._events = answer.events
            raise DistbootError(
                answer.code if answer.code in CODES else "rank-failed", answer.message, answer.hint
            )
        return answer

    def get_ready(self, ready: Ready) -> dict[int, str]:
        """Wait until all ranks are: what they offer, by rank."""
        go: Go = self.ask(ready, ready.limit + _MARGIN, Go, Failed)
        self.page, self._files = (self._files[0] if self._files else None), self._files[1:]
        return {each.rank: each.offer for each in go.offers}

    def arrive(self, arrive: Arrive) -> None:
        """Wait at a key, or lead there."""
        self.ask(arrive, arrive.limit + _MARGIN, Release, Failed)

    def take_listener(self) -> socket.socket | None:
        """Rank 0's listening socket, which is the caller's now; None: it is not available."""
        self.ask(Listen(), _ATTACH, Listening)
        return socket.socket(fileno=self._files.pop()) if self._files else None

    def request_stop(self, why: str, *, lasts: bool) -> None:
        """Let all ranks stop; also in a signal handler, while the script waits here for an answer."""
        with suppress(OSError):
            self._send(RequestStop(why, lasts))

    def keep(self) -> None:
        """The listener is not needed."""
        self.tell(Keep())

    def log(self) -> EventLog | None:
        """What rank 0 has learned of the job; None on all other ranks."""
        with suppress(DistbootError):  # it may have ended
            self._events = self._events or self.ask(AskLog(), _ATTACH, Log).events
        return EventLog.from_json(self._events) if self._events else None

    def leave(self) -> None:
        """This rank comes to no key any more, and any process may have its port."""
        if self._lock.locked():  # a signal handler does so while the script waits here
            with suppress(OSError):
                self._send(Leave())
            return
        with suppress(DistbootError):  # it may have ended
            self.ask(Leave(), _ATTACH, Listening)
        if self._ends_with_context:
            self._close()

    def end(self) -> None:
        """The agent is needed no more."""
        if os.getpid() == self._process:
            self.tell(Finish())
            self._close()

    def attach(self, token: str) -> JoinResult:
        """Be known to the wrapper's agent."""
        answer: JoinResult = self.ask(Attach(token), _ATTACH, JoinResult)
        self._ends_with_context = True
        return answer

    def _send(self, content: object) -> None:
        self._open(_ATTACH).sendall(OPEN.sign(content))

    def _open(self, limit: float) -> socket.socket:
        """Our socket with this time limit; OSError: the script has closed it, and its number may be another file's."""
        if os.fstat(self._connection.fileno()).st_ino != self._inode:
            self._connection.detach()
            raise OSError(errno.EBADF, "the script has closed its socket")
        self._connection.settimeout(limit)
        return self._connection

    def _close(self) -> None:
        with suppress(OSError):
            self._open(0.0).close()

    def ask(self, content: object, limit: float, *kinds: type) -> Any:
        """What the agent answers; `DistbootError`: a failure, or nothing in so many seconds."""
        with self._lock, _answering():
            self._send(content)
            answer = self._next(limit, *kinds)
            # One for another key is that of an earlier question, of which this side had given up hope.
            while isinstance(content, Arrive) and answer.key not in (content.key, None):
                answer = self._next(limit, *kinds)
        if isinstance(answer, Failed):
            raise as_error(answer.problem, "")
        return answer

    def _next(self, limit: float, *kinds: type) -> Any:
        end = time.monotonic() + limit
        while not self._come:
            connection = self._open(max(end - time.monotonic(), 0.01))
            data, files, _, _ = socket.recv_fds(connection, 1 << 20, 4)
            if not data:
                raise ProtocolError("has ended")
            for file in files:
                os.set_inheritable(file, False)
            self._files += files
            self._come += self._frames.feed(data)
        return OPEN.verify(self._come.popleft(), self._frames, *kinds)


@contextmanager
def _answering() -> Iterator[None]:
    """`DistbootError`: the agent does not answer, or not as one."""
    try:
        yield
    except (OSError, ProtocolError) as error:
        how = f"it {error}" if isinstance(error, ProtocolError) else error.strerror or str(error)
        how = "it does not answer" if isinstance(error, TimeoutError) else how
        why = f"the monitor process of this rank cannot be asked: {how}"
        raise DistbootError("rank-failed", why, "look at the lines above; was it killed?") from None


def attached(environ: Mapping[str, str]) -> tuple[AgentLink, JoinResult] | None:
    """The link to the agent of the wrapper around this process; None: no wrapper runs, or it is not for this process.

    `DistbootError`: one runs and does not answer.
    """
    name, _, token = environ.get(VARIABLE, "").partition(":")
    if not name or not token or len(name) > _LONGEST_NAME:
        return None
    connection, end = socket.socket(socket.AF_UNIX), time.monotonic() + _ATTACH
    connection.settimeout(_ATTACH)
    # Its queue may be full, for which connect(2) does not wait, whatever the timeout is.
    while (code := connection.connect_ex(f"\0{name}")) == errno.EAGAIN and time.monotonic() < end:
        time.sleep(_PAUSE)
    link = AgentLink(connection)
    with suppress(DistbootError):
        if code == 0:
            return link, link.attach(token)
    connection.close()
    # The wrapper has ended, or is in another network namespace; or it has refused the token, or is not a wrapper.
    if code == errno.ECONNREFUSED or (code == 0 and time.monotonic() < end):
        return None
    hint = "look at its output; was it stopped, or is its machine overloaded?"
    raise DistbootError("rank-failed", "the wrapper around this process does not answer", hint)
