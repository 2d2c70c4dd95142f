"""The output of the wrapper's child, for `--log-prefix` and `--log-dir`: each line with its rank, a file for each rank.

The child writes to two pipes, and a thread for each passes on what comes out, to the file and to where it would have
gone without us. A reader of ours that stops reading blocks the child, as it would have, and nothing else; one that goes
away takes the child's pipe with it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import sys
import termios
import threading
import time
from collections.abc import Callable
from functools import partial
from math import inf

from ..base import text
from ..base.errors import DistbootError, too_few_files
from ..base.text import host_name, log_line, short_repr
from ..base.threads import start_without_signals
from .log_lines import PrefixedLines

# Seconds for the rest of a line to come; then it is passed on as it is, as a prompt has to be
_HOLD = 0.1
_PIECE = 4096  # bytes; a pipe that is ready takes so many at once, and in one piece: pipe(7)
_MOST = 1 << 16  # bytes read at once
# Once the child has ended:
_LINGER = 1.0  # seconds for the output of what it has started, and left behind
_PATIENCE = 30.0  # seconds for which a reader of ours may take nothing
_STDERR = 2
_HURRY = 0.5  # the same when we were asked to end


class Logs:
    """Where the output of a rank goes: each line with a prefix, or to a file in a folder, where it has none, or both.

    `stdout` and `stderr` are file descriptors for the child. `output-failed`: no file.
    """

    def __init__(self, rank: int, who: str | None, *, prefix: bool, folder: str | None) -> None:
        begin = f"[rank {rank} {host_name()}] " if prefix else ""
        file = (
            None if folder is None else _File(os.path.join(folder, f"rank-{rank}.log"), rank, who)
        )
        ours = {"standard output": sys.__stdout__, "standard error": sys.__stderr__}
        # None: it was closed before we started, and its number may be another file's now.
        consoles = {name: None if one is None else one.fileno() for name, one in ours.items()}
        self._streams = [
            _Stream(name, one, begin.encode(), file, who) for name, one in consoles.items()
        ]
        self.stdout, self.stderr = (stream.theirs for stream in self._streams)

    @property
    def is_done(self) -> bool:
        return all(stream.is_over for stream in self._streams)

    def has_passed_on(self) -> bool:
        """Whether all that the child has written by now is where it goes; asked by another thread."""
        return all(stream.has_passed_on() for stream in self._streams)

    def start(self, done: Callable[[], None]) -> None:
        """The child runs; `done` is called, in another thread, when `is_done` may have come true."""
        for stream in self._streams:
            os.close(stream.theirs)  # or there would be no end to read
            start_without_signals("distboot-logs", partial(stream.work, done))

    def ended(self, told: bytes = b"e") -> None:
        """The child has ended: pass on what it has left, and do not wait long for more."""
        for stream in self._streams:
            os.write(stream.wake, told)

    def close(self) -> None:
        """The child has ended, and so has another round of the job: leave no file open."""
        if self.is_done:
            for stream in self._streams:
                stream.close()

    def hurry(self) -> None:
        """We were asked to end: do not wait for anything."""
        self.ended(b"h")


def folder_problem(folder: str) -> DistbootError | None:
    """Why no log file can be made in a folder, before the ranks that its files are named after are known; or None."""
    from tempfile import TemporaryFile  # late, as few need it

    try:
        os.makedirs(folder, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        return _unwritable(f"log files in {short_repr(folder)}", error)
    return None


def _unwritable(what: str, error: OSError) -> DistbootError:
    hint = "let --log-dir name a folder that this host can write to"
    return too_few_files(error) or DistbootError(
        "output-failed", f"{what} cannot be written: {error.strerror}", hint
    )


class _File:
    """What a rank prints, both streams together."""

    def __init__(self, path: str, rank: int, who: str | None) -> None:
        self._path, self._who = path, who
        # The stream that has written last, if that was no whole line
        self._lock, self._last = threading.Lock(), ""
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        header = f"distboot: rank {rank} on {host_name()}, started at {at}\n"
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
            raise _unwritable(f"the log file {short_repr(path)}", error) from None

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def write(self, data: bytes, stream: str) -> None:
        """Append; a line of one stream does not go on in one of the other."""
        with self._lock:
            if self._last not in ("", stream):
                data = b"\n" + data
            self._last = "" if data.endswith(b"\n") else stream
            try:
                while data and self._file is not None:
                    data = data[os.write(self._file, data) :]
            except OSError as error:  # the disk is full, say: not worth the job
                self._file = None
                log_line(
                    self._who,
                    f"warning: nothing more is written to {short_repr(self._path)}: {error.strerror}",
                )


class _Stream:
    """One of the child's two streams, on its way to ours and to the file: one piece is read, and then written."""

    def __init__(
        self, name: str, console: int | None, begin: bytes, file: _File | None, who: str | None
    ) -> None:
        self._name = name
        self._console = console
        # Whether it is where lines of this process go
        self._is_shared = _is_same_file(console, _STDERR)
        self._file = file
        self._who = who
        self._lines = PrefixedLines(begin) if begin else None  # None: shown as it is written
        self._pipe, self.theirs = os.pipe()  # the child writes to the latter
        # Where to say that the child has ended, or that we were asked to
        self._woken, self.wake = os.pipe()
        self.is_over = False  # whether everything has been passed on
        self._is_passing = False  # whether something was read and is being written
        self._goes_on = True  # until the child, or our reader, has closed its end
        self._held, self._held_since = b"", 0.0  # of a line whose end has not come
        self._moved = 0.0  # when something was read or written
        self._ended = inf  # when the child was seen to have
        self._owed = 0  # bytes that it has left in the pipe
        self._patience, self._linger = _PATIENCE, _LINGER

    def work(self, done: Callable[[], None]) -> None:
        try:
            while self._goes_on:
                if self._is_ready(self._pipe, select.POLLIN, self._end_of_reading):
                    self._read()
                elif self._held:
                    self._flush()
                elif self._bar_due() <= time.monotonic():
                    self._show_bar()
                else:
                    break
            self._flush()
            if self._lines is not None:
                self._show(self._lines.close())
        finally:
            self.is_over = True
            os.close(self._pipe)
            done()

    def has_passed_on(self) -> bool:
        if self.is_over or self._console is None:
            return True
        # In this order: what is read is passing on by the time that it is not in the pipe any more.
        try:
            left = _bytes_in(self._pipe)
        except OSError:  # it is closed
            return True
        return not (left or self._is_passing or self._held)

    def close(self) -> None:
        for file in (self._woken, self.wake):
            os.close(file)
        if self._file is not None:
            self._file.close()

    def _end_of_reading(self) -> float:
        if self._held:
            return self._held_since + _HOLD
        end = inf if self._owed > 0 else self._ended + self._linger
        return min(end, self._bar_due())

    def _bar_due(self) -> float:
        """When the state of a progress bar becomes a line although the bar still moves."""
        return inf if self._lines is None else self._lines.due

    def _show_bar(self) -> None:
        if self._lines is not None:
            self._show(self._lines.release(time.monotonic()))

    def _is_ready(self, file: int, event: int, end: Callable[[], float]) -> bool:
        """Wait for a file, but not beyond an end, which may change when we are told something."""
        poll = select.poll()
        poll.register(file, event)
        poll.register(self._woken, select.POLLIN)
        while True:
            left = end() - time.monotonic()
            ready = {
                each for each, _ in poll.poll(None if left == inf else max(left, 0.0) * 1000 + 1)
            }
            now = time.monotonic()
            if self._woken in ready:
                self._take(os.read(self._woken, _PIECE), now)
            if file in ready:
                self._moved = now
                return True
            if now >= end():
                return False

    def _take(self, told: bytes, now: float) -> None:
        """The child has ended. What it has written is in the pipe by now."""
        if self._ended == inf:
            self._ended = now
            self._owed = _bytes_in(self._pipe)
        if b"h" in told:
            self._patience, self._linger = _HURRY, 0.0

    def _read(self) -> None:
        self._is_passing = True
        data = os.read(self._pipe, _MOST)
        self._owed -= len(data)
        block = self._held + data
        whole = block.rfind(b"\n") + 1
        if whole or not self._held:
            self._held_since = self._moved
        self._goes_on = bool(data) and (self._owed > 0 or self._moved < self._ended + self._linger)
        is_late = self._moved >= self._held_since + _HOLD
        self._held = block[whole:]
        self._pass_on(block[:whole])
        if len(self._held) >= _PIECE or is_late:
            self._flush()
        self._is_passing = False

    def _flush(self) -> None:
        held, self._held = self._held, b""
        self._pass_on(held)

    def _pass_on(self, data: bytes) -> None:
        if not data:
            return
        if self._file is not None:
            self._file.write(data, self._name)
        if self._lines is not None:
            data = self._lines.feed(data, time.monotonic())
        self._show(data)

    def _show(self, data: bytes) -> None:
        while data and self._console is not None:
            if not self._is_ready(
                self._console,
                select.POLLOUT,
                lambda: max(self._moved, self._ended) + self._patience,
            ):
                rest = "is lost" if self._file is None else "is in the log file only"
                log_line(
                    self._who,
                    f"warning: {self._name} is not read: the end of the command's output {rest}",
                )
                self._console = None
                return
            # Whole lines, as other ranks may write there, too.
            end = len(data) if len(data) <= _PIECE else data.rfind(b"\n", 0, _PIECE) + 1 or _PIECE
            try:
                written = os.write(self._console, data[:end])
                if self._is_shared:
                    text.is_line_open = data[written - 1 : written] != b"\n"
                data = data[written:]
            except BlockingIOError:  # another process has made it so, and was quicker
                continue
            except OSError as error:
                if error.errno != errno.EPIPE:
                    log_line(
                        self._who, f"warning: {self._name} cannot be written to: {error.strerror}"
                    )
                self._console, self._goes_on = None, False  # and the child finds the same as we did


def _bytes_in(pipe: int) -> int:
    """What waits in a pipe."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def _is_same_file(one: int | None, other: int) -> bool:
    try:
        return one is not None and os.path.sameopenfile(one, other)
    except OSError:  # it is closed
        return False
