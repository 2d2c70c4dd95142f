"""The monitored process: what its crash hooks report, whether it moves, and how it has ended.

Its parent, or what else sees its end, calls `ended`. What the script leaves behind when it fails
(an exception, a crash) has come through the pipe of its hooks before.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import replace
from math import inf

from ..base.process import Process
from ..job.exit_status import (
    ExitStatus,
    UncaughtException,
    shown,
)
from ..job.messages import (
    Exited,
    Exiting,
    Failing,
    Locate,
    Phases,
    Position,
    Stalled,
)
from ..job.root_cause import from_exit
from ..job.stacks import Stacks
from ..rendezvous.protocol import ProtocolError, decode
from ..script.crash_hooks import (
    ENDING,
    EXCEPTION,
    INTERRUPT,
    OURS,
    PRINTED,
    STEPS,
    TERM,
    TERM_HANDLER,
)
from ..script.progress import KIND as PROGRESS
from .hook_reader import HookReader
from .stack_reader import StackReader
from .stopping_process import StoppingProcess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .agent import Agent

# Seconds for a script to print its traceback, and for the wrapper to pass it on: the lines that the
# failure leads to are to follow it
PRINTING = 0.3
LOOK = 0.02  # seconds between two looks whether it was passed on
_LONGEST_LINE = 400  # characters
_JUST_NOW = 2.0  # seconds
# Exit codes of a process that this agent has stopped as its work was done
_OF_DONE = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
# The events of hooks in which a handler of a signal ran
_SIGNALS = {INTERRUPT: signal.SIGINT, TERM: signal.SIGTERM}


class MonitoredProcess(StoppingProcess):
    """The process of a rank. All times are those of `time.monotonic`."""

    def __init__(self, rank: int, process: Process, hooks: HookReader, agent: Agent) -> None:
        super().__init__(rank, process, agent)
        self._hooks = hooks
        self._exception: UncaughtException | None = None  # with which it ends
        self._last_line = ""  # on its stderr, when it was about to end
        self._failure: Failing | None = None  # to be reported once the script has printed why
        self._failure_due = inf  # when it is reported in any case
        self._has_printed = False
        # Whether its exit code was reported, and is not yet where its launcher reads it
        self.is_leaving = False
        # Whether all that it has written is where its output goes
        self.has_passed_on: Callable[[], bool] = _always
        # The same text as long as a signal has stopped it, and since when; empty: it runs
        self._stopped = ""
        self._stopped_since = 0.0
        # The exception of another process of this rank, and when that was reported
        self._other_exception: UncaughtException | None = None
        self._other_failed_at = 0.0
        self._stacks = StackReader(process, hooks, self._loop)
        self._loop.add_reader(hooks.pipe, self._read_hooks)
        self._role.watched[rank] = self

    def decided(self) -> None:
        """The root cause is known: which rank failed first, or what stopped the job."""

    def poll(self, now: float) -> None:
        """Once a second: whether it has stalled, or has been stopped by a signal for too long."""
        if self._role.restarts is not None:
            self._role.restarts.look(self.process.pid)
        if self.has_ended:
            self._stopped = ""
            return
        numbers = self._role.stops.numbers(self.rank)
        if self._movement.stalled(numbers, now):
            self._role.take(self.rank, Stalled(), now)
        self._poll_stopped(now)

    def _poll_stopped(self, now: float) -> None:
        stopped = self.process.stopped()
        has_run = stopped != self._stopped
        if not stopped or has_run:
            self._stopped = stopped
            self._stopped_since = now
            return
        seconds = self._role.bound
        if now >= self._stopped_since + seconds:
            cause = f"stopped by a signal (SIGSTOP?) for {seconds:g} s"
            end = ExitStatus(
                cause=cause,
                when=time.time(),
            )
            self._role.take(self.rank, Failing(end), now)
            self._stopped = ""

    def pass_key(self, now: float) -> None:
        """Its script begins to wait at a key, or goes on there."""
        self._movement.pass_key(now)

    def locate(self, question: Locate, now: float) -> None:
        """Report how far it is, and, if the question asks for them, its stacks."""
        movement = self._movement
        reads, steps = self._role.stops.numbers(self.rank)
        position = Position(
            question.number,
            max(now - movement.since, 0.0),
            movement.counts,
            reads,
            steps,
            idle=max(now - movement.used_at, 0.0),
            keys=movement.keys,
        )

        def reply(stacks: Stacks | None = None) -> None:
            answer = replace(position, stacks=stacks)
            self._role.take(self.rank, answer, time.monotonic())

        if question.stacks and not self.has_ended:
            self._stacks.read(reply, now)
        else:
            reply()

    def ended(self, how: ExitStatus, now: float) -> ExitStatus:
        """The process has ended: report how, with what its hooks have left."""
        if not self._hooks.ended:
            self._read_hooks(now)
        self.has_ended = True
        self._report_failure(now)
        end = self._complete(how, now)
        exited = Exited(end, is_reaped=not self.is_leaving)
        self._role.take(self.rank, exited, now)
        if self._is_first(end):
            # Now: with process 1 of a container this agent ends, too
            member = self._role.members[self.rank]
            from . import platform_log  # here, as most scripts end well

            cause = from_exit(member, end, 0.0)
            platform_log.write(cause.text)
        if end.crash:  # faulthandler would have printed it, had it not been for the hooks
            self._role.say(
                f"{end.describe()}{shown(end.crash)}",
                self.rank,
                event="crash",
            )
        return end

    def _complete(self, how: ExitStatus, now: float) -> ExitStatus:
        """An exit status with what else is known about the end."""
        if self._is_done and how.status in _OF_DONE:
            how = ExitStatus(code=0)
        external_signal = self.external_signal
        if self.stopped_by_us:
            external_signal = None
        # Another signal than these was there before ours
        may_be_ours = how.signal in (None, signal.SIGTERM, self.ending)
        end = replace(
            how,
            external_signal=external_signal,
            stopped_by_us=self.stopped_by_us and may_be_ours,
            when=time.time(),
        )
        if how.code == 0:
            return end
        return replace(
            end,
            crash=self._hooks.crash(),
            exception=self._last_exception(how, now),
            last_line=self._last_line,
        )

    def _is_first(self, end: ExitStatus) -> bool:
        """Whether the job fails because of this end, as far as this agent knows."""
        if end.is_secondary or not end.is_failure:
            return False
        if self._role.may_restart or not self._role.detects:
            return False
        return self._role.root_cause is None

    def _read_hooks(self, now: float) -> None:
        for kind, pid, text in self._hooks.read():
            if kind == STEPS:  # also from a Python below a shell
                self._report_phases(text, now)
            elif pid == self.process.pid:
                self._take(kind, text, now)
            elif kind == EXCEPTION:  # the process may go on without the one that fails
                self._other_exception = UncaughtException.received(text)
                self._other_failed_at = now
        if self._hooks.take_dump():
            self.terminating(now)
        if self._hooks.ended:
            self._loop.remove_reader(self._hooks.pipe)

    def _report_phases(self, text: str, now: float) -> None:
        with suppress(ValueError, RecursionError, ProtocolError):
            phases = decode(text.encode(), Phases)
            self._role.take(self.rank, phases, now)

    def _take(self, kind: str, text: str, now: float) -> None:
        """Handle an event of the hooks."""
        if kind == EXCEPTION:
            self._failing(UncaughtException.received(text), now)
        elif kind == PRINTED:
            self._printed()
        elif kind == ENDING:
            self._printed()
            self._last_line = text[:_LONGEST_LINE]
            self._role.take(self.rank, Exiting(), now)
        elif kind == PROGRESS:
            self._movement.take(text, now)
        elif kind == TERM_HANDLER:
            self._listens = text == OURS
        elif kind in _SIGNALS:
            self._has_answered = True
            self.terminating(now, _SIGNALS[kind])

    def _failing(self, exception: UncaughtException | None, now: float) -> None:
        if exception is None:
            return
        self._exception = exception
        end = ExitStatus(
            exception=exception,
            stopped_by_us=self.stopped_by_us,
            when=time.time(),
        )
        self._failure = Failing(end)
        self._failure_due = now + PRINTING
        if exception.is_secondary:  # it prints nothing until it knows which rank was first
            self._report_failure(now)
        else:
            self._loop.call_at(self._failure_due, self._report_printed_failure)

    def terminating(
        self, now: float, number: int = signal.SIGTERM, *, of_wrapper: bool = False
    ) -> None:
        self._report_failure(now)  # the signal may be the answer of the launcher
        super().terminating(now, number, of_wrapper=of_wrapper)

    def _printed(self) -> None:
        self._has_printed = True
        self._report_printed_failure()

    def _report_printed_failure(self) -> None:
        if self._failure is None:
            return
        now = time.monotonic()
        is_shown = self._has_printed and self.has_passed_on()
        if is_shown or now >= self._failure_due:
            self._report_failure(now)
        else:
            self._loop.call_at(now + LOOK, self._report_printed_failure)

    def _report_failure(self, now: float) -> None:
        failure = self._failure
        self._failure = None
        if failure is not None:
            self._role.take(self.rank, failure, now)

    def _last_exception(self, how: ExitStatus, now: float) -> UncaughtException | None:
        """The exception that ended it: its own, or that of a Python below a shell.

        A shell ends with the exit code of the Python that it has run.
        """
        is_recent = now < self._other_failed_at + _JUST_NOW
        if self._exception is None and is_recent and how.status in (None, 1):
            return self._other_exception
        return self._exception


def _always() -> bool:
    return True
