"""How an agent reads the Python stacks of a process.

faulthandler writes them: the hooks have registered it for a signal (`script/crash_hooks`), and it
answers also while C code holds Python's lock. The signal may cut a `sleep` in C short, so it is
sent only when a rank is late, or a user asks.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ..base.errors import DistbootError
from ..base.threads import start_without_signals
from ..job.stacks import THREADS, Stacks, frame, from_dump, parts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..base.process import Process
    from .hook_reader import HookReader
    from .loop import EventLoop

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
# mpi4py has no frame of its own: the line of the script that calls it shows the collective
# operation.
_MPI_CALL = re.compile(
    r"\.(Barrier"
    r"|[Ii]?(?:[Aa]ll)?(?:[Rr]educe|[Gg]ather|[Tt]oall)v?"
    r"|[Bb]cast|[Ss]catterv?|[Rr]ecv|Wait(?:all)?)\("
)


class StackReader:
    """Reads the stacks of one process: that of a rank, or the Python below it that trains."""

    def __init__(self, process: Process, hooks: HookReader, loop: EventLoop) -> None:
        self.process = process  # another one from the next time on
        self._process = process
        self._hooks = hooks
        self._loop = loop
        self._replies: list[Callable[[Stacks], object]] = []
        self._until = 0.0  # when the process has to have written them
        self._seen = -1  # characters that it had written at the last poll

    def read(self, reply: Callable[[Stacks], object], now: float) -> None:
        """Call `reply` with the stacks, within seconds."""
        self._replies.append(reply)
        if len(self._replies) > 1:  # they are being read
            return
        self._process = self.process
        if not self._catches():
            self._reply(Stacks(state=self._state()))
            return
        self._until = now + _LIMIT
        self._seen = -1
        self._hooks.expect_stacks()
        self._process.send(SIGNAL)
        self._loop.call_at(now + _QUIET, self._poll)

    def _reply(self, stacks: Stacks) -> None:
        replies = self._replies
        self._replies = []
        for reply in replies:
            reply(stacks)

    def _poll(self) -> None:
        """Reply once the process has written the main thread, and nothing more since."""
        now = time.monotonic()
        dump = self._hooks.stacks()
        found = from_dump(dump)
        is_complete = found is not None and len(dump) == self._seen
        self._seen = len(dump)
        if not is_complete and now < self._until:
            self._loop.call_at(now + _QUIET, self._poll)
            return
        self._hooks.forget_stacks()
        if found is None:
            found = Stacks(state=self._state(_why_unread(dump)))
        if self._may_wait_in_mpi(found):
            self._reply_with_mpi(found)
        else:
            self._reply(found)

    def _catches(self) -> bool:
        """Whether something is registered for the signal, and the process can run it."""
        status = self._process.read("status")
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
        if caught is None:
            return False
        own_bit = 1 << (SIGNAL - 1)
        if not int(caught[1], 16) & own_bit:
            return False
        return self._process.state not in "Tt"

    def _state(self, otherwise: str = _NOWHERE) -> str:
        """Why the process cannot go on, as the kernel says; `otherwise` if it can."""
        state = _STATES.get(self._process.state, otherwise)
        place = self._process.read("wchan").strip()
        if not state or place in ("", "0"):
            return state
        return f"{state} ({place})"

    def _may_wait_in_mpi(self, stacks: Stacks) -> bool:
        if stacks.state or not stacks.main:
            return False
        return "mpi4py" in self._process.read("maps")

    def _reply_with_mpi(self, stacks: Stacks) -> None:
        """Reply with a frame for the function of mpi4py that the script has called."""
        lines: list[str] = []  # empty until it is read
        _, file, number = parts(stacks.main[0])
        read = partial(_read_line, file, number, lines)
        try:
            start_without_signals("distboot-source", read)
        except DistbootError:  # this user may start no more threads
            self._reply(stacks)
            return
        self._until = time.monotonic() + _LIMIT
        self._poll_line(stacks, lines)

    def _poll_line(self, stacks: Stacks, lines: list[str]) -> None:
        now = time.monotonic()
        if not lines and now < self._until:
            poll = partial(self._poll_line, stacks, lines)
            self._loop.call_at(now + _QUIET, poll)
            return
        called = _MPI_CALL.search("".join(lines))
        if called is not None:
            own = frame(called[1], "mpi4py", 0)
            stacks = replace(stacks, main=(own, *stacks.main))
        self._reply(stacks)


def _read_line(file: str, number: str, lines: list[str]) -> None:
    """Add a line of a source, or an empty one; in a thread, as its file system may not answer."""
    line = ""
    with suppress(OSError, ValueError, IndexError):
        if os.path.isfile(file):  # not a pipe, nor a device without an end
            with open(file, "rb") as source:
                code = source.read(_MOST).decode(errors="replace")
            line = code.splitlines()[int(number) - 1]
    lines.append(line)


def _why_unread(dump: str) -> str:
    """Why the dump of faulthandler does not have the main thread."""
    if not dump:
        return _NOWHERE
    # The main thread is the oldest, and written last.
    if len(THREADS.findall(dump)) >= _MOST_DUMPED:
        return _TOO_MANY
    return _TOO_LONG
