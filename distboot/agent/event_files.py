"""The files in which rank 0's agent keeps what happens in its job: the journal, and the metrics."""

from __future__ import annotations

import atexit
import time

from ..base.settings import SupervisionSettings
from ..base.text import first_line
from ..rendezvous.events import Event

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .journal import Journal
    from .metrics_file import MetricsFile


class EventFiles:
    """All files; each takes an event without waiting for its file system."""

    def __init__(self, settings: SupervisionSettings, who: str | None) -> None:
        self._files: list[Journal | MetricsFile] = []
        self._metrics: MetricsFile | None = None
        if settings.report is not None:
            from .journal import opened_beside  # here, as most jobs have none

            journal = opened_beside(settings.report, who)
            self._files += filter(None, [journal])
        if settings.metrics is not None:
            from .metrics_file import MetricsFile

            self._metrics = MetricsFile(settings.metrics, who)
            self._files.append(self._metrics)
        atexit.register(self.close)  # also where the ranks do not meet

    def record(self, event: Event) -> None:
        for file in self._files:
            file.record(event)

    def start_failed(self, error: BaseException) -> None:
        """The ranks have not met. The journal learns it from the process that starts."""
        if self._metrics is not None:
            event = Event(
                time.time(),
                None,
                "start_failed",
                {"text": first_line(error)},
            )
            self._metrics.record(event)

    def close(self) -> None:
        atexit.unregister(self.close)
        for file in self._files:
            file.close()
