"""The page of memory that a script shares with its agent, for `ctx.preempted`.

A page has how often the script has begun to read `ctx.preempted`, until when a read waits for rank
0's answer (0: no stop is asked for), and the read from which on it is true (0: not known yet). So
the agent knows how far the script is while that sits in a collective operation, and a read that no
stop concerns costs no system call. END becomes SIGTERM once the process has to end by that, without
another read.

A script may write there what it likes: its agent takes any number, and the page keeps its size.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TypeAlias

# The numbers of a page; ASKED is a time of `time.monotonic_ns`
READS, ASKED, STOP, STEPS, END = NUMBERS = range(5)
LARGEST = (1 << 64) - 1
_SIZE = 4096  # bytes
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a page has no name there
# linux/fcntl.h, which a Python need not have: neither the size nor the seals can be changed
_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW

Page: TypeAlias = "memoryview | list[int]"


def answer(page: Page, count: int, now: int) -> bool | None:
    """Whether this read is true, when a stop is asked for; None: that is not known yet."""
    is_late = now >= page[ASKED]
    stop = page[STOP]
    if not stop:
        return is_late or None
    # A rank that is further behind by then does not train in step with the others, and stops where it is.
    is_left_behind = is_late and count < stop - 1
    return count >= stop or is_left_behind


def new_page() -> tuple[int, Page]:
    """A page for a script, as a file descriptor, which is the caller's, and mapped."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("distboot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, _SIZE)
        # A script that cut it short would end its agent by SIGBUS
        fcntl.fcntl(file, _F_ADD_SEALS, _SEALS)
    else:  # a Python that was built on an old system, as those of conda are
        file = os.open(_SHARED_MEMORY, os.O_TMPFILE | os.O_RDWR, 0o600)
        os.ftruncate(file, _SIZE)
    return file, mapped(os.dup(file))


def mapped(file: int) -> Page:
    """The numbers in a page, whose file is closed."""
    try:
        return memoryview(mmap.mmap(file, _SIZE)).cast("Q")
    finally:
        os.close(file)
