"""The agent of `init`: a process beside the script, started before anything else, that joins and then watches it.

A thread would not do: while Python's lock is held, in a C extension say, no thread runs. It is an interpreter of its
own, without what the script has loaded, in a session of its own, and no child of the script, which may wait for all of
its children. It ends with the script.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ..base.errors import DistbootError, with_too_few_files
from ..job.exit_status import ExitStatus
from ..job.messages import Register
from ..rendezvous.join import Joined
from ..rendezvous.protocol import Frames
from ..script.crash_hooks import ASK, ASK_FIRST, JOB_ENDS
from .agent import CREDENTIALS, Agent
from .launcher_process import LauncherProcess, find
from .link import (
    MOST,
    OPEN,
    AskLog,
    Begin,
    Finish,
    Log,
    Raised,
)
from .loop import AFTER_THE_FIRST
from .monitored_process import HookReader, MonitoredProcess, Process


class ForeignProcess(MonitoredProcess):
    """The process of the script, which is not our child, and waits for us when it ends.

    Its exit status comes through the socket `status`, and is answered there.
    """

    def __init__(
        self, begin: Begin, process: Process, pipe: int, status: socket.socket, agent: Agent
    ) -> None:
        hooks = HookReader(pipe, begin.plan.secret)
        super().__init__(begin.plan.own.rank, process, hooks, agent)
        self._status = status
        self._asks = ""  # what the script, about to end, waits to hear
        self._given = 0  # what it has heard: that of the job; 0: its own
        if sys.platform == "linux":
            status.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._loop.add_reader(status.fileno(), self._take_status)
        if self.process.file is not None:
            self._loop.add_reader(self.process.file, self._take_end)

    def look(self, now: float) -> None:
        if self.process.file is None and self.process.has_ended():
            self._take_end(now)
        super().look(now)

    def let_go(self) -> None:
        """Do not hold up its exit any longer, if it is about to end."""
        if self.has_ended:
            self._answer()

    def _answer(self) -> None:
        with suppress(OSError):
            self._status.send(b"\0")

    def _take_status(self, now: float) -> None:
        try:
            data, notes, _, _ = self._status.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size))
        except (
            ConnectionResetError
        ):  # it has ended with an answer unread; what it had sent comes next
            return
        # The kernel says whose it is: what the script forks in C ends as it ends.
        pids = [
            CREDENTIALS.unpack(note)[0] for _, kind, note in notes if kind == socket.SCM_CREDENTIALS
        ]
        if not data:
            self._loop.remove_reader(self._status.fileno())
        elif pids != [self.process.pid]:
            self._answer()
        elif (
            data == b"\0" and not self._given and self._instead(code=0)
        ):  # it had to stop: that is no success
            self._kill()
            self._end(ExitStatus(signal=int(signal.SIGKILL)), now)
        elif not self.has_ended:
            self._end(ExitStatus(code=data[0]), now)

    def _take_end(self, now: float) -> None:
        if self.process.file is not None:
            self._loop.remove_reader(self.process.file)
        if not self.has_ended:
            status = self.process.wait_status()
            self._end(
                ExitStatus()
                if status is None
                else ExitStatus.of_child(os.waitstatus_to_exitcode(status)),
                now,
            )

    def _end(self, how: ExitStatus, now: float) -> None:
        end = self.ended(how, now)
        if end.succeeded:
            return
        # A rank that fails because of a peer waits: the launcher must not take its exit code for that of the first.
        cause = self._role.root_cause
        is_first = cause is not None and cause.is_first(self.rank)
        if is_first or self.stopped_by_us or not end.is_secondary:
            self.let_go()

    def decided(self, now: float) -> None:
        fcntl.fcntl(self._hooks.pipe, fcntl.F_SETFL, JOB_ENDS | os.O_NONBLOCK)
        self._reply()
        self._loop.call_at(now + AFTER_THE_FIRST, self.let_go)

    def _take(self, kind: str, text: str, now: float) -> None:
        self._asks = kind if kind in (ASK, ASK_FIRST) else self._asks
        self._reply()
        super()._take(kind, text, now)

    def _reply(self) -> None:
        """Answer the script that asks, once it is known whether this rank was the first."""
        cause = self._role.root_cause
        is_known = cause is not None or not ExitStatus(exception=self._exception).is_secondary
        # Which alone would say it
        if not self._asks or not (is_known or (self.rank > 0 and not self._role.peers)):
            return
        if self._asks == ASK:
            answer = self._given = self._instead(code=0 if self._exception is None else 1)
        else:
            answer = int(cause is not None and self.rank not in cause.ranks)
        self._asks = ""
        with suppress(OSError):
            self._status.send(bytes([answer]))

    def _instead(self, code: int) -> int:
        """The exit code of the job, where the script must not end with this one; 0: it may."""
        end = ExitStatus(
            code, None, self.external_signal, self.stopped_by_us, exception=self._exception
        )
        return 0 if self._role.root_cause is None else self._role.root_cause.exit_code_for(end)


class _ScriptGoneError(Exception):
    """The script has ended, or does not want to join any more."""


def main(control_file: int, pipe: int, status_file: int) -> None:
    """Join for the script that is at the other end of the control socket, and watch it until it has ended."""
    control, status = (socket.socket(fileno=file) for file in (control_file, status_file))
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM"):
        # A launcher sends them to all processes of the job
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    frames = Frames(MOST)
    try:
        begin: Begin = _said(control, frames, Begin)[0]
        process, joined = Process(begin.pid), Joined(begin.plan)
        launcher = find(begin.pid, begin.plan.programs)
        joined.wanted = _watching(control, frames, process, joined, launcher)
        with with_too_few_files():
            result = joined.join()
            agent = Agent(joined, begin.settings, held=False, is_starting=True)
    except _ScriptGoneError:
        return
    except DistbootError as error:
        with suppress(OSError):
            control.sendall(
                OPEN.sign(Raised(error.code, error.message, error.hint, tuple(joined.log() or ())))
            )
        return
    rank = begin.plan.own.rank
    script = ForeignProcess(begin, process, pipe, status, agent)
    with suppress(OSError):
        control.sendall(OPEN.sign(result))
    agent.serve(control, rank)
    if sys.platform == "linux":
        agent.open()
    agent.role.take(rank, Register(begin.pid), time.monotonic())
    if launcher is not None:
        agent.watch_launcher(launcher)
    agent.loop.run()
    script.let_go()
    joined.close()


def _said(control: socket.socket, frames: Frames, *kinds: type) -> list[Any]:
    """What the script says next, a message or several; `_ScriptGoneError`: it has ended, or closed the socket."""
    found: list[Any] = []
    while not found:
        try:
            data = control.recv(1 << 16)
        except ConnectionResetError:  # it ended with something unread
            raise _ScriptGoneError from None
        if not data:
            raise _ScriptGoneError
        found = [OPEN.verify(frame, frames, *kinds) for frame in frames.feed(data)]
    return found


def _watching(
    control: socket.socket,
    frames: Frames,
    process: Process,
    joined: Joined,
    launcher: LauncherProcess | None,
) -> Callable[[], None]:
    """What raises once the script has ended, or does not want to join any more, or its launcher is gone."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    if process.file is not None:
        poll.register(process.file, select.POLLIN)

    def wanted() -> None:
        if launcher is not None:
            launcher.refuse_if_gone()
        for file, _ in poll.poll(0):
            if file != control.fileno():
                raise _ScriptGoneError
            # It is being stopped, and reports what was so far
            for message in _said(control, frames, AskLog, Finish):
                if isinstance(message, Finish):
                    raise _ScriptGoneError
                control.sendall(OPEN.sign(Log(tuple(joined.log() or ()))))

    return wanted
