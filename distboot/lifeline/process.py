"""A process that is not our child: whether it is stopped, a signal for it, and how it ended. Linux."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
from contextlib import suppress

# ioctl_pidfs(2): struct pidfd_info has a mask, the cgroup, eleven ids and the exit code. Since Linux 6.15.
_INFO = struct.Struct("QQ11Ii")
_INFO_EXIT = 1 << 3
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11
# proc_pid_stat(5), counted from the state, which is the third field.
_STATE, _START_CODE, _EXIT_CODE = 0, 23, 49


class Process:
    """A process, by its id.

    Attributes:
        pid: its id.
        file: a file descriptor that is readable once it has ended; None where the kernel has none (before Linux 5.3).
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.file: int | None = None
        with suppress(OSError, AttributeError):
            self.file = os.pidfd_open(pid)
        # To whom the kernel does not tell everything it says 0 as the exit code, and 1 here.
        self._is_told = self._stat(_START_CODE) not in ("", "0", "1")

    def stopped(self) -> str | None:
        """How long it had run when a signal stopped it, which stays the same while it is; None: it is not stopped.

        What a debugger does is its own matter.
        """
        if self._stat(_STATE) != "T":
            return None
        try:
            with open(f"/proc/{self.pid}/schedstat", encoding="ascii") as file:
                return file.read()
        except OSError:
            return ""

    def has_ended(self) -> bool:
        """Whether it has."""
        return self._stat(_STATE) in ("", "Z", "X")

    def send(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        with suppress(OSError):
            if self.file is not None:
                signal.pidfd_send_signal(self.file, number)
            else:
                os.kill(self.pid, number)

    def wait_status(self) -> int | None:
        """How it ended, as `os.waitpid` has it; None if nobody but its parent may know."""
        # A zombie says it to us; once its parent has taken note, only its descriptor does.
        if self._is_told and self._stat(_STATE) in ("Z", "X"):
            code = self._stat(_EXIT_CODE)
            if code:
                return int(code)
        if self.file is None:
            return None
        info = bytearray(_INFO.pack(_INFO_EXIT, *([0] * 13)))
        try:
            fcntl.ioctl(self.file, _GET_INFO, info)
        except OSError:
            return None
        mask, *_, status = _INFO.unpack(info)
        return int(status) if mask & _INFO_EXIT else None

    def _stat(self, field: int) -> str:
        try:
            with open(f"/proc/{self.pid}/stat", encoding="ascii", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[field]
        except (OSError, IndexError):
            return ""
