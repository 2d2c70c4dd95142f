"""The end of a job, as rank 0 says it: in one line, and in the report; also that of a job that did not start."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ..errors import DistbootError
from ..process import FROM_OUTSIDE
from ..text import log_line, short_repr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from ..detection.placement import Placement
    from ..rendezvous.job_info import JobInfo
    from .failure_coordinator import FailureCoordinator


def summarize(coordinator: FailureCoordinator) -> None:
    """Print one line on how the job ended, and write the report where --report or DISTBOOT_REPORT says."""
    from ..report.content import job_report, summary_line  # here, as an agent needs it at its end only
    from ..report.files import try_to_write

    log, settings, now = coordinator.log, coordinator.settings, time.time()
    known = log, coordinator.membership, settings.apart, now
    if coordinator.root_cause is None or not coordinator.root_cause.restarts:
        coordinator.say(summary_line(*known))
    if settings.report is not None and log[0].event == "rendezvous_started":
        earlier = [] if coordinator.restarts is None else coordinator.restarts.rounds
        problem = try_to_write(settings.report, lambda: job_report(*known, earlier))
        if problem is not None:
            coordinator.say(problem)


class StartupReport:
    """The report of a job that is not supervised yet: a rank is missing, say; or that never is."""

    def __init__(self, path: str | None, rounds: Sequence[Mapping[str, Any]] = ()) -> None:
        self._path = path  # None: there is to be none, or another process writes it
        self._rounds = rounds  # of the job, that have failed

    def problem(self, placement: Placement) -> DistbootError | None:
        """Why there could be no report, which all ranks should hear before anything starts; None: nothing."""
        if self._path is not None and placement.rank == 0:
            try:
                from ..report.files import refuse_unwritable

                refuse_unwritable(self._path)
            except DistbootError as error:
                self._path = None
                return error
        return None

    def impossible(self, placement: Placement) -> None:
        """Say that there will be no report, as the ranks do not meet."""
        if self._path is not None and placement.rank == 0:
            problem = f"warning: there will be no report {short_repr(self._path)}: DISTBOOT_RENDEZVOUS=0"
            log_line(placement.who, problem)

    @contextmanager
    def despite_signals(self, placement: Placement) -> Iterator[None]:
        """Let a signal that ends this process in this block do so only after the block, which may report it.

        In the block it is a `SystemExit`, as in process 1 of a container.
        """
        ours = self._path is not None and placement.rank == 0 and threading.current_thread() is threading.main_thread()
        taken = [number for number in FROM_OUTSIDE if ours and signal.getsignal(number) == signal.SIG_DFL]
        got: list[int] = []

        def take(number: int, _: object) -> None:
            for other in taken:  # while the report is being written
                signal.signal(other, signal.SIG_IGN)
            got.append(number)
            raise SystemExit(128 + number)

        for number in taken:
            signal.signal(number, take)
        try:
            yield
        finally:
            for number in taken:
                signal.signal(number, signal.SIG_DFL)
            if got:
                os.kill(os.getpid(), got[0])

    def failed(self, job: JobInfo, error: BaseException | None) -> None:
        """Write, once, that the ranks have not met or could not start for this reason; None: that they have started."""
        path, log = self._path, job.log
        if path is None or log is None:  # only rank 0 knows of the others
            return
        self._path = None
        if job.steps:
            log.add("phases", 0, **job.steps)
        from ..report.content import startup_report
        from ..report.files import try_to_write

        problem = try_to_write(path, lambda: startup_report(log, job.membership, error, time.time(), self._rounds))
        if problem is not None:
            log_line(job.placement.who, problem)

    @contextmanager
    def until_watched(self, job: JobInfo) -> Iterator[None]:
        """Report a job that fails in this block before it is supervised; or that it is not, after the block."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            if not job.is_watched:
                self.failed(job, error)
