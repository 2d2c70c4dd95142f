"""How the process of a rank is stopped: `ctx.preempted`, TERM, a grace, KILL.

There are two reasons, and they differ in what the script may do.

*An external signal stops the job* (the platform, a user). The script that reads `ctx.preempted`
stops at the read that all ranks agree on, and must not get SIGTERM, which would end it before. So
SIGTERM is *held back*, and *passed on* as soon as the script is known not to read `ctx.preempted`,
or if that is still unknown after two seconds. When the grace is over, a SIGTERM that is held back
is sent after all, and KILL follows a second later.

*Another rank has failed.* SIGTERM is sent at once. Usually it ends the script. If the script has our
handler of SIGTERM (it *listens*), SIGTERM only makes `ctx.preempted` true; and the script likely
waits for the rank that failed, in a collective operation that never ends. Such a script is ended
early: when the answer to SIGTERM is late, and the process uses neither a processor nor a disk, it is
told to end without another read (`StopPages.end`), and killed if not even that works.

What always holds: KILL follows a grace after the first TERM of either kind, whatever the script
does. `ending` is the last signal with which this agent made the process end.
"""

from __future__ import annotations

import signal
import time

from ..base.process import LAST_RESORT, Process
from ..job.messages import Terminating
from ..rendezvous.messages import RequestStop
from ..script.progress import Movement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .agent import Agent
    from .participant import Terminate

# Seconds after which SIGTERM is sent to a script that may or may not read `ctx.preempted`
_UNDECIDED = 2.0
_AFTER_TERM = 1.0  # seconds between a SIGTERM that was held back for the grace, and SIGKILL
_UNANSWERED = 2.0  # seconds for a handler of SIGTERM to run, unless the script is in C
_POLLING = 1.0  # seconds; as often as the use of the processor is measured
_WAITS = "the script waits in a call that TERM does not end: killed"
_OUTLASTS_GRACE = "the script has not ended within the grace after TERM (DISTBOOT_GRACE): killed"


class StoppingProcess:
    """The process of a rank, as far as it is stopped. All times are those of `time.monotonic`."""

    def __init__(self, rank: int, process: Process, agent: Agent) -> None:
        self.rank = rank
        self.process = process
        self.has_ended = False
        # The last signal with which it was made to end; None: it was not
        self.ending: int | None = None
        self.external_signal: int | None = None  # that has asked it to stop
        self._loop = agent.loop
        self._role = agent.role
        self._movement = Movement(
            process.pid,
            self._role.settings.stalls_after,
            time.monotonic(),
        )
        self._is_stopped = False  # by this agent, as another rank has failed
        self._is_done = False  # whether this agent has stopped it as its work is done
        self._is_killed_soon = False  # whether the grace has begun
        # Since when SIGTERM is held back, as `ctx.preempted` tells the script; None: it is not
        self._held_since: float | None = None
        # Whether SIGTERM only asks the script to stop, through our handler
        self._listens = False
        self._has_answered = False  # whether that handler has run
        self._asked_at = 0.0  # when SIGTERM was sent as another rank had failed

    @property
    def stopped_by_us(self) -> bool:
        """Whether it had to stop as another rank had failed, by SIGTERM or by `ctx.preempted`."""
        if self._is_stopped:
            return True
        cause = self._role.root_cause
        if cause is None or not cause.is_failure:
            return False
        return self._role.stops.is_told(self.rank)

    def stop(self, order: Terminate, now: float) -> None:
        """Execute an order: ask the process to end, unless a signal has asked it already."""
        self._kill_after_grace(now)
        self.ending = signal.SIGTERM
        if self.external_signal is not None or self.has_ended:
            return
        self._is_stopped = order.is_failure
        self._is_done = order.is_done
        if order.is_failure or order.is_done:
            self._has_answered = False
            self._send_term()
            self._asked_at = now
            self._loop.call_at(now + _UNANSWERED, self._end_waiting)
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
        if self.external_signal is not None or self.has_ended:
            return
        if self.stopped_by_us:
            return
        self.external_signal = int(number)
        message = Terminating(
            self.external_signal,
            of_wrapper,
        )
        self._role.take(self.rank, message, now)
        if number == signal.SIGTERM:
            self._kill_after_grace(now)

    def tell_to_stop(self, now: float) -> None:
        """Its parent got SIGTERM, and holds it back: let `ctx.preempted` tell the script."""
        request = RequestStop(signal.SIGTERM.name)
        self._role.take(self.rank, request, now)
        self.hold_term(now)

    def hold_term(self, now: float) -> None:
        """Let `ctx.preempted` tell the script, and send SIGTERM only if it does not read that."""
        if self._held_since is None:
            self._held_since = now
            self._loop.call_at(now + _UNDECIDED, self._pass_on_late)
            self.pass_on_term(now)

    def pass_on_term(self, now: float) -> None:
        """Send the SIGTERM that is held back, unless the script reads `ctx.preempted`."""
        if self._held_since is None:
            return
        is_read = self._role.stops.is_read(self.rank)
        if is_read is None:  # not known yet
            is_read = now < self._held_since + _UNDECIDED
        if not is_read:
            self._send_term()

    def _pass_on_late(self) -> None:
        self.pass_on_term(time.monotonic())

    def _send_term(self) -> None:
        self._held_since = None
        if not self.has_ended:
            self.process.send(signal.SIGTERM)
            self.process.send(signal.SIGCONT)

    def _end_waiting(self) -> None:
        """End a script that listens, but only waits, likely for the rank that has failed."""
        if not self._listens or self.has_ended:
            return
        if self.ending == signal.SIGKILL or self._role.stops.is_told(self.rank):
            return
        timeout = _UNANSWERED
        if self._has_answered:
            timeout = self._role.stops.limit
        now = time.monotonic()
        if now < self._asked_at + timeout or self._is_busy():
            self._loop.call_at(now + _POLLING, self._end_waiting)
            return
        self._role.stops.end(self.rank)
        self._loop.call_at(now + _POLLING, self._kill_waiting)

    def _kill_waiting(self) -> None:
        """Kill it if not even a thread of Python runs, as the call holds the lock."""
        if self._listens and not self.has_ended:
            self._role.say(
                _WAITS,
                self.rank,
                event="killed",
            )
            self._kill()

    def _is_busy(self) -> bool:
        """Whether it has used a processor, or a disk, since it was asked to stop."""
        uses_processor = self._movement.used_at > self._asked_at + _POLLING
        return uses_processor or self.process.state == "D"

    def _kill_after_grace(self, now: float) -> None:
        if not self._is_killed_soon:
            self._is_killed_soon = True
            grace = self._role.settings.grace
            self._loop.call_at(now + grace, self._end_grace)

    def _end_grace(self) -> None:
        if self._held_since is not None:
            self._send_term()
            now = time.monotonic()
            self._loop.call_at(now + _AFTER_TERM, self._end_grace)
            return
        if not self.has_ended:
            self._role.say(
                _OUTLASTS_GRACE,
                self.rank,
                event="killed",
            )
        self._kill()

    def _kill(self) -> None:
        self.ending = signal.SIGKILL
        if self.has_ended and self.process.file is None:
            return  # its number may be that of another process by now
        number: int = signal.SIGKILL
        if self.process.pid == 1:
            number = LAST_RESORT
        self.process.send(number)
