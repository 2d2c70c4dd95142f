"""In the process of the script: what it leaves behind for its agent when it fails.

An uncaught exception goes through `sys.excepthook`, the text of `sys.exit` through `sys.stderr`, and a crash through
`faulthandler`, all to a pipe. If the script has replaced our hook, the exception goes there at exit. The process prints
what it prints without us. This file is also read by the Python of an unmodified script, which may have another
distboot, or none: it imports what it needs late.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
from contextlib import contextmanager, suppress

from .exceptions import (
    EXIT,
    Description,
    describe,
    describe_text,
    last_line,
)
from .show_exception import print_interrupted, show

TYPE_CHECKING = False
if TYPE_CHECKING:
    import faulthandler  # noqa: TC004 - loaded late, by a function
    import signal  # noqa: TC004 - the same
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType
    from typing import Any

MOST = 3500  # bytes of a text; a write to a pipe of up to 4096 is all or nothing (pipe(7))
VARIABLE = "DISTBOOT_CRASH_HOOKS"  # the pipe, and its inode
EXCEPTION = "exception"
INTERRUPT = "interrupt"
TERM = "term"
ENDING = "ending"
PRINTED = "printed"  # what there is to read about the exception, or the text of `sys.exit`
STACKS = "stacks"  # where SIGURG shows the stack of the process: file, inode
STEPS = "steps"
# Whose handler SIGTERM has, if not that of the system
TERM_HANDLER = "term_handler"
OURS = "distboot"
OF_SCRIPT = "script"
# With which exit code to end; whether another rank has failed first
ASK = "ask"
ASK_FIRST = "ask_first"
# That flag of the pipe, which its reader sets: no message, so that a good end asks for none
JOB_ENDS = os.O_APPEND
# Through which a process speaks to its peers
_FRAMEWORKS = (
    "torch",
    "tensorflow",
    "jax",
    "mpi4py",
    "horovod",
    "distboot.initialize",
)
_WRAPPERS = f"_{__name__}"  # this file, where the wrapper has had it loaded
_POLLING = 0.05  # seconds
_SAME_INTERRUPT = 0.5  # seconds between two arrivals of one Ctrl-C
_EXPLAINED = 2.0  # seconds for the wrapper to stop a rank that fails for another one

_NO_PIPE = (-1, 0)  # what is written there is dropped: nothing reads events
_pipe = _NO_PIPE  # where events are written: file descriptor, inode
_of_parent = _NO_PIPE  # the same of the process that has forked this one
_clean: Callable[[str], str] = str  # takes the secret of the job out of a text
_mask: set[int] = set()  # of signals, before a fork
_awaited: set[str] = set()  # modules that a `_Finder` looks for
_reports_term = False  # whether the pipe is told that SIGTERM has arrived
term_is_held = False  # whether `stop_signals` has taken SIGTERM, and reports it
_term_at = float("inf")  # when a SIGTERM has arrived after which the script goes on
_reported: BaseException | None = None  # the last exception that the agent has been told of
_has_closed = False  # whether the script has closed its context: no peer can fail it any more
_enables_dumps = False  # whether faulthandler is enabled by us, not by the user
_stacks = _NO_PIPE  # for SIGURG, if that is ours: a pipe and its inode
# The end of what the script has written to stderr: argparse and others write there why they end
_stderr_tail = ""
_TAIL = 4096  # characters of it


def install(pipe: int, *, term: bool = False) -> None:
    """Send why this process fails to a pipe; and, with `term`, that SIGTERM has come."""
    global _pipe, _clean, _enables_dumps  # noqa: PLW0603 - as a process has one excepthook
    global _reports_term  # noqa: PLW0603 - the same
    global faulthandler, signal  # noqa: PLW0603 - loaded late
    import faulthandler
    import signal

    secret = os.environ.get("DISTBOOT_SECRET")  # now: the script may remove it
    if secret:
        from ..base.text import without_secret

        _clean = functools.partial(without_secret, secret=secret)
        _clean("")  # it imports what it needs now: later the script may have no file left to open
    _hook()
    _pipe = pipe, os.fstat(pipe).st_ino
    # Also again: of what is registered the last runs first, and the frameworks end their groups in such functions.
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    # Else the script uses it, or a library in C, of which Python does not know
    has_handler = signal.getsignal(signal.SIGURG) != signal.SIG_DFL
    is_used = has_handler or is_caught(signal.SIGURG)
    if _stacks != _NO_PIPE or not is_used:
        with suppress(OSError):  # no file is left
            _show_stacks()
    _enables_dumps |= not faulthandler.is_enabled()
    if _enables_dumps:  # else the user has said where its dumps are to go
        faulthandler.enable(pipe)
    _reports_term = term
    if term:
        _register_term()
        _follow_term()


def is_caught(number: int) -> bool:
    """Whether a handler runs when this signal arrives: ours, or one of the script in its place."""
    with suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            name, _, mask = line.partition(":")
            if name == "SigCgt":  # proc(5)
                return bool(int(mask, 16) >> (number - 1) & 1)
    return True


def install_below_wrapper() -> None:
    """Do so in a Python that has not run the wrapper's `sitecustomize`, as `python -I` does not."""
    # KeyError: it has, and has taken the variable out; the others: this is another process
    with suppress(OSError, ValueError, KeyError):
        pipe, inode = map(int, os.environ[VARIABLE].split(":"))
        del os.environ[VARIABLE]
        _refuse_other(pipe, inode)
        os.set_inheritable(pipe, False)
        install(pipe)


@functools.cache  # a fork has it, too
def _hook() -> None:
    wrap_excepthook()
    _watch_stderr()
    os.register_at_fork(before=_hold_term, after_in_parent=_release_term, after_in_child=_forget)


def wrap_excepthook() -> None:
    """Let ours be called before the hook that there is."""
    if getattr(sys.excepthook, "func", None) is not _excepthook:
        sys.excepthook = functools.partial(_excepthook, sys.excepthook)


def _at_exit() -> None:
    """Before the frameworks end their groups: report an exception that a hook in place of ours has shown."""
    with _uninterrupted():
        with suppress(Exception):
            if exception_ends_script():
                error: Any = sys.last_value
                trace = sys.last_traceback
                _report(error, trace)
        emit(ENDING, last_line(_clean(_stderr_tail)))


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Leave out the same Ctrl-C once more: Slurm and terminals may signal each process of a job.

    One that comes later interrupts the block, which may call a hook of the script's own.
    """
    import signal

    before = signal.getsignal(signal.SIGINT)
    until = time.monotonic() + _SAME_INTERRUPT

    def handle(number: int, frame: FrameType | None) -> None:
        if time.monotonic() > until:
            signal.default_int_handler(number, frame)

    with suppress(ValueError):  # only the main thread sets handlers
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        # Else there was a handler of the script, or a hook in the block has set one
        if signal.getsignal(signal.SIGINT) is handle:
            signal.signal(signal.SIGINT, before)


def exception_ends_script() -> bool:
    """In a function of `atexit`: whether an exception has ended the script.

    Python sets `sys.last_traceback` before it calls the hook. So do others, such as pytest and consoles, for exceptions
    that they show and go on; only those that end the script have come through its outermost frame, which nothing has
    called.
    """
    if _is_interactive():
        return False
    trace = getattr(sys, "last_traceback", None)
    if trace is None:
        return False
    outermost: FrameType = trace.tb_frame
    caller = outermost.f_back
    return caller is None and not has_returned(outermost)


def has_returned(frame: FrameType) -> bool:
    """Whether a frame that is over has returned, and no exception has left it."""
    import opcode

    number = frame.f_code.co_code[frame.f_lasti]
    return opcode.opname[number].startswith("RETURN")


def _report(error: BaseException, trace: TracebackType | None) -> Description | None:
    """Tell the agent with which exception this process ends, once; None: it knows."""
    global _reported  # noqa: PLW0603 - a process ends once
    if error is _reported or _pipe == _NO_PIPE:
        return None
    found = None
    with suppress(Exception):
        before_end()
    if isinstance(error, KeyboardInterrupt):
        emit(INTERRUPT)
    else:
        found = describe(error, trace, _clean)
        found.is_secondary &= not _has_closed
        _emit_description(found)
    _reported = error
    return found


def _nothing() -> None:
    pass


# Called before the exception is reported that ends this process
before_end: Callable[[], object] = _nothing


class _Finder:
    """Finds nothing, but sees that the script imports a module."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self.name = name
        self._act = act

    def find_spec(self, found: str, *_: object) -> None:
        if found == self.name:
            _awaited.discard(found)
            finders = sys.meta_path.copy()  # the list itself is being read
            with suppress(ValueError):
                finders.remove(self)
            sys.meta_path = finders
            self._act()


def when_imported(name: str, act: Callable[[], object]) -> None:
    """Do something when the script imports this module, or now if it has: it is not imported for us.

    A second call for the same module before that has no effect.
    """
    if name in sys.modules:
        act()
    elif name not in _awaited:
        _awaited.add(name)
        sys.meta_path.insert(0, _Finder(name, act))


def emit(kind: str, text: str = "") -> None:
    """Send something in one piece: what it is, whose it is, and the text."""
    if _pipe != _NO_PIPE:
        data = _clean(text).encode(errors="replace").replace(b"\0", b"\\0")
        _write(_pipe, kind, os.getpid(), data[:MOST])
    else:
        _call_in_wrappers("emit", kind, text)


def emit_error(text: str) -> None:
    """Send the DistbootError with which this process ends, without an exception."""
    if _pipe != _NO_PIPE:
        _emit_description(_of_error(text))
    else:
        _call_in_wrappers("emit_error", text)


def emit_error_for_parent(text: str) -> None:
    """In a fork, which is not the rank: send the DistbootError with which the process ends that has forked it."""
    pipe, inode = _of_parent
    with suppress(OSError):
        own = os.open(f"/proc/{os.getppid()}/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
        _write((own, inode), EXCEPTION, os.getppid(), _of_error(text).encode(MOST))


def note_context(*, is_closed: bool) -> None:
    """A context begins or is closed. After that no peer is the reason for an exception."""
    global _has_closed  # noqa: PLW0603 - as a process has one excepthook
    _has_closed = is_closed
    _call_in_wrappers("note_context", is_closed=is_closed)


def note_term() -> None:
    """A SIGTERM has arrived, and the script goes on, as it reads `ctx.preempted`."""
    global _term_at  # noqa: PLW0603 - as a process has one excepthook
    _term_at = time.monotonic()
    _call_in_wrappers("note_term")


def _call_in_wrappers(name: str, *texts: str, **what: bool) -> None:
    """Call a function of this file where the wrapper has had it loaded, maybe from an older distboot."""
    function = getattr(sys.modules.get(_WRAPPERS), name, None)
    if function is not None:
        function(*texts, **what)


def _of_error(text: str) -> Description:
    return describe_text("distboot.DistbootError", text, _clean)


def _emit_description(found: Description) -> None:
    _write(_pipe, EXCEPTION, os.getpid(), found.encode(MOST))
    _write_error_file(found)


def _write(to: tuple[int, int], kind: str, pid: int, data: bytes) -> None:
    pipe, inode = to
    with suppress(OSError):  # the reader has ended
        _refuse_other(pipe, inode)
        os.write(pipe, b"\0%s %d\n%s\0" % (kind.encode(), pid, data))


def _refuse_other(file: int, inode: int) -> None:
    """`OSError` if the script has closed all files, and this is another one."""
    if os.fstat(file).st_ino != inode:
        raise OSError(f"file {file} is another one")


def out_of_the_way(file: int) -> int:
    """A file descriptor moved to a high number: if a script closes all files, those that it opens then are others."""
    import fcntl

    try:
        moved = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, min(os.sysconf("SC_OPEN_MAX"), 1024) - 64)
    except OSError:
        return file
    os.close(file)
    return moved


def _register_term() -> None:
    """Let faulthandler write to the pipe when SIGTERM arrives, and then what was to happen happen.

    In C: it does not wait for Python's lock.
    """
    if term_is_held:
        return
    # None: a handler that is not of Python
    if signal.getsignal(signal.SIGTERM) not in (signal.SIG_IGN, None):
        faulthandler.register(
            signal.SIGTERM,
            _pipe[0],
            all_threads=False,
            chain=True,
        )


def report_term_again() -> None:
    """`stop_signals` handles SIGTERM no more: report it from here again, where that was so."""
    global term_is_held  # noqa: PLW0603
    term_is_held = False
    if _reports_term:
        _register_term()


@functools.cache
def _follow_term() -> None:
    """Let `signal.signal` put our handler before one of the script, which would take its place."""
    before = signal.signal

    @functools.wraps(before)
    def set_handler(signalnum: int, handler: Any) -> Any:
        is_ours = signalnum == signal.SIGTERM and _pipe != _NO_PIPE
        if not is_ours or not _can_be_set(handler):
            return before(signalnum, handler)
        global term_is_held  # noqa: PLW0603
        faulthandler.unregister(signal.SIGTERM)
        term_is_held = False
        try:
            return before(signalnum, handler)
        finally:
            _register_term()

    signal.signal = set_handler


def _can_be_set(handler: object) -> bool:
    """Whether `signal.signal` does not raise: it sets a handler in the main thread alone."""
    import threading

    if threading.current_thread() is not threading.main_thread():
        return False
    return callable(handler) or handler in (signal.SIG_DFL, signal.SIG_IGN)


def quiet(file: int) -> None:
    """Point this descriptor of a forked process at /dev/null, so that its number is not reused."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, file, inheritable=False)
    os.close(null)


def _hold_term() -> None:
    """A signal for a process that is just being forked is not to be written about as ours."""
    global _mask  # noqa: PLW0603
    _mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _release_term() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask)


def _forget() -> None:
    """A forked process, such as a worker of a data loader, is not the rank."""
    global _pipe, _of_parent  # noqa: PLW0603
    if _pipe != _NO_PIPE:
        faulthandler.unregister(signal.SIGTERM)
        pipe, inode = _of_parent = _pipe
        _pipe = _NO_PIPE
        with suppress(OSError):
            _refuse_other(pipe, inode)
            quiet(pipe)
    _release_term()


def _show_stacks() -> None:
    """Let SIGURG show the stack of the main thread in a pipe of its own, which the agent opens.

    Not those of other threads: faulthandler reads them while they run, and one in some fifty such
    dumps ended a process with a busy thread by SIGSEGV (Python 3.10 to 3.13). A fork has the pipe,
    too: the rank may wait for it.
    """
    global _stacks  # noqa: PLW0603 - as a process has one handler
    if _stacks == _NO_PIPE:
        # The reading end stays open, else a write could end the process by SIGPIPE
        reading, writing = map(out_of_the_way, os.pipe())
        os.set_blocking(writing, False)
        _stacks = writing, os.fstat(reading).st_ino
        faulthandler.register(signal.SIGURG, writing, all_threads=False)
    file, inode = _stacks
    emit(STACKS, f"{file} {inode}")


def _excepthook(
    before: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    if isinstance(error, KeyboardInterrupt):
        with _uninterrupted():
            _show_or_report(before, kind, error, trace)
    else:
        _show_or_report(before, kind, error, trace)


def _show_or_report(
    before: Callable[..., object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    is_end = False
    for _ in range(2):  # a signal handler may raise meanwhile, as torch's for SIGCHLD does
        with suppress(Exception):
            is_end = _pipe != _NO_PIPE and is_the_end()
            if is_end and _is_shown_by_agent(error, trace):
                return
            break
    is_printed = show(before, kind, error, trace)
    if is_end and is_printed:
        emit(PRINTED)


def _is_shown_by_agent(error: BaseException, trace: TracebackType | None) -> bool:
    """Report an exception that ends the script; whether its traceback is not to be printed."""
    found = _report(error, trace)
    is_rank = "DISTBOOT_RANK" in os.environ
    is_interrupt = isinstance(error, KeyboardInterrupt) and is_rank
    if is_interrupt and trace is not None:
        print_interrupted(trace)  # in one line, where an agent has started this rank
        return True
    if found is None or not found.is_secondary:
        return False
    with suppress(OSError):  # an agent that a user has stopped does not answer in time
        return is_of_another()  # then the agent prints which rank was first
    return False


def is_the_end() -> bool:
    """Whether Python calls the hook, for the main thread. Scripts call it, too, to show an exception, and go on.

    So does an interactive session: Python's own prompt, `python -i`, IPython, and the kernel of a notebook.
    """
    import threading

    frame: FrameType | None = sys._getframe()  # noqa: SLF001
    while frame is not None:
        place = (frame.f_code.co_name, frame.f_globals.get("__name__"))
        if place == ("<module>", "__main__"):  # the outermost frame of the script
            return False
        frame = frame.f_back
    if _is_interactive():
        return False
    return threading.current_thread() is threading.main_thread()


def _is_interactive() -> bool:
    has_prompt = hasattr(sys, "ps1")
    is_asked = bool(sys.flags.interactive)
    return has_prompt or is_asked


def _wait_for_wrapper() -> bool:
    """Where another rank has failed first, the wrapper stops this one meanwhile.

    A script that reads `ctx.preempted` goes on after the SIGTERM.
    """
    if sys.modules.keys().isdisjoint(_FRAMEWORKS):  # another program of the script
        return False
    end = time.monotonic() + _EXPLAINED
    while time.monotonic() < min(end, _term_at):
        time.sleep(_POLLING)
    return _term_at < end


# Whether another rank has failed first; asks the agent where that is not the wrapper
is_of_another: Callable[[], bool] = _wait_for_wrapper


def _watch_stderr() -> None:
    """Report the text of `sys.exit("text")` and `raise SystemExit("text")`, once that is the end.

    Python calls no hook for it: with no frame left it writes the text to `sys.stderr`, and then the end of the line.
    What is registered with `atexit` may write so, too, but later; and of a `__del__` that fails more is written.
    """
    # Imported now: only then does Python tell it that the main thread has ended
    import threading

    written: list[str] = []

    def write(text: str) -> int:
        _keep_tail(text)
        is_last_text = False
        main = threading.main_thread()
        is_at_end = _is_by_python() and main.is_alive()
        if is_at_end and len(written) < 2:
            written.append(text)
            is_blank = written[0].strip() == ""
            is_last_text = text == "\n" and not is_blank
        if is_last_text:
            with suppress(Exception):
                _emit_description(describe_text(EXIT, written[0], _clean))
        count = before(text)
        if is_last_text:
            emit(PRINTED)
        return count

    with suppress(AttributeError):  # it is missing, or the script's own
        before = sys.stderr.write
        sys.stderr.write = write  # type: ignore[method-assign]


def _is_by_python() -> bool:
    """Whether no code of the script has called `write`, other than such methods of its own."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None and frame.f_code.co_name == "write":
        frame = frame.f_back
    return frame is None


def _keep_tail(text: str) -> None:
    global _stderr_tail  # noqa: PLW0603
    with suppress(TypeError):  # which the write raises, too
        _stderr_tail = (_stderr_tail + text[-_TAIL:])[-_TAIL:]


def _write_error_file(found: Description) -> None:
    """What torchrun reads to show the first failure, as torch's @record writes it, unless that has."""
    # torch.distributed.elastic.multiprocessing.errors.error_handler, ErrorHandler.record_exception
    extra = {"py_callstack": "\n".join(found.lines), "timestamp": str(int(time.time()))}
    with suppress(OSError, ValueError, KeyError):
        path = os.environ["TORCHELASTIC_ERROR_FILE"]
        import json

        with open(path, "x", encoding="utf-8", errors="replace") as file:
            json.dump({"message": {"message": found.headline, "extraInfo": extra}}, file)
