"""Running a command: in place of this process, and the errors for one that does not run."""

from __future__ import annotations

import errno
import os
import resource
import signal

from .errors import DistbootError, too_few_files
from .text import escape_control, short_repr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import NoReturn

SHELLS = ("sh", "bash", "dash", "zsh")
_HINTS = {
    errno.EACCES: "make it executable (chmod +x), or name its interpreter: run -- python script.py",
    errno.ENOEXEC: "it has no #! line: name its interpreter: run -- python script.py",
    errno.ENOENT: "its #! line names an interpreter that does not exist",
    errno.EAGAIN: "this user may not start more processes (ulimit -u)",
}


def become(
    command: Sequence[str],
    environ: Mapping[str, str],
    *,
    open_files: int | None = None,
    cpus: Collection[int],
) -> NoReturn:
    """Replace this process by a command; `DistbootError`: it cannot be run."""
    limit_files(open_files)
    bind(cpus)
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and the command would, too
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvpe(command[0], list(command), dict(environ))  # noqa: S606 - the user's own command
    except OSError as error:
        raise command_error(command[0], error) from None


def limit_files(soft: int | None) -> None:
    """Limit the open files of this process and what it starts; None: the limit stays."""
    if soft is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def bind(cpus: Collection[int]) -> None:
    """Bind this process and what it starts to these CPUs; none: its CPUs stay."""
    if cpus:
        os.sched_setaffinity(0, cpus)


def command_not_found(program: str) -> DistbootError:
    """The error for a command that does not exist."""
    shown = short_repr(program)
    if not os.path.exists(program):
        hint = "check the spelling, PATH and the directory"
        if program.startswith("-"):
            hint = "options of distboot come before --; an image can set DISTBOOT_NPROC_PER_NODE"
        return DistbootError(
            "command-not-found",
            f"{shown} does not exist",
            hint,
        )
    name = escape_control(program)
    return DistbootError(
        "command-not-found",
        f"{shown} is a file in this directory, not a command on PATH",
        f"name the interpreter of a script: run -- python {name}; "
        f"a program in this folder is ./{name}",
    )


def command_error(program: str, error: OSError) -> DistbootError:
    """The error for a command that the system does not start."""
    few = too_few_files(error)
    if few is not None:
        return few
    # If its file exists, it is the interpreter that is missing
    has_file = os.sep in program and os.path.exists(program)
    if isinstance(error, FileNotFoundError | NotADirectoryError) and not has_file:
        return command_not_found(program)
    hint = _HINTS.get(error.errno or 0, "")
    if error.errno == errno.EACCES and has_file and os.path.isdir(program):
        hint = "name a program in it"
    problem = f"{short_repr(program)} cannot be run: {error.strerror}"
    return DistbootError(
        "command-not-executable",
        problem,
        hint,
    )
