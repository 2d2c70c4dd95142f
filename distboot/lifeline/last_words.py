"""In the process of the script: what it leaves behind for whoever watches it, when it fails.

An uncaught exception goes through `sys.excepthook`, and a crash through `faulthandler`, both to a pipe. The process
prints what it prints without us. This file is also read by the Python of an unmodified script, without the rest of the
package: it imports nothing but the standard library, and that late.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

MOST = 3500  # bytes of a traceback; a write to a pipe of up to 4096 is all or nothing (pipe(7))
_LINES = 40
EXCEPTION, INTERRUPT, TERM, ENDING = "exception", "interrupt", "term", "ending"

_pipe: int | None = None  # where words go; None: nobody listens
_mask: set[int] = set()  # of signals, before a fork


def leave_to(pipe: int, term: bool = False) -> None:
    """Send the last words of this process to a pipe; and, with `term`, what it did when SIGTERM came."""
    global _pipe  # noqa: PLW0603 - as a process has one excepthook
    if _pipe is None:
        _hook(sys.excepthook)
        os.register_at_fork(before=_hold_term, after_in_parent=_release_term, after_in_child=_forget)
    _pipe = pipe
    # Also again: of what is registered the last runs first, and the frameworks end their groups in such functions.
    atexit.unregister(_say_ending)
    atexit.register(_say_ending)
    import faulthandler
    import signal

    if not faulthandler.is_enabled():  # else the user has said where its dumps are to go
        faulthandler.enable(pipe)
    before = signal.getsignal(signal.SIGTERM)
    if term and (before == signal.SIG_DFL or callable(before)):
        # In C: it does not wait for Python's lock; and then what was to happen does, death by SIGTERM for one.
        faulthandler.register(signal.SIGTERM, pipe, all_threads=False, chain=True)


def say(kind: str, text: str = "") -> None:
    """Send something in one piece: what it is, whose it is, and the text."""
    if _pipe is not None:
        data = text.encode(errors="replace")[-MOST:]
        with suppress(OSError):  # nobody is there any more
            os.write(_pipe, b"\0%s %d\n%s\0" % (kind.encode(), os.getpid(), data))


def quiet(*files: int) -> None:
    """Turn these files of a forked process into none: their numbers must not become those of other files."""
    null = os.open(os.devnull, os.O_RDWR)
    for file in files:
        os.dup2(null, file, inheritable=False)
    os.close(null)


def _say_ending() -> None:
    say(ENDING)


def _hold_term() -> None:
    """A signal for a process that is just being forked is not to be written about as ours."""
    global _mask  # noqa: PLW0603
    import signal

    _mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release_term() -> None:
    import signal

    signal.pthread_sigmask(signal.SIG_SETMASK, _mask)


def _forget() -> None:
    """A forked process, say a worker of a data loader, is not the rank."""
    global _pipe  # noqa: PLW0603
    if _pipe is not None:
        import faulthandler
        import signal

        faulthandler.unregister(signal.SIGTERM)
        quiet(_pipe)
        _pipe = None
    _release_term()


def _hook(before: Hook) -> None:
    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            if _pipe is not None:
                _leave_words(kind, error, trace)
        finally:
            before(kind, error, trace)

    sys.excepthook = excepthook


def _leave_words(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        say(INTERRUPT)
        return
    import traceback

    try:
        lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
    except Exception:  # noqa: BLE001 - an exception whose text cannot be had
        lines = [kind.__name__]
    say(EXCEPTION, "\n".join(lines[-_LINES:]))
    _write_error_file(error, "\n".join(lines))


def _write_error_file(error: BaseException, text: str) -> None:
    """What torchrun reads to show the first failure, as torch's @record writes it, unless that has."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    import json
    import time

    # torch.distributed.elastic.multiprocessing.errors.error_handler, ErrorHandler.record_exception
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    message = f"{type(error).__name__}: {error}"
    with suppress(OSError, ValueError), open(path, "w", encoding="utf-8", errors="replace") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)
