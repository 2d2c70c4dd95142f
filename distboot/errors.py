"""The one exception of distboot. Every code that it can carry is in `CODES`, with its exit code and its meaning."""

from __future__ import annotations

from collections.abc import Mapping

# 78 is sysexits.h's EX_CONFIG (mend the environment first), 75 is EX_TEMPFAIL (worth a retry);
# 126 and 127 are what POSIX shells return for a command that cannot be run or found.
CODES: Mapping[str, tuple[int, str]] = {
    "broken-environment": (78, "a launcher's variables are missing, malformed or contradict each other"),
    "conflicting-launchers": (78, "two launchers claim this process, and they disagree"),
    "unsupported-launcher": (78, "the process was started by a launcher that distboot cannot read yet"),
    "node-level-launch": (78, "RANK and WORLD_SIZE number pods or nodes, not processes"),
    "unknown-launcher": (78, "the launcher named by the user does not exist"),
    "launcher-mismatch": (78, "the launcher named by the user did not start this process"),
    "no-master-addr": (78, "nothing in the environment says where rank 0 is"),
    "no-master-port": (78, "no port was given, and there is no job id to derive one from"),
    "unresolvable-address": (75, "the name of rank 0's host did not resolve within the join timeout"),
    "port-taken": (75, "rank 0 cannot listen on MASTER_PORT: another program has it"),
    "join-timeout": (75, "not every rank joined within the join timeout"),
    "roster-mismatch": (78, "the ranks that met do not fit together"),
    "unknown-framework": (2, "there is no such framework"),
    "framework-not-installed": (78, "the framework cannot be imported"),
    "backend-not-available": (78, "this build of the framework lacks the backend asked for"),
    "too-few-accelerators": (78, "a node has fewer visible accelerators than local ranks"),
    "already-initialized": (78, "a process group exists already, or init was called for another framework"),
    "usage": (2, "the command line or an argument is wrong"),
    "command-not-found": (127, "the script or command to run does not exist"),
    "command-not-executable": (126, "the script or command to run may not be executed"),
}


class DistbootError(Exception):
    """A refusal that says what is wrong, where, and what to do about it.

    Attributes:
        code: stable kebab-case name, a key of `CODES`.
        message: what was found; may have several lines when there are several problems.
        hint: what to do; may be empty.
        exit_code: the exit code of the command for this error.
    """

    # Tracebacks and pickles show the public name, not the file that it lives in.
    __module__ = "distboot"

    def __init__(self, code: str, message: str, hint: str = "") -> None:
        self.code = code
        self.message = message
        self.hint = hint
        self.exit_code = CODES[code][0]
        super().__init__(code, message, hint)

    def __str__(self) -> str:
        return f"error[{self.code}]: {self.message}" + (f"\nhint: {self.hint}" if self.hint else "")
