"""Files that a user names for a command to read, also pipes."""

from __future__ import annotations

import os
import select
import stat
from typing import TextIO

_WRITER_TIMEOUT = 10.0  # seconds until a pipe has something to read


def opened(path: str) -> TextIO:
    """A file, or a pipe such as bash's `<(…)`, to read as text.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is a pipe to which nobody writes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # without a wait for a writer
    try:
        _refuse_silent(descriptor)
        os.set_blocking(descriptor, True)
        return open(descriptor, encoding="utf-8", errors="replace")
    except (OSError, ValueError):
        os.close(descriptor)
        raise


def _refuse_silent(descriptor: int) -> None:
    is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    if is_pipe and not waiting.poll(_WRITER_TIMEOUT * 1000):
        raise ValueError(f"it is a pipe, to which nobody wrote within {_WRITER_TIMEOUT:g} s")
