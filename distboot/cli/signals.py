"""How a command ends at a signal, where it has no handlers of its own."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

from ..base.process import FROM_OUTSIDE


def exit_on_signals() -> None:
    """Exit on signals in process 1 of a container, too: the kernel drops those without a handler."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    for number in FROM_OUTSIDE:
        is_ignored = signal.getsignal(number) is signal.SIG_IGN
        if not is_ignored:
            signal.signal(number, end)


def raise_at_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, which `__main__` has turned off for the start."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_by_interrupt() -> int:
    """End by SIGINT, so that a shell stops its script.

    In process 1, where the kernel ignores that, return the exit code.
    """
    is_process_1 = os.getpid() == 1
    if not is_process_1:
        with suppress(OSError, AttributeError):
            sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return 128 + signal.SIGINT
