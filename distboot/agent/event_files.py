"""Where rank 0's agent writes what happens in its job: the journal, metrics, a platform's status.

The report of a job that does not start, or is not supervised, is written here, too; any other one at
the end of the job (`job_record`).
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from typing import Any

from ..base.settings import SupervisionSettings
from ..base.text import log_line
from ..rendezvous.events import Event, EventLog
from .link_messages import StartEnded

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..rendezvous.join import Joined
    from ..report.spent import Spent
    from .journal import JournalWriter
    from .state_writer import StateWriter


class EventFiles:
    """All files; each takes an event without waiting for its file system."""

    def __init__(self, settings: SupervisionSettings, who: str | None) -> None:
        self._who = who
        self._report = settings.report  # None: none is wanted
        self._journal: JournalWriter | None = None
        self._states: list[StateWriter] = []
        if settings.report is not None:
            from .journal import opened_beside  # here, as most jobs have none

            self._journal = opened_beside(settings.report, who)
        if settings.metrics is not None:
            from .metrics_file import MetricsFile

            self._states.append(MetricsFile(settings.metrics, who))
        if settings.kubeflow:
            from .kubeflow_status import KubeflowStatus, StatusServer

            self._states.append(KubeflowStatus(StatusServer(*settings.kubeflow), who))
        atexit.register(self.close)  # also where the ranks do not meet

    def record(self, event: Event) -> None:
        if self._journal is not None:
            self._journal.record(event)
        self._record_state(event)

    def _record_state(self, event: Event) -> None:
        for state in self._states:
            state.record(event)

    def start_ended(
        self,
        joined: Joined,
        ended: StartEnded,
        *,
        rounds: Sequence[Mapping[str, Any]] = (),  # failed ones, of this job
        before: Spent | None = None,  # what their time was spent on
    ) -> None:
        """All ranks have started, and are not supervised; or they have not, and the job ends."""
        from ..report.content import startup_report  # here, as most jobs start
        from ..report.files import try_to_write
        from ..report.spent import NO_ROUND
        from ..report.start_failure import StartFailure

        report = self._report
        log = joined.log()
        if log is None:  # there is no job to report on, as rank 0 did not listen
            log = EventLog()
            log.record(self._record_state)
            report = None
        if ended.steps:
            log.add("phases", 0, **ended.steps)
        failure = None
        if ended.failure is None:
            now = log.note("started")
        else:
            failure = StartFailure(*ended.failure)
            now = log.note("start_failed", **failure._asdict())
        membership = None
        if joined.result is not None:
            membership = joined.result.membership
        if report is not None:
            # The same time, so that a report from the journal says the same
            known = (log, membership, failure, now, rounds)
            problem = try_to_write(
                report,
                lambda: startup_report(*known, before=before or NO_ROUND),
            )
            if problem is not None:
                log_line(self._who, problem)
        if failure is not None:
            self.close()

    def close(self) -> None:
        atexit.unregister(self.close)
        if self._journal is not None:
            self._journal.close()
        for state in self._states:
            state.close()
        self._journal = None
        self._states = []
