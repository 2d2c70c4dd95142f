"""How far a script is: in its process, a thread that says so; and its agent, which notes since when it has not moved.

A rank moves when one of its numbers grows: the collective operations that torch counts for each process group, those of
DistributedDataParallel too, and says so also while the script waits in one; its reads of `ctx.preempted`; its calls of
`ctx.step()`. Where it has none of these it moves while its main thread uses a processor; other threads, of Horovod say,
always do. It also moves when it comes to `barrier()` and the like, or leaves: a script may call them once only, so that
they do not count as such a number.

This file is also read by the Python of an unmodified script, without the rest of the package: it imports nothing but
the standard library, and that late.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from . import crash_hooks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KIND = "progress"  # of what is emitted: "name count", a line for each process group
_MODULE = "torch.distributed.distributed_c10d"
_INTERVAL = 2.0  # seconds between two looks
MOST_GROUPS = 32
_LONGEST_NAME = 60
_LARGEST = (1 << 63) - 1
_BUSY = 0.02  # of a processor: less is used by threads that only wait
_USER_TIME = 11  # proc_pid_stat(5), counted from the state; the next one is that of the kernel

_process = 0  # which has the thread; a fork is not the rank


def install() -> None:
    """Say how far this process is, every other second, if that has changed."""
    if f"_{__name__}" not in sys.modules:  # where the wrapper has had this file loaded
        crash_hooks.when_imported(_MODULE, _start)  # a thread is of no use before


def counts() -> dict[str, int]:
    """The collective operations that were begun, by the name of the process group, which is the same on all ranks."""
    world: Any = getattr(sys.modules.get(_MODULE), "_world", None)
    found = {}
    for group in list(getattr(world, "pg_map", ()))[:MOST_GROUPS]:
        # A backend that does not count, or a group that is being destroyed
        with suppress(Exception):
            count = group._get_sequence_number_for_group()  # noqa: SLF001 - there is no public one
            found[str(world.pg_names[group])[:_LONGEST_NAME]] = int(count)
    return found


def is_our_thread(dump: str) -> bool:
    """Whether faulthandler speaks of the thread that watches here."""
    return f'{os.path.join("script", "progress.py")}", line' in dump


def _start() -> None:
    global _process  # noqa: PLW0603 - one thread per process
    if _process != os.getpid():
        _process = os.getpid()
        import threading

        threading.Thread(target=_watch, name="distboot-progress", daemon=True).start()


def _watch() -> None:
    before: dict[str, int] = {}
    while True:
        time.sleep(_INTERVAL)
        found = counts()
        if found != before:
            before = found
            lines = (
                f"{name.split()[0] if name.split() else '-'} {count}"
                for name, count in found.items()
            )
            crash_hooks.emit(KIND, "\n".join(lines))


class Movement:
    """Of one rank. All times are those of `time.monotonic`."""

    def __init__(self, pid: int, after: float, now: float) -> None:
        # Of collective operations, by the name of the process group
        self.counts: dict[str, int] = {}
        self.keys = 0  # how often it has begun or ended to wait at `barrier()` and the like
        # The seconds without movement after which it has stalled; that is said again after twice as many.
        self._pid, self._after = pid, after or float("inf")
        self._numbers: tuple[int, ...] = (0, 0)
        # Seconds of a processor, of all threads and of the main thread
        self._used = {"": 0.0, f"/task/{pid}": 0.0}
        self._looked = self.used_at = now  # when a thread of it has used a processor last
        self._move(now)

    def take(self, text: str, now: float) -> None:
        """What the script has said: a line "name count" for each process group."""
        with suppress(ValueError):
            counts = [line.split(" ") for line in text.splitlines()[:MOST_GROUPS]]
            self.counts = {
                name[:_LONGEST_NAME]: min(int(count), _LARGEST) for name, count in counts
            }
            self._move(now)

    def pass_key(self, now: float) -> None:
        """It begins to wait for other ranks at `barrier()`, say, or does not wait there any more."""
        self.keys += 1
        self._move(now)

    def stalled(self, numbers: tuple[int, ...], now: float) -> bool:
        """Whether it is time to say that it has stalled; `numbers` are what else it counts. Asked once a second."""
        uses, of_main = (self._uses(threads, now) for threads in self._used)
        self.used_at = now if uses else self.used_at
        is_moving = numbers != self._numbers if any(numbers) or self.counts else of_main
        self._looked, self._numbers = now, numbers
        if is_moving:
            self._move(now)
        if now < self.since + self._next:
            return False
        self._next *= 2
        return True

    def _move(self, now: float) -> None:
        self.since, self._next = now, self._after  # when it has moved last

    def _uses(self, threads: str, now: float) -> bool:
        """Whether they have used a processor since they were looked at last."""
        used = 0.0
        with suppress(OSError, IndexError, ValueError):  # it has ended
            with open(
                f"/proc/{self._pid}{threads}/stat", encoding="ascii", errors="replace"
            ) as file:
                fields = file.read().rpartition(")")[2].split()
            used = (int(fields[_USER_TIME]) + int(fields[_USER_TIME + 1])) / os.sysconf(
                "SC_CLK_TCK"
            )
        before, self._used[threads] = self._used[threads], used
        return used - before > _BUSY * (now - self._looked)
