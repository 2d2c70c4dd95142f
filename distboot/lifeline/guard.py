"""The guard: a process beside a script that called `init`, which watches it and keeps the lifeline for it.

A thread would not do: while Python's lock is held, in a C extension say, no thread runs. The guard is an interpreter
of its own, without what the script has loaded, in the script's process group, and no child of it: a script may wait for
all of its children. It ends with the script.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..errors import tell
from ..rollcall.wire import Session
from ..roster import Roster
from .ends import End
from .hub import Hub
from .last_words import ENDING, EXCEPTION, INTERRUPT, TERM
from .line import Line
from .process import Process
from .report import summarize
from .role import Order, Role
from .settings import Settings
from .spoke import Spoke
from .verdict import seats
from .watcher import Watcher
from .words import Reader

LEAVE = b"x"  # what the script sends when it needs its guard no more
FILES_AT_ONCE = 250  # SCM_MAX_FD is 253, unix(7)


class Script:
    """The process of the script, as its guard sees it."""

    def __init__(self, process: Process, words: Reader, status: int, answer: socket.socket, bound: float) -> None:
        self.code: int | None = None
        self.has_ended = False
        self._process, self._words, self._status, self._answer = process, words, status, answer
        self._bound = bound
        self._asked: int | None = None
        self._told = False
        self._stopped_since: float | None = None

    def attach(self, watcher: Watcher, role: Role, words: int) -> None:
        """Let the loop call us when there is something to see."""
        self._watcher, self._role = watcher, role
        watcher.also(self._answer.fileno(), self._take_leave)
        watcher.also(words, lambda now: self._hear(words, now))
        watcher.also(self._status, self._take_status)
        if self._process.file is not None:
            watcher.also(self._process.file, self._take_end)

    def stop(self, order: Order) -> None:
        """Ask it to end, if it has not, and if nobody else has asked."""
        if self._asked is None:
            self._told = order.is_failure
            self._asked = None if order.is_failure else int(signal.SIGTERM)
            self._process.send(signal.SIGTERM)
            self._process.send(signal.SIGCONT)

    def kill(self) -> None:
        """End it, if it has not ended."""
        self._process.send(signal.SIGKILL)

    def look(self, role: Role, now: float) -> None:
        """Whether it has been stopped for too long."""
        if self.has_ended:
            return
        if self._process.file is None and self._process.has_ended():
            self._take_end(now)
        elif not self._process.is_stopped():
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now >= self._stopped_since + self._bound:
            said = f"stopped by a signal (SIGSTOP?) for {self._bound:g} s"
            role.trouble(End(cause=said, when=time.time()), now)

    def let_go(self) -> None:
        """Do not hold up its exit any longer."""
        if self._told and self.code == 0:
            self._process.send(signal.SIGKILL)
        with suppress(OSError):
            self._answer.send(b"\0")

    def _take_leave(self, now: float) -> None:
        """The script calls init once more; an end alone is that of a script that has become another program."""
        self._watcher.no_more(self._answer.fileno())
        with suppress(OSError):
            if self._answer.recv(1) == LEAVE:
                self._role.leave()
                self._role.turn(now)

    def _hear(self, file: int, now: float) -> None:
        for words in self._words.read():
            if words.pid != self._process.pid:
                continue
            if words.kind == EXCEPTION:
                self._role.trouble(End(words=words.text, told=self._told, when=time.time()), now)
            elif words.kind == ENDING:
                self._role.ending(now)
            elif words.kind == INTERRUPT:
                self._asked = signal.SIGINT
            elif words.kind == TERM:
                self._stopping(now)
        if self._words.dumped():
            self._stopping(now)
        if self._words.ended:
            self._watcher.no_more(file)

    def _stopping(self, now: float) -> None:
        """It got TERM; if not from us, then from outside."""
        if self._asked is None and not self._told:
            self._asked = signal.SIGTERM
            self._watcher.kill_after_grace(now)
            self._role.stopping(signal.SIGTERM, now)

    def _take_status(self, now: float) -> None:
        data = os.read(self._status, 1)
        self._watcher.no_more(self._status)
        if data and not self.has_ended:
            self.code = data[0]
            self._end(End(code=self.code), now)
        elif self._process.file is None and self._process.has_ended():
            self._take_end(now)

    def _take_end(self, now: float) -> None:
        if self._process.file is not None:
            self._watcher.no_more(self._process.file)
        if self.has_ended:
            return
        for _ in self._words.read():
            pass
        if self._words.dumped() and not self._told:
            self._asked = self._asked or signal.SIGTERM
        status = self._process.wait_status()
        if status is None:
            self._end(End(), now)
        elif os.WIFSIGNALED(status):
            self._end(End(signal=os.WTERMSIG(status)), now)
        else:
            self._end(End(code=os.waitstatus_to_exitcode(status)), now)

    def _end(self, end: End, now: float) -> None:
        self.has_ended = True
        asked = None if self._told else self._asked
        words = "" if end.code == 0 else self._words.last()
        full = replace(end, asked=asked, told=self._told, words=words, when=time.time())
        if self._told and self.code == 0:  # it was stopped: that is no success, and `let_go` will see to it
            full = replace(full, code=None, signal=int(signal.SIGKILL))
        self._role.ended(full, now)
        if not full.is_well:
            self.let_go()


def main(control: socket.socket, words: int, status: int) -> None:
    """Watch the script that is at the other end of `control`, until it has ended."""
    ignored = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM")
    for name in ignored:  # which go to the whole group, and are for the script
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    with suppress(OSError):
        control.send(b"\0")  # we are there
    plan, files = _taken_over(control)
    if plan is None:  # the script has ended, or does not need us
        return
    settings = Settings(**plan["settings"])
    roster = Roster.from_message(plan["roster"])
    lines = {
        rank: Line(socket.socket(fileno=file), Session(plan["secret"], "this rank", challenge, nonce))
        for file, (rank, challenge, nonce) in zip(files, plan["lines"], strict=True)
    }
    rank, world_size = plan["rank"], plan["world_size"]

    def say(text: str) -> None:
        tell(f"rank {rank}", text)

    role: Hub | Spoke
    if rank == 0:
        role = Hub(seats(roster), lines, settings, held=False, say=say, conclude=summarize)
    else:
        role = Spoke(rank, seats(roster)[0], lines[0], settings, held=False, say=say)
    watcher = Watcher(
        role,
        script := Script(Process(plan["pid"]), Reader(words, plan["secret"]), status, control, settings.bound),
        world_size=world_size,
        bound=settings.bound,
        grace=settings.grace,
    )
    script.attach(watcher, role, words)
    role.start(plan["pid"])
    watcher.run()
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
