"""The file of bad hosts: one host a line, with when and why, for the next job to leave out.

    node-7  # 2026-11-26T20:14:02Z 1.1 Gbit/s to node-8, median of the others 94 Gbit/s

`srun --exclude=./bad-hosts` reads it as it is, and so do programs that read a hostfile. Rank 0's
agent appends to it: each line is one write, so jobs may share a file.
"""

from __future__ import annotations

import os
import stat
import time

from ..base.patterns import pattern
from ..base.text import cut, escape_control, without_secret

_HOST = pattern(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_LONGEST = 300  # characters of why


def append(path: str, host: str, why: str) -> None:
    """Add a host; `OSError`: the file cannot be written, `ValueError`: that is no name of a host."""
    if not is_name(host):
        raise ValueError(f"{host!r} is not a valid name of a host")
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    reason = cut(escape_control(without_secret(why)), _LONGEST)
    line = f"{host}  # {now} {reason}\n"
    # Not through a link: that would write to a file which another user has chosen
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.open(path, flags, 0o644)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path} is not a regular file")
        if not _ends_with_newline(file):  # as after an editor
            line = f"\n{line}"
        _write_whole(file, line.encode())
    finally:
        os.close(file)


def _ends_with_newline(file: int) -> bool:
    """Whether a file ends with a whole line, or is empty."""
    size = os.fstat(file).st_size
    last = os.pread(file, 1, max(size - 1, 0))
    return last in (b"", b"\n")


def _write_whole(file: int, data: bytes) -> None:
    """Write a line, or nothing of it: a disk may be full."""
    written = os.write(file, data)
    if written < len(data):
        os.ftruncate(file, os.fstat(file).st_size - written)
        raise OSError("the disk is full")


def entries(text: str) -> dict[int, str]:
    """What such a file has before each comment, by number of line: a host, or nothing."""
    lines = enumerate(text.splitlines(), start=1)
    return {number: line.partition("#")[0].strip() for number, line in lines}


def is_name(entry: str) -> bool:
    """Whether this is a valid name of a host."""
    return _HOST.fullmatch(entry) is not None
