"""How an agent reads the Python stacks of a process.

faulthandler writes them: the hooks have registered it for a signal (`script/crash_hooks`), with a
pipe of its own, and it answers also while C code holds Python's lock. The signal may cut a `sleep` in C short, so it is
sent only when a rank is late, or a user asks.

If the main thread waits for a worker, of a data loader for example, the workers are asked next, one
after the other, as they write to the same pipe: the first that does not wait for work is the one.
Those that were forked answer; others are asked only whether they are stopped.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ..base.dataclass import replace
from ..base.errors import DistbootError
from ..base.patterns import pattern
from ..base.process import Process, children_of
from ..base.threads import start_without_signals
from ..job.stacks import (
    AT_ITS_END,
    LONGEST_FRAME,
    Stacks,
    frame,
    from_dump,
    has_called,
    is_users_own,
    parts,
    where,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .hook_reader import HookReader
    from .loop import EventLoop

SIGNAL = signal.SIGURG  # which is ignored where nothing is registered for it
_LIMIT = 1.0  # seconds for the process to write
_QUIET = 0.05  # seconds without more, and it has written all
_LARGE_PIPE = 1 << 20  # bytes in a pipe: as many as any user may have, pipe(7)
_MOST_DUMPED = 1 << 21  # bytes of a dump
_MOST_WORKERS = 64  # that are asked
_NOWHERE = "at a place that shows no Python stack"
_TOO_LONG = "at an unknown place (its stacks are too long to be read in time)"
_MOST = 1 << 22  # bytes of a source
_STATES = {
    "D": "in the kernel, where no signal reaches it",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
}
# Where a process waits for a worker that it has started
_WAITS_FOR_WORKER = pattern(r"/(multiprocessing|concurrent/futures|torch/utils/data)/")
# Where a loop of the user's own in a worker waits for work
_WAITS_FOR_WORK = pattern(r"/multiprocessing/(queues|connection|synchronize|managers)\.py:")
# What calls the function of a worker; further out, a fork has the stack of what has started it
_CALLS_FUNCTION = pattern(r"_bootstrap \(.*/multiprocessing/process\.py:\d+\)")
# mpi4py has no frame of its own: the line of the script that calls it shows the collective
# operation.
_MPI_CALL = pattern(
    r"\.(Barrier"
    r"|[Ii]?(?:[Aa]ll)?(?:[Rr]educe|[Gg]ather|[Tt]oall)v?"
    r"|[Bb]cast|[Ss]catterv?|[Rr]ecv|Wait(?:all)?)\("
)


class StackReader:
    """Reads the stacks of one process: that of a rank, or the Python below it that trains."""

    def __init__(self, process: Process, hooks: HookReader, loop: EventLoop) -> None:
        self.process = process  # another one from the next time on
        self._process = process  # which is asked
        self._nowhere = _NOWHERE  # where it is without a stack
        self._hooks = hooks
        self._loop = loop
        self._take: Callable[[Stacks, float], None] = self._take_own  # its stacks
        self._found = Stacks()  # of `process`, while its workers are asked
        self._workers: list[int] = []  # that are still to be asked
        self._workers_until = 0.0
        self._replies: list[Callable[[Stacks], object]] = []
        self._until = 0.0  # when the process has to have written them
        self._seen = -1  # characters that it had written at the last poll
        self._pipe = -1
        self._dump = b""

    def leave(self) -> None:
        """The script has ended: soon Python shows no stack any more."""
        self._nowhere = AT_ITS_END

    def read(self, reply: Callable[[Stacks], object], now: float) -> None:
        """Call `reply` with the stacks, within seconds."""
        self._replies.append(reply)
        if len(self._replies) > 1:  # they are being read
            return
        self._ask(self.process, self._take_own, now)

    def _reply(self, stacks: Stacks) -> None:
        replies = self._replies
        self._replies = []
        for reply in replies:
            reply(stacks)

    # One process

    def _ask(self, process: Process, take: Callable[[Stacks, float], None], now: float) -> None:
        self._process = process
        self._take = take
        pipe = None
        if self._catches():
            pipe = self._opened_pipe()
        if pipe is None:
            take(Stacks(state=self._state(self._nowhere)), now)
            return
        self._pipe = pipe
        self._read_pipe()  # what was not asked for, or came too late
        self._dump = b""
        self._until = now + _LIMIT
        self._seen = -1
        process.send(SIGNAL)
        self._loop.call_at(now + _QUIET, self._poll)

    def _opened_pipe(self) -> int | None:
        """The pipe into which a process shows its stack; a fork has that of the rank."""
        path = self._path_of_pipe()
        if not path:
            return None
        with suppress(OSError):
            pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            # faulthandler does not wait until it has room; only up to a limit
            with suppress(OSError):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _LARGE_PIPE)
            return pipe
        return None

    def _path_of_pipe(self) -> str:
        """Empty: it has none, or has closed it; so it is not the rank, nor a fork of it."""
        file, inode = self._hooks.stack_pipes.get(self.process.pid, ("", 0))
        path = f"/proc/{self._process.pid}/fd/{file}"
        with suppress(OSError):
            if file and os.stat(path).st_ino == inode:
                return path
        return ""

    def _read_pipe(self) -> None:
        with suppress(OSError):
            while data := os.read(self._pipe, _LARGE_PIPE):
                self._dump = (self._dump + data)[:_MOST_DUMPED]

    def _poll(self) -> None:
        """Take its stack once it has written that, and nothing more since."""
        now = time.monotonic()
        self._read_pipe()
        dump = self._hooks.clean(self._dump)
        found = from_dump(dump)
        is_complete = found is not None and len(dump) == self._seen
        self._seen = len(dump)
        if not is_complete and now < self._until:
            self._loop.call_at(now + _QUIET, self._poll)
            return
        os.close(self._pipe)
        if found is None:
            otherwise = self._nowhere
            if dump:
                otherwise = _TOO_LONG
            found = Stacks(state=self._state(otherwise))
        self._take(found, now)

    def _take_own(self, stacks: Stacks, now: float) -> None:
        if has_called(stacks, _WAITS_FOR_WORKER):
            self._found = stacks
            self._workers = children_of(self._process.pid)[:_MOST_WORKERS]
            self._workers_until = now + _LIMIT
            self._ask_next_worker(now)
        elif self._may_wait_in_mpi(stacks):
            self._reply_with_mpi(stacks)
        else:
            self._reply(stacks)

    # Its workers

    def _ask_next_worker(self, now: float) -> None:
        if not self._workers or now >= self._workers_until:
            self._reply(self._found)
            return
        worker = Process(self._workers.pop(0))
        self._ask(worker, self._take_worker, now)

    def _take_worker(self, stacks: Stacks, now: float) -> None:
        is_held = self._process.state in _STATES and self._path_of_pipe() != ""
        self._process.close()
        found = None
        if is_held or not stacks.state:
            found = _with_worker(self._found, stacks)
        if found is None:
            self._ask_next_worker(now)
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

    def _state(self, otherwise: str) -> str:
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


def _with_worker(stacks: Stacks, worker: Stacks) -> Stacks | None:
    """The stacks of a process that waits for this worker; None: the worker waits for work."""
    place = worker.state or _work(worker)
    if not place:
        return None
    shown = f"its worker {place}"
    return replace(stacks, worker=shown[:LONGEST_FRAME])


def _work(worker: Stacks) -> str:
    """Where the user's own code is in a worker; empty: it waits for work, or is no worker."""
    called = []
    for one in worker.main:
        called.append(one)
        if _CALLS_FUNCTION.fullmatch(one):
            break
    else:
        return ""
    stack = Stacks(tuple(called))
    if not any(map(is_users_own, called)) or has_called(stack, _WAITS_FOR_WORK):
        return ""
    return where(stack)
