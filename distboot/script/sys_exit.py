"""How the script ends: by an exception, with `sys.exit`, or well.

In a function of `atexit` Python does not report SystemExit: no hook receives what `sys.exit(3)`
raises, and the script may catch it. So `sys.exit` is replaced by a function that keeps what it
raises.
"""

from __future__ import annotations

import sys
import threading
from functools import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

WELL = "well"
EXIT = "exit"
EXCEPTION = "exception"

_asked: SystemExit | None = None


@cache  # a process ends once
def watch_exit() -> None:
    """From now on, keep what `sys.exit` raises."""

    def leave(status: object = None, /) -> NoReturn:
        __tracebackhide__ = True  # pytest shows where the script has called it
        global _asked  # noqa: PLW0603 - as a process has one sys.exit
        error = SystemExit(status)
        if threading.current_thread() is threading.main_thread():
            _asked = error
        raise error

    sys.exit = leave


def exit_asked() -> SystemExit | None:
    """In a function of `atexit`: the SystemExit that ended the script.

    None if there was none, or if it was caught.
    """
    # Before Python 3.12 there is no traceback here: then no frame has caught it.
    if _asked is None or _asked.__traceback__ is None:
        return _asked
    import opcode

    frame = _asked.__traceback__.tb_frame
    if frame.f_back is not None:
        return None
    # It has reached the outermost frame, unless that has returned
    operation = opcode.opname[frame.f_code.co_code[frame.f_lasti]]
    if operation.startswith("RETURN"):
        return None
    return _asked


def exit_outcome() -> str:
    """In a function of `atexit`: EXCEPTION, EXIT with a code other than 0, or WELL.

    A `SystemExit` that the script raises itself, or by the `exit` of the interactive Python, counts
    as WELL.
    """
    # The interactive Python shows an exception, and goes on
    is_interactive = hasattr(sys, "ps1") or sys.flags.interactive
    if hasattr(sys, "last_type") and not is_interactive:
        return EXCEPTION
    asked = exit_asked()
    if asked is None or asked.code in (None, 0):
        return WELL
    return EXIT
