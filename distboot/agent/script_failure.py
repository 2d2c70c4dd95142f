"""The failure of a script, from its exception until all ranks are told.

A script that fails prints its traceback first, and the lines that the failure leads to are to
follow it. So its exception is reported to all ranks once that is printed, and passed on by the
wrapper, or after `PRINTING`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

from ..job.exit_status import ExitStatus, UncaughtException
from ..job.messages import Failing
from .rank_process import RankProcess
from .stopping import Stopping

# Seconds for a script to print its traceback, and for the wrapper to pass it on
PRINTING = 0.3
LOOK = 0.02  # seconds between two looks whether it was passed on
_JUST_NOW = 2.0  # seconds


class ScriptFailure:
    """Why the script of a rank ends, as it says itself. All times are those of `time.monotonic`."""

    def __init__(self, of: RankProcess, stopping: Stopping) -> None:
        self.exception: UncaughtException | None = None  # with which it ends
        self.last_line = ""  # on its stderr, when it was about to end
        # Whether all that it has written is where its output goes
        self.has_passed_on: Callable[[], bool] = _always
        self._of = of
        self._stopping = stopping
        self._failure: Failing | None = None  # to be reported once the script has printed why
        self._due = inf  # when it is reported in any case
        self._has_printed = False
        # The exception of another process of this rank, and when that was reported
        self._other: UncaughtException | None = None
        self._other_at = 0.0

    def begin(self, exception: UncaughtException | None, now: float) -> None:
        """The script ends with an exception; None: it has sent something else."""
        if exception is None:
            return
        self.exception = exception
        end = ExitStatus(
            exception=exception,
            stopped_by_us=self._stopping.stopped_by_us,
            when=time.time(),
        )
        self._failure = Failing(end)
        self._due = now + PRINTING
        if exception.is_secondary:  # it prints nothing until it knows which rank was first
            self.report(now)
        else:
            self._of.loop.call_at(self._due, self._report_printed)

    def of_another(self, exception: UncaughtException | None, now: float) -> None:
        """Another process of this rank ends with an exception."""
        self._other = exception
        self._other_at = now

    def printed(self) -> None:
        """The script has printed its traceback."""
        self._has_printed = True
        self._report_printed()

    def report(self, now: float) -> None:
        """Do not wait any longer."""
        failure = self._failure
        self._failure = None
        if failure is not None:
            self._of.take(failure, now)

    def last_exception(self, how: ExitStatus, now: float) -> UncaughtException | None:
        """The exception that ended it: its own, or that of a Python below a shell.

        A shell ends with the exit code of the Python that it has run.
        """
        is_recent = now < self._other_at + _JUST_NOW
        if self.exception is None and is_recent and how.status in (None, 1):
            return self._other
        return self.exception

    def _report_printed(self) -> None:
        if self._failure is None:
            return
        now = time.monotonic()
        is_shown = self._has_printed and self.has_passed_on()
        if is_shown or now >= self._due:
            self.report(now)
        else:
            self._of.loop.call_at(now + LOOK, self._report_printed)


def _always() -> bool:
    return True
