"""In the process of the script: starts the guard beside it, and hands the connections of the roll call over to it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict

from .. import handoff
from ..errors import tell
from ..rollcall.meeting import Meeting
from ..rollcall.wire import Session
from . import farewell, last_words
from .guard import FILES_AT_ONCE, LEAVE
from .report import writable
from .settings import Settings

# The first process ends at once: the script must not find a child that it did not start. The second has a session of
# its own, as Open MPI kills the script's whole process group before the guard could say what there is to say.
_BEGIN = """
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
sys.path.insert(0, sys.argv[4])
from socket import socket
from distboot.lifeline.guard import main
main(socket(fileno=int(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))
"""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

_START_LIMIT = 10.0  # seconds

_current: Guard | None = None  # of this process


class Guard:
    """The guard of this process, while the framework is being imported; and later, when it has taken over.

    Args:
        meeting: of all ranks, which have met.
        settings: of the lifeline.
        secret: of the job; may be empty.
    """

    def __init__(self, meeting: Meeting, settings: Settings, secret: str) -> None:
        self._meeting, self._settings, self._secret = meeting, settings, secret
        self._problem: str | None = None
        self._control, theirs = socket.socketpair()
        # Both ends of the pipes stay open here: writing to a guard that was killed must not end the script.
        self._words, self._status = os.pipe(), os.pipe()
        os.set_blocking(self._words[1], False)  # whatever the guard does, the script can end
        files = (theirs.fileno(), self._words[0], self._status[0])
        # Isolated, as what lies around in the working directory is not for the guard.
        command = [sys.executable, "-I", "-S", "-c", _BEGIN, *map(str, files), _PACKAGE]
        try:
            self._started: subprocess.Popen[bytes] | None = subprocess.Popen(
                command, pass_fds=files, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        except (OSError, ValueError) as error:
            self._started, self._problem = None, str(error)
        finally:
            theirs.close()

    def take_over(self) -> None:
        """Hand the connections over; without a guard, say goodbye on them."""
        global _current  # noqa: PLW0603 - a process has one guard
        problem = self._problem or self._await()
        if problem is None:
            try:
                farewell.tell_at_exit(self._status[1], self._control.fileno())
            except (OSError, AttributeError) as error:
                problem = str(error)
        if problem is None:
            lines = self._meeting.hand_over()
            self._send(self._plan(lines), [connection for connection, _ in lines.values()])
            for connection, _ in lines.values():
                connection.close()
            last_words.leave_to(self._words[1], term=True)
            if _current is not None:
                _current.close()
            _current = self
        else:
            tell(self._meeting.placement.who, f"warning: this rank has no lifeline: {problem}")
            self._meeting.goodbye()

    def close(self) -> None:
        """End the guard of a rank that has left the job; or one that has not taken over."""
        with suppress(OSError):
            self._control.send(LEAVE, socket.MSG_NOSIGNAL)
        self._control.close()
        if self._started is not None and self._started.returncode is None:
            self._started.wait()  # it ends at once, having begun
        for file in (*self._words, *self._status):
            os.close(file)

    def _await(self) -> str | None:
        """Wait until the guard is there; why it does not come, if so."""
        assert self._started is not None
        self._control.settimeout(_START_LIMIT)
        try:
            code = self._started.wait(_START_LIMIT)
            there = self._control.recv(1)
        except (OSError, subprocess.TimeoutExpired):
            return f"its guard did not start within {_START_LIMIT:g} s"
        self._control.settimeout(None)
        return None if there else f"its guard did not start (exit code {code})"

    def _plan(self, lines: dict[int, tuple[socket.socket, Session]]) -> dict[str, object]:
        placement, roster = self._meeting.placement, self._meeting.roster
        assert roster is not None
        return {
            "pid": os.getpid(),
            "rank": placement.rank,
            "world_size": placement.world_size,
            "roster": roster.as_message(),
            "settings": asdict(self._settings),
            "secret": self._secret,
            "lines": [(rank, session.challenge, session.nonce) for rank, (_, session) in lines.items()],
        }

    def _send(self, plan: dict[str, object], connections: list[socket.socket]) -> None:
        data = json.dumps(plan).encode()
        for start in range(0, len(connections), FILES_AT_ONCE):
            files = array("i", [each.fileno() for each in connections[start : start + FILES_AT_ONCE]])
            # A space, as a message with files must have a byte, and JSON may begin with one.
            self._control.sendmsg([b" "], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)], socket.MSG_NOSIGNAL)
        sent = 0
        while sent < len(data):
            sent += self._control.send(data[sent:], socket.MSG_NOSIGNAL)
        self._control.send(b"\n", socket.MSG_NOSIGNAL)


@contextmanager
def watched(meeting: Meeting, environ: Mapping[str, str], settings: Settings | None) -> Iterator[None]:
    """See to it that the lifeline of `init` begins when, in this block, all ranks are ready."""
    _, outer = handoff.take(environ)
    if (
        meeting.roster is None
        or meeting.placement.world_size == 1
        or (outer is not None and outer.watched and outer.is_about(meeting.placement))
    ):
        yield  # there are no others, or the wrapper around us keeps the lifeline
        return
    if settings is None or sys.platform != "linux":
        meeting.when_ready = meeting.goodbye
        yield
        return
    if meeting.placement.rank == 0:
        settings = writable(settings, lambda text: tell(meeting.placement.who, text))
    guard = Guard(meeting, settings, environ.get("DISTBOOT_SECRET", ""))
    meeting.when_ready = guard.take_over
    try:
        yield
    except BaseException:
        if _current is not guard:
            guard.close()
        raise
