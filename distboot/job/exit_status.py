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
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ..base.process import FROM_OUTSIDE
from ..base.text import digits, escape_control, without_secret
from ..rendezvous.protocol import (
    flag,
    nested,
    number,
    of,
    optional,
    text,
    time_or_duration,
)
from ..script.exceptions import (
    EXIT,
    Description,
    describe,
    is_of_distboot,
    is_of_others,
)

# SIGRTMAX on Linux: what ends process 1 of a container, which no other signal does
LAST_RESORT = 64
FATAL = "Fatal Python error: "  # how faulthandler begins
_LONGEST_EXCERPT = 4000  # characters
_LONGEST_PART = 400  # characters of a type, of the first line of a message, of a place
_LONGEST_CAUSE = _LONGEST_LINE = 200  # characters that are shown
# The default of terminationMessagePath. The kubelet mounts it, and takes 4096 bytes of it into the status of the pod.
_KUBERNETES = "/dev/termination-log"
_MOST = 4096
# FailureReason of a training job is its beginning. SageMaker's own scripts leave what is there, too.
_SAGEMAKER = "/opt/ml/output/failure"
_OURS = b"distboot: "
_FIRST_LINE = 900  # characters
_KILLED = "out of memory, or kill -9"
# The exit code of a job that no failure gives one: 128 + SIGTERM, which platforms take for "try again"
STOPPED = 143
LONGEST_HEADLINE = 160  # characters of a headline
_MOST_LINES = 12  # of a traceback, on the ranks that did not write it
_LEFT_OUT = "…"
_FRAME = re.compile(r'  File "([^"]+)", line ')
_DISTBOOT_ERROR = "distboot.DistbootError"
_ERROR = re.compile(r"(error\[[a-z-]+\]: )(?:(?:(?:rank|node) \d+ )?on \S+: )?")
# How c10 of torch begins an error: its own source file, and the expression that was false
_C10 = re.compile(r"\[enforce fail at [^\]]+\] (?:.*?\. )?")
_UNCAUGHT = "uncaught exception: "
_SHORT = 70  # characters: a text of at most so many is its beginning, which has the type
# Of faulthandler
_PLACE = re.compile(r'^ +File "([^"]+)", line (\d+),? in (.+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class UncaughtException:
    """What the script tells of the exception that ends it, or of the text of `sys.exit`."""

    # Whether it only tells that a peer is gone or did not answer
    is_secondary: bool = of(flag, default=False)
    has_waited: bool = of(
        flag, default=False
    )  # whether it says that it has waited for peers in vain
    more: int = of(number, default=0)  # other members of its group
    type: str = of(text(_LONGEST_PART), default="")  # with its module
    message: str = of(text(_LONGEST_PART), default="")  # its first line
    place: str = of(text(_LONGEST_PART), default="")  # "load (data.py:41)"; empty: not known
    excerpt: str = of(text(_LONGEST_EXCERPT), default="")  # the last lines of its traceback

    @classmethod
    def received(cls, data: str) -> UncaughtException | None:
        """The one that `Description.encode` of a script has made; None: it is something else."""
        fields: list[object] = [*data.split("\n", len(cls.__slots__) - 1)]
        if len(fields) != len(cls.__slots__):
            return None
        fields[:3] = fields[0] == "1", fields[1] == "1", digits(str(fields[2]))
        try:
            return _received(dict(zip(cls.__slots__, fields, strict=True)))
        except ValueError:
            return None

    @classmethod
    def described(cls, found: Description) -> UncaughtException:
        """The one of this process."""
        return cls.received(found.encode(_LONGEST_EXCERPT).decode()) or cls(type=found.type)


_received: Callable[[object], UncaughtException] = nested(UncaughtException)


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How the process of a rank ended. Neither exit code nor signal: that is not known."""

    code: int | None = of(optional(number), default=None)
    signal: int | None = of(optional(number), default=None)  # that ended it
    external_signal: int | None = of(optional(number), default=None)  # that had asked it to stop
    stopped_by_us: bool = of(flag, default=False)  # whether it was stopped because of another rank
    # Why it cannot go on, although it is not about to end
    cause: str = of(text(_LONGEST_EXCERPT), default="")
    # With which the script ends by itself
    exception: UncaughtException | None = of(optional(nested(UncaughtException)), default=None)
    crash: str = of(text(_LONGEST_EXCERPT), default="")  # what faulthandler has written
    # The last line that a script wrote to stderr which ended with this exit code; empty: not known
    last_line: str = of(text(_LONGEST_PART), default="")
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
        """Whether its exception only tells that a peer is gone or did not answer."""
        return self.exception is not None and self.exception.is_secondary

    @property
    def has_waited(self) -> bool:
        """Whether its exception tells that it has waited for others for too long."""
        return self.exception is not None and self.exception.has_waited

    @property
    def is_abort(self) -> bool:
        """Whether C code has ended it, as NCCL's watchdog does, too."""
        return self.signal == signal.SIGABRT or "Aborted" in self.crash.partition("\n")[0]

    @property
    def traceback(self) -> str:
        """The last lines of its traceback, or the first ones of a crash."""
        if self.crash or self.exception is None:
            return self.crash
        return self.exception.excerpt

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

    def failure_text(self, most: int = LONGEST_HEADLINE) -> str:
        """`"uncaught exception: ValueError: …"`, `"error[usage]: …"`, `"exited: no dataset"`, `"exit code 3"`."""
        if self.exception is None or not self._is_exception:
            return self._exit_text(most)
        more = ""
        if self.exception.more:
            more = f" (and {self.exception.more} more)"
        most -= len(more)
        text = self._exception_text(self.exception)
        if len(text) > most:
            text = text.removeprefix(_UNCAUGHT)
        return without_middle(text, most) + more

    def _exit_text(self, most: int) -> str:
        """How it ended; where that is an exit code alone, what the script wrote last."""
        text = self.describe()
        if self.last_line and text == f"exit code {self.code}":
            text += f", last line on stderr: {escape_control(self.last_line)}"
        return without_middle(text, most)

    @staticmethod
    def _exception_text(exception: UncaughtException) -> str:
        kind, message = escape_control(exception.type), escape_control(exception.message)
        if kind == EXIT:
            return f"exited: {message}"
        error = _ERROR.match(message)
        if kind == _DISTBOOT_ERROR and error is not None:  # it says who that is, and so do we
            return error[1] + message[error.end() :]
        if message:
            return f"{_UNCAUGHT}{kind}: {_C10.sub('', message, count=1)}"
        return f"{_UNCAUGHT}{kind}"

    @property
    def place(self) -> str:
        """Where in the code it has failed, `"load (data.py:41)"`: in the script's own, if any is; empty: not known."""
        if not self.crash:
            return "" if self.exception is None else escape_control(self.exception.place)
        frames = _PLACE.findall(self.crash)
        frames = [one for one in frames if not is_of_others(one[0])] or frames
        if not frames:
            return ""
        file, line, function = frames[0]
        return escape_control(f"{function} ({os.path.basename(file)}:{line})")

    @property
    def code_of_job(self) -> int:
        """The exit code of a job in which a rank failed first, so."""
        code = 1 if self._is_exception else self.status or 0
        return code if 0 < code < 256 else STOPPED

    @property
    def _is_exception(self) -> bool:
        """Whether it is about to end of an uncaught exception, or ended as Python does then: it reads the same."""
        is_other = self.cause or self.crash
        return self.exception is not None and not is_other and self.status in (None, 1)

    def excerpt(self) -> list[str]:
        """What all ranks show of a traceback: where it is long, not our own part of it."""
        lines = self.traceback.splitlines()
        if len(lines) == 1 and lines[0].startswith(EXIT):  # the headline says it
            return []
        if len(lines) <= _MOST_LINES:
            return lines
        if self.crash:  # the innermost frame comes first
            return [*lines[:_MOST_LINES], _LEFT_OUT]
        kept = _without_distboot(lines)
        if len(kept) <= _MOST_LINES:
            return kept
        last = kept[-_MOST_LINES:]
        for _ in range(2):  # not with a line of code without its place
            if last[0].startswith("    "):
                del last[0]
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


def _without_distboot(lines: list[str]) -> list[str]:
    """A traceback without the frames of this package."""
    kept: list[str] = []
    is_ours = False
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            is_ours = is_of_distboot(frame[1])
        elif not line.startswith("    "):
            is_ours = False
        if not is_ours:
            kept.append(line)
        elif kept[-1:] != [_LEFT_OUT]:
            kept.append(_LEFT_OUT)
    return kept


def fitting(message: str, most: int = LONGEST_HEADLINE) -> str:
    """A text of at most so many characters."""
    return message if len(message) <= most else message[: most - 1] + "…"


def without_middle(message: str, most: int) -> str:
    """A text of at most so many characters with its beginning and its end, where a cause often stands."""
    if len(message) <= most or most < _SHORT:
        return fitting(message, most)
    tail = most // 4
    return f"{message[: most - tail - 1]}…{message[len(message) - tail :]}"


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
    error = sys.last_value
    assert isinstance(error, BaseException)
    found = describe(error, error.__traceback__, without_secret)
    end = ExitStatus(exception=UncaughtException.described(found))
    leave(end.failure_text() + shown(end.traceback))


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
