"""This process: how its script ends, threads that take no signals, limits of time, and becoming another command.

In a function of `atexit` Python says nothing of SystemExit: `sys.exit(3)` passes no hook, and may be caught. So what it
raises is kept, and looked at when the end has come.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import sys
import threading
import warnings
from contextlib import contextmanager, suppress
from functools import cache

from .errors import (
    DistbootError,
    printed,
    too_few_files,
    with_too_few_processes,
)
from .text import escape_control, first_line, short_repr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import NoReturn, TypeVar

    S = TypeVar("S")
    T = TypeVar("T")

WELL, EXIT, EXCEPTION = "well", "exit", "exception"
# A process that ends by one of these was stopped, and has not failed.
FROM_OUTSIDE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_DONE = b"\n"
_FULLY_BUFFERED = 0  # _IOFBF, stdio.h

_asked: SystemExit | None = None


@cache  # a process has one end
def watch_exit() -> None:
    """Know from now on what `sys.exit` was called with."""

    def leave(status: object = None, /) -> NoReturn:
        __tracebackhide__ = True  # pytest shows where the script has called it
        global _asked  # noqa: PLW0603 - as a process has one sys.exit
        error = SystemExit(status)
        if threading.current_thread() is threading.main_thread():
            _asked = error
        raise error

    sys.exit = leave


def exit_asked() -> SystemExit | None:
    """In a function of `atexit`: with what `sys.exit` has ended the script; None: it has not, or that was caught."""
    # Before Python 3.12, where no frame could catch it
    if _asked is None or _asked.__traceback__ is None:
        return _asked
    import opcode

    frame = _asked.__traceback__.tb_frame
    has_returned = opcode.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
    # It has come to the outermost frame
    return _asked if frame.f_back is None and not has_returned else None


def exit_outcome() -> str:
    """In a function of `atexit`: EXCEPTION, EXIT with a code other than 0, or WELL.

    A `SystemExit` that the script raises itself, or by the `exit` of the interactive Python, is taken for WELL.
    """
    # Which shows it, and goes on
    if hasattr(sys, "last_type") and not (hasattr(sys, "ps1") or sys.flags.interactive):
        return EXCEPTION
    asked = exit_asked()
    return WELL if asked is None or asked.code in (None, 0) else EXIT


def start_without_signals(name: str, work: Callable[[], object]) -> threading.Thread:
    """Start a thread that takes no signal, and does not keep the process alive."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with with_too_few_processes():
            thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return thread


def result_within(limit: float, name: str, work: Callable[[], T], late: str) -> T:
    """What `work` returns or raises in a thread of this name, which may outlive us; `late` says what has timed out."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread of the caller
            errors.append(error)

    start_without_signals(name, run).join(limit)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(late)
    return results[0]


def at_once(work: Callable[[S], T], on: Sequence[S]) -> list[T]:
    """Do something to each of these at the same time, as they may wait for each other."""
    if len(on) == 1:
        return [work(on[0])]
    from concurrent.futures import ThreadPoolExecutor  # here, as only several need it

    with with_too_few_processes(), ThreadPoolExecutor(len(on)) as pool:
        return list(pool.map(work, on))


@contextmanager
def deadline(
    limit: float,
    too_late: DistbootError,  # printed before
    ended: DistbootError | None = None,  # printed if this process has ended by itself in the block
    say: Callable[[str], object] | None = None,  # is told, too, why it is killed
) -> Iterator[None]:
    """Kill this process if the block has not ended in `limit` seconds. It is watched by a process of its own.

    That is for C code of others that holds Python's lock, in which no thread or signal handler of ours can run.
    """
    us, (reading, writing) = os.getpid(), os.pipe()

    def watch() -> NoReturn:
        try:
            is_late = not select.select([reading], [], [], limit)[0]
            error = too_late if is_late else ended if os.read(reading, 1) != _DONE else None
            if error is not None:
                with suppress(OSError):
                    os.write(2, printed(error).encode())
            if is_late and os.getppid() == us:
                if say is not None:
                    # As the traceback would end
                    say(first_line(too_late))
                os.kill(us, signal.SIGKILL)
        finally:
            os._exit(0)

    # The watcher must not run a handler of the script's, Ctrl-C included: it would go on as the script.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        with warnings.catch_warnings():
            # Of threads in a fork (Python's, JAX's), which does next to nothing
            warnings.simplefilter("ignore")
            watcher = os.fork()
        if watcher == 0:
            os.close(writing)
            watch()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reading)
    try:
        with _printed_at_exit(ended, writing):
            yield
    finally:
        with suppress(OSError):
            os.write(writing, _DONE)
        os.close(writing)
        with suppress(ChildProcessError):  # where SIGCHLD is ignored
            os.waitpid(watcher, 0)


@contextmanager
def _printed_at_exit(error: DistbootError | None, writing: int) -> Iterator[None]:
    """Let the C library print an error, and tell the watcher so, if it ends this process in the block.

    It flushes its streams then. mpirun does not wait for what a watcher prints when all ranks end at once.
    """
    streams = []
    if error is not None and sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        libc.fdopen.restype = ctypes.c_void_p
        for file, text in ((2, printed(error).encode()), (writing, _DONE)):
            stream = ctypes.c_void_p(libc.fdopen(os.dup(file), b"w"))
            libc.setvbuf(stream, None, _FULLY_BUFFERED, len(text) + 1)
            libc.fputs(text, stream)
            streams.append(stream)
    try:
        yield
    finally:
        for stream in streams:
            libc["__fpurge"](stream)  # fclose would print it
            libc.fclose(stream)


def become(
    command: Sequence[str], environ: Mapping[str, str], *, open_files: int | None = None
) -> NoReturn:
    """Replace this process by a command; `DistbootError`: it cannot be run."""
    limit_files(open_files)
    for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores, and the command would, too
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(environ))  # noqa: S606 - what the user asks for
    except OSError as error:
        raise command_error(command[0], error) from None


def proc_stat(process: object = "self") -> list[str]:
    """The fields of proc_pid_stat(5) from the third one on, the state; none: it has ended, or there is no /proc."""
    with (
        suppress(OSError),
        open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file,
    ):
        return file.read().rpartition(")")[2].split()
    return []


def ends_at(process: int, number: int) -> bool:
    """Whether a signal ends a process: it neither blocks, ignores nor handles that, as proc_pid_status(5) has it."""
    try:
        with open(f"/proc/{process}/status", encoding="ascii", errors="replace") as file:
            lines = dict(line.split(":", 1) for line in file)
        masks = [int(lines[name], 16) for name in ("SigBlk", "SigIgn", "SigCgt")]
    except (OSError, ValueError, KeyError):
        return False
    return not any(mask >> (number - 1) & 1 for mask in masks)


def limit_files(soft: int | None) -> None:
    """Let this process, and what it starts, open at most so many files; None: as many as now."""
    if soft is not None:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )


def command_not_found(program: str) -> DistbootError:
    """The error for a command that there is not."""
    if os.path.exists(program):
        said, name = (
            f"{short_repr(program)} is a file here, and no command on PATH",
            escape_control(program),
        )
        hint = f"name the interpreter of a script: run -- python {name}; a program in this folder is ./{name}"
    else:
        said, hint = (
            f"{short_repr(program)} does not exist",
            "check the spelling, PATH and the directory",
        )
    return DistbootError("command-not-found", said, hint)


def command_error(program: str, error: OSError) -> DistbootError:
    """The error for a command that the system does not start."""
    few = too_few_files(error)
    if few is not None:
        return few
    there = os.sep in program and os.path.exists(program)  # then its interpreter is what is missing
    if isinstance(error, FileNotFoundError | NotADirectoryError) and not there:
        return command_not_found(program)
    executable = "make it executable (chmod +x), or name its interpreter: run -- python script.py"
    hints = {
        errno.EACCES: "name a program in it" if there and os.path.isdir(program) else executable,
        errno.ENOEXEC: "it has no #! line: name its interpreter: run -- python script.py",
        errno.ENOENT: "its #! line names an interpreter that does not exist",
        errno.EAGAIN: "this user may not start more processes (ulimit -u)",
    }
    hint = hints.get(error.errno or 0, "")
    return DistbootError(
        "command-not-executable", f"{short_repr(program)} cannot be run: {error.strerror}", hint
    )
