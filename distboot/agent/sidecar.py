"""The agent of `init`: a process beside the script, started first; it joins, then watches it.

A thread would not do: while Python's lock is held, for example in a C extension, no other thread
runs. It is an interpreter of its own, without what the script has loaded, in a session of its own,
and no child of the script, which may wait for all of its children. It ends with the script.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ..base.errors import DistbootError, in_one_line, with_too_few_files
from ..base.process import Process
from ..base.text import log_line
from ..job.messages import Register
from ..rendezvous.join import Joined
from ..rendezvous.messages import as_error
from ..rendezvous.protocol import Frames, ProtocolError
from .agent import Agent
from .foreign_process import ForeignProcess
from .launcher_process import LauncherProcess, find
from .link_messages import (
    MOST,
    OPEN,
    Begin,
    Finish,
    Raised,
    StartEnded,
    Written,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .event_files import EventFiles

# A launcher sends them to all processes of a job
_IGNORED = (
    "SIGTERM",
    "SIGINT",
    "SIGHUP",
    "SIGQUIT",
    "SIGUSR1",
    "SIGUSR2",
    "SIGXCPU",
    "SIGALRM",
)


class _ScriptGoneError(Exception):
    """The script has ended, or does not want to join any more."""


def main(control_file: int, pipe: int, status_file: int) -> None:
    """Join for the script at the other end of the control socket, and watch it until it ends."""
    for name in _IGNORED:
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    control = _Control(socket.socket(fileno=control_file))
    status = socket.socket(fileno=status_file)
    files = None
    try:
        begin = control.begin()
        process = Process(begin.pid)
        launcher = find(begin.pid, begin.plan.programs)
        joined = Joined(begin.plan)
        files = _event_files(begin)
        if files is not None:
            joined.record = files.record
        start_ended = partial(_start_ended, files, joined)
        joined.wanted = _still_wanted(control, process, launcher, start_ended)
        with with_too_few_files():
            result = joined.join()
            # What the meeting has made stays as long as the job: the collector of cycles need not
            # look at it again and again
            gc.freeze()
            agent = Agent(joined, begin.settings, held=False)
            if sys.platform == "linux":
                agent.scripts.open()
    except _ScriptGoneError:
        return
    except DistbootError as error:
        if files is not None:
            start_ended(_failed(begin, error))
        control.send(Raised(error.code, error.message, error.hint))
        return
    control.send(result)
    agent.scripts.start_ended = start_ended
    try:
        with with_too_few_files():
            script = ForeignProcess(
                begin,
                process,
                pipe,
                status,
                agent,
            )
            _watch(begin, control, agent, launcher)
    except DistbootError as error:  # the script is told that this process has ended
        who = f"rank {begin.plan.own.rank}"
        log_line(who, f"the monitor process of this rank ends: {in_one_line(error)}")
        return
    script.let_go()
    joined.close()
    if agent.seconds_to_stay:
        _let_go_of_output()
        time.sleep(agent.seconds_to_stay)


def _watch(begin: Begin, control: _Control, agent: Agent, launcher: LauncherProcess | None) -> None:
    """Watch the script until it ends."""
    rank = begin.plan.own.rank
    agent.scripts.serve(control.socket, rank)
    own = Register(begin.pid, cpus=begin.plan.own.cpus)
    agent.shell.take(rank, own, time.monotonic())
    agent.check_node(begin.pid, is_rank=True)
    if launcher is not None:
        agent.watch_launcher(launcher)
    agent.loop.run()


def _event_files(begin: Begin) -> EventFiles | None:
    """Where rank 0's agent writes what happens, if that is wanted."""
    own = begin.plan.own
    if own.rank != 0 or not begin.settings.keeps_events:
        return None
    from .event_files import EventFiles  # here, as most jobs have none

    return EventFiles(begin.settings, f"rank {own.rank}")


def _failed(begin: Begin, error: DistbootError) -> StartEnded:
    """How the start has ended where the ranks do not meet."""
    from ..report.start_failure import StartFailure  # here, as most jobs start

    problem = begin.plan.own.problem
    if problem is not None:  # it comes before what other ranks report
        error = as_error(problem, "")
    failure = StartFailure.from_error(error)
    return StartEnded(failure)


def _start_ended(files: EventFiles | None, joined: Joined, ended: StartEnded) -> None:
    """Write the report of the start, where there is to be one."""
    if files is not None:
        files.start_ended(joined, ended)


def _let_go_of_output() -> None:
    """The reader of the output of the script waits for the end of it."""
    with open(os.devnull, "wb") as nowhere:
        for file in (1, 2):
            os.dup2(nowhere.fileno(), file)


class _Control:
    """The socket to the script until all ranks have met."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._frames = Frames(MOST)

    def begin(self) -> Begin:
        """The first message; `_ScriptGoneError`: something has ended the start before that."""
        try:
            first, *_ = self.receive(Begin, StartEnded, Finish)
        except ProtocolError as error:
            raise DistbootError(
                "broken-environment",
                f"the environment of this rank is too large for its agent: it {error}",
                "shorten what is named there",
            ) from None
        if not isinstance(first, Begin):
            raise _ScriptGoneError
        return first

    def receive(self, *kinds: type) -> list[Any]:
        """The next messages, at least one; `_ScriptGoneError`: the script has closed the socket."""
        found: list[Any] = []
        while not found:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:  # it ended with something unread
                raise _ScriptGoneError from None
            if not data:
                raise _ScriptGoneError
            for frame in self._frames.feed(data):
                message = OPEN.verify(frame, self._frames, *kinds)
                found.append(message)
        return found

    def send(self, message: object) -> None:
        """Send a message, unless the script has ended."""
        with suppress(OSError):
            self.socket.sendall(OPEN.sign(message))


def _still_wanted(
    control: _Control,
    process: Process,
    launcher: LauncherProcess | None,
    start_ended: Callable[[StartEnded], object],
) -> Callable[[], None]:
    """What is called again and again while the ranks meet.

    It raises if the script has ended or does not want to join, or its launcher is gone.
    """
    poll = select.poll()
    poll.register(control.socket, select.POLLIN)
    if process.file is not None:
        poll.register(process.file, select.POLLIN)

    def check() -> None:
        if launcher is not None:
            launcher.refuse_if_gone()
        for file, _ in poll.poll(0):
            if file != control.socket.fileno():  # the process has ended
                raise _ScriptGoneError
            for message in control.receive(StartEnded, Finish):
                if isinstance(message, Finish):
                    raise _ScriptGoneError
                start_ended(message)  # the script is being stopped
                control.send(Written())

    return check
