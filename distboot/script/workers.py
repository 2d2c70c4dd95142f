"""Shield the workers of a script from the SIGTERM that asks the job to stop.

Slurm, torchrun and mpirun send SIGTERM to every process. But a script needs its workers, those of a
data loader for example, until its checkpoint is written. So:

- A process that `multiprocessing` starts has SIGTERM blocked. (A handler would not do: torch has
  one there.) A thread in it receives the signal instead.
- The thread obeys SIGTERM from the process that started the worker, and drops it from others.
- The worker ends when that process has ended.
- `Process.terminate` sends a second signal as well: its SIGTERM is lost while one from a launcher
  is pending.
- The programs that a worker starts have no signal blocked.

The script is patched at its first read of `ctx.preempted`; with DISTBOOT_SHIELD_WORKERS=1, at its
start.

The Python of an unmodified script, and of its workers, loads this file as well, without the rest of
the package: it imports only the standard library, and late.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from functools import cache, wraps

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal  # noqa: TC004 - loaded late, by a function
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

VARIABLE = "DISTBOOT_SHIELD_WORKERS"
ALWAYS = "1"
NEVER = "0"

# Start methods whose workers get the thread; those of joblib do not
_METHODS = ("fork", "spawn", "forkserver")
_INTERVAL = 1.0  # seconds between two checks whether the starter has ended
_TERM_TOO = 57  # sent by `Process.terminate`: a real-time signal, which the kernel queues
_WAKE = 56  # interrupts a system call of the main thread, with EINTR, for a handler to run
_PIDFD_SEND_SIGNAL = 424  # asm-generic/unistd.h
# Run in a worker that is a new program, before it imports the script.
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
_worker = 0  # the id of the shielded process: this one, or the one that forked it
_is_woken = True  # whether the main thread has run its handlers since it was last to be woken


def install_at_start() -> None:
    """Shield workers from now on, with DISTBOOT_SHIELD_WORKERS=1."""
    if os.environ.get(VARIABLE) == ALWAYS:
        _install()


def install_for_reader() -> None:
    """Shield workers from now on, unless DISTBOOT_SHIELD_WORKERS=0: the script reads."""
    if os.environ.get(VARIABLE) != NEVER:
        _install()


@cache
def _install() -> None:
    from .crash_hooks import when_imported  # here, as no worker needs it

    # Importing multiprocessing takes 15 ms; it imports this part after multiprocessing.process
    when_imported("multiprocessing.reduction", _patch)


def _patch() -> None:
    global signal  # noqa: PLW0603 - late: it takes 2 ms
    import signal

    base = sys.modules["multiprocessing.process"].BaseProcess
    is_patched = hasattr(base.start, "of_distboot")  # by the wrapper's copy of this file
    if sys.platform != "linux" or is_patched:
        return
    _signals.update(_signals_to_outlive())
    base.start = _starting_shielded(base.start)
    base._bootstrap = _running_shielded(base._bootstrap)  # noqa: SLF001
    base.start.of_distboot = True


def _signals_to_outlive() -> list[int]:
    """SIGTERM, and those in DISTBOOT_STOP_SIGNALS, such as "SIGUSR1,USR2"."""
    names = {"SIGTERM"}
    for name in os.environ.get("DISTBOOT_STOP_SIGNALS", "").split(","):
        names.add("SIG" + name.strip().upper().removeprefix("SIG"))
    known = signal.Signals.__members__
    return [int(known[name]) for name in names & known.keys()]


def _starting_shielded(start: Callable[..., Any]) -> Callable[..., Any]:
    """`Process.start`, with the signals blocked while the worker is created."""

    @wraps(start)
    def start_shielded(process: Any) -> None:
        from multiprocessing import get_start_method, resource_tracker

        method = getattr(process, "_start_method", None) or get_start_method()
        if method not in _METHODS:
            _unshielded(start)(process)
            return
        with _masked(signal.SIG_BLOCK):  # the worker inherits the mask
            _prepare()
            if method != "fork":
                # Now, because that unblocks SIGTERM in this thread (bpo-33613)
                resource_tracker.ensure_running()
                signal.pthread_sigmask(signal.SIG_BLOCK, _signals)
            start(process)
        process._popen.is_shielded = True  # noqa: SLF001

    return start_shielded


def _running_shielded(bootstrap: Callable[..., Any]) -> Callable[..., Any]:
    """`Process._bootstrap`, which runs in the worker, with the thread that receives the signals."""

    @wraps(bootstrap)
    def bootstrap_shielded(process: Any, *args: Any, **more: Any) -> object:
        if _worker != os.getpid():
            shield(_signals, process._parent_pid)  # noqa: SLF001
        try:
            return bootstrap(process, *args, **more)
        finally:
            # The thread stops before Python does, which puts back the default effects
            signal.signal(_TERM_TOO, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _signals)

    return bootstrap_shielded


@cache  # a fork inherits it
def _prepare() -> None:
    """Let `terminate` end shielded workers, and shield those that are new programs."""
    from multiprocessing import popen_fork, spawn

    terminate = popen_fork.Popen.terminate
    preparation_data = spawn.get_preparation_data

    def terminate_twice(popen: Any) -> None:  # also of the other two methods
        terminate(popen)
        if hasattr(popen, "is_shielded"):
            popen._send_signal(_TERM_TOO)  # noqa: SLF001

    def with_shield(name: str) -> dict[str, Any]:
        return {**preparation_data(name), "distboot": _Shield()}

    popen_fork.Popen.terminate = terminate_twice  # type: ignore[method-assign, assignment]
    spawn.get_preparation_data = with_shield


class _Shield:
    """Shields the worker that unpickles it, unless that does not find this file."""

    def __reduce__(self) -> tuple[object, ...]:
        folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        return exec, (_LOAD.format((folder, _signals, os.getpid()), _TERM_TOO), {})


def shield(signals: Iterable[int], starter: int) -> None:
    """Shield this process, a worker of the process `starter`."""
    global _worker  # noqa: PLW0603 - a process has one starter
    _signals.update(signals)
    _patch()
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _signals)
        _reset_handlers()
        _start_thread(starter)
        _worker = os.getpid()
        _wrap()
    except Exception:  # noqa: BLE001 - no thread can be started: a worker without a shield
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _signals)


def _reset_handlers() -> None:
    for number in _signals:
        is_of_script = callable(signal.getsignal(number))
        if is_of_script:  # its handler is not for its workers
            signal.signal(number, signal.SIG_DFL)
    # Not SIG_IGN: it would drop one that was sent while this process started (sigaction(2))
    signal.signal(_TERM_TOO, lambda *_: None)
    signal.signal(_WAKE, _note_woken)


def _note_woken(_number: int, _frame: object) -> None:
    """The handler of a signal before it has run by now, as Python takes the lower number first."""
    global _is_woken  # noqa: PLW0603 - a process has one main thread
    _is_woken = True


def _start_thread(starter: int) -> None:
    import threading

    ids = (starter, os.getppid())
    threading.Thread(target=_watch, args=ids, name="distboot-shield", daemon=True).start()


def _watch(starter: int, parent: int) -> None:
    while True:
        found = signal.sigtimedwait(_signals, _INTERVAL)
        if not _is_woken:
            _wake()
        if found is None:
            if _has_ended(starter, parent):
                _obey(signal.SIGTERM, os.getpid())
            continue
        is_repetition = found.si_signo == _TERM_TOO
        number = found.si_signo
        if is_repetition:
            number = signal.SIGTERM
        if callable(signal.getsignal(number)):
            # A handler of the worker's own handles it from every sender, and once
            is_for_worker = not is_repetition
        else:
            is_for_worker = found.si_pid in (starter, os.getpid())
        if is_for_worker:
            _obey(number, found.si_pid)


def _obey(number: int, sender: int) -> None:
    """Deliver a signal to this process as from its sender, which torch's handler compares."""
    global _is_woken  # noqa: PLW0603 - a process has one main thread
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    if callable(signal.getsignal(number)):
        _is_woken = False
        signal.raise_signal(number)
        _wake()
        return
    is_sent = False
    with suppress(Exception):
        is_sent = _sent_as_from(sender, number)
    if not is_sent:
        os.kill(os.getpid(), number)


def _wake() -> None:
    """Let the main thread run the handlers of Python.

    Where it is just about to begin a system call, it does not see the signal: so it is woken again,
    once an interval, until it was.
    """
    import threading

    main = threading.main_thread().ident or 0
    signal.pthread_kill(main, _WAKE)


def _sent_as_from(sender: int, number: int) -> bool:
    import ctypes
    import struct

    # Any sender is allowed with SI_QUEUE, which is -1 (rt_sigqueueinfo(2)).
    info = struct.pack("iii0PiI", number, 0, -1, sender, os.getuid()).ljust(128, b"\0")
    process = os.pidfd_open(os.getpid())
    failed = ctypes.CDLL(None).syscall(_PIDFD_SEND_SIGNAL, process, number, info, 0)
    return not failed


def _has_ended(starter: int, parent: int) -> bool:
    """Whether the process that started this worker has ended, or its parent has.

    They differ for a worker of a forkserver, which ends after its workers.
    """
    if os.getppid() != parent:
        return True
    try:
        with open(f"/proc/{starter}/stat", "rb") as file:
            state = file.read().rpartition(b") ")[2][:1]
    except OSError:
        return os.path.exists("/proc/self")
    return state in b"ZX"


@cache
def _wrap() -> None:
    """Start programs from this worker with no signal blocked."""
    import subprocess

    popen: Any = subprocess.Popen
    popen._execute_child = _unshielded(popen._execute_child)  # noqa: SLF001
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
    """In a fork of a worker, which is not shielded unless it is a worker itself."""
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
