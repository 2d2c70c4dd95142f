"""The monitored process: stop it, poll it, read its crash events, record its exit status."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import time
from contextlib import suppress
from dataclasses import replace

from ..base.procfs import proc_stat
from ..base.signals import LAST_RESORT
from ..base.text import without_secret
from ..job.exit_status import (
    FATAL,
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
    Terminating,
)
from ..job.root_cause import from_exit
from ..job.stacks import ANOTHER, THREADS, Stacks
from ..rendezvous.messages import RequestStop
from ..rendezvous.protocol import ProtocolError, decode
from ..script.crash_hooks import (
    ENDING,
    EXCEPTION,
    INTERRUPT,
    OURS,
    STEPS,
    TERM,
    TERM_HANDLER,
)
from ..script.progress import KIND as PROGRESS
from ..script.progress import Movement, is_our_thread
from .loop import StopRequest
from .stack_reader import StackReader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .agent import Agent

# ioctl_pidfs(2): struct pidfd_info has a mask, the cgroup, eleven ids and the exit code. Since Linux 6.15.
_INFO = struct.Struct("QQ11Ii")
_INFO_EXIT = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
# proc_pid_stat(5), counted from the state, which is the third field.
_START_CODE, _EXIT_CODE = 23, 49

_MOST_STACKS = 1 << 21  # bytes: what a faulthandler writes of a hundred threads
# Bytes in a pipe, pipe(7): as usual; and while stacks are read, as much as any user may have
_PIPE, _LARGE_PIPE = 1 << 16, 1 << 20
_ONE_THREAD = b"Stack (most recent call first):"  # how it begins
_MOST_KEPT = 16384  # bytes: what a faulthandler writes of many threads
_EVENT = re.compile(rb"\0(\w{1,20}) (\d{1,10})\n([^\0]*)\0")
_LONGEST = 3500  # characters
_LONGEST_LINE = 400  # characters
_JUST_NOW = 2.0  # seconds
# Seconds after which SIGTERM is sent to a script of which it is not known whether it reads `ctx.preempted`
_UNDECIDED = 2.0
_AFTER_TERM = 1.0  # seconds between a SIGTERM that was held back for the grace, and SIGKILL
_UNANSWERED = 2.0  # seconds for a handler of SIGTERM to run, unless the script is in C
_POLLING = 1.0  # seconds; as often as it is known whether a process uses a processor
_WAITS = "the script waits in a call that TERM does not end: killed"


class Process:
    """A process that need not be our child, by its id."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # Is readable once it has ended; None: the kernel has none (before Linux 5.3)
        self.file: int | None = None
        with suppress(OSError, AttributeError):
            self.file = os.pidfd_open(pid)
        # To whom the kernel does not tell everything it says 0 as the exit code, and 1 here.
        self._is_told = proc_stat(pid)[_START_CODE:][:1] not in ([], ["0"], ["1"])

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None

    @property
    def state(self) -> str:
        """A letter, as proc_pid_stat(5) has it; empty: it has ended."""
        return "".join(proc_stat(self.pid)[:1])

    def stopped(self) -> str:
        """Text that stays the same while it is stopped by a signal, and not by a debugger ("t"); else empty."""
        return f"T {self.read('schedstat')}" if self.state == "T" else ""

    def has_ended(self) -> bool:
        return self.state in ("", "Z", "X")

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with suppress(OSError):
            if self.file is not None:
                signal.pidfd_send_signal(self.file, number)
            else:
                os.kill(self.pid, number)

    def wait_status(self) -> int | None:
        """How it ended, as `os.waitpid` has it; None if only its parent may know."""
        # A zombie says it to us; once its parent has taken note, only its descriptor does.
        stat = proc_stat(self.pid)
        if self._is_told and stat and stat[0] in "ZX":
            return int(stat[_EXIT_CODE])
        if self.file is None:
            return None
        info = bytearray(_INFO.pack(_INFO_EXIT, *([0] * 13)))
        try:
            fcntl.ioctl(self.file, _GET_INFO, info)
        except OSError:
            return None
        mask, *_, status = _INFO.unpack(info)
        return int(status) if mask & _INFO_EXIT else None

    def read(self, name: str) -> str:
        """A file about it in /proc; empty: it is not there, or not for us."""
        with (
            suppress(OSError),
            open(f"/proc/{self.pid}/{name}", encoding="ascii", errors="replace") as file,
        ):
            return file.read()
        return ""


class HookReader:
    """Reads a pipe, which stays the caller's, without waiting; the secret, if there is one, is not passed on."""

    def __init__(self, pipe: int, secret: str = "") -> None:
        os.set_blocking(pipe, False)
        self.ended = self.expects_stacks = False
        self.pipe, self._secret, self._buffer = pipe, secret, b""

    def read(self) -> list[tuple[str, int, str]]:
        """What has come and is complete: of what kind, from which process, and the text."""
        self._fill()
        events = _EVENT.findall(self._buffer)
        self._buffer = _EVENT.sub(b"", self._buffer)
        return [
            (kind.decode(), int(pid), self.clean(text)[-_LONGEST:]) for kind, pid, text in events
        ]

    def take_dump(self) -> bool:
        """Whether a faulthandler has written what the process did when SIGTERM came; said once."""
        dump, *crash = self._buffer.partition(FATAL.encode())
        left = dump.replace(_ONE_THREAD, b"") if self.expects_stacks else b""
        self._buffer = b"".join((left, *crash))
        return _ONE_THREAD in dump

    def stacks(self) -> str:
        """What a faulthandler has written of all threads until now, while that is expected."""
        if not self.ended:
            self._fill()
        return self.clean(self._buffer)

    def expect_stacks(self) -> None:
        """Let a faulthandler write all threads: it does not wait for room in the pipe."""
        self.expects_stacks = True
        self._resize(_LARGE_PIPE)

    def forget_stacks(self) -> None:
        self.expects_stacks = False
        self.take_dump()
        self._resize(_PIPE)

    def _resize(self, size: int) -> None:
        with suppress(OSError, AttributeError):  # only Linux can, up to a limit
            fcntl.fcntl(self.pipe, fcntl.F_SETPIPE_SZ, size)

    def crash(self) -> str:
        """What a faulthandler has written about a crash, the thread that crashed first; empty if it has not."""
        if not self._buffer.startswith(FATAL.encode()):
            return ""
        first, *threads = THREADS.split(self.clean(self._buffer).partition("Extension modules")[0])
        threads = sorted(
            (one for one in threads if not is_our_thread(one)),
            key=lambda one: one.startswith(ANOTHER),
        )
        return "\n".join(
            line for line in (first + "".join(threads))[:_LONGEST].splitlines() if line
        )

    def _fill(self) -> None:
        kept = _MOST_STACKS if self.expects_stacks else _MOST_KEPT
        try:
            while data := os.read(self.pipe, 65536):
                self._buffer = (self._buffer + data)[:kept]
        except BlockingIOError:
            return
        except OSError:  # as good as its end
            pass
        self.ended = True

    def clean(self, data: bytes) -> str:
        return without_secret(data.decode(errors="replace"), self._secret)


class MonitoredProcess:
    """The process of a rank; its parent, or what else sees it end, says so with `ended`."""

    def __init__(self, rank: int, process: Process, hooks: HookReader, agent: Agent) -> None:
        # The last signal with which it was made to end; None: it was not
        self.ending: int | None = None
        self.external_signal: int | None = None  # that has asked it to stop
        self._is_stopped = False  # by us, for the failure of another rank
        self._is_done = False  # whether we have ended it, as its work is done
        self.has_ended = self._is_killed_soon = False
        # Since when SIGTERM is held back, as `ctx.preempted` tells the script; None: it is not
        self._held_since: float | None = None
        # Whether SIGTERM only asks the script to stop, through our handler; and whether that has run
        self._listens = self._has_answered = False
        self._asked_at = 0.0  # when SIGTERM was sent as another rank had failed
        self.rank, self.process = rank, process
        self._loop, self._role = agent.loop, agent.role
        self._hooks = hooks
        self._exception: UncaughtException | None = None  # with which it ends
        self._last_line = ""  # on its stderr, when it was about to end
        self._stopped, self._stopped_since = "", 0.0  # how long it had run by then
        # When another process of this rank had one, and which
        self._other: tuple[float, UncaughtException | None] = (0.0, None)
        settings, now = self._role.settings, time.monotonic()
        self._stacks = StackReader(process, hooks, self._loop)
        self._movement = Movement(process.pid, settings.stalls_after, now)
        self._loop.add_reader(hooks.pipe, self._hear)
        self._role.watched[rank] = self

    @property
    def stopped_by_us(self) -> bool:
        """Whether it had to stop for the failure of another rank, or was told so by `ctx.preempted`."""
        cause = self._role.root_cause
        return self._is_stopped or (
            cause is not None and cause.is_failure and self._role.stops.is_told(self.rank)
        )

    def stop(self, order: StopRequest, now: float) -> None:
        """Ask it to end, if it has not, and has not been asked."""
        self._kill_after_grace(now)
        self.ending = signal.SIGTERM
        if self.external_signal is None and not self.has_ended:
            self._is_stopped, self._is_done = order.is_failure, order.is_done
            if self._is_stopped or self._is_done:
                self._has_answered = False
                self._send_term()
                self._asked_at = now
                self._loop.call_at(now + _UNANSWERED, self._end_waiting)
            else:
                self.external_signal = int(signal.SIGTERM)
                self.hold_term(now)

    def tell_to_stop(self, now: float) -> None:
        """Its parent got SIGTERM, which is held back: `ctx.preempted` is to tell the script."""
        self._role.take(self.rank, RequestStop(signal.SIGTERM.name), now)
        self.hold_term(now)

    def hold_term(self, now: float) -> None:
        """Let `ctx.preempted` tell the script to stop, and send SIGTERM only if it does not read that."""
        if self._held_since is None:
            self._held_since = now
            self._loop.call_at(now + _UNDECIDED, self._pass_on_late)
            self.pass_on_term(now)

    def pass_on_term(self, now: float) -> None:
        """Send the SIGTERM that is held back to a script that does not read `ctx.preempted`."""
        if self._held_since is None:
            return
        is_read = self._role.stops.is_read(self.rank)
        is_late = now >= self._held_since + _UNDECIDED
        if is_read is False or (is_read is None and is_late):
            self._send_term()

    def _pass_on_late(self) -> None:
        self.pass_on_term(time.monotonic())

    def _send_term(self) -> None:
        self._held_since = None
        if not self.has_ended:
            self.process.send(signal.SIGTERM)
            self.process.send(signal.SIGCONT)

    def _end_waiting(self) -> None:
        """End a script that listens, but only waits since another rank has failed: likely for that rank."""
        now = time.monotonic()
        is_done = self.has_ended or self._role.stops.is_told(self.rank)
        if is_done or not self._listens or self.ending == signal.SIGKILL:
            return
        limit = self._role.stops.limit if self._has_answered else _UNANSWERED
        if now < self._asked_at + limit or self._is_busy():
            self._loop.call_at(now + _POLLING, self._end_waiting)
            return
        self._role.stops.end(self.rank)
        self._loop.call_at(now + _POLLING, self._kill_waiting)

    def _kill_waiting(self) -> None:
        """Kill it where not even a thread of Python runs, as the call holds the lock."""
        if not self.has_ended and self._listens:
            self._role.say(_WAITS, self.rank, event="killed")
            self._kill()

    def _is_busy(self) -> bool:
        """Whether it has used a processor, or a disk, since it was asked to stop."""
        return self._movement.used_at > self._asked_at + _POLLING or self.process.state == "D"

    def _kill_after_grace(self, now: float) -> None:
        if not self._is_killed_soon:
            self._is_killed_soon = True
            self._loop.call_at(now + self._role.settings.grace, self._end_grace)

    def _end_grace(self) -> None:
        if self._held_since is not None:
            self._send_term()
            self._loop.call_at(time.monotonic() + _AFTER_TERM, self._end_grace)
            return
        if not self.has_ended:
            said = "the script has not ended within the grace after TERM (DISTBOOT_GRACE): killed"
            self._role.say(said, self.rank, event="killed")
        self._kill()

    def _kill(self) -> None:
        self.ending = signal.SIGKILL
        # Else its number may be another's by now
        if self.process.file is not None or not self.has_ended:
            self.process.send(LAST_RESORT if self.process.pid == 1 else signal.SIGKILL)

    def decided(self, now: float) -> None:
        """It is clear now which rank failed first, or what stopped the job."""

    def look(self, now: float) -> None:
        """Whether it has been stopped for too long, or has stalled; once a second."""
        if self._role.restarts is not None:
            self._role.restarts.look(self.process.pid)
        if not self.has_ended and self._movement.stalled(self._role.stops.numbers(self.rank), now):
            self._role.take(self.rank, Stalled(), now)
        stopped = "" if self.has_ended else self.process.stopped()
        if not stopped or stopped != self._stopped:  # else it has not run since we looked
            self._stopped, self._stopped_since = stopped, now
        elif now >= self._stopped_since + self._role.bound:
            cause = f"stopped by a signal (SIGSTOP?) for {self._role.bound:g} s"
            self._role.take(self.rank, Failing(ExitStatus(cause=cause, when=time.time())), now)
            self._stopped = ""

    def pass_key(self, now: float) -> None:
        """Its script begins to wait at a key, or goes on there."""
        self._movement.pass_key(now)

    def locate(self, question: Locate, now: float) -> None:
        movement, numbers = self._movement, self._role.stops.numbers(self.rank)
        since, idle = max(now - movement.since, 0.0), max(now - movement.used_at, 0.0)
        position = Position(
            question.number, since, movement.counts, *numbers, idle=idle, keys=movement.keys
        )

        def reply(stacks: Stacks | None = None) -> None:
            self._role.take(self.rank, replace(position, stacks=stacks), time.monotonic())

        if question.stacks and not self.has_ended:
            self._stacks.read(reply, now)
        else:
            reply()

    def stopping(
        self, now: float, number: int = signal.SIGTERM, *, of_wrapper: bool = False
    ) -> None:
        """It got a signal that asks it to stop; if that is the first, and not ours, all ranks are told."""
        if self.external_signal is None and not self.stopped_by_us and not self.has_ended:
            self.external_signal = int(number)
            message = Terminating(self.external_signal, of_wrapper)
            self._role.take(self.rank, message, now)
            if number == signal.SIGTERM:
                self._kill_after_grace(now)

    def ended(self, how: ExitStatus, now: float) -> ExitStatus:
        if not self._hooks.ended:
            self._hear(now)
        self.has_ended = True
        if self._is_done and how.status in (128 + signal.SIGTERM, 128 + signal.SIGKILL):
            how = ExitStatus(code=0)
        ours = (None, signal.SIGTERM, self.ending)  # another signal was there before it
        end = replace(
            how,
            external_signal=None if self.stopped_by_us else self.external_signal,
            stopped_by_us=self.stopped_by_us and how.signal in ours,
            when=time.time(),
        )
        if how.code != 0:
            exception = self._last_exception(now)
            crash = self._hooks.crash()
            end = replace(end, crash=crash, exception=exception, last_line=self._last_line)
        self._role.take(self.rank, Exited(end), now)
        role, is_first = self._role, end.is_failure and not end.is_secondary  # as far as is known
        if is_first and role.detects and role.root_cause is None and not role.may_restart:
            # Now: with process 1 of a container we end, too
            from . import platform_log  # here, as most scripts end well

            platform_log.write(from_exit(role.members[self.rank], end, 0.0).text)
        if end.crash:  # which it would have printed itself, had it been asked to
            self._role.say(f"{end.describe()}{shown(end.crash)}", self.rank, event="crash")
        return end

    def _hear(self, now: float) -> None:
        for kind, pid, text in self._hooks.read():
            if kind == STEPS:  # also of a Python below a shell
                with suppress(ValueError, RecursionError, ProtocolError):
                    self._role.take(self.rank, decode(text.encode(), Phases), now)
            elif pid == self.process.pid:
                self._take(kind, text, now)
            elif kind == EXCEPTION:  # of another process, which may fail without it
                self._other = (now, UncaughtException.received(text))
        if self._hooks.take_dump():
            self.stopping(now)
        if self._hooks.ended:
            self._loop.remove_reader(self._hooks.pipe)

    def _take(self, kind: str, text: str, now: float) -> None:
        if kind == EXCEPTION:
            exception = UncaughtException.received(text)
            if exception is not None:
                self._fails(exception, now)
        elif kind == ENDING:
            self._last_line = text[:_LONGEST_LINE]
            self._role.take(self.rank, Exiting(), now)
        elif kind == PROGRESS:
            self._movement.take(text, now)
        elif kind == TERM_HANDLER:
            self._listens = text == OURS
        elif kind in (INTERRUPT, TERM):
            self._has_answered = True
            self.stopping(now, signal.SIGINT if kind == INTERRUPT else signal.SIGTERM)

    def _fails(self, exception: UncaughtException, now: float) -> None:
        self._exception = exception
        end = ExitStatus(exception=exception, stopped_by_us=self.stopped_by_us, when=time.time())
        self._role.take(self.rank, Failing(end), now)

    def _last_exception(self, now: float) -> UncaughtException | None:
        at, other = self._other
        if self._exception is None and now < at + _JUST_NOW:
            return other  # a shell that runs Python ends with its exit code
        return self._exception
