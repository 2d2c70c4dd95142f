"""What /proc has about a process."""

from __future__ import annotations

import os
import re
from contextlib import suppress

# In clock ticks after boot: proc_pid_stat(5), counted from the state
_START_TIME = 19
# Open MPI and Intel; MPICH, as Debian has it; libmpi_gnu_112.so.12 and the like of Cray;
# libmpi_abi.so of MPI 5
MPI_LIBRARY = re.compile(r"/libmpi(ch)?(_\w+)?\.so")


def proc_stat(process: object = "self") -> list[str]:
    """The fields of proc_pid_stat(5), from the third one on: the state.

    Empty if the process has ended, or if there is no /proc.
    """
    with (
        suppress(OSError),
        open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file,
    ):
        return file.read().rpartition(")")[2].split()
    return []


def started(process: object = "self") -> float | None:
    """When a process began, in seconds after boot, as CLOCK_BOOTTIME counts.

    None if the process has ended, or if there is no /proc.
    """
    fields = proc_stat(process)
    if not fields:
        return None
    return int(fields[_START_TIME]) / os.sysconf("SC_CLK_TCK")


def ends_at(process: int, number: int) -> bool:
    """Whether a signal ends a process: it does not block, ignore or handle the signal.

    False also if that is not known.
    """
    try:
        with open(f"/proc/{process}/status", encoding="ascii", errors="replace") as file:
            lines = dict(line.split(":", 1) for line in file)
        # proc_pid_status(5): SigCgt:	0000000180004a02
        kept = int(lines["SigBlk"], 16) | int(lines["SigIgn"], 16) | int(lines["SigCgt"], 16)
    except (OSError, ValueError, KeyError):
        return False
    own_bit = 1 << (number - 1)
    return not kept & own_bit


def has_loaded(pid: int, library: re.Pattern[str]) -> bool:
    """Whether a process or one that it started has a library in memory; False if not known."""
    pids = [pid]
    while pids:
        process = pids.pop()
        if library.search(_read(f"{process}/maps")):
            return True
        children = _read(f"{process}/task/{process}/children")
        pids += map(int, children.split())
    return False


def _read(path: str) -> str:
    """A file of /proc; empty if the process has ended, or if there is no /proc."""
    with (
        suppress(OSError),
        open(f"/proc/{path}", encoding="utf-8", errors="replace") as file,
    ):
        return file.read()
    return ""
