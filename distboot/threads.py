"""Threads beside a main thread that waits for signals, as the wrapper's does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable


def start_without_signals(name: str, work: Callable[[], object]) -> None:
    """Start a thread that takes no signal, and does not keep the process alive."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        threading.Thread(target=work, name=name, daemon=True).start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
