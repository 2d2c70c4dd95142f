"""The command that the wrapper starts as its child, or becomes."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from ..errors import DistbootError, too_few_files
from ..text import escape_control, short_repr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from .supervisor import Command

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def start(
    command: Command, mask: set[int | signal.Signals], *, own_group: bool, open_files: int | None
) -> subprocess.Popen[bytes]:
    """Start a command as our child, in which the signals in `mask` are blocked; `DistbootError`: it cannot be."""
    prctl, parent = _prctl(), os.getpid()
    # Those below us that lose their parent become ours, where Linux can do it: process 1 may be a program that does not
    # reap, and whose zombies no user should wait for.
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def in_child() -> None:
        # Without a terminal the child leads a group of its own: mpirun and others signal our whole group, and
        # the child must get each signal once, from us. With one it stays with us, for the shell's job control.
        if own_group:
            os.setpgid(0, 0)
        # If we are killed outright (mpirun does that), so is it: an orphan would keep its accelerator without a trace.
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # we have died in between
            os.kill(os.getpid(), signal.SIGKILL)
        _limit_files(open_files)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        # Popen also gives SIGPIPE and SIGXFSZ, which Python ignores, back to the child.
        files, logs = () if command.file is None else (command.file,), command.logs
        stdout, stderr = (None, None) if logs is None else (logs.stdout, logs.stderr)
        return subprocess.Popen(
            command.words, env=dict(command.environ), pass_fds=files, stdout=stdout, stderr=stderr,
            preexec_fn=in_child,  # noqa: PLW1509 - it imports nothing and takes no lock
        )  # fmt: skip
    except OSError as error:
        raise _error(command.words[0], error) from None


def become(command: Sequence[str], environ: Mapping[str, str], *, open_files: int | None = None) -> NoReturn:
    """Replace this process by a command; `DistbootError`: it cannot be run."""
    _limit_files(open_files)
    for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores, and the command would, too
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(environ))  # noqa: S606 - what the user asks for
    except OSError as error:
        raise _error(command[0], error) from None


def _limit_files(soft: int | None) -> None:
    if soft is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def with_hooks(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a child, with our `sitecustomize` before all others."""
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "injected")
    return {**environ, "PYTHONPATH": os.pathsep.join([folder, *filter(None, [environ.get("PYTHONPATH")])])}


def not_found(program: str) -> DistbootError:
    """The error for a command that there is not."""
    if os.path.exists(program):
        said, name = f"{short_repr(program)} is a file here, and no command on PATH", escape_control(program)
        hint = f"name the interpreter of a script: run -- python {name}; a program in this folder is ./{name}"
    else:
        said, hint = f"{short_repr(program)} does not exist", "check the spelling, PATH and the directory"
    return DistbootError("command-not-found", said, hint)


def _error(program: str, error: OSError) -> DistbootError:
    few = too_few_files(error)
    if few is not None:
        return few
    there = os.sep in program and os.path.exists(program)  # then its interpreter is what is missing
    if isinstance(error, FileNotFoundError | NotADirectoryError) and not there:
        return not_found(program)
    hints = {
        errno.EACCES: "make it executable (chmod +x), or name its interpreter: run -- python script.py",
        errno.ENOEXEC: "it has no #! line: name its interpreter: run -- python script.py",
        errno.ENOENT: "its #! line names an interpreter that does not exist",
        errno.EAGAIN: "this user may not start more processes (ulimit -u)",
    }
    hint = hints.get(error.errno or 0, "")
    return DistbootError("command-not-executable", f"{short_repr(program)} cannot be run: {error.strerror}", hint)


def _prctl() -> Callable[..., object]:
    if sys.platform == "linux":
        import ctypes

        with suppress(OSError, AttributeError):  # a libc that has none
            return ctypes.CDLL(None).prctl
    return lambda *_: None
