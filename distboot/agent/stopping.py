"""How the process of a rank is stopped: `ctx.preempted`, TERM, a grace, KILL.

There are two reasons, and they differ in what the script may do.

*An external signal stops the job* (the platform, a user). The script that reads `ctx.preempted`
stops at the read that all ranks agree on, and must not get SIGTERM, which would end it before. So
SIGTERM is *held back*, and *passed on* as soon as the script is known not to read `ctx.preempted`,
or if that is still unknown after two seconds. When the grace is over, a SIGTERM that is held back
is sent after all, and KILL follows a second later.

*Another rank has failed.* SIGTERM is sent at once. Usually it ends the script. If the script has
our handler of SIGTERM (it *listens*), SIGTERM only makes `ctx.preempted` true; and the script
likely waits for another rank, in a collective operation that never ends. Such a script is
ended early: when the answer to SIGTERM is late, and the process uses neither a processor nor a
disk, it is told to end without another read (`StopPages.end`), and killed if not even that works. A
script that sends a checkpoint over a network hardly uses a processor, but its main thread runs again
and again; in most collective operations it sleeps. So it is ended early only where it sleeps: one that
polls for its peers has the whole grace.

What always holds: KILL follows a grace after the first TERM of either kind, whatever the script
does. `ending` is the last signal with which this agent made the process end.
"""

from __future__ import annotations

import signal
import time
from functools import partial
from math import inf

from ..base.process import is_pending
from ..job.messages import Terminating
from ..rendezvous.messages import RequestStop
from .own_process import Terminate
from .rank_process import RankProcess

# Seconds after which SIGTERM is sent to a script that may or may not read `ctx.preempted`
_UNDECIDED = 2.0
_AFTER_TERM = 1.0  # seconds between a SIGTERM that was held back for the grace, and SIGKILL
_UNANSWERED = 2.0  # seconds for a handler of SIGTERM to run, unless the script is in C
_POLLING = 1.0  # seconds; as often as the use of the processor is measured
_SLEEPS = (
    "the main thread has not run for {:.0f} s after TERM, and likely waits for another rank: "
    "ended before the end of the grace (DISTBOOT_GRACE)"
)
_WAITS = "the script waits in a call that TERM does not end: killed"
_OUTLASTS_GRACE = "the script has not ended within the grace (DISTBOOT_GRACE): killed"
_NEVER_READ = (
    "; SIGTERM did not end it, as its code reads ctx.preempted, but it never came to that read"
)


class Stopping:
    """How one process is stopped. All times are those of `time.monotonic`."""

    def __init__(self, of: RankProcess) -> None:
        # The last signal with which it was made to end; None: it was not
        self.ending: int | None = None
        self.external_signal: int | None = None  # that has asked it to stop
        self.is_done = False  # whether this agent has stopped it as its work is done
        # Whether SIGTERM only asks the script to stop, through our handler
        self.listens = False
        self.has_answered = False  # whether that handler has run
        self._of = of
        self._is_stopped = False  # by this agent, as another rank has failed
        self._is_killed_soon = False  # whether the grace has begun
        # Since when SIGTERM is held back, as `ctx.preempted` tells the script; None: it is not
        self._held_since: float | None = None
        self._asked_at = 0.0  # when SIGTERM was sent as another rank had failed
        self._runs = ""  # of its main thread, until it was looked at last
        self._ran_at = -inf  # when it was seen to have run after its answer to SIGTERM

    @property
    def stopped_by_us(self) -> bool:
        """Whether it had to stop as another rank had failed, by SIGTERM or by `ctx.preempted`."""
        if self._is_stopped:
            return True
        cause = self._of.shell.root_cause
        if cause is None or not cause.is_failure:
            return False
        return self._of.shell.stops.is_told(self._of.rank)

    def stop(self, order: Terminate, now: float) -> None:
        """Execute an order: ask the process to end, unless a signal has asked it already."""
        self._kill_after_grace(now)
        self.ending = signal.SIGTERM
        if self.external_signal is not None or self._of.has_ended:
            return
        self._is_stopped = order.is_failure
        self.is_done = order.is_done
        if order.is_failure or order.is_done:
            self.has_answered = False
            self._send_term()
            self._asked_at = now
            self._of.loop.call_at(now + _POLLING, self._watch)
        else:
            self.external_signal = int(signal.SIGTERM)
            self.hold_term(now)

    def terminating(
        self,
        now: float,
        number: int = signal.SIGTERM,
        *,
        of_wrapper: bool = False,
    ) -> None:
        """The process or its wrapper got a signal that asks it to stop.

        If that is the first, and not from this agent, all ranks are told.
        """
        if self.external_signal is not None or self._of.has_ended:
            return
        if self.stopped_by_us:
            return
        self.external_signal = int(number)
        message = Terminating(
            self.external_signal,
            of_wrapper,
        )
        self._of.take(message, now)
        if number == signal.SIGTERM:
            self._kill_after_grace(now)

    def answers_interrupt(self, now: float) -> bool:
        """Whether a script that ends by itself does so because of SIGINT."""
        checks = (
            now < self._of.shell.own.answers_interrupt_until,
            self.external_signal is None,
            not self.stopped_by_us,
        )
        return all(checks)

    def tell_to_stop(self, now: float) -> None:
        """Its parent got SIGTERM, and holds it back: let `ctx.preempted` tell the script."""
        request = RequestStop(signal.SIGTERM.name)
        self._of.take(request, now)
        self.hold_term(now)

    def hold_term(self, now: float) -> None:
        """Let `ctx.preempted` tell the script, and send SIGTERM only if it does not read that."""
        if self._held_since is None:
            self._held_since = now
            decided_at = now + _UNDECIDED
            self._of.loop.call_at(decided_at, partial(self.pass_on_term, decided_at))
            self.pass_on_term(now)

    def pass_on_term(self, now: float) -> None:
        """Send the SIGTERM that is held back, unless the script reads `ctx.preempted`."""
        if self._held_since is None:
            return
        is_read = self._of.shell.stops.is_read(self._of.rank)
        if is_read is None:  # not known yet
            is_read = now < self._held_since + _UNDECIDED
        if not is_read:
            self._send_term()

    def _send_term(self) -> None:
        self._held_since = None
        self._of.send(signal.SIGTERM)
        self._of.send(signal.SIGCONT)

    def _watch(self) -> None:
        """What its main thread has run until now may be the answer to SIGTERM."""
        self._runs = self._of.trainer.read("schedstat")
        self._of.loop.call_at(self._asked_at + _UNANSWERED, self._end_waiting)

    def _end_waiting(self) -> None:
        """End a script that listens, but only waits, likely for the rank that has failed."""
        if not self.listens or self._of.has_ended:
            return
        if self.ending == signal.SIGKILL or self._of.shell.stops.is_told(self._of.rank):
            return
        timeout = _UNANSWERED
        if self.has_answered:
            timeout = self._of.shell.stops.limit
        now = time.monotonic()
        is_busy = self._is_busy(now)
        if now < self._asked_at + timeout or is_busy:
            self._of.loop.call_at(now + _POLLING, self._end_waiting)
            return
        if self._is_stopped:
            seconds = now - max(self._asked_at, self._ran_at)
            self._of.say(_SLEEPS.format(seconds), event="killed")
        self._of.shell.stops.end(self._of.rank)
        self._of.loop.call_at(now + _POLLING, self._kill_waiting)

    def _kill_waiting(self) -> None:
        """Kill it if not even a thread of Python runs, as the call holds the lock."""
        if self.listens and not self._of.has_ended:
            self._of.say(_WAITS, event="killed")
            self.kill()

    def _is_busy(self, now: float) -> bool:
        """Whether it has used a processor, a disk or a network since it was asked to stop."""
        uses_processor = self._of.movement.used_at > self._asked_at + _POLLING
        uses_disk = self._of.process.state == "D"
        return any((uses_processor, uses_disk, self._has_run(now)))

    def _has_run(self, now: float) -> bool:
        """Whether its main thread has run lately, however little; asked once a second."""
        runs = self._of.trainer.read("schedstat")
        if runs != self._runs:
            self._runs = runs
            self._ran_at = now
        return now < self._ran_at + self._of.shell.stops.limit

    def _kill_after_grace(self, now: float) -> None:
        if not self._is_killed_soon:
            self._is_killed_soon = True
            grace = self._of.shell.facts.settings.grace
            self._of.loop.call_at(now + grace, self._end_grace)

    def _end_grace(self) -> None:
        if self._held_since is not None:
            self._send_term()
            now = time.monotonic()
            self._of.loop.call_at(now + _AFTER_TERM, self._end_grace)
            return
        if not self._of.has_ended:
            self._of.say(f"{_OUTLASTS_GRACE}{self._why_term_is_outlived()}", event="killed")
        self.kill()

    def _why_term_is_outlived(self) -> str:
        """Why SIGTERM did not end the script, if its code reads `ctx.preempted`, but it did not."""
        reads, _ = self._of.shell.stops.numbers(self._of.rank)
        checks = (
            self.listens,
            reads == 0,
            not is_pending(self._of.process.pid, signal.SIGTERM),  # else it blocks SIGTERM
        )
        if all(checks):
            return _NEVER_READ
        return ""

    def kill(self) -> None:
        self.ending = signal.SIGKILL
        self._of.kill()
