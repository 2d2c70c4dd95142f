"""In the process of the script: its exit status, told to its sidecar while it ends. Needs on_exit of the GNU C library.

Python does not say with which code it is about to end: `raise SystemExit(3)` passes no hook. The C library does: it
calls fputc(status, file) for us, as on_exit(3) has it, and then fgetc(file), which waits until the sidecar has passed
that on. Also in a container whose process 1 is the script, and where all ends with it.
"""

from __future__ import annotations

import ctypes
import os

from .crash_hooks import out_of_the_way, quiet
from .exit_status import LAST_RESORT

_UNBUFFERED = 2  # _IONBF, stdio.h

_files: tuple[int, int] | None = None  # that the C library writes the status to, and waits for; of this process


def report_exit_code(status: int, answer: int) -> None:
    """At the exit of this process, write its code to `status` as one byte, and wait for a byte or the end of `answer`.

    A second call replaces both. The descriptors stay the caller's.

    Raises:
        OSError, AttributeError: this C library cannot do it.
    """
    global _files  # noqa: PLW0603 - a process ends once
    if _files is None:
        files = out_of_the_way(os.dup(status)), out_of_the_way(os.dup(answer))
        _register(*files)
        os.register_at_fork(after_in_child=_forget)
        _files = files
    else:
        for new, old in zip((status, answer), _files, strict=True):
            os.dup2(new, old, inheritable=False)


def _register(status: int, answer: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    on_exit, at_exit = libc.on_exit, libc["__cxa_atexit"]  # which atexit(3) calls, and which takes an argument
    libc.fdopen.restype = ctypes.c_void_p
    libc.fdopen.argtypes = [ctypes.c_int, ctypes.c_char_p]
    libc.setvbuf.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_size_t]
    writing, reading = libc.fdopen(status, b"w"), libc.fdopen(answer, b"r")
    if not writing or not reading:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    libc.setvbuf(writing, None, _UNBUFFERED, 0)
    # The last to be registered is called first.
    at_exit(ctypes.cast(libc.fgetc, ctypes.c_void_p), ctypes.c_void_p(reading), None)
    on_exit(ctypes.cast(libc.fputc, ctypes.c_void_p), ctypes.c_void_p(writing))
    if os.getpid() == 1:
        # The kernel keeps SIGKILL away from process 1 of a container, and every signal without a handler. This one is
        # _exit(2), which takes the number of the signal as its exit code.
        libc.signal(LAST_RESORT, ctypes.cast(libc._exit, ctypes.c_void_p))  # noqa: SLF001


def _forget() -> None:
    """The exit of a forked process is not that of the rank."""
    if _files is not None:
        quiet(*_files)
