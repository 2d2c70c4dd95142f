"""What a script without an agent leaves behind: a line in the termination log, and its exit code.

The exit code of an error of distboot is the error's own. Python ends with 1 for every uncaught
exception, unless `sys.excepthook` raises SystemExit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial

from ..base.errors import DistbootError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType


def report_error_at_exit(error: DistbootError, *, has_context: Callable[[], bool]) -> None:
    """At exit, write this error of `init` to the log, or what has ended the script instead.

    Nothing where a later init() succeeded.
    """
    from ..script.sys_exit import at_end

    def report() -> None:
        if has_context():  # its agent knows why the script ends
            return
        _write(error)

    at_end(exited=report, failed=report)


def report_exception_at_exit() -> None:
    """At exit, write the uncaught exception of a process that is alone to the log."""
    from ..script.sys_exit import at_end

    report = partial(_write, None)
    at_end(failed=report)


def _write(error: DistbootError | None) -> None:
    """Write an error of `init`, or another exception that has ended the script."""
    last = getattr(sys, "last_value", error)
    # Ctrl-C is not a failure. And after these imports Python would not end by SIGINT.
    if isinstance(last, KeyboardInterrupt):
        return
    try:
        from ..agent import platform_log  # here, as most scripts end well
        from ..script.exceptions import chain
    except OSError:  # no file left
        return
    assert last is not None
    led_to_it = map(id, chain(last))
    if id(error) in led_to_it:
        platform_log.write(str(error))
    else:
        platform_log.write_uncaught()


@cache
def install_exit_code_hook() -> None:
    """From now on an uncaught `DistbootError` ends the script with its own exit code."""
    from ..script.crash_hooks import is_the_end  # now, as no file may be left later

    before = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        before(kind, error, trace)
        # Not every exception that has an `exit_code`: click's have one, too
        if isinstance(error, DistbootError) and is_the_end():
            raise SystemExit(error.exit_code)

    sys.excepthook = excepthook
