"""In the process of the script: starts the guard beside it, and hands the connections of the roll call over to it."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import subprocess
import sys
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from .. import detached, handoff
from ..errors import tell
from ..placement import Placement
from ..rollcall.handed import Handed, say_goodbye
from ..rollcall.meeting import Meeting
from . import farewell, last_words
from .guard import FILES_AT_ONCE, LEAVE
from .settings import Settings

_ANSWER_LIMIT = 15  # seconds; rank 0 waits 5 for the others

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
        self._files: list[int] = []
        self._control = -1
        self._started: subprocess.Popen[bytes] | None = None
        self._problem: str | None = None
        try:
            self._start()
        except (OSError, ValueError, TypeError) as error:
            self._problem = f"its guard did not start: {error}"

    def take_over(self) -> None:
        """Hand the connections over; without a guard, say goodbye on them."""
        global _current  # noqa: PLW0603 - a process has one guard
        problem = self._problem or self._await()
        if problem is None:
            try:
                farewell.tell_at_exit(self._status, self._control)
                self._hand_over()
            except (OSError, AttributeError) as error:
                problem = str(error)
        if problem is None:
            last_words.leave_to(self._words, term=True)
            if _current is not None:
                _current.close()
            _current = self
            self._meeting.is_watched = True
            tell_steps(self._meeting)
        else:
            tell(self._meeting.placement.who, f"warning: this rank has no lifeline: {problem}")
            self._meeting.goodbye()
            self.close()

    def close(self) -> None:
        """End the guard of a rank that has left the job; or one that has not taken over."""
        with suppress(OSError), self._line() as control:
            control.send(LEAVE, socket.MSG_NOSIGNAL)
            control.shutdown(socket.SHUT_RDWR)  # also for the C library, which has it under another number
        for file in self._files:
            os.close(file)
        self._files.clear()
        self._control = -1
        if self._started is not None and self._started.poll() is None:
            self._started.kill()  # it ends at once by itself, if it has begun at all
            self._started.wait()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        # The C library waits for the answer, but not for a guard that somebody has stopped.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _ANSWER_LIMIT, 0))
        # A number, as an object of Python's would be missed at the end of the process.
        self._control = ours.detach()
        self._files.append(self._control)
        # Both ends stay open here: writing to a guard that was killed must not end the script.
        reading, writing = os.pipe()
        self._words = last_words.out_of_the_way(writing)
        self._files += [reading, self._words]
        os.set_blocking(self._words, False)  # whatever the guard does, the script can end
        reports, self._status = (end.detach() for end in socket.socketpair())
        self._files += [reports, self._status]
        files = (theirs.fileno(), reading, reports)
        with theirs:
            self._started = detached.start("distboot.lifeline.guard", *files)

    def _await(self) -> str | None:
        """Wait until the guard is there; why it does not come, if so."""
        assert self._started is not None
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        try:
            if poll.poll(detached.START_LIMIT * 1000) and os.read(self._control, 1):
                self._started.wait(detached.START_LIMIT)
                return None
        except (OSError, subprocess.TimeoutExpired):
            return f"its guard did not start within {detached.START_LIMIT} s"
        return "its guard did not start, or ended at once"

    def _line(self) -> socket.socket:
        """What leads to the guard, as an object for a moment."""
        return socket.socket(fileno=os.dup(self._control))

    def _hand_over(self) -> None:
        lines = self._meeting.hand_over()
        try:
            self._send(self._plan(lines), [line.connection for line in lines])
        except OSError:
            say_goodbye(lines)
            raise
        for line in lines:
            line.connection.close()

    def _plan(self, lines: list[Handed]) -> dict[str, object]:
        placement, roster = self._meeting.placement, self._meeting.roster
        assert roster is not None
        history = self._meeting.history if self._settings.report else None
        return {
            "pid": os.getpid(),
            "rank": placement.rank,
            "roster": roster.as_message(),
            "world_size": placement.world_size,
            "settings": self._settings._asdict(),
            "secret": self._secret,
            "history": history and history.as_plan(),
            "lines": [(line.ranks, line.session.challenge, line.session.nonce, line.is_relay) for line in lines],
        }

    def _send(self, plan: dict[str, object], connections: list[socket.socket]) -> None:
        data = json.dumps(plan).encode()
        with self._line() as control:
            for start in range(0, len(connections), FILES_AT_ONCE):
                files = array("i", [each.fileno() for each in connections[start : start + FILES_AT_ONCE]])
                # A space, as a message with files must have a byte, and JSON may begin with one.
                control.sendmsg([b" "], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)], socket.MSG_NOSIGNAL)
            sent = 0
            while sent < len(data):
                sent += control.send(data[sent:], socket.MSG_NOSIGNAL)
            control.send(b"\n", socket.MSG_NOSIGNAL)


def by_wrapper(placement: Placement, environ: Mapping[str, str]) -> bool:
    """Whether the wrapper around us keeps the lifeline of this rank."""
    _, outer = handoff.take(environ)
    return outer is not None and outer.watched and outer.is_about(placement)


def tell_steps(meeting: Meeting) -> None:
    """Tell whoever watches this process how its beginning went, so far."""
    last_words.say(last_words.STEPS, json.dumps(meeting.steps))


@contextmanager
def watched(meeting: Meeting, environ: Mapping[str, str], settings: Settings | None) -> Iterator[None]:
    """See to it that the lifeline of `init` begins when, in this block, all ranks are ready."""
    is_alone = meeting.placement.world_size == 1 and (settings is None or settings.report is None)
    if meeting.roster is None or is_alone:
        yield  # nobody else is to hear of it
        return
    if by_wrapper(meeting.placement, environ):
        meeting.is_watched = True
        yield
        return
    if settings is None or sys.platform != "linux":
        meeting.when_ready = meeting.goodbye
        yield
        return
    guard = Guard(meeting, settings, environ.get("DISTBOOT_SECRET", ""))
    meeting.when_ready = guard.take_over
    try:
        yield
    except BaseException:
        if _current is not guard:
            guard.close()
        raise
