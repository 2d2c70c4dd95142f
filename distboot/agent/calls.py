"""Calls from other threads to the thread of the event loop: a queue, and a pipe that wakes the loop."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from contextlib import suppress


class Calls:
    """What the loop is to call next, with the time."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[float], object]] = queue.SimpleQueue()
        self.file, self._wake = os.pipe()  # the end that the loop reads, and the other one
        os.set_blocking(self._wake, False)

    def put(self, call: Callable[[float], object]) -> None:
        """Let the loop call this soon."""
        self._waiting.put(call)
        with suppress(OSError):
            os.write(self._wake, b"\0")

    def take(self, now: float) -> None:
        """Call what waits; called by the loop when `file` is readable."""
        os.read(self.file, 4096)
        while not self._waiting.empty():
            call = self._waiting.get()
            call(now)

    def close(self) -> None:
        os.close(self.file)
        os.close(self._wake)
