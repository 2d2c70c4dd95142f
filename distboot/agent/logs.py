"""The output of the wrapper's child, for `--log-prefix` and `--log-dir`: each line with its rank, a file for each rank.

The child writes to two pipes, and one thread passes on what comes out of them, to the file and to where it would have
gone without us. A reader of ours that stops reading blocks the child, as it would have, and nothing else; one that goes
away takes the child's pipe with it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import sys
import termios
import time
from collections.abc import Callable
from math import inf

from ..errors import DistbootError
from ..process import start_without_signals
from ..text import escape_control, log_line, short_repr

_HOLD = 0.1  # seconds for the rest of a line to come; then it is passed on as it is, as a prompt has to be
_PIECE = 4096  # bytes; a pipe that is ready takes so many at once, and in one piece: pipe(7)
_MOST = 1 << 16  # bytes read at once
# Once the child has ended:
_LINGER = 1.0  # seconds for the output of what it has started, and left behind
_PATIENCE = 30.0  # seconds for which a reader of ours may take nothing
_HURRY = 0.5  # the same when we were asked to end

# Where a line begins. Also after \r, as a progress bar overwrites what is before it; but \r\n is one end of a line.
_BEGINS = re.compile(rb"\n(?=[^\r])|\r+(?=[^\r\n])")


class Logs:
    """Where the output of a rank goes.

    Args:
        rank: whose output it is.
        who: this process, as `Placement.who`.
        prefix: whether each line says its rank and host; not in the file.
        folder: for the file; None: there is none.

    Attributes:
        stdout: a file descriptor for the child; None: it inherits ours.
        stderr: the same.
        is_done: whether everything has been passed on.

    Raises:
        DistbootError: `output-failed`; the file cannot be written.
    """

    def __init__(self, rank: int, who: str | None, *, prefix: bool, folder: str | None) -> None:
        self.is_done = False
        begin = f"[rank {rank} {escape_control(os.uname().nodename)}] " if prefix else ""
        file = None if folder is None else _File(os.path.join(folder, f"rank-{rank}.log"), rank, who)
        self._woken, self._wake = os.pipe()
        self._streams: list[_Stream] = []

        def piped(name: str, console: int | None) -> int | None:
            if console is None and file is None:
                return None
            stream = _Stream(name, console, begin.encode(), file, who)
            self._streams.append(stream)
            return stream.theirs

        # None: it was closed before we started, and its number may be another file's now.
        self.stdout = piped("standard output", None if sys.__stdout__ is None else sys.__stdout__.fileno())
        self.stderr = piped("standard error", None if sys.__stderr__ is None else sys.__stderr__.fileno())

    def start(self, done: Callable[[], None]) -> None:
        """The child runs; `done` is called, in another thread, when `is_done` comes true."""
        for stream in self._streams:
            os.close(stream.theirs)  # or there would be no end to read

        def work() -> None:
            try:
                self._pass_on()
            finally:
                self.is_done = True
                done()

        start_without_signals("distboot-logs", work)

    def ended(self) -> None:
        """The child has ended: pass on what it has left, and do not wait long for more."""
        os.write(self._wake, b"e")

    def hurry(self) -> None:
        """We were asked to end: do not wait for anything."""
        os.write(self._wake, b"h")

    def _pass_on(self) -> None:
        while streams := [stream for stream in self._streams if not stream.is_over]:
            poll = select.poll()
            poll.register(self._woken, select.POLLIN)
            for stream in streams:
                poll.register(*stream.event)
            due = min(stream.due for stream in streams)
            limit = None if due == inf else max(due - time.monotonic(), 0.0) * 1000 + 1
            ready = {file for file, _ in poll.poll(limit)}
            now = time.monotonic()
            told = os.read(self._woken, _PIECE) if self._woken in ready else b""
            for stream in streams:
                if told:
                    stream.end(now, hurry=b"h" in told)
                if stream.event[0] in ready:
                    stream.go_on(now)
                elif now >= stream.due:
                    stream.late()


class _File:
    """What a rank prints, both streams together."""

    def __init__(self, path: str, rank: int, who: str | None) -> None:
        self._path, self._who = path, who
        self._last: object = None  # who has written last, if that was no whole line
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        header = f"distboot: rank {rank} on {escape_control(os.uname().nodename)}, started at {at}\n"
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            # Not from its beginning: a second attempt of the job must not hide why the first one failed.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            # Of a pipe without a reader this is an error; without O_NONBLOCK it would wait for one.
            self._file: int | None = os.open(path, flags | os.O_NONBLOCK, 0o666)
            os.set_blocking(self._file, True)
            again = os.fstat(self._file).st_size > 0
            os.write(self._file, ("\n" * again + header).encode())
        except OSError as error:
            raise DistbootError(
                "output-failed",
                f"the log file {short_repr(path)} cannot be written: {error.strerror}",
                "let --log-dir name a folder that this host can write to",
            ) from None

    def write(self, data: bytes, writer: object) -> None:
        """Append; a line of one stream does not go on in one of the other."""
        if self._last not in (None, writer):
            data = b"\n" + data
        self._last = None if data.endswith(b"\n") else writer
        try:
            while data and self._file is not None:
                data = data[os.write(self._file, data) :]
        except OSError as error:  # the disk is full, say: not worth the job
            self._file = None
            log_line(self._who, f"warning: nothing more is written to {short_repr(self._path)}: {error.strerror}")


class _Stream:
    """One of the child's two streams, on its way to ours and to the file: what is read is written before more is read.

    Attributes:
        theirs: the end that the child writes to.
    """

    def __init__(self, name: str, console: int | None, begin: bytes, file: _File | None, who: str | None) -> None:
        self._name, self._console, self._begin, self._file, self._who = name, console, begin, file, who
        pipe, self.theirs = os.pipe()
        self._pipe: int | None = pipe  # until the child, or our reader, has closed its end
        self._held, self._held_since = b"", 0.0  # of a line whose end has not come
        self._last = b"\n"  # the last byte that was passed on
        self._out, self._at = b"", 0  # for the console, and how much of it has been written
        self._moved = 0.0  # when something was read or written
        self._ended = inf  # when the child was seen to have
        self._owed = 0  # bytes that it has left in the pipe
        self._patience, self._linger = _PATIENCE, _LINGER

    @property
    def is_over(self) -> bool:
        return self._pipe is None and not self._out

    @property
    def event(self) -> tuple[int, int]:
        """What is waited for, as `poll` wants to know it."""
        if self._out:
            assert self._console is not None
            return self._console, select.POLLOUT
        assert self._pipe is not None
        return self._pipe, select.POLLIN

    @property
    def due(self) -> float:
        """Until when."""
        if self._out:
            return max(self._moved, self._ended) + self._patience
        if self._held:
            return self._held_since + _HOLD
        return inf if self._owed > 0 else self._ended + self._linger

    def go_on(self, now: float) -> None:
        """It has come."""
        self._moved = now
        if self._out:
            self._write()
        else:
            self._read(now)

    def late(self) -> None:
        """It has not come in time."""
        if self._out:
            rest = "is lost" if self._file is None else "is in the log file only"
            log_line(self._who, f"warning: {self._name} is not read: the end of the command's output {rest}")
            self._console, self._out = None, b""
        elif self._held:
            self._flush()
        else:
            self._close()

    def end(self, now: float, *, hurry: bool) -> None:
        """The child has ended. What it has written is in the pipe by now."""
        if self._ended == inf:
            self._ended = now
            if self._pipe is not None:
                left = fcntl.ioctl(self._pipe, termios.FIONREAD, bytes(4))
                self._owed = int.from_bytes(left, sys.byteorder)
        if hurry:
            self._patience, self._linger = _HURRY, 0.0

    def _read(self, now: float) -> None:
        assert self._pipe is not None
        data = os.read(self._pipe, _MOST)
        self._owed -= len(data)
        block = self._held + data
        whole = block.rfind(b"\n") + 1
        if whole or not self._held:
            self._held_since = now
        self._pass_on(block[:whole])
        self._held = block[whole:]
        if len(self._held) >= _PIECE or now >= self._held_since + _HOLD:
            self._flush()
        if not data or (self._owed <= 0 and now >= self._ended + self._linger):
            self._close()

    def _flush(self) -> None:
        held, self._held = self._held, b""
        self._pass_on(held)

    def _pass_on(self, data: bytes) -> None:
        if not data:
            return
        if self._file is not None:
            self._file.write(data, self)
        if self._console is not None:
            data = self._last + data  # which says whether a line begins
            if self._begin:
                data = _BEGINS.sub(lambda match: match[0] + self._begin, data)
            self._out += data[1:]
            self._last = data[-1:]

    def _write(self) -> None:
        assert self._console is not None
        end = self._at + _PIECE
        if end < len(self._out):  # whole lines, as other ranks may write there, too
            end = self._out.rfind(b"\n", self._at, end) + 1 or end
        try:
            self._at += os.write(self._console, self._out[self._at : end])
        except BlockingIOError:  # another process has made it so, and was quicker
            return
        except OSError as error:
            if error.errno != errno.EPIPE:
                log_line(self._who, f"warning: {self._name} cannot be written to: {error.strerror}")
            self._console, self._out = None, b""
            self._close()  # and the child finds the same as we did
            return
        if self._at == len(self._out):
            self._out, self._at = b"", 0

    def _close(self) -> None:
        self._flush()
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
