"""The output of the wrapper's child, for `--log-prefix` and `--log-dir`: each line with its rank, a file for each rank.

The child writes to two pipes, and a thread for each (`log_stream`) passes on what is read there, to
the file and to where it would have gone without us. A reader of ours that stops reading blocks the
child, as it would have, and nothing else; one that closes its end takes the child's pipe with it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from ..base.errors import DistbootError, too_few_files
from ..base.text import host_name, log_line, short_repr
from ..base.threads import start_without_signals
from .log_stream import LogStream

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO


class Logs:
    """Where the output of a rank goes: each line with a prefix, to a file in a folder, or both.

    `stdout` and `stderr` are file descriptors for the child. `output-failed`: no file.
    """

    def __init__(self, rank: int, who: str | None, *, prefix: bool, folder: str | None) -> None:
        begin = b""
        if prefix:
            begin = f"[rank {rank} {host_name()}] ".encode()
        file = None
        if folder is not None:
            path = os.path.join(folder, f"rank-{rank}.log")
            file = LogFile(path, rank, who)
        stdout = LogStream(
            "standard output",
            _file_of(sys.__stdout__),
            begin,
            file,
            who,
        )
        stderr = LogStream(
            "standard error",
            _file_of(sys.__stderr__),
            begin,
            file,
            who,
        )
        self._streams = (stdout, stderr)
        self.stdout = stdout.theirs
        self.stderr = stderr.theirs

    @property
    def is_done(self) -> bool:
        return all(stream.is_over for stream in self._streams)

    def has_passed_on(self) -> bool:
        """Whether all that the child has written by now was passed on; asked by another thread."""
        return all(stream.has_passed_on() for stream in self._streams)

    def start(self, done: Callable[[], None]) -> None:
        """The child runs.

        `done` is called, in another thread, when `is_done` may have become true.
        """
        for stream in self._streams:
            os.close(stream.theirs)  # or there would be no end to read
            work = partial(stream.work, done)
            start_without_signals("distboot-logs", work)

    def ended(self) -> None:
        """The child has ended: pass on what it has left, and do not wait long for more."""
        for stream in self._streams:
            stream.wake(hurry=False)

    def hurry(self) -> None:
        """The wrapper was asked to end: do not wait for anything."""
        for stream in self._streams:
            stream.wake(hurry=True)

    def close(self) -> None:
        """The child has ended, and so has another round of the job: leave no file open."""
        if self.is_done:
            for stream in self._streams:
                stream.close()


class LogFile:
    """What a rank prints, both streams together."""

    def __init__(self, path: str, rank: int, who: str | None) -> None:
        self._path = path
        self._who = who
        self._lock = threading.Lock()
        self._open_line = ""  # the stream whose last line has no end yet
        self._file: int | None = None
        at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        header = f"distboot: rank {rank} on {host_name()}, started at {at}\n"
        try:
            self._open(header)
        except OSError as error:
            raise _unwritable(f"the log file {short_repr(path)}", error) from None

    def _open(self, header: str) -> None:
        os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
        # Append: a second attempt of the job must not hide why the first one failed
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        # O_NONBLOCK: opening a pipe without a reader is an error then, and waits without it
        file = os.open(self._path, flags | os.O_NONBLOCK, 0o666)
        self._file = file
        os.set_blocking(file, True)
        if os.fstat(file).st_size > 0:
            header = f"\n{header}"
        os.write(file, header.encode())

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def write(self, data: bytes, stream: str) -> None:
        """Append; a line of one stream does not continue in one of the other."""
        with self._lock:
            if self._open_line not in ("", stream):
                data = b"\n" + data
            self._open_line = stream
            if data.endswith(b"\n"):
                self._open_line = ""
            try:
                self._write_all(data)
            except OSError as error:  # for example a full disk: not worth the job
                self._file = None
                path = short_repr(self._path)
                what = f"nothing more is written to {path}: {error.strerror}"
                log_line(self._who, f"warning: {what}")

    def _write_all(self, data: bytes) -> None:
        while data and self._file is not None:
            written = os.write(self._file, data)
            data = data[written:]


def _unwritable(what: str, error: OSError) -> DistbootError:
    hint = "let --log-dir name a folder that this host can write to"
    problem = DistbootError("output-failed", f"{what} cannot be written: {error.strerror}", hint)
    return too_few_files(error) or problem


def _file_of(stream: TextIO | None) -> int | None:
    """The descriptor of a stream.

    None: it was closed before this process started, and another file may have its number now.
    """
    if stream is None:
        return None
    return stream.fileno()


def folder_problem(folder: str) -> DistbootError | None:
    """Why no log file can be made in a folder, or None.

    This is asked before the ranks are known, after which the files are named.
    """
    from tempfile import TemporaryFile  # late, as few need it

    try:
        os.makedirs(folder, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        return _unwritable(f"log files in {short_repr(folder)}", error)
    return None
