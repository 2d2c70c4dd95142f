"""The agent's end of the pipe into which the crash hooks of a script write.

Two writers share it. The hooks (`script/crash_hooks`) write *events*: a kind, the id of the
process, a text, between zero bytes. faulthandler writes plain text there: about a crash (it begins
with "Fatal Python error"), and the stack of the main thread when a signal arrives. So what is left
in the buffer without the events is a dump of faulthandler.

A dump does not say for which signal it is. The agent knows which processes it has asked for their
stacks, and have not answered: as many dumps are answers, and one more is of SIGTERM.

Nothing waits for this pipe: it does not block, its writers drop what does not fit, and the buffer
is bounded. The secret of the job is removed from every text before it goes on.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import suppress

from ..base.text import without_secret
from ..job.exit_status import FATAL
from ..job.stacks import ONE_THREAD
from ..script.crash_hooks import EXCEPTION
from ..script.progress import is_our_thread

_EVENT = re.compile(rb"\0(\w{1,20}) (\d{1,10})\n([^\0]*)\0")
_BEGINNING = f"\0{EXCEPTION} ".encode()  # of the event that tells of one
_LONGEST = 3500  # characters of a text
_MOST_KEPT = 16384  # bytes: what faulthandler writes of many threads at a crash
_MOST_STACKS = 1 << 21  # bytes: the same while a stack is read
# Bytes in a pipe, pipe(7): as usual; and while stacks are read, as much as any user may have
_PIPE = 1 << 16
_LARGE_PIPE = 1 << 20
_ONE_THREAD = ONE_THREAD.encode()
# Where each thread begins in the dump of a crash, and how one begins that is not the current one
_THREADS = re.compile(r"^(?=Thread 0x|Current thread 0x)", re.MULTILINE)
_ANOTHER = "Thread"


class HookReader:
    """Reads a pipe, which stays the caller's, without waiting."""

    def __init__(self, pipe: int, secret: str = "") -> None:
        os.set_blocking(pipe, False)
        self.pipe = pipe
        self.ended = False
        self.expects_stacks = False
        # Whether a dump that has arrived is older than an exception among the events
        self.dump_is_first = False
        self._secret = secret
        self._buffer = b""
        self._asked: set[int] = set()  # processes that have not shown their stack

    def read(self) -> list[tuple[str, int, str]]:
        """The complete events that have arrived: kind, process, text."""
        self.dump_is_first = False
        found = []
        for data in self._arrived():
            self._buffer += data
            found += self._take_events()  # now: what is kept of the rest is limited
            self._buffer = self._buffer[: self._most]
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
            found.append((kind.decode(), int(pid), text[-_LONGEST:]))
        return found

    def take_dump(self) -> bool:
        """Whether faulthandler has shown what the process did when SIGTERM arrived; True once."""
        dump, *crash = self._buffer.partition(FATAL.encode())
        _, *found = dump.split(_ONE_THREAD)
        answers = len(self._asked)
        left = b""
        if self.expects_stacks:
            for one in found[-answers:]:
                left += _ONE_THREAD + one
        else:
            answered = list(self._asked)[: len(found)]
            self._asked.difference_update(answered)
        self._buffer = b"".join((left, *crash))
        return len(found) > answers

    def stacks(self) -> str:
        """What faulthandler has written so far, while a stack is expected."""
        if not self.ended:
            for data in self._arrived():
                self._buffer = (self._buffer + data)[: self._most]
        return self.clean(self._buffer)

    def expect_stacks(self, pid: int) -> None:
        """Make room for a whole stack: faulthandler does not wait until the pipe has room."""
        self.expects_stacks = True
        self._asked.add(pid)
        self._resize(_LARGE_PIPE)

    def forget_stacks(self) -> None:
        """It has answered; or it does so later, or never."""
        self.expects_stacks = False
        self.take_dump()
        self._resize(_PIPE)

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

    @property
    def _most(self) -> int:
        """Bytes that are kept."""
        if self.expects_stacks:
            return _MOST_STACKS
        return _MOST_KEPT

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

    def _resize(self, size: int) -> None:
        with suppress(OSError, AttributeError):  # only Linux can, up to a limit
            fcntl.fcntl(self.pipe, fcntl.F_SETPIPE_SZ, size)
