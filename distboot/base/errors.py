"""The one exception of distboot; `CODES` has its codes, each with an exit code and a meaning."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# From sysexits.h: 78 is EX_CONFIG (fix the environment first), 75 is EX_TEMPFAIL (worth a retry),
# 74 is EX_IOERR; POSIX shells return 126 and 127 for a command that cannot be run or found.
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
        "no launcher numbers the process, and its environment shows that there are others",
    ),
    "unknown-launcher": (78, "the launcher named by the user does not exist"),
    "launcher-mismatch": (78, "the launcher named by the user did not start this process"),
    "no-master-addr": (78, "the environment does not have the address of rank 0"),
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
    "stopped": (143, "a signal asked the job to stop while its ranks were between two rounds"),
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
        "the ranks run incompatible versions of distboot",
    ),
    "duplicate-rank": (78, "two processes have the same rank"),
    "membership-mismatch": (78, "the ranks disagree about their job"),
    "node-check": (78, "DISTBOOT_CHECK=stop, and a node or a link between two is not fit"),
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
        "mpi4py or Horovod uses a different MPI than the one that started the process",
    ),
    "rank-mismatch": (
        78,
        "the framework has different numbers than the launcher: ranks that train separately",
    ),
    "mpi-failed": (78, "the process ended while MPI was starting"),
    "rendezvous-needed": (
        78,
        "rendezvous is disabled and the environment does not determine all values",
    ),
    "process-group-failed": (78, "torch could not start the process group"),
    "strategy-failed": (78, "TensorFlow could not start the strategy, or the server of a task"),
    "unknown-framework": (2, "the framework does not exist"),
    "framework-not-installed": (78, "the framework cannot be imported"),
    "backend-not-available": (78, "this build of the framework lacks the backend asked for"),
    "too-few-accelerators": (78, "a node has fewer visible accelerators than local ranks"),
    "device-failed": (78, "a rank could not set up its accelerator"),
    "already-joined": (
        78,
        "another process has joined already as the rank that this one would be",
    ),
    "spawned-process": (
        78,
        "multiprocessing started the process, and its environment does not have its rank",
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


# `DistbootError.who` of a process whose environment does not have its rank
UNKNOWN_RANK = ""


class DistbootError(Exception):
    """The one exception: a stable code, a message and a hint.

    Attributes:
        code: stable kebab-case name, for example "join-timeout".
        message: what was found; may have several lines when there are several problems.
        hint: what to do; may be empty.
        exit_code: the exit code of the command for this error.
        who: this process, as "rank 3"; empty if its environment does not have the rank; None if it
            is alone.
    """

    # Tracebacks and pickles show the public name, not the file that it lives in.
    __module__ = "distboot"

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        from .text import without_secret  # here, as most processes raise none

        # What a user gives in place of a valid value may be the secret
        message = without_secret(message)
        hint = without_secret(hint)
        self.code: str = code
        self.message: str = message
        self.hint: str = hint
        self.exit_code: int = CODES[code][0]
        self.who: str | None = None
        super().__init__(code, message, hint)

    def of(self, who: str | None) -> DistbootError:
        """This error, with a process unless it has one."""
        if self.who is None:
            self.who = who
        return self

    def __str__(self) -> str:
        # Every line has rank and host, as those of `log_line`: lines of 63 other ranks may be
        # between them. Python begins the first line of a traceback with "distboot.DistbootError: ".
        from .text import host_name  # here, as most processes print none

        whose = ""
        where = ""
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


def already_joined(process: int, how: str = "") -> DistbootError:
    """The error of a process that would be a rank which another one is; `how` these are related."""
    return DistbootError(
        "already-joined",
        f"this rank has joined already, as process {process}{how}",
        "call distboot.init() in one process per rank, below `if __name__ == '__main__':` "
        "where workers are spawned, or close() the context before another process takes its "
        "place",
    )


def rendezvous_needed(why: str) -> DistbootError:
    """The error where only the rendezvous, which is off, could complete something."""
    problem = f"DISTBOOT_RENDEZVOUS=0, and {why}"
    return DistbootError("rendezvous-needed", problem, "unset DISTBOOT_RENDEZVOUS")


def too_few_files(error: BaseException) -> DistbootError | None:
    """The error for an OSError because this process may open no more files; None for any other."""
    if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
        return None
    hint = "raise the limit (ulimit -n), or look for files that are left open"
    return DistbootError("too-few-files", "this process may open no more files", hint)


@contextmanager
def with_too_few_processes() -> Iterator[None]:
    """In this block, a thread that cannot be started is the error `too-few-processes`."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise DistbootError(
            "too-few-processes",
            "the system does not let this process start another thread",
            "raise the limit of processes "
            "(ulimit -u; --pids-limit of a container, pids.max of its cgroup)",
        ) from None


@contextmanager
def with_too_few_files() -> Iterator[None]:
    """In this block, a file that must not be opened is the error `too-few-files`."""
    try:
        yield
    except OSError as error:
        few = too_few_files(error)
        if few is None:
            raise
        raise few from None


@contextmanager
def with_rank(who: str | None) -> Iterator[None]:
    """Errors in this block are of this process unless they have one; `who` as `Placement.who`."""
    try:
        yield
    except DistbootError as error:
        raise error.of(who) from None


def reason_of(error: Exception) -> str:
    """What the system says of an error, `"Connection refused"`; of another kind, its message."""
    return getattr(error, "strerror", None) or str(error)


def in_one_line(error: DistbootError) -> str:
    """The message and the hint, as a part of a line that says more."""
    return f"{error.message}; {error.hint}"
