"""The error of a script that has no agent, for the platform's termination log."""

from __future__ import annotations

import sys
from collections.abc import Callable

from ..base.errors import DistbootError


def report_error_at_exit(error: DistbootError, *, has_context: Callable[[], bool]) -> None:
    """At exit, write this error of `init` to the log, unless a later init() succeeded."""
    from ..frameworks._base import at_end

    def report() -> None:
        if _is_interrupt() or has_context():  # the agent of a context knows why it ends
            return
        from ..agent import platform_log  # here, as most scripts end well

        platform_log.write(str(error))

    at_end(exited=report, failed=report)


def report_exception_at_exit() -> None:
    """At exit, write the uncaught exception of a process that is alone to the log."""
    from ..frameworks._base import at_end

    def report() -> None:
        if _is_interrupt():
            return
        from ..agent import platform_log  # here, as most scripts end well

        platform_log.write_uncaught()

    at_end(failed=report)


def _is_interrupt() -> bool:
    """Whether Ctrl-C ends the script.

    That is not a failure. And after the import in `report` Python would not end by SIGINT.
    """
    return isinstance(getattr(sys, "last_value", None), KeyboardInterrupt)
