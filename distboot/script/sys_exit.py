"""How the script ends: by an exception, with `sys.exit`, or well.

A function of `atexit` cannot ask Python for the exit code: no hook receives the SystemExit of
`sys.exit(3)`, and the script may catch it. So a function replaces `sys.exit` that keeps the
SystemExit it raises.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from functools import cache, wraps

from .crash_hooks import exception_ends_script, has_returned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

WELL = "well"
EXIT = "exit"
EXCEPTION = "exception"

_raised: SystemExit | None = None  # by the last `sys.exit` of the main thread


@cache  # a process ends once
def watch_exit() -> None:
    """From now on, keep what `sys.exit` raises."""

    @wraps(sys.exit)  # so that it is pickled as such
    def leave(status: object = None, /) -> NoReturn:
        __tracebackhide__ = True  # pytest shows the call in the script, not this line
        global _raised  # noqa: PLW0603 - as a process has one sys.exit
        error = SystemExit(status)
        thread = threading.current_thread()
        if thread is threading.main_thread():  # in another one it ends only that
            _raised = error
        raise error

    sys.exit = leave


def exit_asked() -> SystemExit | None:
    """In a function of `atexit`: the SystemExit that ended the script.

    None if there was none, or if the script caught it.
    """
    trace = getattr(_raised, "__traceback__", None)
    # Before Python 3.12 one that ended the script has no traceback here
    if trace is None:
        return _raised
    frame: FrameType = trace.tb_frame
    is_outermost = frame.f_back is None
    if not is_outermost:
        return None
    if has_returned(frame):
        return None
    return _raised


def exit_outcome() -> str:
    """In a function of `atexit`: EXCEPTION, EXIT with a code other than 0, or WELL.

    A `SystemExit` that the script raises itself, or by the `exit` of the interactive Python, counts
    as WELL.
    """
    if exception_ends_script():
        return EXCEPTION
    asked = exit_asked()
    code = getattr(asked, "code", None)
    if code in (None, 0):
        return WELL
    return EXIT


def at_end(
    *,
    well: Callable[[], object] | None = None,
    exited: Callable[[], object] | None = None,  # by `sys.exit`
    failed: Callable[[], object] | None = None,  # with an uncaught exception
) -> None:
    """Call one of these when the script ends, but not in a forked child."""
    watch_exit()
    pid = os.getpid()
    calls = {WELL: well, EXIT: exited, EXCEPTION: failed}

    def run() -> None:
        call = calls[exit_outcome()]
        if os.getpid() == pid and call is not None:
            call()

    atexit.register(run)
