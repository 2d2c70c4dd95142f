"""The agent's end of the pipe into which the crash hooks of a script write.

Two writers share it. The hooks (`script/crash_hooks`) write *events*: a kind, the id of the
process, a text, between zero bytes. faulthandler writes plain text there: about a crash (it begins
with "Fatal Python error"), and the stack of the main thread when SIGTERM arrives. So what is left in
the buffer without the events is a dump of faulthandler.

Nothing waits for this pipe: it does not block, its writers drop what does not fit, and the buffer
is bounded. The secret of the job is removed from every text before it goes on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ..base.patterns import pattern
from ..base.text import without_secret
from ..job.exit_status import FATAL
from ..job.stacks import ONE_THREAD
from ..script.crash_hooks import EXCEPTION, STACKS
from ..script.progress import is_our_thread

_EVENT = pattern(rb"\0(\w{1,20}) (\d{1,10})\n([^\0]*)\0")
_BEGINNING = f"\0{EXCEPTION} ".encode()  # of the event that tells of one
_LONGEST = 3500  # characters of a text
_PIPE_OF_STACKS = pattern(r"([0-9]{1,9}) ([0-9]{1,18})")
_MOST_PROCESSES = 256  # that have told of their pipe
_MOST_KEPT = 16384  # bytes: what faulthandler writes of many threads
_ONE_THREAD = ONE_THREAD.encode()
# Where each thread begins in the dump of a crash, and how one begins that is not the current one
_THREADS = pattern(r"^(?=Thread 0x|Current thread 0x)", re.MULTILINE)
_ANOTHER = "Thread"


class HookReader:
    """Reads a pipe, which stays the caller's, without waiting."""

    def __init__(self, pipe: int, secret: str = "") -> None:
        os.set_blocking(pipe, False)
        self.pipe = pipe
        self.ended = False
        # Where SIGURG shows the stack of a process, by its id: a pipe of its own, and the inode
        self.stack_pipes: dict[int, tuple[str, int]] = {}
        # Whether a dump that has arrived is older than an exception among the events
        self.dump_is_first = False
        self._secret = secret
        self._buffer = b""

    def read(self) -> list[tuple[str, int, str]]:
        """The complete events that have arrived: kind, process, text."""
        self.dump_is_first = False
        found = []
        for data in self._arrived():
            self._buffer += data
            found += self._take_events()  # now: what is kept of the rest is limited
            self._buffer = self._buffer[:_MOST_KEPT]
        return found + self._take_events()

    def _take_events(self) -> list[tuple[str, int, str]]:
        start = self._buffer.find(_BEGINNING)
        before = self._buffer[: max(start, 0)]
        self.dump_is_first |= _ONE_THREAD in before
        events = _EVENT.findall(self._buffer)
        self._buffer = _EVENT.sub(b"", self._buffer)
        found = []
        for kind, pid, data in events:
            text = self.clean(data)
            if kind == STACKS.encode():
                self._note_stack_pipe(int(pid), text)
                continue
            found.append((kind.decode(), int(pid), text[-_LONGEST:]))
        return found

    def _note_stack_pipe(self, pid: int, text: str) -> None:
        numbers = _PIPE_OF_STACKS.fullmatch(text)
        if numbers is None:
            return
        if len(self.stack_pipes) == _MOST_PROCESSES:
            oldest = next(iter(self.stack_pipes))
            del self.stack_pipes[oldest]
        self.stack_pipes[pid] = (numbers[1], int(numbers[2]))

    def take_dump(self) -> bool:
        """Whether faulthandler has shown what the process did when SIGTERM arrived; True once."""
        dump, *crash = self._buffer.partition(FATAL.encode())
        self._buffer = b"".join(crash)
        return _ONE_THREAD in dump

    def crash(self) -> str:
        """What faulthandler has written about a crash, the thread that crashed first; or empty."""
        if not self._buffer.startswith(FATAL.encode()):
            return ""
        dump, _, _ = self.clean(self._buffer).partition("Extension modules")
        first, *threads = _THREADS.split(dump)
        own = [thread for thread in threads if not is_our_thread(thread)]
        own.sort(key=lambda thread: thread.startswith(_ANOTHER))
        text = first + "".join(own)
        lines = text[:_LONGEST].splitlines()
        return "\n".join(filter(None, lines))

    def clean(self, data: bytes) -> str:
        text = data.decode(errors="replace")
        return without_secret(text, self._secret)

    def _arrived(self) -> Iterator[bytes]:
        """What the pipe has now, piece by piece."""
        try:
            while data := os.read(self.pipe, 65536):
                yield data
        except BlockingIOError:
            return
        except OSError:  # the same as its end
            pass
        self.ended = True
