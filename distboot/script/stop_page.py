"""The page of memory that a script shares with its agent, for `ctx.preempted`.

It is a row of numbers of 64 bits:

    READS   how many reads of `ctx.preempted` the script has begun
    ASKED   until when a read waits for rank 0's answer, by `time.monotonic_ns`; 0: no stop
    STOP    the answer: the first read that is true; 0: not known yet
    STEPS   how many steps the script has begun, as `ctx.step()` counts them
    END     SIGTERM, once the process has to end by it without another read

So the agent sees how far the script is while that is in a collective operation, and a read costs no
system call unless a stop is asked for. A script can write any number there: its agent accepts it,
and the page keeps its size.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import TypeAlias

READS = 0
ASKED = 1
STOP = 2
STEPS = 3
END = 4
LARGEST = (1 << 64) - 1
_SIZE = 4096  # bytes
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - a page has no name there
# linux/fcntl.h, which a Python need not have: neither the size nor the seals can be changed
_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW

Page: TypeAlias = "memoryview | list[int]"


def answer(page: Page, count: int, now: int) -> bool | None:
    """Whether a read is true, when a stop is asked for; None: that is not known yet.

    Args:
        page: of the script.
        count: the number of the read.
        now: of `time.monotonic_ns`.
    """
    stop = page[STOP]
    is_late = now >= page[ASKED]
    if not stop:
        if is_late:
            return True
        return None
    is_reached = count >= stop
    # A rank that is further behind by then does not train in step with the others: it stops where
    # it is
    is_left_behind = is_late and count < stop - 1
    return is_reached or is_left_behind


def blank_page() -> Page:
    """The page of a script without an agent."""
    return [0] * (END + 1)


def new_page() -> tuple[int, Page]:
    """A page for a script, as a file descriptor, which is the caller's, and mapped."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("distboot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(file, _SIZE)
        # A script that truncates it would end its agent by SIGBUS
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
