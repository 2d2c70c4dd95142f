"""The loop of an agent, in a thread of the wrapper or in the sidecar of `init`, and the sides that it drives."""

from __future__ import annotations

import os
import selectors
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from ..settings import SupervisionSettings
from ..text import first_line
from .heartbeat import HeartbeatConnection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .root_cause import RootCause

AFTER_THE_FIRST = 0.15  # seconds; torchrun looks 10 times a second who has ended, and lists them in that order
_FINISHING = 5.0  # seconds for the rank that failed first to end by itself, with its own exit code
_FOLLOWING = 0.6  # seconds for another one that fails, too
ASLEEP = 2.0  # seconds by which we are late when we were stopped ourselves, or starved


@dataclass(frozen=True, slots=True)
class StopRequest:
    """That the process of this rank has to stop."""

    at: float  # as `time.monotonic` has it
    is_failure: bool  # whether it is for the failure of a rank; else an external signal stops the job
    is_done: bool = False  # whether it is for neither: its work is done, and it has ended well

    @classmethod
    def after(cls, cause: RootCause, rank: int, failing: bool, now: float, before: StopRequest | None) -> StopRequest:
        """What a root cause means for a rank, which may be failing by itself, and may have had a request before."""
        first = rank in cause.ranks
        delay = (_FINISHING if first else _FOLLOWING) if failing else 0.0 if first else cause.delay
        return cls(now + delay if before is None else min(now + delay, before.at), cause.is_failure)


class Say(Protocol):
    """Prints a line."""

    def __call__(self, text: str, rank: int | None = None) -> None:
        """As the agent, or as a rank."""


class Participant(Protocol):
    """One side of failure detection, as the loop drives it. All times are those of `time.monotonic`.

    Attributes:
        settings: of this rank.
        held: whether the exit of the ranks waits for us, as in the wrapper.
        root_cause: why the job ends, once that is known.
        orders: by rank of its own.
        reply: passes on what is for the script of a rank.
        is_starting: whether all ranks are to get ready first; until then a failure is that of the start.
    """

    settings: SupervisionSettings
    held: bool
    say: Say
    root_cause: RootCause | None
    orders: dict[int, StopRequest]
    reply: Callable[[int, object], None]
    is_starting: bool

    @property
    def _detects(self) -> bool:
        """Whether a failure is to be told to all, now."""
        return self.settings.detects and not self.is_starting

    def connections(self) -> Collection[HeartbeatConnection]:
        """The open ones; none is added later."""

    def take(self, rank: int, message: object, now: float) -> None:
        """Take what a rank of ours says: any message of a rank, as it is sent to rank 0. Replies go through `reply`."""

    def read(self, connection: HeartbeatConnection, now: float) -> None:
        """Take what has come on a connection."""

    def tick(self, now: float) -> None:
        """Once a second: send heartbeats, and look which have not come."""

    def turn(self, now: float) -> None:
        """Do what is due."""

    def due(self, now: float) -> float:
        """When something is."""

    def leave(self) -> None:
        """The ranks of this agent leave the job, in good order."""

    def hurry(self) -> None:
        """Do not wait for other ranks any longer."""

    def over(self, now: float) -> bool:
        """Whether nothing is left to do."""

    def finish(self) -> None:
        """The last thing before the end."""

    def close(self) -> None:
        """End all connections."""


class Supervised(Protocol):
    """The process of this rank, as the loop sees it."""

    def stop(self, order: StopRequest) -> None:
        """Ask it to end, unless it has ended or was asked already."""

    def kill(self) -> None:
        """End it, if it has not ended."""

    def decided(self, now: float) -> None:
        """It is clear now who failed first, or who stopped the job."""

    def look(self, now: float) -> None:
        """Once a second: see what is wrong with it."""


class EventLoop:
    """Drives one side of failure detection until nothing is left to do.

    Args:
        role: that side.
        interval: seconds between two beats.
        grace: seconds between TERM and KILL.
    """

    def __init__(self, role: Participant, *, interval: float, grace: float) -> None:
        self._role, self._grace = role, grace
        self._interval = interval
        self._selector = selectors.DefaultSelector()
        self._watched: set[HeartbeatConnection] = set()
        self._decided = False
        self._obeyed: set[int] = set()
        self._killing: list[Callable[[], None]] = []
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self.watched: dict[int, Supervised] = {}  # by rank, once it runs

    def add_reader(self, file: int, ready: Callable[[float], None]) -> None:
        """Call `ready` with the time when there is something to read from a file descriptor."""
        self._selector.register(file, selectors.EVENT_READ, ready)

    def remove_reader(self, file: int) -> None:
        """Stop calling for a file descriptor, if we do."""
        with suppress(KeyError):
            self._selector.unregister(file)

    def call_at(self, at: float, call: Callable[[], None]) -> None:
        """Call something once, when its time has come."""
        self._timers.append((at, call))

    def kill_after_grace(self, now: float, kill: Callable[[], None]) -> None:
        """The process has been asked to stop."""
        if kill not in self._killing:
            self._killing.append(kill)
            self.call_at(now + self._grace, kill)

    def run(self) -> None:
        """Until nothing is left to do."""
        beat = time.monotonic() + self._interval
        try:
            while not self._role.over(now := time.monotonic()):
                self._look_at_lines()
                ready = self._selector.select(max(min(beat, self._due(now)) - now, 0.0))
                now = time.monotonic()
                if now > beat + ASLEEP:
                    for line in self._role.connections():
                        line.reset_timers(now)
                for key, _ in ready:
                    if isinstance(key.fileobj, HeartbeatConnection):
                        self._role.read(key.fileobj, now)
                        self._look_at_lines()  # before the number of one that has ended is that of another file
                    elif (
                        key.fd in self._selector.get_map() and key.data is self._selector.get_map()[key.fd].data
                    ):  # else it has gone in this very round
                        key.data(now)
                if now >= beat:
                    beat = now + self._interval
                    for watched in self.watched.values():
                        watched.look(now)
                    self._role.tick(now)
                self._role.turn(now)
                self._obey(now)
            self._role.finish()
        except Exception as error:  # noqa: BLE001 - a defect of ours must not end the training
            frames = traceback.extract_tb(error.__traceback__)
            where = [frame for frame in frames if "distboot" in frame.filename][-1]
            said = f"{type(error).__name__}: {first_line(error)} ({os.path.basename(where.filename)}:{where.lineno})"
            self._role.say(f"warning: this rank goes on without failure detection, because of a defect in it: {said}")
            self._role.leave()
        finally:
            self._role.close()
            self._selector.close()

    def _look_at_lines(self) -> None:
        lines = self._role.connections()
        if len(lines) == len(self._watched):  # none is ever added
            return
        current = set(lines)
        for line in self._watched - current:
            with suppress(KeyError, ValueError):
                self._selector.unregister(line)
        for line in current - self._watched:
            self._selector.register(line, selectors.EVENT_READ)
        self._watched = current

    def _due(self, now: float) -> float:
        times = [self._role.due(now)]
        times += [order.at for rank, order in self._role.orders.items() if rank in self.watched.keys() - self._obeyed]
        return min(times + [at for at, _ in self._timers])

    def _obey(self, now: float) -> None:
        for rank in self.watched.keys() - self._obeyed:
            order, watched = self._role.orders.get(rank), self.watched[rank]
            if order is not None and now >= order.at:
                self._obeyed.add(rank)
                watched.stop(order)
                self.kill_after_grace(now, watched.kill)
        if self._role.root_cause is not None and self.watched and not self._decided:
            self._decided = True
            for watched in self.watched.values():
                watched.decided(now)
        for timer in [timer for timer in self._timers if now >= timer[0]]:
            self._timers.remove(timer)
            timer[1]()
