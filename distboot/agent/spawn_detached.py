"""Starts an interpreter of our own beside a process: no child of it, and in a session of its own."""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

_START_LIMIT = 20.0  # seconds for the process that starts it to end

# The first process ends at once: the script must not find a child that it did not start. The second has a session of
# its own, as Open MPI kills the script's whole process group before there is time to say what there is to say.
_BEGIN = """
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
sys.path.append(sys.argv[1])
from importlib import import_module
import_module(sys.argv[2]).main(*map(int, sys.argv[3:]))
"""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def leave_signals_to_the_job() -> None:
    """Ignore those that are for the script or the ranks: a launcher sends them to all processes of the job."""
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)


def start(module: str, *files: int) -> subprocess.Popen[bytes]:
    """Call `main` of a module with these file descriptors, in a process of its own: the one that starts it.

    Raises:
        OSError: it cannot be started.
    """
    import subprocess  # here, as what is started has no need of it

    # Isolated, as what lies around in the working directory is not for it; that hides PYTHONDONTWRITEBYTECODE.
    options = ["-I", "-S", *(["-B"] if sys.dont_write_bytecode else [])]
    command = [sys.executable, *options, "-c", _BEGIN, _PACKAGE, module, *map(str, files)]
    return subprocess.Popen(command, pass_fds=files, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def wait_until_started(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of the process that starts it; OSError: that fails, or does not end in time, and is killed."""
    import subprocess

    try:
        code = process.wait(_START_LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise OSError(f"it did not start within {_START_LIMIT:g} s") from None
    if code != 0:
        raise OSError("its first process failed")
