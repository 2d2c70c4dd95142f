"""The file of what a rank prints, for `--log-dir`."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress

from ..base.errors import DistbootError, too_few_files
from ..base.text import host_name, log_line, short_repr


class LogFile:
    """What a rank prints, both streams together."""

    def __init__(self, path: str, rank: int, who: str | None) -> None:
        self._path = path
        self._who = who
        self._lock = threading.Lock()
        self._open_line = ""  # the stream whose last line has no end yet
        self._file: int | None = None
        self._about = f"distboot: rank {rank} on {host_name()}"
        header = f"{self._about}, started at {_now()}\n"
        try:
            self._open(header)
        except OSError as error:
            self.close()
            raise unwritable(f"the log file {short_repr(path)}", error) from None

    def _open(self, header: str) -> None:
        os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
        # Append: a second attempt of the job must not hide why the first one failed
        file = opened_to_append(self._path)
        self._file = file
        if os.fstat(file).st_size > 0:
            header = f"\n{header}"
        os.write(file, header.encode())

    def close(self) -> None:
        file = self._file
        self._file = None
        if file is not None:
            with suppress(OSError):  # a full disk may be told only now
                os.close(file)

    def write_end(self, how: str) -> None:
        """The child has ended, and all its output is there."""
        line = f"{self._about}, ended at {_now()}: {how}\n"
        self.write(line.encode(), "")

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
                self.close()
                path = short_repr(self._path)
                what = f"nothing more is written to {path}: {error.strerror}"
                log_line(self._who, f"warning: {what}")

    def _write_all(self, data: bytes) -> None:
        while data and self._file is not None:
            written = os.write(self._file, data)
            data = data[written:]


def opened_to_append(path: str) -> int:
    """A file, or a pipe with a reader, at a path; `OSError`: it cannot be opened."""
    # O_NONBLOCK: opening a pipe without a reader is an error then, and waits without it
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
    file = os.open(path, flags | os.O_CLOEXEC, 0o666)
    os.set_blocking(file, True)
    return file


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())


def unwritable(what: str, error: OSError) -> DistbootError:
    """Why `what` cannot be written."""
    hint = "let --log-dir name a folder that this host can write to"
    problem = DistbootError("output-failed", f"{what} cannot be written: {error.strerror}", hint)
    return too_few_files(error) or problem
