"""A signal that asks a script to stop, where Python's handlers cannot be set, or cannot run.

*They cannot be set*: Python sets handlers in its main thread only, and `init()` may run in another
one, below Ray Train for example. So faulthandler handles the signal, in C and in the thread to
which the kernel delivers it: it writes to a pipe, and the process goes on. A thread of distboot
reads the pipe.

*They cannot run*: Python runs handlers in its main thread, once that is back from C. Once the job
has failed, that may be never: a collective operation waits for a rank that has ended. Then the
agent writes into the page that the process has to end, and a thread gives SIGTERM its default
effect. So the exit code is that of a script without a handler.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ..base.threads import start_without_signals
from . import crash_hooks
from .crash_hooks import out_of_the_way, quiet
from .stop_page import END, Page

_INTERVAL = 0.5  # seconds between two checks whether the process has to end

_files: dict[int, int] = {}  # by signal: the end of its pipe that faulthandler writes to


def listen(number: int, receive: Callable[[], None], *, chain: bool) -> None:
    """When this signal arrives, call a function in a thread, instead of ending the process.

    With `chain`, the handler of the script runs as well.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    if not _files:
        os.register_at_fork(after_in_child=_forget)
    if number in _files:  # the script has set its default effect since: let that thread end
        faulthandler.unregister(number)
        os.close(_files[number])
    _files[number] = out_of_the_way(writing)
    faulthandler.register(number, _files[number], all_threads=False, chain=chain)
    if number == signal.SIGTERM:
        crash_hooks.term_is_held = True
    name = signal.Signals(number).name
    read = partial(_read, out_of_the_way(reading), receive)
    start_without_signals(f"distboot-{name}", read)


def stop_listening(number: int, before: object) -> None:
    """Give a signal the effect that it had before `listen`, unless the script has set another one.

    `before` is the handler that Python knew of then.
    """
    is_changed = signal.getsignal(number) not in (before, None)
    if is_changed:
        return
    faulthandler.unregister(number)
    os.close(_files.pop(number))  # which ends the thread
    if number == signal.SIGTERM:
        crash_hooks.report_term_again()


def watch_end(page: Page, over: threading.Event, is_ours: Callable[[], bool]) -> None:
    """Until `over`, let a thread end this process by SIGTERM once its page has it.

    `is_ours` is false while the script has a handler of its own, or ignores SIGTERM. The thread
    reports each change of that, and the agent waits for a handler of the script.
    """

    def watch() -> None:
        reported = crash_hooks.OURS
        while not over.wait(_INTERVAL):
            owner = crash_hooks.OURS if is_ours() else crash_hooks.OF_SCRIPT
            if owner != reported:
                crash_hooks.emit(crash_hooks.TERM_HANDLER, owner)
                reported = owner
            if page[END] != signal.SIGTERM:
                continue
            if owner == crash_hooks.OURS:
                _end_by_term()

    crash_hooks.emit(crash_hooks.TERM_HANDLER, crash_hooks.OURS)
    start_without_signals("distboot-end", watch)


def _end_by_term() -> None:
    """End this process by SIGTERM, whatever its threads do."""
    with suppress(ImportError, AttributeError):  # a Python without libffi
        import ctypes

        # In place of `signal.signal`, which only the main thread may call
        set_handler = ctypes.pythonapi.PyOS_setsig
        set_handler.argtypes = [ctypes.c_int, ctypes.c_void_p]
        set_handler.restype = ctypes.c_void_p
        set_handler(signal.SIGTERM, None)
        os.kill(os.getpid(), signal.SIGTERM)
    os._exit(128 + signal.SIGTERM)


def _read(pipe: int, receive: Callable[[], None]) -> None:
    while os.read(pipe, 1 << 16):
        receive()
    os.close(pipe)


def _forget() -> None:
    """In a fork, which is not the rank: give signals the effect that they had before."""
    for number, file in _files.items():
        faulthandler.unregister(number)
        quiet(file)
    _files.clear()
    crash_hooks.term_is_held = False
