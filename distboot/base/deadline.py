"""A time limit for C code that holds Python's lock.

No thread and no signal handler of this process can run meanwhile, so a child watches the time, and
kills the process when it is over. If C code exits the process, the C library prints the error: it
flushes its streams then, and mpirun does not wait for what a child prints when all ranks end at
once.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import warnings
from contextlib import contextmanager, suppress
from typing import NamedTuple

from .errors import DistbootError, printed
from .text import first_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, NoReturn

    Report = Callable[[str], object]

_DONE = b"\n"
_FULLY_BUFFERED = 0  # _IOFBF, stdio.h


@contextmanager
def deadline(
    limit: float,
    too_late: DistbootError,  # printed before the process is killed
    ended: DistbootError | None = None,  # printed if the process ends by itself in the block
    say: Report | None = None,  # called with the reason before the process is killed
) -> Iterator[None]:
    """Kill this process if the block has not ended within `limit` seconds."""
    process = os.getpid()
    reading, writing = os.pipe()
    # The watcher must not run a handler of the script, Ctrl-C included: it would go on as the
    # script.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        watcher = _fork()
        if watcher == 0:
            os.close(writing)
            _watch(reading, _Order(process, limit, too_late, ended, say))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reading)
    try:
        with _printed_at_exit(ended, writing):
            yield
    finally:
        with suppress(OSError):
            os.write(writing, _DONE)
        os.close(writing)
        with suppress(ChildProcessError):  # where SIGCHLD is ignored
            os.waitpid(watcher, 0)


def _fork() -> int:
    with warnings.catch_warnings():
        # Python and JAX warn of threads in a fork, which does next to nothing here
        warnings.simplefilter("ignore")
        return os.fork()


class _Order(NamedTuple):
    """What the child does; as the arguments of `deadline`."""

    process: int  # to kill
    limit: float
    too_late: DistbootError
    ended: DistbootError | None
    say: Report | None


def _watch(reading: int, order: _Order) -> NoReturn:
    """In the child: wait for the end of the block, of the process, or of the time."""
    try:
        ready, _, _ = select.select([reading], [], [], order.limit)
        if not ready:
            _print(order.too_late)
            _kill(order)
        elif os.read(reading, 1) != _DONE and order.ended is not None:
            _print(order.ended)
    finally:
        os._exit(0)


def _kill(order: _Order) -> None:
    if os.getppid() != order.process:  # it has ended
        return
    if order.say is not None:
        # As the traceback would end
        order.say(first_line(order.too_late))
    os.kill(order.process, signal.SIGKILL)


def _print(error: DistbootError) -> None:
    with suppress(OSError):
        os.write(2, printed(error).encode())


@contextmanager
def _printed_at_exit(error: DistbootError | None, writing: int) -> Iterator[None]:
    """If C code ends this process in the block, print an error and tell the watcher."""
    if error is None or sys.platform != "linux":
        yield
        return
    import ctypes

    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    streams = [
        _stream(libc, 2, printed(error).encode()),
        _stream(libc, writing, _DONE),
    ]
    try:
        yield
    finally:
        for stream in streams:
            libc["__fpurge"](stream)  # fclose would print the text
            libc.fclose(stream)


def _stream(libc: Any, file: int, text: bytes) -> Any:
    """A stream of the C library that holds a text until it is flushed."""
    import ctypes

    stream = ctypes.c_void_p(libc.fdopen(os.dup(file), b"w"))
    libc.setvbuf(stream, None, _FULLY_BUFFERED, len(text) + 1)
    libc.fputs(text, stream)
    return stream
