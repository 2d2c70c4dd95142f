"""How the script of this process ends, as far as Python tells: in a function of `atexit` it says nothing of SystemExit.

`sys.exit(3)` passes no hook, and may be caught. So what it raises is kept, and looked at when the end has come.
"""

from __future__ import annotations

import signal
import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

WELL, EXIT, EXCEPTION = "well", "exit", "exception"
FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # nobody fails of these by himself

_asked: SystemExit | None = None
_is_watched = False


def watch() -> None:
    """Know from now on what `sys.exit` was called with."""
    global _is_watched  # noqa: PLW0603 - a process has one end
    if _is_watched:
        return
    _is_watched = True

    def leave(status: object = None, /) -> NoReturn:
        global _asked  # noqa: PLW0603
        error = SystemExit(status)
        if threading.current_thread() is threading.main_thread():
            _asked = error
        raise error

    sys.exit = leave


def exit_asked() -> SystemExit | None:
    """In a function of `atexit`: with what `sys.exit` has ended the script; None: it has not."""
    return _asked if _asked is not None and _is_uncaught(_asked) else None


def outcome() -> str:
    """In a function of `atexit`: EXCEPTION, EXIT with a code other than 0, or WELL.

    A `SystemExit` that the script raises itself, or by the `exit` of the interactive Python, is taken for WELL.
    """
    if hasattr(sys, "last_type"):
        return EXCEPTION
    asked = exit_asked()
    return WELL if asked is None or asked.code in (None, 0) else EXIT


def _is_uncaught(error: SystemExit) -> bool:
    """Whether nobody has caught it: it has come to the outermost frame, and that has not returned."""
    import opcode

    trace = error.__traceback__
    if trace is None:  # before Python 3.12, if there was nobody who could
        return True
    frame = trace.tb_frame
    return frame.f_back is None and not opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
