"""Signals by number: those that come from outside of a job, and what a number means."""

from __future__ import annotations

import signal

ABORT = signal.SIGABRT
INTERRUPT = signal.SIGINT
KILL = signal.SIGKILL
# A process that one of these ends was stopped; it did not fail.
FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
# SIGRTMAX on Linux: it ends process 1 of a container, which no other signal does.
LAST_RESORT = 64


def signal_name(number: int) -> str:
    """`"SIGTERM"`; `"signal 34"` for those without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def signal_of_code(code: int | None) -> int | None:
    """The signal in an exit code as a shell reports it, 128 + n; None: it has none."""
    if code is None:
        return None
    number = code - 128
    if 0 < number < signal.NSIG:
        return number
    return None
