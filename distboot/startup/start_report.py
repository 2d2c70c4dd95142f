"""How the start of a job ended: each process reports it, and rank 0's agent writes it.

A signal that ends this process while the ranks meet is reported as well: see `despite_signals`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..agent.link_messages import StartEnded
from ..agent.session import Session
from ..base.errors import DistbootError
from ..base.process import FROM_OUTSIDE
from ..base.text import log_line, short_repr
from ..detection.placement import Placement


def warn_of_no_report(placement: Placement, path: str) -> None:
    """Warn on rank 0 that no report will be written."""
    if placement.rank != 0:
        return
    log_line(
        placement.who,
        f"warning: {short_repr(path)} is not written: a report needs the rendezvous, which "
        "DISTBOOT_RENDEZVOUS=0 turns off",
    )


class StartReport:
    """Reports how the start ended; does nothing on ranks above 0."""

    def __init__(
        self,
        path: str | None,
        placement: Placement,
        tell: Callable[[Session, StartEnded], object] | None = None,
    ) -> None:
        self._path = path  # of the report; None: none is wanted
        # Lets the agent write how the start has ended; None: nothing is written
        self.tell = tell
        if placement.rank != 0:
            self._path = None
            self.tell = None

    def disable_if_unwritable(self) -> DistbootError | None:
        """If the report cannot be written, try no more, and return the error; else None.

        All ranks receive the error before the start.
        """
        if self._path is None:
            return None
        from ..report.files import unwritable  # here, as most jobs have no report

        error = unwritable(self._path)
        if error is not None:
            self._path = None
            self.tell = None
        return error

    @contextmanager
    def despite_signals(self, *, is_printed: bool = False) -> Iterator[None]:
        """Delay a signal that would end this process to the end of the block, which may report it.

        In the block it is a `SystemExit`, as in process 1 of a container. Without a report there is
        nothing to delay it for, unless the block prints it.
        """
        handled = []
        if self._path is not None or is_printed:
            handled = self._signals_to_handle()
        received: list[int] = []

        def exit_later(number: int, _: object) -> None:
            for other in handled:  # while the report is being written
                signal.signal(other, signal.SIG_IGN)
            received.append(number)
            raise SystemExit(128 + number)

        for number in handled:
            signal.signal(number, exit_later)
        try:
            yield
        finally:
            for number in handled:
                # Else the block has found a use for it
                if signal.getsignal(number) in (exit_later, signal.SIG_IGN):
                    signal.signal(number, signal.SIG_DFL)
            if received:
                os.kill(os.getpid(), received[0])

    def _signals_to_handle(self) -> list[int]:
        """Those that end this process. Only the main thread handles any."""
        if threading.current_thread() is not threading.main_thread():
            return []
        return list(filter(_has_no_handler, FROM_OUTSIDE))

    def ended(self, session: Session, error: BaseException | None) -> None:
        """Report once that the start has failed with this error; None: all ranks have started."""
        tell = self.tell
        self.tell = None  # it is said once
        if tell is None:
            return
        failure = None
        if error is not None:
            try:
                from ..report.start_failure import StartFailure  # here, as most jobs start
            except OSError:  # no more file can be opened, which the error itself says
                return
            failure = StartFailure.from_error(error)
        tell(session, StartEnded(failure, session.steps))

    @contextmanager
    def until_watched(self, session: Session) -> Iterator[None]:
        """Report a job that fails in this block, or that is not supervised at its end."""
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            if not session.is_watched:
                self.ended(session, error)


def _has_no_handler(number: int) -> bool:
    return signal.getsignal(number) == signal.SIG_DFL
