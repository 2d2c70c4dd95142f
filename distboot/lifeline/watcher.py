"""The loop of the lifeline, which runs beside the script: in a thread of the wrapper, or in the guard of `init`."""

from __future__ import annotations

import os
import selectors
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ..errors import first_line
from .line import Line
from .role import Order, Role

ASLEEP = 2.0  # seconds by which we are late when we were stopped ourselves, or starved


class Watched(Protocol):
    """The process of this rank, as the loop sees it."""

    def stop(self, order: Order) -> None:
        """Ask it to end, if it has not, and if nobody else has asked."""

    def kill(self) -> None:
        """End it, if it has not ended."""

    def decided(self, now: float) -> None:
        """It is clear now who failed first, or who stopped the job."""

    def look(self, now: float) -> None:
        """Once a second: see what is wrong with it."""


class Watcher:
    """Drives one side of the lifeline until nothing is left to do.

    Args:
        role: that side.
        interval: seconds between two beats.
        grace: seconds between TERM and KILL.
    """

    def __init__(self, role: Role, *, interval: float, grace: float) -> None:
        self._role, self._grace = role, grace
        self._interval = interval
        self._selector = selectors.DefaultSelector()
        self._watched: set[Line] = set()
        self._obeyed = self._decided = self._killing = False
        self._timers: list[tuple[float, Callable[[], None]]] = []

    def also(self, file: int, ready: Callable[[float], None]) -> None:
        """Call `ready` with the time when there is something to read from a file descriptor."""
        self._selector.register(file, selectors.EVENT_READ, ready)

    def no_more(self, file: int) -> None:
        """Stop calling for a file descriptor, if we do."""
        with suppress(KeyError):
            self._selector.unregister(file)

    def call_at(self, at: float, call: Callable[[], None]) -> None:
        """Call something once, when its time has come."""
        self._timers.append((at, call))

    def kill_after_grace(self, now: float, kill: Callable[[], None]) -> None:
        """The process has been asked to stop."""
        if not self._killing:
            self._killing = True
            self.call_at(now + self._grace, kill)

    def run(self, watched: Watched) -> None:
        """Until nothing is left to do."""
        beat = time.monotonic() + self._interval
        try:
            while not self._role.over(now := time.monotonic()):
                self._look_at_lines()
                ready = self._selector.select(max(min(beat, self._due(now)) - now, 0.0))
                now = time.monotonic()
                if now > beat + ASLEEP:
                    for line in self._role.lines():
                        line.forgive(now)
                for key, _ in ready:
                    if isinstance(key.fileobj, Line):
                        self._role.read(key.fileobj, now)
                    elif key.fd in self._selector.get_map():  # else it has gone in this very round
                        key.data(now)
                if now >= beat:
                    beat = now + self._interval
                    watched.look(now)
                    self._role.tick(now)
                self._role.turn(now)
                self._obey(watched, now)
            self._role.finish()
        except Exception as error:  # noqa: BLE001 - a defect of ours must not end the training
            frames = traceback.extract_tb(error.__traceback__)
            where = [frame for frame in frames if "distboot" in frame.filename][-1]
            said = f"{type(error).__name__}: {first_line(error)} ({os.path.basename(where.filename)}:{where.lineno})"
            self._role.say(f"warning: this rank goes on without the lifeline, because of a defect in it: {said}")
            self._role.leave()
        finally:
            self._role.close()
            self._selector.close()

    def _look_at_lines(self) -> None:
        lines = self._role.lines()
        if len(lines) == len(self._watched):
            return
        current = set(lines)
        for line in self._watched - current:
            self._selector.unregister(line)
        for line in current - self._watched:
            self._selector.register(line, selectors.EVENT_READ)
        self._watched = current

    def _due(self, now: float) -> float:
        times = [self._role.due(now)]
        if self._role.order is not None and not self._obeyed:
            times.append(self._role.order.at)
        return min(times + [at for at, _ in self._timers])

    def _obey(self, watched: Watched, now: float) -> None:
        order = self._role.order
        if order is not None and not self._obeyed and now >= order.at:
            self._obeyed = True
            watched.stop(order)
            self.kill_after_grace(now, watched.kill)
        if self._role.verdict is not None and not self._decided:
            self._decided = True
            watched.decided(now)
        for timer in [timer for timer in self._timers if now >= timer[0]]:
            self._timers.remove(timer)
            timer[1]()
