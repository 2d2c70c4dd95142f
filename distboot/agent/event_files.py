"""Where rank 0's agent writes what happens in its job: the journal, metrics, a platform's status."""

from __future__ import annotations

import atexit
import time

from ..base.settings import SupervisionSettings
from ..base.text import first_line, without_secret
from ..rendezvous.events import Event

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .journal import Journal
    from .state_writer import StateWriter


class EventFiles:
    """All files; each takes an event without waiting for its file system."""

    def __init__(self, settings: SupervisionSettings, who: str | None) -> None:
        self._files: list[Journal | StateWriter] = []
        self._states: list[StateWriter] = []
        if settings.report is not None:
            from .journal import opened_beside  # here, as most jobs have none

            journal = opened_beside(settings.report, who)
            self._files += filter(None, [journal])
        if settings.metrics is not None:
            from .metrics_file import MetricsFile

            self._states.append(MetricsFile(settings.metrics, who))
        if settings.kubeflow:
            from .kubeflow_status import KubeflowStatus, StatusServer

            self._states.append(KubeflowStatus(StatusServer(*settings.kubeflow), who))
        self._files += self._states
        atexit.register(self.close)  # also where the ranks do not meet

    def record(self, event: Event) -> None:
        for file in self._files:
            file.record(event)

    def start_failed(self, error: BaseException) -> None:
        """The ranks have not met. The journal learns it from the process that starts."""
        event = Event(
            time.time(),
            None,
            "start_failed",
            {"text": without_secret(first_line(error))},
        )
        for state in self._states:
            state.record(event)

    def close(self) -> None:
        atexit.unregister(self.close)
        for file in self._files:
            file.close()
