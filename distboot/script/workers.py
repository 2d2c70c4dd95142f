"""The workers of a script, of a data loader say, outlive the signal that asks all processes of a job to stop.

Slurm, torchrun and mpirun send SIGTERM to every process, and a script needs its workers until its checkpoint is
written. In what `multiprocessing` starts the signal is blocked, as torch has a handler of its own there, and a thread
takes it: from the process that started the worker it is obeyed, from others dropped. When that process has ended, the
worker ends.

This file is also read by the Python of an unmodified script, and of its workers, without the rest of the package: it
imports nothing but the standard library, and that late.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from functools import cache, wraps

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

# Of others, as joblib's, the workers have no such thread
_METHODS = ("fork", "spawn", "forkserver")
_INTERVAL = 1.0  # seconds between two looks at who has started this
# Of `Process.terminate`: its SIGTERM is lost while another one waits, and real-time signals queue
_TERM_TOO = 57
_WAKE = 56  # what the main thread is doing ends with EINTR
_PIDFD_SEND_SIGNAL = 424  # asm-generic/unistd.h
# In a worker that is a new program, before it imports the script.
_LOAD = """
import importlib, signal, sys, types
folder, signals, starter = {!r}
try:
    package = sys.modules.setdefault("_distboot", types.ModuleType("_distboot"))
    package.__path__ = [folder]
    importlib.import_module("_distboot.script.workers").shield(signals, starter)
except Exception:
    signal.signal({}, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
"""

_signals = {_TERM_TOO}
_worker = 0  # the process that is shielded: this one, or that which has forked it


@cache
def install() -> None:
    """Shield workers from SIGTERM, and from the signals in DISTBOOT_STOP_SIGNALS, such as "SIGUSR1,USR2"."""
    from .crash_hooks import when_imported  # here, as no worker needs it

    # multiprocessing takes 15 ms; this part of it comes after multiprocessing.process.
    when_imported("multiprocessing.reduction", _patch)


def _patch() -> None:
    global signal  # noqa: PLW0603 - late: it takes 2 ms
    import signal

    base = sys.modules["multiprocessing.process"].BaseProcess
    start, bootstrap = base.start, base._bootstrap  # noqa: SLF001
    if sys.platform != "linux" or hasattr(start, "of_distboot"):  # the wrapper has done it
        return
    asked = ["TERM", *os.environ.get("DISTBOOT_STOP_SIGNALS", "").split(",")]
    names = {"SIG" + name.strip().upper().removeprefix("SIG") for name in asked}
    _signals.update(int(number) for number in signal.Signals if number.name in names)

    @wraps(start)
    def start_shielded(process: Any) -> None:
        from multiprocessing import get_start_method, resource_tracker

        method = getattr(process, "_start_method", None) or get_start_method()
        if method not in _METHODS:
            _unshielded(start)(process)
            return
        with _masked(signal.SIG_BLOCK):  # it is born with them blocked
            _prepare()
            if method != "fork":
                # Now, as that unblocks SIGTERM in this thread (bpo-33613)
                resource_tracker.ensure_running()
                signal.pthread_sigmask(signal.SIG_BLOCK, _signals)
            start(process)
        process._popen.is_shielded = True  # noqa: SLF001

    @wraps(bootstrap)
    def bootstrap_shielded(process: Any, *args: Any, **more: Any) -> object:
        if _worker != os.getpid():
            shield(_signals, process._parent_pid)  # noqa: SLF001
        try:
            return bootstrap(process, *args, **more)
        finally:
            # Our thread stops before Python does
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _signals)

    base.start, base._bootstrap = start_shielded, bootstrap_shielded  # noqa: SLF001
    base.start.of_distboot = True


@cache  # a fork has it, too
def _prepare() -> None:
    """Let this process end its workers, and those that are new programs be shielded by what they read first."""
    from multiprocessing import popen_fork, spawn

    terminate, preparation_data = popen_fork.Popen.terminate, spawn.get_preparation_data

    def terminate_twice(popen: Any) -> None:  # also of the other two methods
        terminate(popen)
        if hasattr(popen, "is_shielded"):
            popen._send_signal(_TERM_TOO)  # noqa: SLF001

    def with_shield(name: str) -> dict[str, Any]:
        return {**preparation_data(name), "distboot": _Shield()}

    popen_fork.Popen.terminate = terminate_twice  # type: ignore[method-assign, assignment]
    spawn.get_preparation_data = with_shield


class _Shield:
    """Once unpickled, it is there; a worker that does not find this file is as it was without us."""

    def __reduce__(self) -> tuple[object, ...]:
        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        return exec, (_LOAD.format((folder, _signals, os.getpid()), _TERM_TOO), {})


def shield(signals: Iterable[int], starter: int) -> None:
    """Shield this process, a worker of another one."""
    global _worker  # noqa: PLW0603 - as a process has one starter
    _signals.update(signals)
    _patch()
    import threading

    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _signals)
        for number in _signals:
            if callable(signal.getsignal(number)):  # the script's own is not for its workers
                signal.signal(number, signal.SIG_DFL)
        signal.signal(_TERM_TOO, signal.SIG_IGN)
        signal.signal(_WAKE, lambda *_: None)
        threading.Thread(
            target=_watch, args=(starter, os.getppid()), name="distboot-shield", daemon=True
        ).start()
        _worker = os.getpid()
        _wrap()
    except Exception:  # noqa: BLE001 - no thread could be started, say: a worker without a shield
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _signals)


def _watch(starter: int, parent: int) -> None:
    while True:
        found = signal.sigtimedwait(_signals, _INTERVAL)
        if found is None:
            if _has_ended(starter, parent):
                _obey(signal.SIGTERM, os.getpid())
            continue
        number = signal.SIGTERM if found.si_signo == _TERM_TOO else found.si_signo
        # Of the worker's own, which takes all, and each of them once
        has_handler = callable(signal.getsignal(number))
        if number == found.si_signo if has_handler else found.si_pid in (starter, os.getpid()):
            _obey(number, found.si_pid)


def _obey(number: int, sender: int) -> None:
    """Let this process have a signal as from its sender: torch's handler compares it with its parent."""
    import threading

    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    if callable(signal.getsignal(number)):
        signal.raise_signal(number)
        # Where Python's handlers run
        signal.pthread_kill(threading.main_thread().ident or 0, _WAKE)
        return
    with suppress(Exception):
        import ctypes
        import struct

        # Anything goes as SI_QUEUE, which is -1 (rt_sigqueueinfo(2)).
        info = struct.pack("iii0PiI", number, 0, -1, sender, os.getuid()).ljust(128, b"\0")
        if not ctypes.CDLL(None).syscall(
            _PIDFD_SEND_SIGNAL, os.pidfd_open(os.getpid()), number, info, 0
        ):
            return
    os.kill(os.getpid(), number)


def _has_ended(starter: int, parent: int) -> bool:
    """A forkserver, the parent of workers that another process has started, ends after them."""
    try:
        with open(f"/proc/{starter}/stat", "rb") as file:
            return os.getppid() != parent or file.read().rpartition(b") ")[2][:1] in b"ZX"
    except OSError:
        return os.getppid() != parent or os.path.exists("/proc/self")


@cache
def _wrap() -> None:
    """Let the programs that this worker starts have no signal blocked."""
    import subprocess

    subprocess.Popen._execute_child = _unshielded(subprocess.Popen._execute_child)  # type: ignore[attr-defined]  # noqa: SLF001
    for name in ("execv", "execve", "posix_spawn", "posix_spawnp", "system"):
        setattr(os, name, _unshielded(getattr(os, name)))
    os.register_at_fork(after_in_child=_forget)


def _unshielded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        if _worker != os.getpid():
            return function(*args, **more)
        with _masked(signal.SIG_UNBLOCK):
            return function(*args, **more)

    return call


def _forget() -> None:
    """What a worker forks is not shielded, unless it is a worker itself."""
    global _worker  # noqa: PLW0603
    if _worker:
        _worker = 0
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _signals)


@contextmanager
def _masked(how: int) -> Iterator[None]:
    before = signal.pthread_sigmask(how, _signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
