"""The loop of an agent, in a thread of the wrapper or in the sidecar of `init`.

One thread, one selector. A *reader* is a file, and what is called with the time when that is
readable: the connections to other agents, the sockets of scripts, the pipes of crash hooks,
descriptors of processes. A *timer* is a time, and what is called then. One turn is, in this order:

1. Sleep until a file is readable, a timer or the shell is due, or the next tick.
2. Call the readers. One that was removed by another reader of the same turn is not called: its
   descriptor may already be that of another file.
3. Once a second, tick: poll what no file tells (processes that are stopped, silent peers, and
   connections that do not report).
4. `turn` of the shell: decide on what has arrived. After the readers, so that it decides on all of
   it at once: who failed first may have been read after who failed for that.
5. Execute orders: TERM, a grace, KILL.
6. Call the timers that are due.
7. Publish the answer at which read of `ctx.preempted` all scripts stop. Last: a script that sees it
   may end at once, and the SIGTERM of this turn would kill a Python that is about to end.

What always holds:

- Only the sleep has no limit. A slow reader (a peer, a script, a terminal) has a bounded buffer or
  a timeout of its own, and a file system that may not answer has a timeout.
- If a turn comes more than two seconds late, this process was stopped or starved. Then nothing is
  concluded from the silence of the peers: it counts from now on. Nor from that of our own ranks,
  which were stopped, too, if the whole job was (`scontrol suspend`, `docker pause`).
- A defect in the agent must not end the training. An exception ends failure detection of this
  agent, with a warning; the other agents are told so, as if its ranks had left (`Detach`).
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ..base.text import first_line
from .heartbeat import HeartbeatConnection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .shell import Shell

_TICK = 1.0  # seconds between two polls of what no file tells
_ASLEEP = 2.0  # seconds by which a tick is late if this process was stopped or starved


class EventLoop:
    """Calls the shell of an agent, readers and timers."""

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._tick_at = 0.0
        # Called once a second, with the time
        self.each_tick: Callable[[float], None] = lambda _: None
        peers = shell.peers
        peers.add_reader = self.add_reader
        peers.remove_reader = self.remove_reader
        for connection in peers.members:
            self.add_reader(connection, partial(peers.read, connection))

    def add_reader(self, file: int | HeartbeatConnection, ready: Callable[[float], None]) -> None:
        self._selector.register(file, selectors.EVENT_READ, ready)

    def remove_reader(self, file: int | HeartbeatConnection) -> None:
        """Stop calling for a file, if it is read, before it is closed."""
        with suppress(KeyError, ValueError):  # ValueError: it is closed
            self._selector.unregister(file)

    def call_at(self, at: float, call: Callable[[], None]) -> None:
        self._timers.append((at, call))

    def run(self) -> None:
        """Take turns until the shell is over."""
        try:
            now = time.monotonic()
            self._tick_at = now + _TICK
            while not self._shell.over(now):
                self._take_turn(now)
                now = time.monotonic()
            self._shell.finish()
        except Exception as error:  # noqa: BLE001 - see the top of this file
            self._give_up(error)
        finally:
            self._shell.close()
            self._selector.close()

    def _take_turn(self, now: float) -> None:
        ready = self._selector.select(max(self._due(now) - now, 0.0))
        now = time.monotonic()
        asleep = now - self._tick_at
        if asleep > _ASLEEP:
            self._shell.peers.wake(asleep, now)
            for watched in self._shell.own.watched.values():
                watched.skip(asleep)
        for key, _ in ready:
            is_registered = self._selector.get_map().get(key.fd) is key
            if is_registered:
                key.data(now)
        if now >= self._tick_at:
            self._tick_at = now + _TICK
            self._shell.tick(now)
            self.each_tick(now)
        self._shell.turn(now)
        self._shell.own.execute(now)
        self._call_timers(now)
        self._shell.stops.publish()

    def _due(self, now: float) -> float:
        due = min(self._tick_at, self._shell.due(now))
        for at, _ in self._timers:
            due = min(due, at)
        return due

    def _call_timers(self, now: float) -> None:
        due = [timer for timer in self._timers if now >= timer[0]]
        for timer in due:
            self._timers.remove(timer)
            _, call = timer
            call()

    def _give_up(self, error: Exception) -> None:
        """Say where the defect is, and leave the job."""
        # Not by `traceback`, which takes as long to import as ten files of this package
        place = ""
        frame = error.__traceback__
        while frame is not None:
            file = frame.tb_frame.f_code.co_filename
            if "distboot" in file:
                place = f"{os.path.basename(file)}:{frame.tb_lineno}"
            frame = frame.tb_next
        bug = f"{type(error).__name__}: {first_line(error)} ({place})"
        what = "this rank continues without failure detection, because of a bug in distboot"
        self._shell.say(f"warning: {what}: {bug}")
        self._shell.leave(gave_up=True)
