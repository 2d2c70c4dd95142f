"""Calls from other threads to the thread of the event loop: a queue, and sockets that wake the loop."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable
from contextlib import suppress


class Calls:
    """What the loop is to call next, with the time."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[float], object]] = queue.SimpleQueue()
        # Sockets, as a thread may still have one to send to when this is closed
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)

    def fileno(self) -> int:
        """What the loop reads."""
        return self._woken.fileno()

    def put(self, call: Callable[[float], object]) -> None:
        """Let the loop call this soon, from any thread."""
        self._waiting.put(call)
        with suppress(OSError):
            self._wake.send(b"\0")

    def take(self, now: float) -> None:
        """Call what waits; called by the loop when there is something to read."""
        self._woken.recv(4096)
        while not self._waiting.empty():
            call = self._waiting.get()
            call(now)

    def close(self) -> None:
        self._woken.close()
        self._wake.close()
