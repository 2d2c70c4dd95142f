"""How far a script is: counted by a thread in its process, and judged by its agent.

The two halves are in one file because they are one rule. A rank moves when

- one of its numbers grows: the collective operations that torch counts for each process group
  (those of DistributedDataParallel as well, and also while the script waits in one), its reads of
  `ctx.preempted`, or its calls of `ctx.step()`;
- it has none of these numbers, and its main thread uses a processor. Other threads do not count:
  those of Horovod always use one;
- it begins or ends to wait at `barrier()` and the like. A script may call them only once, so they
  are no number: a rank that has called one can still move by its main thread.

Once its script has ended it does not move any more: MPI waits for the other ranks then, with a processor.

From the first time on that the script trains, the same thread asks whether it trains a model of its
own (`separate_model`).

The Python of an unmodified script loads this file as well, without the rest of the package: it
imports only the standard library, and late.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress

from . import crash_hooks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from .separate_model import SeparateModel

# What is emitted: "name count", a line for each process group; and why this rank trains a model of
# its own, or nothing if that is not so any more
KIND = "progress"
SEPARATE_MODEL = "separate_model"
_MODULE = "torch.distributed.distributed_c10d"
# Frameworks that count no collective operations, whose scripts may train a model on each rank
_OTHER_FRAMEWORKS = ("tensorflow", "jax")
_INTERVAL = 2.0  # seconds between two counts
# In one report; ranks are compared by these. An operation of another group leads to a report as well, by
# which its rank moves
MOST_GROUPS = 32
_LONGEST_NAME = 60
_LARGEST = (1 << 63) - 1
_BUSY = 0.02  # of a processor: threads that only wait use less
# proc_pid_stat(5): the index of utime, counted from the state; stime is the next one
_USER_TIME = 11

_is_of_wrapper = __name__.startswith("_")
_process = 0  # which has the thread; a fork is not the rank
_reported: dict[str, int] = {}


def install() -> None:
    """Report how far this process is every other second, if that has changed."""
    is_installed = f"_{__name__}" in sys.modules  # by the `sitecustomize` of the wrapper
    if is_installed:
        return
    crash_hooks.when_imported(_MODULE, _start)  # before that there is nothing to count
    if _is_of_wrapper:
        for framework in _OTHER_FRAMEWORKS:
            crash_hooks.when_imported(framework, _start)


def counts(groups: Sequence[Any]) -> dict[str, int]:
    """The collective operations that have begun, by process group; ranks have the same names."""
    world = _world()
    found = {}
    for group in groups:
        # A backend that does not count, or a group that is being destroyed
        with suppress(Exception):
            count = group._get_sequence_number_for_group()  # noqa: SLF001 - there is no public one
            found[str(world.pg_names[group])[:_LONGEST_NAME]] = int(count)
    return found


def _world() -> Any:
    """All process groups of torch; None: it was not imported."""
    return getattr(sys.modules.get(_MODULE), "_world", None)


def _groups() -> list[Any]:
    """The process groups that this rank is in."""
    return list(getattr(_world(), "pg_map", ()))


def _shared_groups() -> list[Any]:
    """Those of several ranks: one rank alone shares nothing."""
    return [group for group in _groups() if group.size() > 1]


def is_our_thread(dump: str) -> bool:
    """Whether this dump of faulthandler shows the thread that counts."""
    return f'{os.path.join("script", "progress.py")}", line' in dump


def _start() -> None:
    global _process  # noqa: PLW0603 - one thread per process
    if _process == os.getpid():
        return
    _process = os.getpid()
    crash_hooks.before_end = _report
    import threading

    threading.Thread(target=_watch, name="distboot-progress", daemon=True).start()


def _watch() -> None:
    # What fails here, as no file can be opened, must not end the counts
    with suppress(Exception):
        _watch_for_separate_model()
    while True:
        time.sleep(_INTERVAL)
        _report()


def _watch_for_separate_model() -> None:
    time.sleep(_INTERVAL)  # a script that has just begun does not train yet
    _report()
    from .training import trains  # here and below, in the thread: the script does not wait for it

    while not trains():
        time.sleep(_INTERVAL)
        _report()
    from .separate_model import SeparateModel

    model = SeparateModel(counts(_shared_groups()), time.monotonic())
    while not model.is_over:
        time.sleep(_INTERVAL)
        _report()
        with suppress(Exception):  # a group that is being destroyed
            _look_at(model)


def _look_at(model: SeparateModel) -> None:
    """Report whether the script trains a model of its own, if that has changed."""
    from . import training

    stacks = training.stacks()
    stack = training.training_stack(stacks)
    groups = _shared_groups()
    reason = model.look(
        counts(groups),
        time.monotonic(),
        stack=stack,
        trains=bool(stack) or training.has_gradient_of_jax() or training.is_in_compiled(stacks),
        groups=len(groups),
    )
    if reason is not None:
        crash_hooks.emit(SEPARATE_MODEL, reason)


def _report() -> None:
    """Report the numbers, if any has changed."""
    global _reported  # noqa: PLW0603 - one process
    found = counts(_groups())
    if found != _reported:
        _reported = found
        lines = [_line(name, found[name]) for name in found]
        crash_hooks.emit(KIND, "\n".join(lines[:MOST_GROUPS]))


def _line(group: str, count: int) -> str:
    first = [*group.split(), "-"][0]
    return f"{first} {count}"


class Movement:
    """When one rank has moved. All times are those of `time.monotonic`."""

    def __init__(self, pid: int, after: float, now: float) -> None:
        # Collective operations by the name of the process group
        self.counts: dict[str, int] = {}
        # How often it has begun or ended to wait at `barrier()` and the like
        self.keys = 0
        self.since = now  # when it moved last
        self.used_at = now  # when a thread of it used a processor last
        self._pid = pid
        self._after = after or float("inf")  # seconds without movement until it has stalled
        self._next = self._after  # the same, doubled each time that it is reported
        self._is_leaving = False  # whether its script has ended, and the process has not
        self._numbers: tuple[int, ...] = (0, 0)
        # Seconds of a processor
        self._used_by_all = 0.0
        self._used_by_main = 0.0
        self._read_at = now  # when these were read

    def take(self, text: str, now: float) -> None:
        """Note what the script has reported: a line "name count" for each process group."""
        counts = {}
        try:
            for line in text.splitlines()[:MOST_GROUPS]:
                name, count = line.split(" ")
                counts[name[:_LONGEST_NAME]] = min(int(count), _LARGEST)
        except ValueError:
            return
        self.counts = counts
        self._move(now)

    def pass_key(self, now: float) -> None:
        """Note that it begins or ends to wait for other ranks, at `barrier()` for example."""
        self.keys += 1
        self._move(now)

    def leave(self, now: float) -> None:
        """Note that its script has ended, and the process is about to."""
        self._move(now)
        self._is_leaving = True

    def stalled(self, numbers: tuple[int, ...], now: float) -> bool:
        """Whether to report that it has stalled; asked once a second.

        `numbers` are its other numbers: reads of `ctx.preempted` and steps.
        """
        main_is_busy = self._read_processor_time(now)
        if self._is_leaving:
            is_moving = False
        elif any(numbers) or self.counts:
            is_moving = numbers != self._numbers
        else:
            is_moving = main_is_busy
        self._numbers = numbers
        if is_moving:
            self._move(now)
        if now < self.since + self._next:
            return False
        self._next *= 2
        return True

    def skip(self, seconds: float) -> None:
        """Leave out a time in which this process was stopped, most likely."""
        self.since += seconds
        self.used_at += seconds
        self._read_at += seconds

    def _move(self, now: float) -> None:
        self.since = now
        self._next = self._after

    def _read_processor_time(self, now: float) -> bool:
        """Whether the main thread has used a processor since the last call; notes it for all."""
        least = _BUSY * (now - self._read_at)
        used_by_all = _processor_seconds(f"{self._pid}")
        used_by_main = _processor_seconds(f"{self._pid}/task/{self._pid}")
        if used_by_all - self._used_by_all > least:
            self.used_at = now
        main_is_busy = used_by_main - self._used_by_main > least
        self._used_by_all = used_by_all
        self._used_by_main = used_by_main
        self._read_at = now
        return main_is_busy


def _processor_seconds(process: str) -> float:
    """What a process or thread has used; 0 if it has ended."""
    from ..base.process import proc_stat  # here, as only the agent asks

    fields = proc_stat(process)
    with suppress(IndexError, ValueError):
        ticks = int(fields[_USER_TIME]) + int(fields[_USER_TIME + 1])
        return ticks / os.sysconf("SC_CLK_TCK")
    return 0.0
