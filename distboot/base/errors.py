"""The one exception of distboot. Every code that it can carry is in `CODES`, with its exit code and its meaning."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# From sysexits.h: 78 is EX_CONFIG (fix the environment first), 75 is EX_TEMPFAIL (worth a retry), 74 is EX_IOERR;
# 126 and 127 are what POSIX shells return for a command that cannot be run or found.
CODES: Mapping[str, tuple[int, str]] = {
    "broken-environment": (
        78,
        "a launcher's variables are missing, malformed or contradict each other",
    ),
    "conflicting-launchers": (78, "two launchers claim this process, and they disagree"),
    "unsupported-launcher": (78, "the launcher does not tell the process its rank, or not in time"),
    "node-level-launch": (78, "the process stands for a whole node or pod, and is not a rank"),
    "not-alone": (
        78,
        "no launcher numbers the process, and its environment says that there are others",
    ),
    "unknown-launcher": (78, "the launcher named by the user does not exist"),
    "launcher-mismatch": (78, "the launcher named by the user did not start this process"),
    "no-master-addr": (78, "nothing in the environment says where rank 0 is"),
    "no-master-port": (78, "no port was given, and there is no job id to derive one from"),
    "unresolvable-address": (
        75,
        "the name of rank 0's host did not resolve within the join timeout",
    ),
    "port-taken": (
        75,
        "rank 0 cannot listen on MASTER_PORT, nor on any other port that the ranks try",
    ),
    "launcher-gone": (75, "the launcher's process above a rank has ended before the rank"),
    "join-timeout": (75, "the ranks had met, but their framework did not start in time"),
    "missing-rank": (
        75,
        "some ranks did not reach the roll call, barrier() or main_first() in time",
    ),
    "rank-failed": (
        75,
        "a rank has failed before the framework could start, or in its block of main_first()",
    ),
    "version-mismatch": (
        78,
        "the ranks run versions of distboot that do not understand each other",
    ),
    "duplicate-rank": (78, "two processes say that they are the same rank"),
    "membership-mismatch": (78, "the ranks that met do not fit together"),
    "shared-accelerator": (78, "two ranks would use the same accelerator"),
    "unknown-interface": (78, "a variable names a network interface that this host does not have"),
    "too-few-files": (
        78,
        "a process may not open as many files as it needs, on rank 0 one for every connection",
    ),
    "too-few-processes": (
        78,
        "this user, or this container, may not run as many processes and threads as it needs",
    ),
    "mpi-mismatch": (
        78,
        "mpi4py or Horovod uses another MPI than the one that started the process",
    ),
    "rank-mismatch": (
        78,
        "the framework has other numbers than the launcher: ranks in worlds of their own",
    ),
    "mpi-failed": (78, "the process ended while MPI was starting"),
    "rendezvous-needed": (
        78,
        "rendezvous is disabled and the environment does not determine all values",
    ),
    "process-group-failed": (78, "torch could not start the process group"),
    "strategy-failed": (78, "TensorFlow could not start the strategy, or the server of a task"),
    "unknown-framework": (2, "there is no such framework"),
    "framework-not-installed": (78, "the framework cannot be imported"),
    "backend-not-available": (78, "this build of the framework lacks the backend asked for"),
    "too-few-accelerators": (78, "a node has fewer visible accelerators than local ranks"),
    "device-failed": (78, "a rank could not set up its accelerator"),
    "already-joined": (
        78,
        "this process was started by a rank that has joined the job, and would be that rank again",
    ),
    "spawned-process": (
        78,
        "multiprocessing started the process, and nothing says which rank it is",
    ),
    "already-initialized": (
        78,
        "a process group exists already, or init was called for another framework",
    ),
    "usage": (2, "the command line or an argument is wrong"),
    "output-failed": (
        74,
        "standard output, the log file of a rank, or the report, cannot be written to",
    ),
    "command-not-found": (127, "the script or command to run does not exist"),
    "command-not-executable": (126, "the script or command to run may not be executed"),
}


# The rank of a process whose environment does not say which it is, as `DistbootError.who` has it
UNKNOWN_RANK = ""


class DistbootError(Exception):
    """A refusal that says what is wrong, where, and what to do about it.

    Attributes:
        code: stable kebab-case name, a key of `CODES`.
        message: what was found; may have several lines when there are several problems.
        hint: what to do; may be empty.
        exit_code: the exit code of the command for this error.
        who: this process, as "rank 3", or UNKNOWN_RANK when its environment does not say which; None when it is alone.
    """

    # Tracebacks and pickles show the public name, not the file that it lives in.
    __module__ = "distboot"

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        self.code: str = code
        self.message: str = message
        self.hint: str = hint
        self.exit_code: int = CODES[code][0]
        self.who: str | None = None
        super().__init__(code, message, hint)

    def of(self, who: str | None) -> DistbootError:
        """This very error, which now says whose it is, unless it did already."""
        self.who = who if self.who is None else self.who
        return self

    def __str__(self) -> str:
        # Every line says its rank and host, as `log_line` does: it may stand between those of 63 other ranks.
        # Python begins the first one of a traceback with "distboot.DistbootError: ".
        from .text import host_name  # here, as most processes print none

        whose = where = ""
        if self.who == UNKNOWN_RANK:
            where = f"on {host_name()}: "
        elif self.who is not None:
            whose = f"{self.who} on {host_name()}: "
        first, *others = self.message.split("\n")
        lines = [f"error[{self.code}]: {where}{whose}{first}"]
        for other in others:
            lines.append(f"distboot: {whose}{other}")
        if self.hint:
            lines.append(f"distboot: hint: {whose}{self.hint}")
        return "\n".join(lines)


def printed(error: DistbootError) -> str:
    """An error as distboot prints it: its lines, or one object of JSON."""
    from .text import as_json  # here, as most processes print none

    line = as_json(error.who, error.message, event="error", code=error.code, hint=error.hint)
    return line or f"distboot: {error}\n"


def rendezvous_needed(why: str) -> DistbootError:
    """The error where the roll call, which is off, is the only way to learn something."""
    return DistbootError(
        "rendezvous-needed", f"DISTBOOT_RENDEZVOUS=0, and {why}", "unset DISTBOOT_RENDEZVOUS"
    )


def too_few_files(error: BaseException) -> DistbootError | None:
    """The error for one that says that this process may open no more files; None: it says something else."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    hint = "raise the limit (ulimit -n), or look for files that are left open"
    return DistbootError("too-few-files", "this process may open no more files", hint)


@contextmanager
def with_too_few_processes() -> Iterator[None]:
    """That no more threads can be started is `too-few-processes` in this block."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        text = "the system does not let this process start another thread"
        hint = "raise the limit of processes (ulimit -u; --pids-limit of a container, pids.max of its cgroup)"
        raise DistbootError("too-few-processes", text, hint) from None


@contextmanager
def with_too_few_files() -> Iterator[None]:
    """That this process may open no more files is `too-few-files` in this block."""
    try:
        yield
    except OSError as error:
        raise too_few_files(error) or error from None


@contextmanager
def with_rank(who: str | None) -> Iterator[None]:
    """Errors in this block say whose they are, unless they do already; `who` as `Placement.who`."""
    try:
        yield
    except DistbootError as error:
        raise error.of(who) from None
