"""The wrapper's children: started, sent every signal that we get, waited for, and their ends turned into our exit code.

The whole job is one loop on `sigwait`, as in dumb-init: the signals are blocked before a child exists and taken
one by one, so none is lost and no handler runs at a bad moment. It also holds as process 1, where a signal that is
neither handled nor blocked is dropped by the kernel, and where the orphans of others have to be reaped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from .. import script
from ..base.commands import command_error, limit_files
from ..base.errors import DistbootError
from ..base.process import FROM_OUTSIDE, proc_stat
from ..base.text import escape_control, log_line

# Type checkers take the name for typing's, whose import would slow every start
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .in_wrapper import WrapperAgent
    from .logs import Logs


class Command(NamedTuple):
    """What becomes a child."""

    words: Sequence[str]  # program and arguments
    environ: Mapping[str, str]
    rank: int = 0
    file: int | None = None  # a descriptor for it, under the same number
    logs: Logs | None = None  # where its output goes; None: to where ours does


_FORWARDED = {*FROM_OUTSIDE, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH}
# What the terminal sends to every process of the foreground group, the child included.
_FROM_TERMINAL = {signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH}
_WAITED_FOR = _FORWARDED | {signal.SIGCHLD, signal.SIGALRM}
_HOOKS = os.path.join(os.path.dirname(script.__file__), "injected")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_GROUP_LOOK = 0.02  # seconds
_KILLED = 5.0  # seconds for a process to end that was killed
_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT}  # HUP is "reload" to some
# Some scripts read them as "reload" and "show the stacks"; SIGINT stays the key that ends what waits between two rounds
_MAY_MEAN_ELSE = {signal.SIGHUP, signal.SIGQUIT}
# A script may handle them and go on, or ignore them: they count once they have ended it
_MAY_END = {signal.SIGHUP, signal.SIGINT, signal.SIGQUIT}


def run(
    commands: Sequence[Command],
    *,
    grace: float,
    open_files: int | None = None,
    watch: WrapperAgent | None = None,
) -> int:
    """Run commands as children until all have ended: the exit code of the first that failed, 128 + n for signal n.

    `grace` is the time between a TERM for us and KILL for them, `open_files` their soft limit where that is not ours.
    `DistbootError`: one cannot be run, and nothing is left of what was started.
    """
    shared_group = _on_terminal()
    for quiet in (signal.SIGCHLD, signal.SIGWINCH):
        # Ignored, SIGCHLD would never come and the kernel would eat the child's exit code; and macOS drops, even
        # when they are blocked, the signals that by default are ignored. Starting a program undoes a handler.
        signal.signal(quiet, lambda *_: None)  # is never run, as the signals are blocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED_FOR)
    children: dict[int, Command] = {}  # by process id
    # Of the script that has become us, say
    spared = _children() if watch is not None and watch.may_restart else set()
    try:
        for command in commands:
            children[_start(command, before, own_group=not shared_group, open_files=open_files)] = (
                command
            )
        done = partial(signal.pthread_kill, threading.get_ident(), signal.SIGCHLD)
        logs = [command.logs for command in commands if command.logs is not None]
        for each in logs:
            each.start(done)
        if watch is not None:
            watch.start({command.rank: pid for pid, command in children.items()}, done)
        code = _Supervision(children, grace, watch, shared_group=shared_group).run()
        if watch is not None and watch.next_round is not None:
            _end_orphans(grace, spared)
            for each in logs:
                each.close()
        return code  # noqa: TRY300 - with what is above it is one step
    except DistbootError:  # what had started before
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(
    command: Command, mask: set[int | signal.Signals], *, own_group: bool, open_files: int | None
) -> int:
    """Start a command as our child, in which the signals in `mask` are blocked; `DistbootError`: it cannot be."""
    import ctypes

    # MacOS has none
    prctl, parent = getattr(ctypes.CDLL(None), "prctl", lambda *_: None), os.getpid()
    # Those below us that lose their parent become ours, where Linux can do it: process 1 may be a program that does not
    # reap, and whose zombies no user should wait for.
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def in_child() -> None:
        # Without a terminal the child leads a group of its own: mpirun and others signal our whole group, and
        # the child must get each signal once, from us. With one it stays with us, for the shell's job control.
        if own_group:
            os.setpgid(0, 0)
        # If we are killed outright (mpirun does that), so is it: an orphan would keep its accelerator without a trace.
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # we have died in between
            os.kill(os.getpid(), signal.SIGKILL)
        limit_files(open_files)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        # Popen also gives SIGPIPE and SIGXFSZ, which Python ignores, back to the child.
        files, logs = () if command.file is None else (command.file,), command.logs
        stdout, stderr = (None, None) if logs is None else (logs.stdout, logs.stderr)
        # The output is a pipe, in which Python would else keep it back until it ends.
        environ = (
            dict(command.environ) if logs is None else {"PYTHONUNBUFFERED": "1", **command.environ}
        )
        # Our `sitecustomize` comes before all others.
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_HOOKS, environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            command.words, env=environ, pass_fds=files, stdout=stdout, stderr=stderr,
            preexec_fn=in_child,  # noqa: PLW1509 - it imports nothing and takes no lock
        )  # fmt: skip
    except OSError as error:
        raise command_error(command.words[0], error) from None
    process.returncode = 0  # or Popen would wait for it, too
    return process.pid


class _Supervision:
    """The loop on signals, from the start of the children until we may end."""

    def __init__(
        self,
        children: dict[int, Command],
        grace: float,
        watch: WrapperAgent | None,
        *,
        shared_group: bool,
    ) -> None:
        self._children = children  # by process id
        self._grace, self._watch, self._shared_group = grace, watch, shared_group
        everything = (watch, *(command.logs for command in children.values()))
        self._others = [other for other in everything if other is not None]
        # SIGTERM, once it was passed on: it asks the children to end, whatever they make of it
        self._ending: int | None = None
        # The others that came while a child ran: what they ask for is the child's to say
        self._came: set[int] = set()
        # As under nohup, which the children inherit
        self._ignored = {
            number
            for number in _ENDING - {signal.SIGTERM}
            if signal.getsignal(number) == signal.SIG_IGN
        }
        self._groups_end: float | None = None  # when what is left of their groups is killed
        self._codes: dict[int, int] = {}  # of the children that have ended, by rank
        self._is_over = self._is_hurried = False

    def run(self) -> int:
        while not self._is_over:
            number, from_kernel = _next_signal()
            if number == signal.SIGCHLD:
                self._reap()
            elif not self._children:
                self._hurry(number)
            elif number == signal.SIGALRM:
                if self._ending is not None:
                    self._send(signal.SIGKILL)
            else:
                self._came.add(number)
                if not (self._shared_group and from_kernel and number in _FROM_TERMINAL):
                    self._forward(number)
        signal.setitimer(signal.ITIMER_REAL, 0)
        # It has come too late; let through, it would decide our exit code
        while signal.sigpending() & _WAITED_FOR:
            self._hurry(_next_signal()[0])
        if self._watch is not None:
            return self._watch.final(self._codes)
        code = next(filter(None, self._codes.values()), 0)
        # KILL after the grace is but the end of what was asked for.
        return (
            128 + self._ending
            if self._ending is not None and code == 128 + signal.SIGKILL
            else code
        )

    def _reap(self) -> None:
        with suppress(ChildProcessError):  # all have ended
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] in self._children:  # else it is an orphan that has become ours
                    self._take(ended[0], os.waitstatus_to_exitcode(ended[1]))
        self._is_over = not self._children and all(other.is_done for other in self._others)

    def _take(self, pid: int, code: int) -> None:
        command = self._children.pop(pid)
        rank, logs = command.rank, command.logs
        self._codes[rank] = 128 - code if code < 0 else code
        asked = self._ending or self._ended_by(self._codes[rank])
        ending = asked
        if self._watch is not None:
            self._watch.ended(rank, code)
            self._watch.outlived(self._came & _MAY_MEAN_ELSE - {asked})
            if asked is not None:
                self._watch.asked(asked)
            ending = asked or self._watch.ending(rank)
        if ending is not None and not self._shared_group:
            self._end_group(pid, ending)
        if logs is not None:
            logs.ended()
            if asked is not None:  # then a reader that has stopped is not waited for
                logs.hurry()

    def _ended_by(self, status: int) -> int | None:
        """The signal that came and ended a child, as its exit code has it: 128 + n also of a shell."""
        number = status - 128
        return number if number in self._came & _MAY_END else None

    def _end_group(self, leader: int, number: int) -> None:
        """Pass on a signal that ended a child to what is left of its group: only the child itself got it.

        What is still there after the grace is killed: it would keep its accelerator without a trace.
        """
        # Not to all at once: a checkpoint handler needs its data loader's workers.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, number)
            now = time.monotonic()
            self._groups_end = now + self._grace if self._groups_end is None else self._groups_end
            while now < self._groups_end and not signal.sigpending() & _ENDING:
                time.sleep(_GROUP_LOOK)
                now = time.monotonic()
                self._reap()  # as process 1 we are the parent of orphans
                os.killpg(leader, 0)
            os.killpg(leader, signal.SIGKILL)

    def _forward(self, number: int) -> None:
        if number == signal.SIGQUIT and self._watch is not None and self._watch.shows_stacks():
            return
        held = self._held(number)
        if number == signal.SIGTERM:
            self._ending = number
            # Else it counts for itself
            if self._watch is None or self._watch.is_done:
                signal.setitimer(signal.ITIMER_REAL, self._grace)
        self._send(number, held)
        if self._watch is not None and number == signal.SIGTERM:
            self._watch.asked(number)

    def _held(self, number: int) -> set[int]:
        """The children that get no SIGTERM yet, as `ctx.preempted` tells their scripts; a second one is passed on."""
        watch = self._watch
        is_first_term = (number, self._ending) == (signal.SIGTERM, None)
        if watch is None or not is_first_term:
            return set()
        return {pid for pid, child in self._children.items() if watch.holds_term(child.rank)}

    def _send(self, number: int, held: Collection[int] = ()) -> None:
        for pid in self._children.keys() - held:
            with suppress(PermissionError):  # of another user
                os.kill(pid, number)

    def _means_else(self, number: int) -> bool:
        """Whether a signal that finds no child does not ask us to end."""
        if self._watch is None:
            return False
        if number == signal.SIGQUIT and self._watch.shows_stacks():
            return True
        return self._watch.is_harmless(number)

    def _hurry(self, number: int) -> None:
        """A signal that asks us to end, and no child is left: no other round follows.

        A second one ends us without the goodbye of failure detection, and without a reader of the output.
        """
        if self._means_else(number):
            return
        if number in _ENDING - self._ignored:
            self._is_over |= self._is_hurried
            self._is_hurried = True
            if self._watch is not None:
                self._watch.asked(number)
            for other in self._others:
                other.hurry()


def _end_orphans(grace: float, spared: set[int]) -> None:
    """End what the ranks have left behind, and what that has: it would keep a port or an accelerator.

    It is ours by now, in whatever group or session it is: see `_start`. Those that were there before stay.
    """
    end = time.monotonic() + grace
    asked: set[int] = set()
    while orphans := _children() - spared:
        now = time.monotonic()
        is_late = now >= end
        if now >= end + _KILLED:  # another user's, or the kernel does not let go of it
            left = ", ".join(f"{pid} ({_name(pid)})" for pid in sorted(orphans))
            log_line(None, f"warning: cannot end processes that a rank has left behind: {left}")
            return
        for pid in orphans if is_late else orphans - asked:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
        asked |= orphans
        if signal.sigtimedwait(_ENDING, _GROUP_LOOK) is not None:
            os.kill(os.getpid(), signal.SIGTERM)  # once they may come again
            return
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _children() -> set[int]:
    """The ids of our children, also of those that were started by another process; none where there is no /proc."""
    pids = filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ())
    return {int(pid) for pid in pids if proc_stat(pid)[1:2] == [str(os.getpid())]}


def _name(pid: int) -> str:
    """What a process runs, as far as is known."""
    with suppress(OSError), open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
        return escape_control(file.read().strip())
    return "?"


def _next_signal() -> tuple[int, bool]:
    """The next signal, and whether the kernel sent it, as it does for the keys of a terminal."""
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        info = signal.sigwaitinfo(_WAITED_FOR)
        return info.si_signo, info.si_code > 0  # SI_KERNEL; kill() and its like have 0 and less
    return signal.sigwait(_WAITED_FOR), True


def _on_terminal() -> bool:
    """Whether a shell's job control rules our process group: we read from our terminal, or it sends us its signals."""
    try:
        # A session of its own, as torchrun's workers have, has no terminal, whatever their stdin is.
        with open("/dev/tty", "rb") as terminal:
            return os.isatty(0) or os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False
