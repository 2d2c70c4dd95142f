"""The lifeline of the wrapper: a thread beside its loop on signals, which watches the child."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from ..errors import tell
from ..rollcall.meeting import Meeting
from .ends import End
from .hub import Hub
from .last_words import ENDING, EXCEPTION
from .line import Line
from .process import Process
from .report import summarize, writable
from .role import Order, Role
from .settings import Settings
from .spoke import Spoke
from .verdict import seats
from .watcher import Watcher
from .words import Reader

_INJECTED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "injected")
_ASKS_TO_STOP = signal.SIGTERM  # others may mean something else to the child


class Keeper:
    """Keeps the lifeline of the rank whose process `supervise.run` starts.

    Args:
        meeting: of all ranks, which have met.
        settings: of the lifeline.
        secret: of the job; may be empty.

    Attributes:
        file: the file descriptor that the child has to inherit.
        ending: the signal with which the child was made to end because of the job; None if it was not.
        is_done: whether nothing is left to do; `run` may end.
    """

    def __init__(self, meeting: Meeting, settings: Settings, secret: str) -> None:
        self.ending: int | None = None
        self.is_done = False
        self._settings, self._secret = settings, secret
        self._role = _role(meeting, settings)
        self._world_size = meeting.placement.world_size
        self._events: queue.SimpleQueue[Callable[[float], None]] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._words, self.file = os.pipe()
        os.set_blocking(self.file, False)  # whatever we do, the child can end
        self._asked: int | None = None
        self._told = False
        self._ended = False
        self._stopped_since: float | None = None

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment for the child, so that Python in it leaves its last words to us."""
        path = os.pathsep.join([_INJECTED, *filter(None, [environ.get("PYTHONPATH")])])
        return {
            **environ,
            "PYTHONPATH": path,
            "DISTBOOT_LAST_WORDS": f"{self.file}:{os.fstat(self.file).st_ino}",
        }

    def start(self, pid: int, done: Callable[[], None]) -> None:
        """The child runs; `done` is called, in another thread, when `is_done` comes true."""
        os.close(self.file)
        self._process = Process(pid)
        self._reader = Reader(self._words, self._secret)
        watcher = Watcher(
            self._role, self, world_size=self._world_size, bound=self._settings.bound, grace=self._settings.grace
        )
        watcher.also(self._woken, self._take_events)
        watcher.also(self._words, self._hear)
        self._watcher = watcher
        self._role.start(pid)

        def work() -> None:
            try:
                watcher.run()
            finally:
                self.is_done = True
                done()

        threading.Thread(target=work, name="distboot-lifeline", daemon=True).start()

    def asked(self, number: int) -> None:
        """The wrapper got a signal from outside, and passed it on."""
        if number == _ASKS_TO_STOP:
            self._tell(self._take_asked)

    def ended(self, code: int) -> None:
        """The child has ended: exit code, or minus the signal."""
        self._tell(lambda now: self._take_end(code, now))

    def final(self, code: int) -> int:
        """The exit code of the wrapper, whose child has this one: who was stopped for a failure has no success."""
        verdict = self._role.verdict
        return 128 + signal.SIGTERM if code == 0 and self._told and verdict and verdict.is_failure else code

    # What the loop calls, in its thread

    def stop(self, order: Order) -> None:
        """Ask the child to end, if it has not, and if nobody else has asked."""
        if self._asked is None:
            self._told = order.is_failure
            self._asked = None if order.is_failure else int(signal.SIGTERM)
            self._end(signal.SIGTERM)
            self._process.send(signal.SIGCONT)

    def kill(self) -> None:
        """End the child, if it has not ended."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        self.ending = int(number)
        self._process.send(number)

    def look(self, role: Role, now: float) -> None:
        """Whether the child has been stopped for too long."""
        if self._ended or not self._process.is_stopped():
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        elif now >= self._stopped_since + self._settings.bound:
            said = f"stopped by a signal (SIGSTOP?) for {self._settings.bound:g} s"
            role.trouble(End(cause=said, when=time.time()), now)

    def _tell(self, event: Callable[[float], None]) -> None:
        self._events.put(event)
        with suppress(OSError):
            os.write(self._wake, b"\0")

    def _take_events(self, now: float) -> None:
        os.read(self._woken, 4096)
        with suppress(queue.Empty):
            while True:
                self._events.get_nowait()(now)

    def _take_asked(self, now: float) -> None:
        if self._asked is None and not self._told:
            self._asked = int(_ASKS_TO_STOP)
            self._role.stopping(self._asked, now)

    def _hear(self, now: float) -> None:
        for words in self._reader.read():
            if words.pid != self._process.pid:
                continue  # another process than the child may fail without it
            if words.kind == EXCEPTION:
                self._role.trouble(End(words=words.text, told=self._told, when=time.time()), now)
            elif words.kind == ENDING:
                self._role.ending(now)
        if self._reader.ended:
            self._watcher.no_more(self._words)

    def _take_end(self, code: int, now: float) -> None:
        if not self._reader.ended:
            self._hear(now)
        self._ended = True
        asked = None if self._told else self._asked
        words = "" if code == 0 else self._reader.last()
        how = End(signal=-code) if code < 0 else End(code=code)
        self._role.ended(replace(how, asked=asked, told=self._told, words=words, when=time.time()), now)


def _role(meeting: Meeting, settings: Settings) -> Hub | Spoke:
    who, rank = meeting.placement.who, meeting.placement.rank
    assert meeting.roster is not None
    lines = {each: Line(connection, session) for each, (connection, session) in meeting.hand_over().items()}

    def say(text: str) -> None:
        tell(who, text)

    if rank == 0:
        return Hub(seats(meeting.roster), lines, writable(settings, say), held=True, say=say, conclude=summarize)
    return Spoke(rank, seats(meeting.roster)[0], lines[0], settings, held=True, say=say)
