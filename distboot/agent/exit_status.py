"""How the process of a rank ended, what is said of it, and where a platform shows it.

That is the termination log of Kubernetes, and the failure file of SageMaker. Each agent leaves there what it prints:
the log of every pod says the same. What others wrote there stays.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
import stat
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ..process import FROM_OUTSIDE
from ..rendezvous.protocol import flag, number, of, optional, text, time_or_duration
from ..text import escape_control, without_secret
from .crash_hooks import EXITED, OF_LIBRARIES
from .hints import speaks_of_a_peer

# SIGRTMAX on Linux: what ends process 1 of a container, which no other signal does
LAST_RESORT = 64
FATAL = "Fatal Python error: "  # how faulthandler begins
_LONGEST_WORDS = 4000  # characters
_LONGEST_CAUSE = _LONGEST_LINE = 200  # characters that are shown
# The default of terminationMessagePath. The kubelet mounts it, and takes 4096 bytes of it into the status of the pod.
_KUBERNETES = "/dev/termination-log"
_MOST = 4096
# FailureReason of a training job is its beginning. SageMaker's own scripts leave what is there, too.
_SAGEMAKER = "/opt/ml/output/failure"
_OURS = b"distboot: "
_FIRST_LINE = 900  # characters
_KILLED = "out of memory, or kill -9"
# How it speaks of a collective operation to which others did not come: Gloo; torch of NCCL, twice.
_HAS_WAITED = ("timed out waiting", "collective operation timeout", "wait timeout after")
# The exit code of a job that no failure gives one: 128 + SIGTERM, which platforms take for "try again"
STOPPED = 143
LONGEST_HEADLINE = 160  # characters of a headline
_MOST_LINES = 12  # of a traceback, on the ranks that did not write it
_LEFT_OUT = "…"
_FRAME = re.compile(r'  File "([^"]+)", line ')
_OF_OURS = re.compile(r".*/distboot/(.+)")
_ERROR = re.compile(r"[\w.]*\bDistbootError: (error\[[a-z-]+\]: )(?:(?:rank|node) \d+ on \S+: )?")
# Of Python, and of faulthandler
_PLACE = re.compile(r'^ +File "([^"]+)", line (\d+),? in (.+)$', re.MULTILINE)
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How the process of a rank ended. Neither exit code nor signal: that is not known."""

    code: int | None = of(optional(number), default=None)
    signal: int | None = of(optional(number), default=None)  # that ended it
    external_signal: int | None = of(optional(number), default=None)  # that had asked it to stop
    stopped_by_us: bool = of(flag, default=False)  # whether it was stopped because of another rank
    # Why it cannot go on, although it is not about to end
    cause: str = of(text(_LONGEST_WORDS), default="")
    words: str = of(text(_LONGEST_WORDS), default="")  # the last lines of its traceback
    when: float = of(time_or_duration, default=0.0)  # seconds since the epoch

    @classmethod
    def of_child(cls, code: int) -> ExitStatus:
        """As `subprocess` has it: exit code, or minus the signal."""
        return cls(signal=-code) if code < 0 else cls(code=code)

    @property
    def succeeded(self) -> bool:
        """Whether the rank was done."""
        return self.code == 0 and not self.stopped_by_us

    @property
    def terminated_by(self) -> int | None:
        """The signal from outside that made it stop; None if it ended in another way."""
        if self.external_signal is not None:
            return self.external_signal
        if self.signal in FROM_OUTSIDE:
            return self.signal
        # Of a shell, or of a script that does as shells do
        code = 0 if self.code is None else self.code - 128
        return code if code in FROM_OUTSIDE else None

    @property
    def is_failure(self) -> bool:
        """Whether it ended neither well nor because it was stopped."""
        return not (self.succeeded or self.stopped_by_us or self.terminated_by)

    @property
    def is_secondary(self) -> bool:
        """Whether it says itself that a peer disconnected before."""
        return speaks_of_a_peer(self.words)

    @property
    def has_waited(self) -> bool:
        """Whether it says itself that it has waited for others for too long."""
        return any(phrase in self.words.lower() for phrase in _HAS_WAITED)

    @property
    def is_abort(self) -> bool:
        """Whether C code has ended it, as NCCL's watchdog does, too."""
        return self.signal == signal.SIGABRT or (
            self.is_crash and "Aborted" in self.words.partition("\n")[0]
        )

    @property
    def is_crash(self) -> bool:
        """Whether the words are those of `faulthandler`."""
        return self.words.startswith(FATAL)

    @property
    def status(self) -> int | None:
        """The exit code as a shell has it: 128 + n for signal n."""
        return self.code if self.signal is None else 128 + self.signal

    def describe(self) -> str:
        """`"exit code 3"`, `"killed by SIGSEGV"`, say."""
        if self.cause:
            return escape_control(self.cause)[:_LONGEST_CAUSE]
        if self.signal is not None:
            name = signal_name(self.signal)
            return f"killed by {name}" + (f" ({_KILLED})" if self.signal == signal.SIGKILL else "")
        if self.code is not None:
            return f"exit code {self.code}"
        return "exited without reporting a status: killed by SIGKILL (out of memory?) or called os._exit"

    @property
    def failure_text(self) -> str:
        """`"uncaught exception: ValueError: …"`, `"error[usage]: …"`, `"exited: no dataset"`, `"exit code 3"`."""
        if not self._is_exception:
            return self.describe()
        message = escape_control(_message(self.words.splitlines()))
        error = _ERROR.match(message)
        if error is not None:  # it says who that is, and so do we
            return fitting(error[1] + message[error.end() :])
        begin = "exited: " if message.startswith(EXITED) else "uncaught exception: "
        return begin + fitting(message.removeprefix(EXITED))

    @property
    def place(self) -> str:
        """Where in the code it has failed, `"load (data.py:41)"`: in the script's own, if any is; empty: not known."""
        frames = _PLACE.findall(self.words)
        frames = [one for one in frames if not _is_of_others(one[0])] or frames
        if not frames:
            return ""
        file, line, function = frames[0 if self.is_crash else -1]
        return escape_control(f"{function} ({os.path.basename(file)}:{line})")

    @property
    def code_of_job(self) -> int:
        """The exit code of a job in which a rank failed first, so."""
        code = 1 if self._is_exception else self.status or 0
        return code if 0 < code < 256 else STOPPED

    @property
    def _is_exception(self) -> bool:
        """Whether it is about to end of an uncaught exception, or ended as Python does then: it reads the same."""
        return (
            bool(self.words) and not self.cause and not self.is_crash and self.status in (None, 1)
        )

    def excerpt(self) -> list[str]:
        """What all ranks show of a traceback: where it is long, not our own part of it."""
        words = self.words.splitlines()
        if len(words) == 1 and words[0].startswith(EXITED):  # the headline says it
            return []
        if len(words) <= _MOST_LINES:
            return words
        if self.is_crash:  # the innermost frame comes first
            return [*words[:_MOST_LINES], _LEFT_OUT]
        kept: list[str] = []
        is_ours = False
        for line in words:
            frame = _FRAME.match(line)
            is_ours = (
                _is_ours(frame[1]) if frame is not None else is_ours and line.startswith("    ")
            )
            if not is_ours:
                kept.append(line)
            elif kept[-1:] != [_LEFT_OUT]:
                kept.append(_LEFT_OUT)
        if len(kept) <= _MOST_LINES:
            return kept
        last = kept[-_MOST_LINES:]
        for _ in range(2):  # not with a line of code without its place
            last = last[1:] if last[0].startswith("    ") else last
        return [_LEFT_OUT, *last]

    def as_details(self) -> dict[str, object]:
        how = {"exit_code": self.status, "signal": self.signal, "stopped_by_us": self.stopped_by_us}
        return {**how, "external_signal": self.terminated_by, "at": self.when}


def signal_name(number: int) -> str:
    """`"SIGTERM"`; `"signal 34"` for those without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shown(words: str) -> str:
    """A traceback for the terminal, indented and without control characters."""
    return "".join(
        f"\n  | {escape_control(line)[:_LONGEST_LINE]}"
        for line in words.splitlines()
        if line.strip()
    )


def _is_of_others(file: str) -> bool:
    """Whether it is not the script's."""
    return file.startswith("<") or any(part in file for part in OF_LIBRARIES) or _is_ours(file)


def _is_ours(file: str) -> bool:
    """Whether it is one of this package, which every rank has, wherever that is."""
    found = _OF_OURS.fullmatch(file)
    return found is not None and os.path.isfile(os.path.join(_PACKAGE, found[1]))


def fitting(message: str, most: int = LONGEST_HEADLINE) -> str:
    """A text of at most so many characters."""
    return message if len(message) <= most else message[: most - 1] + "…"


def _message(words: Sequence[str]) -> str:
    """The first line of the exception itself in a traceback, or of an exit: what it says may have several."""
    if words[0].startswith(EXITED):
        return words[0]
    frames = [number for number, line in enumerate(words) if line.startswith('  File "')]
    after = words[frames[-1] + 1 :] if frames else []
    return next((line for line in after if line and not line.startswith(" ")), words[-1])


def leave(text: str, *, replaces: bool = False) -> None:
    """Leave a text there; `replaces`: also in the place of an earlier one of distboot's. Nothing is said of errors."""
    data = _OURS + _shortened(without_secret(text))
    with suppress(OSError):
        _leave(_KUBERNETES, 0, data, replaces=replaces)
    with suppress(OSError, ImportError):
        # Here, as a sidecar needs nothing else of detection
        from ..detection.placement import recognise

        platform = recognise(os.environ)
        if platform is not None and platform.name == "sagemaker":
            _leave(_SAGEMAKER, os.O_CREAT, data, replaces=replaces)


def leave_uncaught() -> None:
    """Leave the uncaught exception with which this process ends, which is alone: no agent knows of it."""
    import traceback  # here, as it is rarely needed

    words = "".join(traceback.format_exception(sys.last_value))[-_MOST:]
    leave(ExitStatus(words=words).failure_text + shown(words))


def _shortened(text: str) -> bytes:
    """The first line, and as many of the last ones as there is room for."""
    head, *lines = text.split("\n")
    lines.insert(0, head[:_FIRST_LINE])
    while len(data := "\n".join(lines).encode(errors="replace")) > _MOST - len(_OURS):
        lines[1:3] = ["…"]
    return data


def _leave(path: str, more: int, data: bytes, *, replaces: bool) -> None:
    file = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | more, 0o644)
    try:
        # Other ranks in this container have the same to say
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISREG(os.fstat(file).st_mode):
            before = os.read(file, len(_OURS))
            if not before or (replaces and before == _OURS):
                os.ftruncate(file, os.pwrite(file, data, 0))  # a disk may be full
    finally:
        os.close(file)
