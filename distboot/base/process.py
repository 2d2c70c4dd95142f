"""A process, by its id: what /proc has about it, signals for it, how it has ended."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from .patterns import pattern

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket

# Signals that come from outside of a job: a process that one of these ends was stopped; it did not
# fail.
FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
ABORT = signal.SIGABRT
INTERRUPT = signal.SIGINT
KILL = signal.SIGKILL
TERM = signal.SIGTERM
# SIGRTMAX on Linux: it ends process 1 of a container, which no other signal does.
LAST_RESORT = 64
# Open MPI and Intel; MPICH, as Debian has it; libmpi_gnu_112.so.12 and the like of Cray;
# libmpi_abi.so of MPI 5
MPI_LIBRARY = pattern(r"/libmpi(ch)?(_\w+)?\.so")

# ioctl_pidfs(2): struct pidfd_info has a mask, the cgroup, eleven ids and the exit code. Since
# Linux 6.15.
_INFO = struct.Struct("QQ11Ii")
_INFO_EXIT = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
# proc_pid_stat(5), counted from the state, which is the third field.
_PARENT = 1
_START_CODE = 23
_START_TIME = 19  # in clock ticks after boot
_EXIT_CODE = 49
CREDENTIALS = struct.Struct("3i")  # struct ucred, unix(7): pid, uid, gid
_ALL = (1 << 64) - 1  # signals
_LONGEST_NAME = 15  # bytes of a name in comm, proc_pid_comm(5)
# Where its code starts, if this process may not read that, or if it has ended. Then its exit code,
# too, reads as 0.
_HIDDEN: tuple[list[str], ...] = ([], ["0"], ["1"])


def signal_name(number: int) -> str:
    """`"SIGTERM"`; `"signal 34"` for those without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_of_code(code: int | None) -> int | None:
    """The signal in an exit code as a shell reports it, 128 + n; None: it has none."""
    if code is None:
        return None
    number = code - 128
    if 0 < number < signal.NSIG:
        return number
    return None


def has_loaded_mpi(pid: int) -> bool:
    """Whether a process or one that it started has MPI in memory; False if not known."""
    pids = [pid]
    while pids:
        process = pids.pop()
        maps = read_proc(f"{process}/maps")
        if MPI_LIBRARY.search(maps):
            return True
        pids += children_of(process)
    return False


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, the oldest first; empty if not known."""
    found: list[int] = []
    tasks: list[str] = []
    with suppress(OSError):
        tasks = os.listdir(f"/proc/{pid}/task")
    for thread in tasks:
        children = read_proc(f"{pid}/task/{thread}/children")
        found += map(int, children.split())
    return sorted(found)


def read_proc(path: str) -> str:
    """A file of /proc; empty if the process has ended, or if there is no /proc."""
    with (
        suppress(OSError),
        open(f"/proc/{path}", encoding="utf-8", errors="replace") as file,
    ):
        return file.read()
    return ""


def proc_stat(process: object) -> list[str]:
    """The fields of proc_pid_stat(5), from the third one on: the state.

    Empty if the process has ended, or if there is no /proc.
    """
    text = read_proc(f"{process}/stat")
    return text.rpartition(")")[2].split()


def started(process: object = "self") -> float | None:
    """When a process began, in seconds after boot, as CLOCK_BOOTTIME counts.

    None if the process has ended, or if there is no /proc.
    """
    fields = proc_stat(process)
    if not fields:
        return None
    return int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")


class Program(NamedTuple):
    """What a process runs."""

    pid: int
    name: str  # one of those that were looked for
    words: Sequence[str]  # of its command line

    def option(self, name: str) -> str | None:
        """The value of an option, which is the next word; None: it is not there."""
        if name not in self.words:
            return None
        after = self.words.index(name) + 1
        return next(iter(self.words[after:]), None)


def program_of(pid: int, programs: Sequence[str]) -> Program | None:
    """Which of these programs a process runs; None: none of them, or that cannot be seen."""
    short = read_proc(f"{pid}/comm").rstrip("\n")
    words = read_proc(f"{pid}/cmdline").split("\0")
    names = _names(words)
    for program in programs:
        name = program[:_LONGEST_NAME]
        if short == name or program in names:
            return Program(pid, program, words)
    return None


def program_above(programs: Sequence[str]) -> Program | None:
    """The nearest process above this one that runs one of these programs."""
    for pid in _above():
        found = program_of(pid, programs)
        if found is not None:
            return found
    return None


def _above() -> Iterator[int]:
    pid = os.getppid()
    while pid > 1:
        yield pid
        stat = proc_stat(pid)
        if len(stat) <= _PARENT:  # it has ended just now, or cannot be seen
            return
        pid = int(stat[_PARENT])


def _names(words: Sequence[str]) -> list[str]:
    """The program of a command line; if that is Python, its script or module."""
    program = os.path.basename(words[0])
    if not program.startswith("python"):
        return [program]
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            module = next(rest, "")
            return [module]
        is_option = word.startswith("-")
        if not is_option:
            script = os.path.basename(word)
            return [script]
    return []


def ends_at(process: int, number: int) -> bool:
    """Whether a signal ends a process: it does not block, ignore or handle the signal.

    False also if that is not known.
    """
    kept = _signals(process, "SigBlk", "SigIgn", "SigCgt", unknown=_ALL)
    own_bit = 1 << (number - 1)
    return not kept & own_bit


def is_pending(process: int, number: int) -> bool:
    """Whether a signal that was sent to a process waits, as all its threads block it, for example.

    False also if that is not known.
    """
    pending = _signals(process, "ShdPnd", unknown=0)
    own_bit = 1 << (number - 1)
    return bool(pending & own_bit)


def _signals(process: int, *names: str, unknown: int) -> int:
    """The union of these sets of signals of a process, one bit each; `unknown` if it is not."""
    text = read_proc(f"{process}/status").strip()
    found = 0
    try:
        lines = dict(line.split(":", 1) for line in text.split("\n"))
        for name in names:  # proc_pid_status(5): SigCgt:	0000000180004a02
            found |= int(lines[name], 16)
    except (ValueError, KeyError):
        return unknown
    return found


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process at the other end of a Unix socket, 0 if it cannot be seen from here, and its user."""
    from socket import SO_PEERCRED, SOL_SOCKET  # here, as a process that is alone needs no socket

    peer = connection.getsockopt(SOL_SOCKET, SO_PEERCRED, CREDENTIALS.size)
    pid, user, _ = CREDENTIALS.unpack(peer)
    return pid, user


class Process:
    """A process that need not be a child of this one."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # Readable once the process has ended; None: the kernel lacks it (before Linux 5.3)
        self.file: int | None = None
        with suppress(OSError, AttributeError):
            self.file = os.pidfd_open(pid)
        stat = proc_stat(pid)
        start_code = stat[_START_CODE : _START_CODE + 1]
        self._shows_exit_code = start_code not in _HIDDEN

    def close(self) -> None:
        if self.file is not None:
            os.close(self.file)
            self.file = None

    @property
    def state(self) -> str:
        """A letter, as in proc_pid_stat(5); empty if the process has ended."""
        stat = proc_stat(self.pid)
        return "".join(stat[:1])

    def stopped(self) -> str:
        """Empty, unless a signal, and not a debugger ("t"), has stopped the process.

        The text stays the same until the process has run again.
        """
        if self.state != "T":
            return ""
        return f"T {self.read('schedstat')}"

    def is_reaped(self) -> bool:
        """Whether its parent has read its exit code."""
        return not self.state

    def has_ended(self) -> bool:
        return self.state in ("", "Z", "X")

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with suppress(OSError):
            if self.file is not None:
                signal.pidfd_send_signal(self.file, number)
            else:
                os.kill(self.pid, number)

    def wait_status(self) -> int | None:
        """How the process ended, as `os.waitpid` returns it; None if only its parent may know."""
        # A zombie shows it here; once its parent has waited for it, only the descriptor has it.
        stat = proc_stat(self.pid)
        is_zombie = stat[:1] in (["Z"], ["X"])
        if is_zombie and self._shows_exit_code:
            return int(stat[_EXIT_CODE])
        if self.file is None:
            return None
        no_values = [0] * 13
        info = bytearray(_INFO.pack(_INFO_EXIT, *no_values))
        try:
            fcntl.ioctl(self.file, _GET_INFO, info)
        except OSError:
            return None
        mask, *_, status = _INFO.unpack(info)
        if not mask & _INFO_EXIT:
            return None
        return int(status)

    def read(self, name: str) -> str:
        """The text of a file of the process in /proc; empty if it cannot be read."""
        return read_proc(f"{self.pid}/{name}")
