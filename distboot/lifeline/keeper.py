"""The lifeline of the wrapper: a thread beside its loop on signals, which watches the child."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from ..report.steps import COMMAND
from ..rollcall.meeting import Meeting
from .charge import Charge
from .ends import End
from .last_words import out_of_the_way
from .line import interval_of
from .process import Process
from .role import Order
from .settings import Settings
from .sides import side_of
from .watcher import Watcher
from .words import Reader

_INJECTED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "injected")
_ASKS_TO_STOP = signal.SIGTERM  # others may mean something else to the child


class Child(Charge):
    """The child of the wrapper.

    Attributes:
        ending: the signal with which it was made to end; None if it was not.
    """

    ending: int | None = None

    def stop(self, order: Order) -> None:
        """Ask it to end, if it has not, and if nobody else has asked."""
        self.ending = int(signal.SIGTERM)
        super().stop(order)

    def kill(self) -> None:
        """End it, if it has not ended."""
        self.ending = int(signal.SIGKILL)
        super().kill()


class Keeper:
    """Keeps the lifeline of the rank whose process `supervise.run` starts.

    Args:
        meeting: of all ranks, which have met.
        settings: of the lifeline.
        secret: of the job; may be empty.

    Attributes:
        file: the file descriptor that the child has to inherit.
        is_done: whether nothing is left to do; `run` may end.
    """

    def __init__(self, meeting: Meeting, settings: Settings, secret: str) -> None:
        self.is_done = False
        self._meeting, self._settings, self._secret = meeting, settings, secret
        assert meeting.roster is not None
        placement = meeting.placement
        history = meeting.history if settings.report else None
        self._role = side_of(placement.rank, meeting.roster, meeting.hand_over(), settings, held=True, history=history)
        self._interval = interval_of(meeting.roster)
        self._events: queue.SimpleQueue[Callable[[float], object]] = queue.SimpleQueue()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._words, file = os.pipe()
        self.file = out_of_the_way(file)
        os.set_blocking(self.file, False)  # whatever we do, the child can end

    def environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """The environment for the child, so that Python in it leaves its last words to us."""
        path = os.pathsep.join([_INJECTED, *filter(None, [environ.get("PYTHONPATH")])])
        return {
            **environ,
            "PYTHONPATH": path,
            "DISTBOOT_LAST_WORDS": f"{self.file}:{os.fstat(self.file).st_ino}",
        }

    @property
    def ending(self) -> int | None:
        """The signal with which the child was made to end because of the job; None if it was not."""
        return self._child.ending

    def start(self, pid: int, done: Callable[[], None]) -> None:
        """The child runs; `done` is called, in another thread, when `is_done` comes true."""
        os.close(self.file)
        bound = self._settings.bound
        watcher = Watcher(self._role, interval=self._interval, grace=self._settings.grace)
        watcher.also(self._woken, self._take_events)
        reader = Reader(self._words, self._secret)
        self._child = Child(Process(pid), reader, self._words, watcher=watcher, role=self._role, bound=bound)
        self._role.start(pid)
        self._meeting.mark(COMMAND)
        self._role.steps(self._meeting.steps)
        self._meeting.is_watched = True

        def work() -> None:
            try:
                watcher.run(self._child)
            finally:
                self.is_done = True
                done()

        threading.Thread(target=work, name="distboot-lifeline", daemon=True).start()

    def asked(self, number: int) -> None:
        """The wrapper got a signal from outside, and passed it on."""
        if number == _ASKS_TO_STOP:
            self._tell(self._child.stopping)

    def ended(self, code: int) -> None:
        """The child has ended: exit code, or minus the signal."""
        end = End(signal=-code) if code < 0 else End(code=code)
        self._tell(lambda now: self._child.ended(end, now))

    def hurry(self) -> None:
        """The wrapper was asked to end, after the child has."""
        self._tell(lambda _: self._role.hurry())

    def final(self, code: int) -> int:
        """The exit code of the wrapper, whose child has this one: who was stopped for a failure has no success."""
        verdict = self._role.verdict
        was_stopped = self._child.told or self._child.asked is not None
        return 128 + signal.SIGTERM if code == 0 and was_stopped and verdict and verdict.is_failure else code

    def _tell(self, event: Callable[[float], object]) -> None:
        self._events.put(event)
        with suppress(OSError):
            os.write(self._wake, b"\0")

    def _take_events(self, now: float) -> None:
        os.read(self._woken, 4096)
        with suppress(queue.Empty):
            while True:
                self._events.get_nowait()(now)
