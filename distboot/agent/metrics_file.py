"""Rank 0's agent keeps the metrics of its job (`report/metrics`) in a file, for Prometheus.

A thread writes it, so that a slow file system holds nobody up: once a second at most, and each
`_REFRESH` seconds, as times go on without events. The file is replaced as a whole; a link at its
place is replaced, too, and not followed.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from contextlib import suppress

from ..base.text import log_line, short_repr
from ..base.threads import start_without_signals
from ..rendezvous.events import Event
from ..report.metrics import Metrics

_BETWEEN = 1.0  # seconds
_REFRESH = 15.0  # seconds, the usual interval of a collector
_LAST = 1.0  # seconds for the thread to write the end


class MetricsFile:
    """The file with the metrics of a job."""

    def __init__(self, path: str, who: str | None) -> None:
        self._path = path
        self._who = who
        self._metrics = Metrics()
        self._is_new = False  # whether an event is not in the file yet
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread = start_without_signals("distboot-metrics", self._work)

    def record(self, event: Event) -> None:
        """Let an event count; it is in the file soon."""
        with self._changed:
            self._metrics.take(event)
            self._is_new = True
            self._changed.notify()

    def close(self) -> None:
        """Write the end, within a second."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_LAST)

    def _work(self) -> None:
        try:
            is_last = False
            while not is_last:
                self._wait()
                is_last = self._write()
        except OSError as error:
            why = error.strerror or str(error)
            what = f"no more metrics are written to {short_repr(self._path)}: {why}"
            log_line(self._who, f"warning: {what}")

    def _wait(self) -> None:
        """Wait until something is to be written."""
        with self._changed:
            self._changed.wait_for(self._has_work, _REFRESH)
            # Events come in groups: one file for all of them
            self._changed.wait_for(lambda: self._is_closing, _BETWEEN)

    def _has_work(self) -> bool:
        return any((self._is_new, self._is_closing))

    def _write(self) -> bool:
        """Write the metrics; whether no more events follow."""
        with self._changed:
            text = self._metrics.text(time.time())
            self._is_new = False
            is_last = self._is_closing
        _refuse_special(self._path)
        part = f"{self._path}.{os.urandom(4).hex()}.part"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        descriptor = os.open(part, flags, 0o644)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text.encode(errors="backslashreplace"))
            os.replace(part, self._path)
        except OSError:
            with suppress(OSError):
                os.unlink(part)
            raise
        return is_last


def _refuse_special(path: str) -> None:
    """Refuse a folder, a pipe and a device, which would be replaced."""
    with suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        is_replaced = any((stat.S_ISREG(mode), stat.S_ISLNK(mode)))
        if not is_replaced:
            raise OSError(errno.EINVAL, "it is not a regular file")
