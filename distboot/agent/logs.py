"""The output of the wrapper's child, for `--log-prefix` and `--log-dir`: each line with its rank, a file for each rank.

The child writes to two pipes, and a thread for each (`log_stream`) passes on what is read there, to
the file and to where it would have gone without us. A reader of ours that stops reading blocks the
child, as it would have, and nothing else; one that closes its end takes the child's pipe with it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from functools import partial

from ..base.errors import DistbootError
from ..base.text import host_name, short_repr
from ..base.threads import start_without_signals
from .log_file import LogFile, unwritable
from .log_stream import LogStream, file_of


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
            file_of(sys.__stdout__),
            begin,
            file,
            who,
        )
        stderr = LogStream(
            "standard error",
            file_of(sys.__stderr__),
            begin,
            file,
            who,
        )
        self._streams = (stdout, stderr)
        self._file = file
        self._end = ""  # how the child has ended; empty: it runs
        self._ends = threading.Lock()
        self.is_done = False  # whether it has, and all its output was passed on
        self.stdout = stdout.theirs
        self.stderr = stderr.theirs

    def has_passed_on(self) -> bool:
        """Whether all that the child has written by now was passed on; asked by another thread."""
        return all(stream.has_passed_on() for stream in self._streams)

    def start(self, done: Callable[[], None]) -> None:
        """The child runs.

        `done` is called, in another thread, when `is_done` may have become true.
        """

        def stream_over() -> None:
            self._finish()
            done()

        for stream in self._streams:
            os.close(stream.theirs)  # or there would be no end to read
            work = partial(stream.work, stream_over)
            start_without_signals("distboot-logs", work)

    def ended(self, code: int, *, is_stopped: bool) -> None:
        """The child has ended: pass on what it has left, and do not wait long for more.

        Args:
            code: negative for a signal.
            is_stopped: whether it was asked to end.
        """
        # Here, as a process without an agent has not loaded it
        from ..job.exit_status import ExitStatus

        self._end = ExitStatus.of_child(code).describe()
        if is_stopped:
            how, _, _ = self._end.partition(" (")  # so that it is clear who killed it
            self._end = f"{how}, as it was asked to end"
        for stream in self._streams:
            stream.wake(hurry=False)
        self._finish()

    def _finish(self) -> None:
        """Say in the file how the child has ended, once its last output is there."""
        with self._ends:  # two threads may see the end of the last stream
            is_over = self._end and all(stream.is_over for stream in self._streams)
            if not is_over or self.is_done:
                return
            if self._file is not None:
                self._file.write_end(self._end)
            self.is_done = True

    def hurry(self) -> None:
        """The wrapper was asked to end: do not wait for anything."""
        for stream in self._streams:
            stream.wake(hurry=True)

    def close(self) -> None:
        """The child has ended, and so has another round of the job: leave no file open."""
        if self.is_done:
            for stream in self._streams:
                stream.close()


def folder_problem(folder: str) -> DistbootError | None:
    """Why no log file can be made in a folder, or None.

    This is asked before the ranks are known, after which the files are named.
    """
    from tempfile import TemporaryFile  # late, as few need it

    try:
        os.makedirs(folder, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        return unwritable(f"log files in {short_repr(folder)}", error)
    return None
