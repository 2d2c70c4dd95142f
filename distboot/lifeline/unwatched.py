"""The report of a job whose lifeline has not begun: a rank is missing, say, or nobody wants one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ..ending import FROM_OUTSIDE
from ..errors import DistbootError, quoted, tell
from ..placement import Placement
from ..report.content import not_begun
from ..report.files import refuse_unwritable, try_to_write
from ..rollcall.meeting import Meeting


class Unwatched:
    """Reports a job until its lifeline has begun, and does that from then on.

    Args:
        path: of the report; None: there is to be none, or it is not ours to write.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._is_written = False

    def problem(self, placement: Placement) -> DistbootError | None:
        """Why there could be no report, which all ranks should hear before anything starts; None: nothing."""
        if self._path is not None and placement.rank == 0:
            try:
                refuse_unwritable(self._path)
            except DistbootError as error:
                self._path = None
                return error
        return None

    def impossible(self, placement: Placement) -> None:
        """Say that there will be no report, as the ranks do not meet."""
        if self._path is not None and placement.rank == 0:
            tell(placement.who, f"warning: there will be no report {quoted(self._path)}: DISTBOOT_ROLL_CALL=0")

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

    def failed(self, meeting: Meeting, error: BaseException | None) -> None:
        """Write that the ranks have not met, or could not start, for this reason; without one, that they have started.

        Only rank 0 knows anything of the others, and only it does so.
        """
        path = None if self._is_written else self._path
        history = None if path is None else meeting.history
        if path is None or history is None:
            return
        self._is_written = True
        own = {meeting.placement.rank: meeting.steps}
        problem = try_to_write(path, lambda: not_begun(history, own, error, time.time()))
        if problem is not None:
            tell(meeting.placement.who, problem)

    @contextmanager
    def until_watched(self, meeting: Meeting) -> Iterator[None]:
        """Report a job that fails in this block before its lifeline has begun; or that it has none."""
        try:
            yield
        except BaseException as error:
            if not meeting.is_watched:
                self.failed(meeting, error)
            raise
        if not meeting.is_watched:
            self.failed(meeting, None)
