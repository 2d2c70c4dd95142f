"""A time limit for C code of others that holds Python's lock, in which no thread or signal handler of ours can run."""

from __future__ import annotations

import os
import select
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .errors import DistbootError

_DONE = b"\n"


@contextmanager
def deadline(limit: float, too_late: DistbootError, ended: DistbootError | None = None) -> Iterator[None]:
    """Kill this process if the block has not ended in time. It is watched by a process of its own.

    Args:
        limit: seconds.
        too_late: what is printed before.
        ended: what is printed if this process has ended by itself in the block; None: nothing.
    """
    us, (reading, writing) = os.getpid(), os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads in a fork, which does next to nothing
        watcher = os.fork()
    if watcher == 0:
        os.close(writing)
        error: DistbootError | None = None
        if not select.select([reading], [], [], limit)[0]:
            error = too_late
        elif os.read(reading, 1) != _DONE:
            error = ended
        with suppress(OSError):
            if error is not None:
                os.write(2, f"distboot: {error}\n".encode())
            if error is too_late and os.getppid() == us:
                os.kill(us, signal.SIGKILL)
        os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        with suppress(OSError):
            os.write(writing, _DONE)
        os.close(writing)
        os.waitpid(watcher, 0)
