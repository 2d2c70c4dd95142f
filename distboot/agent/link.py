"""The script's end of the one socket to its agent; `link_messages` has what is sent there."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from ..base.errors import CODES, DistbootError, reason_of
from ..rendezvous.events import EventLog
from ..rendezvous.membership import JoinResult
from ..rendezvous.messages import (
    Arrive,
    Failed,
    Go,
    Leave,
    Ready,
    Release,
    RequestStop,
    as_error,
)
from ..rendezvous.protocol import Frame, Frames, ProtocolError
from .link_messages import (
    MOST,
    OPEN,
    AskLog,
    Attach,
    Finish,
    Keep,
    Listen,
    Listening,
    Log,
    Raised,
    StartEnded,
    Written,
)

VARIABLE = "DISTBOOT_AGENT"
_MARGIN = 5.0  # seconds beyond a timeout for the agent to report it
_ATTACH = 10.0  # seconds for an agent to answer
_PAUSE = 0.002  # seconds until the queue of an agent is tried again
_MOST_RECEIVED = 1 << 20  # bytes at a time
_LONGEST_NAME = 107  # bytes of the name of a socket, unix(7)
# All that an agent answers
_ANSWERS = (JoinResult, Raised, Go, Release, Failed, Listening, Log, Written)


class AgentLink:
    """The script's end of the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._inode = os.fstat(connection.fileno()).st_ino
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._frames = Frames(MOST)
        self._files: list[int] = []  # that came with the last message
        # More than one: a timeout or a signal has ended the wait for the others
        self._unanswered = 0
        self._has_asked_for_listener = False
        self._ends_with_context = False  # as below the wrapper, whose agent stays
        # That came with the last Go, for `ctx.preempted`; a file descriptor
        self.page: int | None = None

    def tell(self, content: object) -> None:
        with self._lock, suppress(OSError):
            self._send(content)

    def joined(self, limit: float) -> JoinResult:
        """Wait until the agent has joined; `DistbootError`: the ranks have not met."""
        self._unanswered += 1
        with _answering():
            answer: JoinResult | Raised = self._next(limit + 2 * _ATTACH, JoinResult, Raised)
        if isinstance(answer, JoinResult):
            return answer
        code = answer.code
        if code not in CODES:
            code = "rank-failed"
        raise DistbootError(code, answer.message, answer.hint)

    def get_ready(self, ready: Ready) -> dict[int, str]:
        """Wait until all ranks are ready; returns what they offer, by rank."""
        go: Go = self.ask(ready, ready.limit + _MARGIN, Go, Failed)
        self.page = None
        if self._files:
            self.page = self._files.pop(0)
        return {each.rank: each.offer for each in go.offers}

    def arrive(self, arrive: Arrive) -> None:
        """Wait at a key, or lead there."""
        self.ask(
            arrive,
            arrive.limit + _MARGIN,
            Release,
            Failed,
        )

    def take_listener(self) -> socket.socket | None:
        """Rank 0's listening socket, which is the caller's now; None: it is not available."""
        self._has_asked_for_listener = True
        self.ask(Listen(), _ATTACH, Listening)
        if not self._files:
            return None
        return socket.socket(fileno=self._files.pop())

    def request_stop(self, why: str, *, lasts: bool) -> None:
        """Let all ranks stop; also in a signal handler, while the script waits for an answer."""
        with suppress(OSError):
            self._send(RequestStop(why, lasts))

    def keep(self) -> None:
        """The listening socket is not needed, unless it was taken."""
        if not self._has_asked_for_listener:
            self.tell(Keep())

    def start_ended(self, ended: StartEnded) -> None:
        """Let the agent write the report of the start, unless it has, and has ended."""
        with self._lock, suppress(OSError, ProtocolError):
            self._unanswered += 1
            self._send(ended)
            self._next(_ATTACH, Written, Raised)

    def log(self) -> EventLog | None:
        """What rank 0 has learned of the job; None on all other ranks."""
        events: tuple[Any, ...] = ()
        with suppress(DistbootError):  # the agent may have ended
            answer: Log = self.ask(AskLog(), _ATTACH, Log)
            events = answer.events
        if not events:
            return None
        return EventLog.from_json(events)

    def leave(self) -> None:
        """This rank will use no more keys; its port is released."""
        if self._lock.locked():  # a signal handler calls this while the script waits here
            with suppress(OSError):
                self._send(Leave())
                self._unanswered += 1
            return
        with suppress(DistbootError):  # the agent may have ended
            self.ask(Leave(), _ATTACH, Listening)
        if self._ends_with_context:
            self.close()

    def end(self) -> None:
        """The agent is not needed any more."""
        if os.getpid() == self._process:
            self.tell(Finish())
            self.close()

    def attach(self, token: str) -> JoinResult:
        """Authenticate to the agent of the wrapper."""
        answer: JoinResult = self.ask(Attach(token), _ATTACH, JoinResult)
        self._ends_with_context = True
        return answer

    def ask(self, content: object, limit: float, *kinds: type) -> Any:
        """The agent's answer; `DistbootError`: a failure, or nothing in so many seconds."""
        with self._lock, _answering():
            self._unanswered += 1
            self._send(content)
            answer = self._next(limit, *kinds)
            # One for another key answers an earlier question, on which this process has given up.
            while isinstance(content, Arrive) and answer.key not in (content.key, None):
                answer = self._next(limit, *kinds)
        if isinstance(answer, Failed):
            raise as_error(answer.problem, "")
        return answer

    def _next(self, limit: float, *kinds: type) -> Any:
        """The next message of these kinds, after late answers to earlier questions."""
        end = time.monotonic() + limit
        answer = self._answer(end, *kinds)
        while not isinstance(answer, kinds):
            while self._files:  # of the late answer
                os.close(self._files.pop())
            answer = self._answer(end, *kinds)
        return answer

    def _answer(self, end: float, *kinds: type) -> Any:
        """The next message, of these kinds or to an earlier question."""
        frame = self._frame(end)
        if self._unanswered > 1:
            kinds += _ANSWERS
        answer = OPEN.verify(frame, self._frames, *kinds)
        self._unanswered -= 1
        return answer

    def _frame(self, end: float) -> Frame:
        """The next frame, until this time."""
        frames: list[Frame] = []
        while not frames:
            left = end - time.monotonic()
            connection = self._open(max(left, 0.01))
            # No byte of the next frame: the files that come are of this one
            most = min(self._frames.missing, _MOST_RECEIVED)
            data, files, _, _ = socket.recv_fds(connection, most, 4)
            if not data:
                raise ProtocolError("has ended")
            for file in files:
                os.set_inheritable(file, False)
            self._files += files
            frames = self._frames.feed(data)
        return frames[0]

    def _send(self, content: object) -> None:
        connection = self._open(_ATTACH)
        connection.sendall(OPEN.sign(content))

    def _open(self, limit: float) -> socket.socket:
        """The socket, with this timeout.

        `OSError`: the script has closed it, and its number may be that of another file.
        """
        if os.fstat(self._connection.fileno()).st_ino != self._inode:
            self._connection.detach()
            raise OSError(errno.EBADF, "the script has closed its socket")
        self._connection.settimeout(limit)
        return self._connection

    def close(self) -> None:
        """The agent is left alone; it may stay."""
        with suppress(OSError):
            connection = self._open(0.0)
            connection.close()


@contextmanager
def _answering() -> Iterator[None]:
    """`DistbootError`: the agent does not answer, or does not follow the protocol."""
    try:
        yield
    except (OSError, ProtocolError) as error:
        problem = f"the monitor process of this rank gave no answer: {_how(error)}"
        raise DistbootError(
            "rank-failed",
            problem,
            "look at the lines above; was it killed?",
        ) from None


def _how(error: OSError | ProtocolError) -> str:
    if isinstance(error, ProtocolError):
        return f"it {error}"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return reason_of(error)


def attached(environ: Mapping[str, str]) -> tuple[AgentLink, JoinResult] | None:
    """The link to the agent of the wrapper around this process.

    None: no wrapper runs, or it is not for this process. `DistbootError`: it does not answer.
    """
    name, _, token = environ.get(VARIABLE, "").partition(":")
    if not name or not token or len(name) > _LONGEST_NAME:
        return None
    end = time.monotonic() + _ATTACH
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_ATTACH)
    code = _connect(connection, name, end)
    if code == 0:
        link = AgentLink(connection)
        with suppress(DistbootError):
            return link, link.attach(token)
    connection.close()
    if code == errno.ECONNREFUSED:  # it has ended, or is in another network namespace
        return None
    if code == 0 and time.monotonic() < end:  # it has refused the token, or is not a wrapper
        return None
    raise DistbootError(
        "rank-failed",
        "the wrapper around this process does not answer",
        "look at its output; was it stopped, or is its machine overloaded?",
    )


def _connect(connection: socket.socket, name: str, end: float) -> int:
    """Connect to an agent; returns 0, or the number of the error."""
    while True:
        code = connection.connect_ex(f"\0{name}")
        # Its queue is full, for which connect(2) does not wait, whatever the timeout is.
        is_full = code == errno.EAGAIN
        if not is_full or time.monotonic() >= end:
            return code
        time.sleep(_PAUSE)
