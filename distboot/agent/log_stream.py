"""`LogStream`: one of the two streams of a rank, on its way to our own stream and to a log file.

A thread of its own reads a piece from the pipe of the child, and then writes it; nothing is read
before that. So a reader of ours that stops reading blocks the child, as it would have without us.
A line is passed on once it is whole. What has no newline waits for a moment, as a prompt has none,
and is then passed on as it is.

Once the child has ended, what it has left in the pipe is still passed on, and what other processes
write that it has left behind, for a short time. Then the stream is over.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf

from ..base import text
from ..base.text import log_line
from .log_lines import PlainLines, PrefixedLines

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

    from .log_file import LogFile

# Seconds for the rest of a line to arrive; then it is passed on as it is, as a prompt has to be
_HOLD = 0.1
_PIECE = 4096  # bytes; a pipe that is ready takes so many at once, and in one piece: pipe(7)
_MOST = 1 << 16  # bytes read at once
# Once the child has ended:
_LINGER = 1.0  # seconds for the output of what it has started, and left behind
_READER_TIMEOUT = 30.0  # seconds for which a reader of ours may take nothing
_HURRIED_READER_TIMEOUT = 0.5  # the same when we were asked to end
_ENDED = b"e"  # what wakes a stream: the child has ended
_HURRY = b"h"  # the same, and nothing is to be waited for
_STDERR = 2


class LogStream:
    """One stream of a child; `theirs` is the end of the pipe for it. All times are monotonic."""

    def __init__(
        self,
        name: str,
        console: int | None,
        prefix: bytes,
        file: LogFile | None,
        who: str | None,
    ) -> None:
        self._ours = _OwnStream(name, console, who)
        self._file = file
        self._lines: PlainLines | PrefixedLines = PlainLines()
        if prefix:
            self._lines = PrefixedLines(prefix)
        self._pipe, self.theirs = os.pipe()
        self._woken, self._wake = os.pipe()
        self.is_over = False  # whether everything was passed on
        self._is_passing = False  # whether a piece was read that is not written yet
        self._goes_on = True  # until the child, or our reader, has closed its end
        self._held = b""  # of a line whose end has not arrived
        self._held_since = 0.0
        self._moved = 0.0  # when something was read or written
        self._end = _ChildEnd()

    def wake(self, *, hurry: bool) -> None:
        """The child has ended."""
        how = _ENDED
        if hurry:
            how = _HURRY
        os.write(self._wake, how)

    def work(self, done: Callable[[], None]) -> None:
        """Pass everything on, in a thread of its own."""
        try:
            self._pass_all()
        finally:
            self.is_over = True
            os.close(self._pipe)
            done()

    def has_passed_on(self) -> bool:
        """Whether nothing waits that the child has written by now; asked by another thread."""
        # First: what has been read by then is being passed on
        waiting = _bytes_in(self._pipe)
        waiting += len(self._held)
        waiting += self._is_passing
        return self.is_over or waiting == 0

    def close(self) -> None:
        os.close(self._woken)
        os.close(self._wake)
        if self._file is not None:
            self._file.close()

    def _pass_all(self) -> None:
        while self._goes_on:
            if self._is_ready(self._pipe, select.POLLIN, self._end_of_reading):
                self._read()
            elif self._held:
                self._flush()
            elif self._lines.due <= time.monotonic():
                self._show(self._lines.release(time.monotonic()))
            else:
                break
        self._flush()
        self._show(self._lines.close())

    def _end_of_reading(self) -> float:
        if self._held:
            return self._held_since + _HOLD
        if self._end.owed > 0:
            return self._lines.due
        return min(self._end.lingers_until, self._lines.due)

    def _is_ready(self, file: int, event: int, end: Callable[[], float]) -> bool:
        """Wait for a file until an end, which may change while we wait."""
        poll = select.poll()
        poll.register(file, event)
        poll.register(self._woken, select.POLLIN)
        while True:
            timeout = _milliseconds(end() - time.monotonic())
            ready = {number for number, _ in poll.poll(timeout)}
            now = time.monotonic()
            if self._woken in ready:
                self._child_ended(os.read(self._woken, _PIECE), now)
            if file in ready:
                self._moved = now
                return True
            if now >= end():
                return False

    def _child_ended(self, woken_by: bytes, now: float) -> None:
        """What the child has written is in the pipe by now."""
        if self._end.seen == inf:
            self._end.seen = now
            self._end.owed = _bytes_in(self._pipe)
        if _HURRY in woken_by:
            self._end.reader_timeout = _HURRIED_READER_TIMEOUT
            self._end.linger = 0.0

    def _read(self) -> None:
        self._is_passing = True
        data = os.read(self._pipe, _MOST)
        self._end.owed -= len(data)
        is_last = self._end.owed <= 0 and self._moved >= self._end.lingers_until
        self._goes_on = bool(data) and not is_last
        self._pass_lines(data)
        self._is_passing = False

    def _pass_lines(self, data: bytes) -> None:
        """Pass the whole lines on, and the rest where it is long or late."""
        block = self._held + data
        whole = block.rfind(b"\n") + 1
        if whole or not self._held:
            self._held_since = self._moved
        is_late = self._moved >= self._held_since + _HOLD
        self._held = block[whole:]
        self._pass_on(block[:whole])
        if is_late or len(self._held) >= _PIECE:
            self._flush()

    def _flush(self) -> None:
        held = self._held
        self._held = b""
        self._pass_on(held)

    def _pass_on(self, data: bytes) -> None:
        if not data:
            return
        if self._file is not None:
            self._file.write(data, self._ours.name)
        shown = self._lines.feed(data, time.monotonic())
        self._show(shown)

    def _show(self, data: bytes) -> None:
        while data and self._ours.file is not None:
            if not self._is_ready(self._ours.file, select.POLLOUT, self._end_of_writing):
                self._ours.give_up(is_in_file=self._file is not None)
                return
            try:
                written = self._ours.write(data)
            except BlockingIOError:  # another process has made it so, and was quicker
                continue
            except OSError as error:  # our reader has gone; the child finds the same as we did
                self._ours.lose(error)
                self._goes_on = False
                return
            data = data[written:]

    def _end_of_writing(self) -> float:
        return max(self._moved, self._end.seen) + self._end.reader_timeout


class _ChildEnd:
    """What is known of the end of the child, and how long its stream goes on after it."""

    def __init__(self) -> None:
        self.seen = inf  # when
        self.owed = 0  # bytes that it has left in the pipe
        self.reader_timeout = _READER_TIMEOUT
        self.linger = _LINGER

    @property
    def lingers_until(self) -> float:
        return self.seen + self.linger


class _OwnStream:
    """The stream of this process to which a stream of the child is passed on."""

    def __init__(self, name: str, file: int | None, who: str | None) -> None:
        self.name = name
        self.file = file  # None: it is closed, or its reader has gone
        self._who = who
        # Whether lines of this process go to the same file
        self._is_shared = _is_stderr(file)

    def write(self, data: bytes) -> int:
        """Write a piece; returns how many bytes that were."""
        assert self.file is not None
        piece = data[: _end_of_piece(data)]
        if self._is_shared:
            text.before_output(piece)
        written = os.write(self.file, piece)
        if self._is_shared:
            text.after_output(piece[:written])
        return written

    def give_up(self, *, is_in_file: bool) -> None:
        """The child has ended, and our reader takes nothing."""
        rest = "is lost"
        if is_in_file:
            rest = "is in the log file only"
        what = f"{self.name} is not read: the end of the command's output {rest}"
        log_line(self._who, f"warning: {what}")
        self.file = None

    def lose(self, error: OSError) -> None:
        """Our reader has gone."""
        if error.errno != errno.EPIPE:
            what = f"{self.name} cannot be written to: {error.strerror}"
            log_line(self._who, f"warning: {what}")
        self.file = None


def _end_of_piece(data: bytes) -> int:
    """How much is written at once: whole lines, as other ranks may write there, too."""
    if len(data) <= _PIECE:
        return len(data)
    lines = data.rfind(b"\n", 0, _PIECE) + 1
    return lines or _PIECE


def _milliseconds(seconds: float) -> float | None:
    """For `poll`; None: without an end."""
    if seconds == inf:
        return None
    return max(seconds, 0.0) * 1000 + 1


def _bytes_in(pipe: int) -> int:
    """How much waits in a pipe; nothing, where it is closed."""
    count = bytes(4)
    with suppress(OSError):
        count = fcntl.ioctl(
            pipe,
            termios.FIONREAD,
            count,
        )
    return int.from_bytes(count, sys.byteorder)


def _is_stderr(file: int | None) -> bool:
    if file is not None:
        with suppress(OSError):  # it is closed
            return os.path.sameopenfile(file, _STDERR)
    return False


def file_of(stream: TextIO | None) -> int | None:
    """The descriptor of a stream.

    None: it was closed before this process started, and another file may have its number now.
    """
    if stream is None:
        return None
    return stream.fileno()
