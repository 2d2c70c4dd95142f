"""This process: how its script ends, as far as Python tells, and threads that take no signals.

In a function of `atexit` Python says nothing of SystemExit: `sys.exit(3)` passes no hook, and may be caught. So what it
raises is kept, and looked at when the end has come.
"""

from __future__ import annotations

import queue
import signal
import sys
import threading
from functools import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn, TypeVar

    T = TypeVar("T")

WELL, EXIT, EXCEPTION = "well", "exit", "exception"
# A process that ends by one of these was stopped, and has not failed.
FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_asked: SystemExit | None = None


@cache  # a process has one end
def watch_exit() -> None:
    """Know from now on what `sys.exit` was called with."""

    def leave(status: object = None, /) -> NoReturn:
        global _asked  # noqa: PLW0603 - as a process has one sys.exit
        error = SystemExit(status)
        if threading.current_thread() is threading.main_thread():
            _asked = error
        raise error

    sys.exit = leave


def exit_asked() -> SystemExit | None:
    """In a function of `atexit`: with what `sys.exit` has ended the script; None: it has not."""
    return _asked if _asked is not None and _is_uncaught(_asked) else None


def exit_outcome() -> str:
    """In a function of `atexit`: EXCEPTION, EXIT with a code other than 0, or WELL.

    A `SystemExit` that the script raises itself, or by the `exit` of the interactive Python, is taken for WELL.
    """
    if hasattr(sys, "last_type"):
        return EXCEPTION
    asked = exit_asked()
    return WELL if asked is None or asked.code in (None, 0) else EXIT


def _is_uncaught(error: SystemExit) -> bool:
    """Whether it was not caught: it has come to the outermost frame, and that has not returned."""
    import opcode

    trace = error.__traceback__
    if trace is None:  # before Python 3.12, where no frame could catch it
        return True
    frame = trace.tb_frame
    return frame.f_back is None and not opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")


def start_without_signals(name: str, work: Callable[[], object]) -> None:
    """Start a thread that takes no signal, and does not keep the process alive."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def result_within(limit: float, name: str, work: Callable[[], T], late: str) -> T:
    """What `work` returns or raises in a thread of this name, which may outlive us; `late` says what has timed out."""
    done: queue.SimpleQueue[tuple[list[T], BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put(([work()], None))
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread of the caller
            done.put(([], error))

    start_without_signals(name, run)
    try:
        found, error = done.get(timeout=limit)
    except queue.Empty:
        raise TimeoutError(late) from None
    if error is not None:
        raise error
    return found[0]
