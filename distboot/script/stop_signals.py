"""A signal that asks a script to stop, where no handler of Python's can be set: in any thread but the main one.

`init()` runs in another thread below Ray Train, for example. Python runs handlers in the main thread only, which may be
in C++ for good. So faulthandler handles the signal, in C and in the thread to which the kernel delivers it: it writes
to a pipe, and the process goes on. A thread of distboot reads the pipe.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Callable
from functools import partial

from ..base.threads import start_without_signals
from . import crash_hooks
from .crash_hooks import out_of_the_way, quiet

_files: dict[int, int] = {}  # by signal: the end of its pipe to which faulthandler writes


def listen(number: int, receive: Callable[[], None], *, chain: bool) -> None:
    """Call a function, in a thread of its own, when this signal arrives, instead of ending the process.

    `chain`: the script's own handler runs as well.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    if not _files:
        os.register_at_fork(after_in_child=_forget)
    _files[number] = out_of_the_way(writing)
    faulthandler.register(number, _files[number], all_threads=False, chain=chain)
    crash_hooks.term_is_held = crash_hooks.term_is_held or number == signal.SIGTERM
    name = signal.Signals(number).name
    start_without_signals(f"distboot-{name}", partial(_read, out_of_the_way(reading), receive))


def _read(pipe: int, receive: Callable[[], None]) -> None:
    while os.read(pipe, 1 << 16):
        receive()


def _forget() -> None:
    """A fork is not the rank: signals have the effect on it that they had before."""
    for number, file in _files.items():
        faulthandler.unregister(number)
        quiet(file)
    _files.clear()
    crash_hooks.term_is_held = False
