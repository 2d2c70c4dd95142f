"""The guard: a process beside a script that called `init`, which watches it and keeps the lifeline for it.

A thread would not do: while Python's lock is held, in a C extension say, no thread runs. The guard is an interpreter
of its own, without what the script has loaded, in a session of its own, and no child of the script, which may wait for
all of its children. It ends with the script.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from contextlib import suppress
from typing import Any

from ..detached import leave_signals_to_the_job
from ..report.history import History
from ..rollcall.handed import Handed
from ..rollcall.node import CREDENTIALS
from ..rollcall.wire import Session
from ..roster import Roster
from .charge import Charge
from .ends import End
from .line import interval_of
from .process import Process
from .role import AFTER_THE_FIRST
from .settings import Settings
from .sides import side_of
from .watcher import Watcher
from .words import Reader

LEAVE = b"x"  # what the script sends when it needs its guard no more
FILES_AT_ONCE = 250  # SCM_MAX_FD is 253, unix(7)


class Script(Charge):
    """The process of the script, which is not our child, and waits for us when it ends."""

    def listen(self, status: socket.socket, answer: socket.socket) -> None:
        """Take the exit status that comes through `status`, and answer it."""
        self._status, self._answer = status, answer
        status.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._watcher.also(status.fileno(), self._take_status)
        self._watcher.also(answer.fileno(), self._take_leave)
        if self.process.file is not None:
            self._watcher.also(self.process.file, self._take_end)

    def look(self, now: float) -> None:
        """Whether it has ended, where the kernel does not say so, or has been stopped for too long."""
        if self.process.file is None and self.process.has_ended():
            self._end_seen(now)
        super().look(now)

    def let_go(self) -> None:
        """Do not hold up its exit any longer, if it is about to end."""
        if self.has_ended:
            self._answer_exit()

    def _answer_exit(self) -> None:
        with suppress(OSError):
            self._answer.send(b"\0")

    def _take_leave(self, now: float) -> None:
        """The script calls init once more; an end alone is that of a script that has become another program."""
        self._watcher.no_more(self._answer.fileno())
        with suppress(OSError):
            if self._answer.recv(1) == LEAVE:
                self._role.leave()
                self._role.turn(now)

    def _take_status(self, now: float) -> None:
        data, notes, _, _ = self._status.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size))
        # The kernel says whose it is: what the script forks in C ends as it ends.
        pids = [CREDENTIALS.unpack(note)[0] for _, kind, note in notes if kind == socket.SCM_CREDENTIALS]
        if not data:
            self._watcher.no_more(self._status.fileno())
        elif pids != [self.process.pid]:
            self._answer_exit()
        elif self.told and data == b"\0":  # it had to stop: that is no success
            self.kill()
            self._end(End(signal=int(signal.SIGKILL)), now)
        elif not self.has_ended:
            self._end(End(code=data[0]), now)

    def _take_end(self, now: float) -> None:
        assert self.process.file is not None
        self._watcher.no_more(self.process.file)
        self._end_seen(now)

    def _end_seen(self, now: float) -> None:
        if not self.has_ended:
            status = self.process.wait_status()
            if status is None:
                self._end(End(), now)
            elif os.WIFSIGNALED(status):
                self._end(End(signal=os.WTERMSIG(status)), now)
            else:
                self._end(End(code=os.waitstatus_to_exitcode(status)), now)

    def _end(self, how: End, now: float) -> None:
        end = self.ended(how, now)
        # Who fails because of a peer waits, so that the launcher does not take his exit code for that of the first.
        if not end.is_well and (self.told or not end.is_consequence):
            self.let_go()

    def decided(self, now: float) -> None:
        """It is clear now who failed first."""
        self._watcher.call_at(now + AFTER_THE_FIRST, self.let_go)


def main(control_file: int, words: int, status_file: int) -> None:
    """Watch the script that is at the other end of the control socket, until it has ended."""
    control, status = (socket.socket(fileno=file) for file in (control_file, status_file))
    leave_signals_to_the_job()
    with suppress(OSError):
        control.send(b"\0")  # we are there
    plan, files = _taken_over(control)
    if plan is None:  # the script has ended, or does not need us
        return
    settings, rank = Settings(**plan["settings"]), plan["rank"]
    us = "rank 0" if rank == 0 else "this rank"
    connections = [
        Handed(tuple(ranks), socket.socket(fileno=file), Session(plan["secret"], us, challenge, nonce), is_relay)
        for file, (ranks, challenge, nonce, is_relay) in zip(files, plan["lines"], strict=True)
    ]
    roster = Roster.from_message(plan["roster"], plan["world_size"])
    history = None if plan["history"] is None else History.from_plan(plan["history"])
    role = side_of(rank, roster, connections, settings, held=False, history=history)
    watcher = Watcher(role, interval=interval_of(roster), grace=settings.grace)
    process, reader = Process(plan["pid"]), Reader(words, plan["secret"])
    script = Script(process, reader, words, watcher=watcher, role=role, bound=settings.bound)
    script.listen(status, control)
    role.start(plan["pid"])
    watcher.run(script)
    script.let_go()


def _taken_over(control: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """The plan, and the connections; None and none if the script has gone."""
    data, files = bytearray(), list[int]()
    while not data.endswith(b"\n"):
        try:
            more, new, _, _ = socket.recv_fds(control, 65536, FILES_AT_ONCE)
        except ConnectionResetError:
            more, new = b"", []
        if not more:
            return None, []
        data += more
        files += new
    return json.loads(data), files
