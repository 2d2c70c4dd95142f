"""A time limit for C code of others that holds Python's lock, in which no thread or signal handler of ours can run."""

from __future__ import annotations

import os
import select
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from ..errors import DistbootError, printed
from ..text import first_line

_DONE = b"\n"


@contextmanager
def deadline(
    limit: float,
    too_late: DistbootError,  # printed before
    ended: DistbootError | None = None,  # printed if this process has ended by itself in the block
    say: Callable[[str], object] | None = None,  # is told, too, why it is killed
) -> Iterator[None]:
    """Kill this process if the block has not ended in `limit` seconds. It is watched by a process of its own."""
    us, (reading, writing) = os.getpid(), os.pipe()
    # The watcher must not run a handler of the script's, Ctrl-C included: it would go on as the script.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads in a fork (Python's, JAX's), which does next to nothing
            watcher = os.fork()
        if watcher == 0:
            os.close(writing)
            _watch(us, reading, limit, (too_late, ended), say)
    except OSError:
        os.close(writing)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reading)
    try:
        yield
    finally:
        with suppress(OSError):
            os.write(writing, _DONE)
        os.close(writing)
        with suppress(ChildProcessError):  # where SIGCHLD is ignored
            os.waitpid(watcher, 0)


def _watch(
    us: int,
    reading: int,
    limit: float,
    errors: tuple[DistbootError, DistbootError | None],
    say: Callable[[str], object] | None,
) -> NoReturn:
    """The watcher: print an error, and end the process that it watches, or not."""
    try:
        too_late, ended = errors
        is_late = not select.select([reading], [], [], limit)[0]
        error = too_late if is_late else ended if os.read(reading, 1) != _DONE else None
        if error is not None:
            with suppress(OSError):
                os.write(2, printed(error).encode())
        if is_late and os.getppid() == us:
            if say is not None:
                say(f"distboot.DistbootError: {first_line(too_late)}")  # as the traceback would end
            os.kill(us, signal.SIGKILL)
    finally:
        os._exit(0)
