"""The process of a script under a bare `init`: no child of its agent.

It reports its exit code through a socket while it ends (`sidecar_start` says how), and waits there
for an answer: its launcher must not see its exit code before that of the rank that failed first. So
a rank that fails because of a peer is answered once the root cause is known and the rank that
failed first has had its time; all others are answered at once. A script that is about to end may
also *ask* before: whether another rank failed first, and with which code to end instead of its own.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial

from ..base.dataclass import dataclass
from ..base.process import CREDENTIALS, Process
from ..job.exit_status import ExitStatus
from ..job.facts import LONGEST_ENDING
from ..job.messages import Reaped
from ..script.crash_hooks import ASK, ASK_FIRST, JOB_ENDS
from .agent import Agent
from .hook_reader import HookReader
from .link_messages import Begin
from .monitored_process import MonitoredProcess
from .rank_process import RankProcess
from .script_failure import LOOK

# Seconds for a Python to end once its exit code is known: without running, and in any case
_ENDING = 3.0
_LONGEST_ENDING = LONGEST_ENDING - 0.5
_READING = 0.5  # seconds for its parent to read that; torchrun does 10 times a second


@dataclass(slots=True)
class Leaving:
    """A process whose exit code is known, and that still runs. Times are those of `time.monotonic`."""

    until: float  # it is not waited for any longer
    at_most: float
    _ran: str = ""  # how long it has run, by its kernel

    def look(self, process: Process, now: float) -> None:
        """It may take longer as long as it runs: on a busy host, libraries end slowly."""
        if process.has_ended():
            self.until = min(self.until, now + _READING)
            return
        ran = process.read("schedstat")
        if ran != self._ran:
            self.until = min(now + _ENDING, self.at_most)
        self._ran = ran


class ForeignProcess(MonitoredProcess):
    """The process of the script; its exit code comes through `status`, and is answered there."""

    def __init__(
        self,
        begin: Begin,
        process: Process,
        pipe: int,
        status: socket.socket,
        agent: Agent,
    ) -> None:
        of = RankProcess(
            begin.plan.own.rank,
            process,
            agent.shell,
            agent.loop,
        )
        hooks = HookReader(pipe, begin.plan.secret)
        super().__init__(of, hooks)
        self._status = status
        self._question = ""  # of a script that is about to end and waits for the answer
        self._given = 0  # the exit code that it was told to end with; 0: its own
        if sys.platform == "linux":
            status.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.of.loop.add_reader(
            status.fileno(),
            self._take_status,
        )
        if process.file is not None:
            self.of.loop.add_reader(
                process.file,
                self._take_end,
            )

    def poll(self, now: float) -> None:
        if self.of.process.file is None and self.of.process.has_ended():
            self._take_end(now)
        super().poll(now)

    def let_go(self) -> None:
        """Do not hold up its exit any longer, if it is about to end."""
        if self.of.has_ended:
            self._answer()

    def decided(self) -> None:
        # A flag of the pipe that the script can read without asking
        fcntl.fcntl(
            self._hooks.pipe,
            fcntl.F_SETFL,
            JOB_ENDS | os.O_NONBLOCK,
        )
        self._reply()
        self.of.loop.call_at(self.of.shell.facts.ends.release_at, self._release)

    def _release(self) -> None:
        """Let it go, unless the rank that failed first has got more time since."""
        if time.monotonic() >= self.of.shell.facts.ends.release_at:
            self.let_go()

    def _answer(self) -> None:
        with suppress(OSError):
            self._status.send(b"\0")

    def _take_status(self, now: float) -> None:
        room = socket.CMSG_SPACE(CREDENTIALS.size)
        try:
            data, notes, _, _ = self._status.recvmsg(1, room)
        except ConnectionResetError:  # an answer was left unread; what was sent before comes next
            return
        if not data:
            self.of.loop.remove_reader(self._status.fileno())
            return
        # The kernel adds the sender: a process that the script forks in C ends in the same way.
        senders = []
        for _, kind, note in notes:
            if kind == socket.SCM_CREDENTIALS:
                pid, _, _ = CREDENTIALS.unpack(note)
                senders.append(pid)
        if senders == [self.of.process.pid]:
            code = data[0]
            self._take_code(code, now)
        else:
            self._answer()

    def _take_code(self, code: int, now: float) -> None:
        """The script is about to end with this exit code."""
        had_to_stop = code == 0 and not self._given and self._instead(code=0)
        if had_to_stop:  # that is no success
            self.stopping.kill()
            how = ExitStatus(signal=int(signal.SIGKILL))
            self._end(how, now)
        elif not self.of.has_ended:
            self._end(ExitStatus(code=code), now)

    def _take_end(self, now: float) -> None:
        """The process has ended, whether or not it has reported its exit code."""
        if self.of.process.file is not None:
            self.of.loop.remove_reader(self.of.process.file)
        if self.of.has_ended:
            return
        how = ExitStatus()
        status = self.of.process.wait_status()
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            how = ExitStatus.of_child(code)
        self._end(how, now)

    def _end(self, how: ExitStatus, now: float) -> None:
        is_failure = how.code != 0
        if is_failure and self._may_be_first():
            self.is_leaving = not self.of.process.is_reaped()
        end = self.ended(how, now)
        if self.is_leaving:
            leaving = Leaving(
                until=now + _ENDING,
                at_most=now + _LONGEST_ENDING,
            )
            self._leave(leaving)
        if end.succeeded:
            return
        cause = self.of.shell.root_cause
        is_first = cause is not None and cause.is_first(self.of.rank)
        if is_first or self.stopping.stopped_by_us or not end.is_secondary:
            self.let_go()

    def _may_be_first(self) -> bool:
        """Whether the launcher may have to see its exit code before those of other ranks."""
        cause = self.of.shell.root_cause
        if cause is None:
            return self.of.shell.facts.detects
        return cause.is_first(self.of.rank)

    def _leave(self, leaving: Leaving) -> None:
        """Report when its parent has read its exit code: libraries end after that is known here."""
        now = time.monotonic()
        leaving.look(self.of.process, now)
        is_seen = self.of.process.is_reaped() or not self._may_be_first()
        if is_seen or now >= leaving.until:
            self.is_leaving = False
            self.of.take(Reaped(), now)
            return
        self.of.loop.call_at(
            now + LOOK,
            partial(self._leave, leaving),
        )

    def _take(
        self,
        kind: str,
        text: str,
        now: float,
    ) -> None:
        if kind in (ASK, ASK_FIRST):
            self._question = kind
        self._reply()
        super()._take(kind, text, now)

    def _reply(self) -> None:
        """Answer the question of the script, once it is known whether this rank failed first."""
        if not self._question or not self._is_decided():
            return
        if self._question == ASK:
            code = 0
            if self.failure.exception is not None:
                code = 1
            self._given = self._instead(code)
            answer = self._given
        else:
            answer = 0
            cause = self.of.shell.root_cause
            if cause is not None:
                is_of_another = self.of.rank not in cause.ranks
                answer = int(is_of_another)
        self._question = ""
        with suppress(OSError):
            self._status.send(bytes([answer]))

    def _is_decided(self) -> bool:
        cause = self.of.shell.root_cause
        if cause is not None:
            return True
        own = ExitStatus(exception=self.failure.exception)
        if not own.is_secondary:
            return True
        # Rank 0 decides, and cannot be reached any more
        return self.of.rank > 0 and not self.of.shell.peers.members

    def _instead(self, code: int) -> int:
        """The exit code of the job, if the script must not end with this one; 0: it may."""
        cause = self.of.shell.root_cause
        if cause is None:
            return 0
        end = ExitStatus(
            code=code,
            external_signal=self.stopping.external_signal,
            stopped_by_us=self.stopping.stopped_by_us,
            exception=self.failure.exception,
        )
        return cause.exit_code_for(end)
