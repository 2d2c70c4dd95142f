"""Rank 0's agent tells the state of its job elsewhere, from its events (`report/metrics`).

A thread does it, so that the loop waits for no slow file system or network. Events that come
together are told together, and the last state when the job ends.
"""

from __future__ import annotations

import threading

from ..base.errors import DistbootError, in_one_line, reason_of
from ..base.text import log_line
from ..base.threads import start_without_signals
from ..rendezvous.events import Event
from ..report.metrics import Metrics


class StateWriter:
    """What tells the state; a subclass says how."""

    what = ""  # for the warning that it was not told
    between = 0.0  # seconds between two times, at least
    refresh: float  # seconds after which it is told again
    last = 0.0  # seconds for the end of the job to be told

    def __init__(self, who: str | None) -> None:
        self._who = who
        self._metrics = Metrics()
        self._is_new = False  # whether an event is not told yet
        self._is_closing = False
        self._has_warned = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        try:
            self._thread = start_without_signals("distboot-state", self._work)
        except DistbootError as error:  # this user may start no more threads
            self._warn(in_one_line(error))

    def record(self, event: Event) -> None:
        """Let an event count; it is told soon."""
        with self._changed:
            self._metrics.take(event)
            self._is_new = True
            self._changed.notify()

    def close(self) -> None:
        """Tell the end, as far as time allows."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(self.last)

    def text(self, metrics: Metrics) -> str:
        """What is to be told now; empty: nothing."""
        raise NotImplementedError

    def write(self, text: str) -> None:
        """Tell it, or raise an OSError; the job goes on."""
        raise NotImplementedError

    def after_error(self, error: OSError) -> bool:  # noqa: ARG002 - a subclass looks at it
        """The state could not be written; returns whether to go on."""
        return False

    def _work(self) -> None:
        is_last = False
        while not is_last:
            self._wait()
            with self._changed:
                text = self.text(self._metrics)
                self._is_new = False
                is_last = self._is_closing
            try:
                if text:
                    self.write(text)
            except OSError as error:
                self._warn(reason_of(error))
                is_last |= not self.after_error(error)

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            log_line(self._who, f"warning: {self.what}: {why}")

    def _wait(self) -> None:
        """Wait until something is to be told."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_new or self._is_closing, self.refresh)
            # Events come in groups
            self._changed.wait_for(lambda: self._is_closing, self.between)
