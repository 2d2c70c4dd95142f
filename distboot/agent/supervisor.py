"""The supervisor of the wrapper's children: it starts them, passes signals on, and waits for them.

The whole job is one loop on `sigwait`, as in dumb-init: the signals are blocked before a child
exists and taken one by one, so that none is lost and no handler runs at a bad moment. It also works
as process 1, where the kernel drops a signal that is neither handled nor blocked, and where the
orphans of others have to be reaped.

What each signal does, while a child runs:

- SIGCHLD: reap. A helper thread (the agent, the readers of the output) sends it, too, when it is
  done: the loop looks again whether all is over.
- SIGTERM is passed on, and starts the grace, after which SIGALRM kills. If the agent can tell the
  script by `ctx.preempted`, the agent holds it back, and times the grace itself. A second SIGTERM
  is always passed on.
- SIGINT, SIGHUP, SIGQUIT are passed on. The script decides what they mean: a script may
  handle SIGHUP as "reload". So they count as a request to end only once they have ended a child. A
  script that ends in its own way within the grace after SIGINT has been stopped by it, too.
- What the terminal sends to its foreground group has reached the child already, if it shares that
  group, and is not passed on. A child has a group of its own where no terminal is involved.

When a child ends because of a signal, the rest of its group gets the same signal (only the child
itself had got it), and KILL after the grace. The group of a child that had to be killed gets KILL
at once: the grace is over. Then the loop waits for the other children, the agent and the readers of
the output. A signal that asks to end while no child is left makes them hurry; a second one ends the
loop.

What always holds: each child gets a signal at most once per arrival; a child never outlives this
process (`child`); the exit code is that of the first child that failed, or what the agent makes of
all (`ThreadAgent.final`), and 128 + n for signal n.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

from ..base.errors import DistbootError
from . import child
from .child import Command
from .wrapper_signals import (
    ENDING,
    FROM_TERMINAL,
    WAITED_FOR,
    next_signal,
    on_terminal,
    stop_ignoring,
)

# Type checkers take the name for typing's, whose import would slow every start
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .logs import Logs
    from .wrapper_agent import ThreadAgent


_GROUP_POLL = 0.02  # seconds
_SHORTEST_GRACE = 0.001  # seconds; below a microsecond the timer would be off
# Some scripts read them as "reload" and "show the stacks"; SIGINT remains the key that ends the
# wait between two rounds
_MAY_MEAN_ELSE = {signal.SIGHUP, signal.SIGQUIT}
# A script may handle them and go on, or ignore them: they count once they have ended it
_MAY_END = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}


def run(
    commands: Sequence[Command],
    *,
    grace: float,
    open_files: int | None = None,
    watch: ThreadAgent | None = None,
    pending_signal: int = 0,
) -> int:
    """Run commands as children until all have ended; returns the exit code of this process.

    `grace` is the time between a TERM for this process and KILL for them, `open_files` their soft
    limit where that is not ours, `pending_signal` one that came before this call.

    `DistbootError`: one cannot be run, and none is left running.
    """
    shared_group = on_terminal()
    stop_ignoring()
    logs = [command.logs for command in commands if command.logs is not None]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WAITED_FOR)
    os.kill(os.getpid(), pending_signal)  # which waits until the children run; 0 is none
    children: dict[int, Command] = {}  # by process id
    try:
        spared = _children_before(watch)
        for command in commands:
            pid = child.start(
                command,
                before,
                own_group=not shared_group,
                open_files=open_files,
            )
            children[pid] = command
        _start_helpers(children, logs, watch, shared_group=shared_group)
        supervision = _Supervision(
            children,
            logs,
            grace,
            watch,
            shared_group=shared_group,
        )
        code = supervision.run()
        another_round = watch is not None and watch.next_round is not None
        if another_round:
            _end_round(logs, grace, spared)
        return code  # noqa: TRY300 - with what is above it is one step
    except DistbootError:  # what had started before
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_helpers(
    children: Mapping[int, Command],
    logs: Sequence[Logs],
    watch: ThreadAgent | None,
    *,
    shared_group: bool,
) -> None:
    """Start the threads beside the loop, which each wake it up when they are done."""
    done = partial(
        signal.pthread_kill,
        threading.get_ident(),
        signal.SIGCHLD,
    )
    for each in logs:
        each.start(done)
    if watch is not None:
        pids = {command.rank: pid for pid, command in children.items()}
        watch.start(pids, done, shares_keys=shared_group)


def _children_before(watch: ThreadAgent | None) -> set[int]:
    """The children that are not of a round, for example of a shell that has become this process."""
    if watch is None or not watch.may_restart:
        return set()
    from .orphans import children  # here, as few jobs have another round

    return children()


def _end_round(
    logs: Sequence[Logs],
    grace: float,
    spared: set[int],
) -> None:
    """Another round follows: end what the ranks have left behind."""
    from .orphans import end_orphans

    end_orphans(grace, spared)
    for each in logs:
        each.close()


class _Supervision:
    """The loop on signals, from the start of the children until this process may end."""

    def __init__(
        self,
        children: dict[int, Command],
        logs: Sequence[Logs],
        grace: float,
        watch: ThreadAgent | None,
        *,
        shared_group: bool,
    ) -> None:
        self._children = children  # by process id
        self._grace = grace
        self._watch = watch
        self._shared_group = shared_group  # whether the children are in our process group
        self._helpers: list[ThreadAgent | Logs] = [*logs]
        if watch is not None:
            self._helpers.insert(0, watch)
        # SIGTERM, once it was passed on: it asks the children to end, whatever they make of it.
        # SIGKILL, once the grace after that is over
        self._ending: int | None = None
        # The others that arrived while a child ran: what they ask for is the child's to say
        self._came: set[int] = set()
        # The children inherit this
        self._ignored: set[int] = set()
        for number in (signal.SIGINT, signal.SIGQUIT):
            if signal.getsignal(number) == signal.SIG_IGN:
                self._ignored.add(number)
        self._groups_end: float | None = None  # when what is left of their groups is killed
        self._codes: dict[int, int] = {}  # of the children that have ended, by rank
        self._is_over = False
        self._is_hurried = False

    def run(self) -> int:
        while not self._is_over:
            number, is_from_kernel = next_signal()
            self._handle(number, is_from_kernel=is_from_kernel)
        signal.setitimer(signal.ITIMER_REAL, 0)
        # Too late; let through, it would decide our exit code
        while signal.sigpending() & WAITED_FOR:
            number, _ = next_signal()
            self._hurry(number)
        return self._exit_code()

    def _handle(
        self,
        number: int,
        *,
        is_from_kernel: bool,
    ) -> None:
        if number == signal.SIGCHLD:
            self._reap()
        elif not self._children:
            self._hurry(number)
        elif number == signal.SIGALRM:
            if self._ending is not None:
                self._ending = signal.SIGKILL
                self._send(self._ending)
        else:
            self._came.add(number)
            if self._watch is not None:
                self._watch.arrived({number} - self._ignored)
            is_key = is_from_kernel and number in FROM_TERMINAL
            has_reached_child = is_key and self._shared_group
            if not has_reached_child:
                self._forward(number)

    def _exit_code(self) -> int:
        if self._watch is not None:
            return self._watch.final(self._codes)
        failures = filter(None, self._codes.values())
        code = next(failures, 0)
        was_killed = code == 128 + signal.SIGKILL
        if was_killed and self._ending is not None:
            return 128 + signal.SIGTERM  # KILL after the grace only completes it
        return code

    def _reap(self) -> None:
        with suppress(ChildProcessError):  # all have ended
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid in self._children:  # otherwise it is an orphan that has become ours
                    code = os.waitstatus_to_exitcode(status)
                    self._child_ended(pid, code)
        if not self._children:
            self._is_over = all(helper.is_done for helper in self._helpers)

    def _child_ended(self, pid: int, code: int) -> None:
        """A child has ended: exit code, or minus the signal."""
        command = self._children.pop(pid)
        status = code
        if code < 0:
            status = 128 - code
        self._codes[command.rank] = status
        asked = self._ending or self._ended_by(status)
        if self._watch is not None:
            self._watch.ended(command.rank, code)
            may_mean_else = _MAY_MEAN_ELSE - {asked}
            self._watch.outlived(self._came & may_mean_else)
            if asked is not None:
                self._watch.asked(asked)
        ending = self._signal_for_group(command.rank, asked)
        if ending is not None and not self._shared_group:
            self._end_group(pid, ending)
        if command.logs is not None:
            command.logs.ended(code, is_stopped=ending is not None)
            if asked is not None:  # then a reader that has stopped is not waited for
                command.logs.hurry()

    def _ended_by(self, status: int) -> int | None:
        """The signal that arrived and ended a child: its exit code is 128 + n, also of a shell."""
        number = status - 128
        if number in self._came & _MAY_END:
            return number
        return None

    def _signal_for_group(self, rank: int, asked: int | None) -> int | None:
        """What made a child end: a signal that arrived, or one of the agent; KILL comes after both."""
        if self._watch is None:
            return asked
        by_agent = self._watch.ending(rank)
        if by_agent == signal.SIGKILL:
            return by_agent
        return asked or by_agent

    def _end_group(
        self,
        leader: int,
        number: int,
    ) -> None:
        """Pass on a signal that ended a child to what is left of its group: only the child got it.

        What is still there after the grace is killed: it would keep its accelerator without a
        trace.
        """
        # Not to all at once: a checkpoint handler needs its data loader's workers.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)
            now = time.monotonic()
            if self._groups_end is None:
                self._groups_end = now + self._grace
            while now < self._groups_end:
                if signal.sigpending() & (ENDING - self._ignored):
                    break
                time.sleep(_GROUP_POLL)
                now = time.monotonic()
                self._reap()  # as process 1 this process is the parent of orphans
                os.killpg(leader, 0)
            os.killpg(leader, signal.SIGKILL)

    def _forward(self, number: int) -> None:
        """Pass a signal on to the children, or to the agent in their place."""
        watch = self._watch
        if watch is not None and watch.shows_stacks(number):
            return
        if number != signal.SIGTERM:
            self._send(number)
            return
        held = self._held()
        self._ending = number
        if watch is None or watch.is_done:  # otherwise the agent counts the grace
            signal.setitimer(signal.ITIMER_REAL, max(self._grace, _SHORTEST_GRACE))
        self._send(number, held)
        if watch is not None:
            watch.asked(number)

    def _held(self) -> set[int]:
        """The children whose scripts `ctx.preempted` tells of a first SIGTERM."""
        watch = self._watch
        if watch is None or self._ending is not None:
            return set()
        held = set()
        for pid, command in self._children.items():
            if watch.holds_term(command.rank):
                held.add(pid)
        return held

    def _send(
        self,
        number: int,
        held: Collection[int] = (),
    ) -> None:
        pids = self._children.keys() - held
        for pid in pids:
            with suppress(PermissionError, ProcessLookupError):  # of another user, or another group
                child.send(pid, number, leads_group=not self._shared_group)

    def _hurry(self, number: int) -> None:
        """A signal arrived while no child is left; if it asks to end, no other round follows.

        A second one ends this process without the goodbye of failure detection, and without a
        reader of the output.
        """
        asks_to_end = number in ENDING - self._ignored
        asks_to_end |= self._watch is not None and number in self._watch.stop_signals
        if self._means_else(number) or not asks_to_end:
            return
        if self._is_hurried:
            self._is_over = True
        self._is_hurried = True
        if self._watch is not None:
            self._watch.asked(number)
        for helper in self._helpers:
            helper.hurry()

    def _means_else(self, number: int) -> bool:
        """Whether a signal that finds no child does not ask to end."""
        if self._watch is None:
            return False
        if self._watch.shows_stacks(number):
            return True
        return self._watch.is_harmless(number)
