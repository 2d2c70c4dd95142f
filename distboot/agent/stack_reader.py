"""How an agent reads the Python stacks of a process.

faulthandler writes them: the hooks have registered it for a signal (`script/crash_hooks`), and it
answers also while C code holds Python's lock. The signal may cut a `sleep` in C short, so it is sent
only when a rank is late, or a user asks.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ..job.stacks import THREADS, Stacks, frame, from_dump, parts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .loop import EventLoop
    from .monitored_process import HookReader, Process

SIGNAL = signal.SIGURG  # which is ignored where nothing is registered for it
_LIMIT = 1.0  # seconds for the process to write
_QUIET = 0.05  # seconds without more, and it has written all
_MOST_DUMPED = 100  # threads that faulthandler writes, the newest ones
_TOO_MANY = "in a process of more than 100 threads, which faulthandler does not show"
_NOWHERE = "at a place where it has no Python stack to show"
_TOO_LONG = "at an unknown place (its stacks are too long to be read in time)"
_MOST = 1 << 22  # bytes of a source
_STATES = {
    "D": "in the kernel, where no signal reaches it",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
}
# A collective operation of mpi4py has no frame of its own: the line of the script that calls it shows it.
_MPI_CALL = re.compile(
    r"\.(Barrier|[Ii]?(?:[Aa]ll)?(?:[Rr]educe|[Gg]ather|[Tt]oall)v?|[Bb]cast|[Ss]catterv?|[Rr]ecv|Wait(?:all)?)\("
)


class StackReader:
    """Of one process."""

    def __init__(self, process: Process, hooks: HookReader, loop: EventLoop) -> None:
        self._process, self._hooks, self._loop = process, hooks, loop
        self._replies: list[Callable[[Stacks], object]] = []
        self._until, self._seen = 0.0, -1

    def read(self, reply: Callable[[Stacks], object], now: float) -> None:
        """Call `reply` with its stacks, within seconds."""
        self._replies.append(reply)
        if len(self._replies) == 1:
            self._begin_signal(now)

    def _reply(self, stacks: Stacks) -> None:
        replies, self._replies = self._replies, []
        for reply in replies:
            reply(stacks)

    def _begin_signal(self, now: float) -> None:
        if not self._catches():
            self._reply(Stacks(state=self._state()))
            return
        self._until, self._seen = now + _LIMIT, -1
        self._hooks.expect_stacks()
        self._process.send(SIGNAL)
        self._loop.call_at(now + _QUIET, self._look)

    def _look(self) -> None:
        now, dump = time.monotonic(), self._hooks.stacks()
        found, before, self._seen = from_dump(dump), self._seen, len(dump)
        if (found is None or len(dump) != before) and now < self._until:
            self._loop.call_at(now + _QUIET, self._look)
            return
        self._hooks.forget_stacks()
        self._reply(self._with_mpi(found or Stacks(state=self._state(_why_unread(dump)))))

    def _catches(self) -> bool:
        """Whether something is registered for the signal, and nothing keeps the process from running it."""
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", self._process.read("status"), re.MULTILINE)
        return (
            caught is not None
            and bool(int(caught[1], 16) >> (SIGNAL - 1) & 1)
            and self._process.state not in "Tt"
        )

    def _state(self, otherwise: str = _NOWHERE) -> str:
        """What the kernel says of it: that it cannot go on, or this."""
        state, place = (
            _STATES.get(self._process.state, otherwise),
            self._process.read("wchan").strip(),
        )
        return f"{state} ({place})" if state and place not in ("", "0") else state

    def _with_mpi(self, stacks: Stacks) -> Stacks:
        """The same, with a frame for what mpi4py is called with."""
        _, file, line = parts(stacks.main[0]) if stacks.main else ("", "", "")
        # A stack may name a pipe, or a device without an end.
        if stacks.state or not os.path.isfile(file) or "mpi4py" not in self._process.read("maps"):
            return stacks
        called = None
        with suppress(OSError, ValueError, IndexError), open(file, "rb") as source:
            code = source.read(_MOST).decode(errors="replace")
            called = _MPI_CALL.search(code.splitlines()[int(line) - 1])
        return (
            stacks
            if called is None
            else replace(stacks, main=(frame(called[1], "mpi4py", 0), *stacks.main))
        )


def _why_unread(dump: str) -> str:
    """Why there is no main thread in what faulthandler has written."""
    if not dump:
        return _NOWHERE
    # The main thread is the oldest, and written last.
    return _TOO_MANY if len(THREADS.findall(dump)) >= _MOST_DUMPED else _TOO_LONG
