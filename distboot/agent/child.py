"""Start a command as a child of the wrapper, and see that it does not outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import NamedTuple

from .. import script
from ..base.commands import SHELLS, bind, command_error, limit_files
from ..base.errors import DistbootError
from ..base.process import program_of
from ..base.text import short_repr

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from .logs import Logs

_HOOKS = os.path.join(os.path.dirname(script.__file__), "injected")
# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Command(NamedTuple):
    """What becomes a child."""

    words: Sequence[str]  # program and arguments
    environ: Mapping[str, str]
    rank: int = 0
    file: int | None = None  # a descriptor for it, under the same number
    logs: Logs | None = None  # read its output; None: it goes to this process's stdout and stderr
    cpus: Collection[int] = ()  # to which it is bound; empty: as this process is


def start(
    command: Command,
    mask: set[int | signal.Signals],
    *,
    own_group: bool,
    open_files: int | None,
) -> int:
    """Start a command as a child in which the signals in `mask` are blocked; returns its id.

    `DistbootError`: the command cannot be run.
    """
    stdout = None
    stderr = None
    if command.logs is not None:
        stdout = command.logs.stdout
        stderr = command.logs.stderr
    prepare = _prepared(command, mask, own_group, open_files)
    try:
        # Popen also gives SIGPIPE and SIGXFSZ, which Python ignores, back to the child.
        process = subprocess.Popen(
            command.words,
            env=_environ(command),
            # What this process was started with is for the command: Hydra's socket (PMI_FD), a
            # shell's `<(…)`. Files of our own are closed there (PEP 446).
            close_fds=False,
            stdout=stdout,
            stderr=stderr,
            preexec_fn=prepare,  # noqa: PLW1509 - it imports nothing, and takes no lock
        )
    except OSError as error:
        raise command_error(command.words[0], error) from None
    except subprocess.SubprocessError as error:  # in `prepare`
        raise _unprepared(command, error) from None
    process.returncode = 0  # or Popen would wait for it, too
    return process.pid


def _unprepared(command: Command, error: Exception) -> DistbootError:
    """The error where the child has failed before it ran the command."""
    program = short_repr(command.words[0])
    what = f"{program} cannot be started: {error}"
    hint = "look at the limits of this user and of the container"
    if command.cpus:  # which were there a moment ago
        cpus = ",".join(map(str, sorted(command.cpus)))
        what = f"{program} cannot be bound to the CPUs {cpus}"
        hint = (
            "look whether this host's CPUs, or those of its container, have just changed; "
            "or leave out --bind"
        )
    return DistbootError("command-not-executable", what, hint)


def send(pid: int, number: int, *, leads_group: bool) -> None:
    """Pass a signal on to a child.

    A shell drops SIGINT unless the program that it waits for has ended of it, so that one gets it,
    too, as from a terminal.
    """
    is_dropped = number == signal.SIGINT and program_of(pid, SHELLS) is not None
    if is_dropped and leads_group:
        os.killpg(pid, number)
    else:
        os.kill(pid, number)


def _environ(command: Command) -> dict[str, str]:
    environ = dict(command.environ)
    if command.logs is not None:
        # The output is a pipe, in which Python would keep it back until it ends.
        environ.setdefault("PYTHONUNBUFFERED", "1")
    # Our `sitecustomize` comes before all others.
    paths = [_HOOKS, environ.get("PYTHONPATH")]
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environ


def _prepared(
    command: Command,
    mask: set[int | signal.Signals],
    own_group: bool,
    open_files: int | None,
) -> Callable[[], None]:
    """What the child runs before the command."""
    import ctypes

    # macOS lacks prctl
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda *_: None)
    parent = os.getpid()
    # On Linux, processes below this one that lose their parent become its children: process 1 may
    # be a program that does not reap, and no user should wait for its zombies.
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def prepare() -> None:
        # Without a terminal the child leads a group of its own: mpirun and others signal our whole
        # group, and the child must get each signal once, from us. With a terminal it stays in our
        # group, for the shell's job control.
        if own_group:
            os.setpgid(0, 0)
        # If this process is killed outright (mpirun does that), so is the child: an orphan would
        # keep its accelerator without a trace.
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it has died in between
            os.kill(os.getpid(), signal.SIGKILL)
        if command.file is not None:
            os.set_inheritable(command.file, True)
        limit_files(open_files)
        bind(command.cpus)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    return prepare
