"""Rank 0's agent writes the journal of its job (`job/journal`), without ever waiting for the file system.

The agent puts each event into a queue, and a thread writes it. A file system that hangs or is slow
fills the queue, which is bounded: what does not fit is left out and counted, in an event of its own
once there is room again. A file that cannot be written any more costs a warning, and never the job.

Each job has a lock on its journal, so that no other one with the same path empties it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
import time
from collections import deque

from ..base.errors import DistbootError, in_one_line, reason_of
from ..base.text import log_line, short_repr
from ..base.threads import start_without_signals
from ..job.journal import line_of, path_beside
from ..rendezvous.events import Event, job_time
from ..report.files import is_special
from .log_file import opened_to_append

_MOST_WAITING = 50_000  # events
_EARLIER_JOB = 20.0  # seconds for an earlier job to end
_INTERVAL = 0.1  # seconds between two looks whether it has
_IS_LOCKED = "another job, or an earlier context of this process, writes to it"
_LAST_LINES = 1.0  # seconds for the thread to write what waits, at the end of the agent


class JournalWriter:
    """The file of a journal; `OSError`, `DistbootError`: it has no file, or no thread."""

    def __init__(self, path: str, who: str | None) -> None:
        self._file = opened_to_append(path)
        self._path = path
        self._who = who
        self._waiting: deque[Event] = deque()
        self._left_out = 0
        self._is_closing = False
        self._changed = threading.Condition()
        try:
            self._thread = start_without_signals("distboot-journal", self._work)
        except DistbootError:
            os.close(self._file)
            raise

    def record(self, event: Event) -> None:
        """Write an event soon."""
        with self._changed:
            if len(self._waiting) >= _MOST_WAITING:
                self._left_out += 1
                return
            if self._left_out:
                details = {"count": self._left_out}
                self._waiting.append(Event(job_time(), None, "not_written", details))
                self._left_out = 0
            self._waiting.append(event)
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, within a second."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_LAST_LINES)
        if not self._thread.is_alive():
            os.close(self._file)

    def _work(self) -> None:
        try:
            mode = os.fstat(self._file).st_mode
            if stat.S_ISREG(mode):
                self._take_over()
            while events := self._next():
                lines = "".join(map(line_of, events))
                data = lines.encode(errors="backslashreplace")
                while data:
                    written = os.write(self._file, data)
                    data = data[written:]
        except OSError as error:
            self._give_up(error)

    def _take_over(self) -> None:
        """Empty the file, once no agent of an earlier job writes to it.

        A launcher may restart the ranks while the agent of the rank 0 before writes its last lines.
        """
        end = time.monotonic() + _EARLIER_JOB
        while not self._is_locked():
            with self._changed:
                self._changed.wait(_INTERVAL)
                is_late = self._is_closing or time.monotonic() > end
            if is_late:
                raise OSError(errno.EBUSY, _IS_LOCKED)
        os.ftruncate(self._file, 0)

    def _is_locked(self) -> bool:
        """Whether this job has the lock of the file; true as well where files have none."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno != errno.EWOULDBLOCK
        return True

    def _next(self) -> list[Event]:
        """The events that wait, at least one; none: the job has ended."""
        with self._changed:
            while not self._waiting and not self._is_closing:
                self._changed.wait()
            found = list(self._waiting)
            self._waiting.clear()
            return found

    def _give_up(self, error: OSError) -> None:
        why = reason_of(error)
        what = f"no more events are written to the journal {short_repr(self._path)}: {why}"
        log_line(self._who, f"warning: {what}")


def opened_beside(report: str, who: str | None) -> JournalWriter | None:
    """The journal of a job with this report; None, with a warning: it cannot be written."""
    path = path_beside(report)
    if is_special(report) and path != report:  # a pipe or a device has no file beside it
        return None
    try:
        return JournalWriter(path, who)
    except OSError as error:
        why = reason_of(error)
    except DistbootError as error:  # this user may start no more threads
        why = in_one_line(error)
    log_line(who, f"warning: there will be no journal {short_repr(path)}: {why}")
    return None
