"""`ctx.preempted`: SIGTERM as a question to the script, which ends by itself; if it asks."""

from __future__ import annotations

import signal
from contextlib import suppress
from functools import partial
from types import FrameType

from . import crash_hooks

_asked = False  # of this process, whatever its context
_listening = False


def preempted() -> bool:
    """Whether SIGTERM has come. From the first call on it does not end this process by itself.

    A script that never asks is ended by SIGTERM as any other process is, also inside a collective operation, where no
    handler written in Python would run.
    """
    global _listening  # noqa: PLW0603 - a process has one handler
    if not _listening:
        with suppress(ValueError):  # not the main thread, which alone may say it
            signal.signal(signal.SIGTERM, partial(_take, signal.getsignal(signal.SIGTERM)))
            _listening = True
    return _asked


def _take(before: object, number: int, frame: FrameType | None) -> None:
    global _asked  # noqa: PLW0603 - set once
    _asked = True
    crash_hooks.emit(crash_hooks.TERM)
    if callable(before):
        before(number, frame)
