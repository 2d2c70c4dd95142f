"""The monitored process: what its crash hooks report, whether it moves, and how it has ended.

Its parent, or what else sees its end, calls `ended`. What the script leaves behind when it fails
(an exception, a crash) has come through the pipe of its hooks before.
"""

from __future__ import annotations

import signal
import time
from contextlib import suppress

from ..base.dataclass import replace
from ..base.text import cut
from ..job.exit_status import (
    ExitStatus,
    UncaughtException,
    shown,
)
from ..job.messages import (
    LONGEST_SEEN,
    Exited,
    Exiting,
    Failing,
    Locate,
    Phases,
    Position,
    SeparateModel,
    Stalled,
)
from ..job.root_cause import from_exit, from_hidden
from ..job.stacks import Stacks
from ..rendezvous.events import clock_time
from ..rendezvous.protocol import ProtocolError, decode
from ..script.crash_hooks import (
    ENDING,
    EXCEPTION,
    INTERRUPT,
    OURS,
    PRINTED,
    TERM,
    TERM_HANDLER,
)
from ..script.progress import KIND as PROGRESS
from ..script.progress import SEPARATE_MODEL
from .hook_reader import HookReader
from .own_process import Terminate
from .rank_process import RankProcess
from .script_failure import OF_TRAINING, ScriptFailure
from .stack_reader import StackReader
from .stopping import Stopping

_LONGEST_LINE = 400  # characters
# Exit codes of a process that this agent has stopped as its work was done
_OF_DONE = (128 + signal.SIGTERM, 128 + signal.SIGKILL)
# As with `if ctx.is_main and ctx.preempted:`
_NEVER_READ = (
    "warning: other ranks were told to stop by ctx.preempted, which this rank has never read: read "
    "it on all ranks, at the same place"
)
_REMEDY = "a shell passes its exit code on with set -e (bash: set -eo pipefail)"
# The events of hooks in which a handler of a signal ran
_SIGNALS = {INTERRUPT: signal.SIGINT, TERM: signal.SIGTERM}


class MonitoredProcess:
    """The process of a rank. All times are those of `time.monotonic`."""

    def __init__(self, of: RankProcess, hooks: HookReader) -> None:
        self.of = of
        self.stopping = Stopping(of)
        self.failure = ScriptFailure(of, self.stopping)
        # Whether its exit code was reported, and is not yet where its launcher reads it
        self.is_leaving = False
        self._hooks = hooks
        self._separate_model = ""  # why it trains one, as its hooks have reported
        # The same text as long as a signal has stopped it, and since when; empty: it runs
        self._stopped = ""
        self._stopped_since = 0.0
        self._stacks = StackReader(of.process, hooks, of.loop)
        of.loop.add_reader(hooks.pipe, self._read_hooks)
        of.shell.own.watched[of.rank] = self

    def stop(self, order: Terminate, now: float) -> None:
        """Execute an order."""
        self.stopping.stop(order, now)

    def pass_on_term(self, now: float) -> None:
        """In each turn: send the SIGTERM that is held back, if its time has come."""
        self.stopping.pass_on_term(now)

    def terminating(
        self,
        now: float,
        number: int = signal.SIGTERM,
        *,
        of_wrapper: bool = False,
    ) -> None:
        """The process or its wrapper got a signal that asks it to stop."""
        self._note_launcher()
        self.failure.report(now)  # the signal may be the answer of the launcher
        self.stopping.terminating(now, number, of_wrapper=of_wrapper)

    def _note_launcher(self) -> None:
        """A signal may be of a helper of a launcher that was killed."""
        self.of.member.was_left |= self.of.shell.own.launcher_is_ending()

    def decided(self) -> None:
        """The root cause is known: which rank failed first, or what stopped the job."""

    def poll(self, now: float) -> None:
        """Once a second: whether it has stalled, or has been stopped by a signal for too long."""
        if self.of.shell.restarts is not None:
            self.of.shell.restarts.check_for_mpi(self.of.process.pid)
        if self.of.has_ended:
            self._stopped = ""
            return
        self.failure.others.look(now)
        self.of.look()
        numbers = self.of.shell.stops.numbers(self.of.rank)
        if self.of.movement.stalled(numbers, now):
            self.of.take(Stalled(), now)
        self._poll_stopped(now)

    def _poll_stopped(self, now: float) -> None:
        stopped = self.of.trainer.stopped()
        has_run = stopped != self._stopped
        if not stopped or has_run:
            self._stopped = stopped
            self._stopped_since = now
            return
        seconds = self.of.shell.peers.bound
        if now >= self._stopped_since + seconds:
            cause = f"stopped by a signal (SIGSTOP?) for {seconds:g} s"
            end = ExitStatus(
                cause=cause,
                when=clock_time(),
            )
            self.of.take(Failing(end), now)
            self._stopped = ""

    def skip(self, seconds: float) -> None:
        self.of.movement.skip(seconds)
        self._stopped_since += seconds

    def pass_key(self, now: float) -> None:
        """Its script begins to wait at a key, or goes on there."""
        self.of.movement.pass_key(now)

    def locate(self, question: Locate, now: float) -> None:
        """Report how far it is, and, if the question asks for them, its stacks."""
        movement = self.of.movement
        reads, steps = self.of.shell.stops.numbers(self.of.rank)
        position = Position(
            question.number,
            max(now - movement.since, 0.0),
            movement.counts,
            reads,
            steps,
            idle=max(now - movement.used_at, 0.0),
            keys=movement.keys,
            is_at_key=self.of.rank in self.of.shell.facts.waits,
        )

        def reply(stacks: Stacks | None = None) -> None:
            answer = replace(position, stacks=stacks)
            self.of.take(answer, time.monotonic())

        self._stacks.process = self.of.trainer
        if question.stacks and not self.of.has_ended:
            self._stacks.read(reply, now)
        else:
            reply()

    def ended(self, how: ExitStatus, now: float) -> ExitStatus:
        """The process has ended: report how, with what its hooks have left."""
        if not self._hooks.ended:
            self._read_hooks(now)
        self.of.has_ended = True
        self.failure.report(now)
        end = self._complete(how, now)
        self._note_launcher()
        exited = Exited(end, is_reaped=not self.is_leaving)
        self.of.take(exited, now)
        if self._is_first(end):
            # Now: with process 1 of a container this agent ends, too
            cause = from_exit(self.of.member, end, 0.0)
            with suppress(OSError):  # no file left, also for the module
                from . import platform_log  # here, as most scripts end well

                platform_log.write_in_time(cause.text)
        if end.hides_failure and not end.is_secondary:
            self.of.say(f"warning: {from_hidden(self.of.member, end)}; {_REMEDY}")
        if end.is_of_peer and self.of.shell.stops.was_missed(self.of.rank):
            self.of.say(_NEVER_READ)
        if end.crash:  # faulthandler would have printed it, had it not been for the hooks
            self.of.say(f"{end.describe()}{shown(end.crash)}", event="crash")
        return end

    def _complete(self, how: ExitStatus, now: float) -> ExitStatus:
        """An exit status with what else is known about the end."""
        if self.stopping.is_done and how.status in _OF_DONE:
            how = ExitStatus(code=0)
        external_signal = self.stopping.external_signal
        # Before the script listens to it, a signal that asks to stop ends it
        if how.signal in self.of.shell.facts.settings.stop_signals:
            external_signal = external_signal or how.signal
        has_own_code = how.code not in (None, 0)
        if has_own_code and self._answers_interrupt(self.failure.exception, now):
            external_signal = int(signal.SIGINT)
        if self.stopping.stopped_by_us:
            external_signal = None
        # Another signal than these was there before ours
        may_be_ours = how.signal in (None, signal.SIGTERM, self.stopping.ending)
        end = replace(
            how,
            external_signal=external_signal,
            stopped_by_us=self.stopping.stopped_by_us and may_be_ours,
            when=clock_time(),
        )
        exception = self.failure.last_exception(how)
        if how.code == 0:
            return replace(end, exception=exception)
        return replace(
            end,
            crash=self._hooks.crash(),
            exception=exception,
            last_line=self.failure.last_line,
        )

    def _answers_interrupt(self, exception: UncaughtException | None, now: float) -> bool:
        """Whether the script ends because of SIGINT: as a data loader whose workers Ctrl-C ended.

        One that has lost a peer does not: it may have handled SIGINT, and gone on.
        """
        if exception is not None and exception.is_secondary:
            return False
        return self.stopping.answers_interrupt(now)

    def _is_first(self, end: ExitStatus) -> bool:
        """Whether the job fails because of this end, as far as this agent knows."""
        if end.is_secondary or not end.is_failure:
            return False
        if self.of.shell.facts.may_restart or not self.of.shell.facts.detects:
            return False
        return self.of.shell.root_cause is None

    def _read_hooks(self, now: float) -> None:
        events = self._hooks.read()
        if self._hooks.dump_is_first and self._hooks.take_dump():
            self.terminating(now)  # whose handler raises
        for kind, pid, text in events:
            if kind in OF_TRAINING:  # also from a Python below a shell
                self.of.follow(pid)
                self._report_progress(kind, pid, text, now)
            if kind == SEPARATE_MODEL:
                self._note_separate_model(text, now)
            elif pid == self.of.process.pid:
                self._take(kind, text, now)
            else:
                self.failure.others.take(kind, pid, text, now)
        if self._hooks.take_dump():
            self.terminating(now)
        if self._hooks.ended:
            self.of.loop.remove_reader(self._hooks.pipe)

    def _note_separate_model(self, reason: str, now: float) -> None:
        """A Python of this rank trains a model of its own, or not any more: the last one counts."""
        if reason != self._separate_model:
            self._separate_model = reason
            self.of.take(SeparateModel(reason[:LONGEST_SEEN]), now)

    def _report_progress(self, kind: str, pid: int, text: str, now: float) -> None:
        if kind == PROGRESS:
            if pid == self.of.trainer.pid:
                self.of.movement.take(text, now)
            return
        with suppress(ValueError, RecursionError, ProtocolError):
            phases = decode(text.encode(), Phases)
            self.of.take(phases, now)

    def _take(self, kind: str, text: str, now: float) -> None:
        """Handle an event of the hooks."""
        if kind == EXCEPTION:
            exception = UncaughtException.received(text)
            if self._answers_interrupt(exception, now):
                self.failure.exception = exception
                self.terminating(now, signal.SIGINT)
            else:
                self.failure.begin(exception, now)
        elif kind == PRINTED:
            self.failure.printed()
        elif kind == ENDING:
            self.failure.printed()
            self.failure.last_line = cut(text, _LONGEST_LINE)
            self.of.movement.leave(now)
            self._stacks.leave()
            self.of.take(Exiting(), now)
        elif kind == TERM_HANDLER:
            self.stopping.listens = text == OURS
        elif kind in _SIGNALS:
            self.stopping.has_answered = True
            self.terminating(now, _SIGNALS[kind])
