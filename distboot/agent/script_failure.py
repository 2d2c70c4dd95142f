"""The failure of a script, from its exception until all ranks are told.

A script that fails prints its traceback first, and the lines that the failure leads to are to
follow it. So its exception is reported to all ranks once that is printed, and passed on by the
wrapper, or after `PRINTING`.

Where the process of the rank is a shell, or another program that starts Python, the exceptions of
those Pythons come through the same pipe. Such a process may go on without the Python that has
failed, so that does not end the rank. It explains how the rank ends:

    exit code of the rank | the exception that explains it
    ----------------------+-------------------------------------------------------------------
    not 0                 | of the last Python that took part in the training, if it has ended just
                          | before; where none did, of any, if the code is that of an exception
    0                     | of the last Python that took part in the training: the shell has no
                          | `set -e`, or a pipe no `pipefail`
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf

from ..base.process import proc_stat
from ..job.exit_status import ExitStatus, UncaughtException
from ..job.messages import Failing
from ..rendezvous.events import clock_time
from ..script.crash_hooks import EXCEPTION, STEPS
from ..script.progress import KIND as PROGRESS
from .rank_process import RankProcess
from .stopping import Stopping

# Seconds for a script to print its traceback, and for the wrapper to pass it on
PRINTING = 0.3
LOOK = 0.02  # seconds between two looks whether it was passed on
_JUST_NOW = 2.0  # seconds
# It has called `init`, or has a process group of torch
OF_TRAINING = (STEPS, PROGRESS)
# Exit codes of a Python that ends with an exception: 1, and those of most errors of distboot's
_OF_EXCEPTIONS = (None, 1, 75, 78)
_ENDED: tuple[list[str], ...] = ([], ["Z"], ["X"])  # the state of a process, in /proc


class ScriptFailure:
    """Why the script of a rank ends, as it says itself. All times are those of `time.monotonic`."""

    def __init__(self, of: RankProcess, stopping: Stopping) -> None:
        self.exception: UncaughtException | None = None  # with which it ends
        self.last_line = ""  # on its stderr, when it was about to end
        # Whether all that it has written is where its output goes
        self.has_passed_on: Callable[[], bool] = lambda: True
        self._of = of
        self._stopping = stopping
        self._failure: Failing | None = None  # to be reported once the script has printed why
        self._due = inf  # when it is reported in any case
        self._has_printed = False
        self.others = OtherPythons()

    def begin(self, exception: UncaughtException | None, now: float) -> None:
        """The script ends with an exception; None: it has sent something else."""
        if exception is None:
            return
        self.exception = exception
        is_stopped = self._stopping.stopped_by_us
        external_signal = self._stopping.external_signal
        if is_stopped:
            external_signal = None
        end = ExitStatus(
            exception=exception,
            external_signal=external_signal,
            stopped_by_us=is_stopped,
            when=clock_time(),
        )
        self._failure = Failing(end)
        self._due = now + PRINTING
        if exception.is_secondary:  # it prints nothing until it knows which rank was first
            self.report(now)
        else:
            self._of.loop.call_at(self._due, self._report_printed)

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

    def last_exception(self, how: ExitStatus) -> UncaughtException | None:
        """The exception that ended it: its own, or that of a Python below a shell."""
        own = self.exception
        if how.code == 0:
            own = None
        return own or self.others.exception(how.code)

    def _report_printed(self) -> None:
        if self._failure is None:
            return
        now = time.monotonic()
        is_shown = self._has_printed and self.has_passed_on()
        if is_shown or now >= self._due:
            self.report(now)
        else:
            self._of.loop.call_at(now + LOOK, self._report_printed)


class OtherPythons:
    """Those below the process of a rank. All times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._training = 0  # the process that was the last to take part in the training
        self._failed = 0  # the last one that has failed
        self._exception: UncaughtException | None = None  # of that one
        self._is_recent = False
        self._lived_at = 0.0

    def take(self, kind: str, pid: int, text: str, now: float) -> None:
        """Note an event of the hooks of one of them."""
        if kind == EXCEPTION:
            self._failed = pid
            self._exception = UncaughtException.received(text)
            self._is_recent = True
            self._lived_at = now
        elif kind in OF_TRAINING:
            self._training = pid

    def look(self, now: float) -> None:
        """In each second: a Python may take long to end after its exception."""
        if self._is_recent and proc_stat(self._failed)[:1] not in _ENDED:
            self._lived_at = now
        self._is_recent = now < self._lived_at + _JUST_NOW

    def exception(self, code: int | None) -> UncaughtException | None:
        """What explains the exit code of the process of the rank."""
        is_of_training = self._failed == self._training
        none_trained = self._training == 0 and code in _OF_EXCEPTIONS
        explains = self._is_recent
        if code == 0:
            explains = is_of_training
        elif not none_trained:
            explains &= is_of_training
        if not explains:
            return None
        return self._exception
