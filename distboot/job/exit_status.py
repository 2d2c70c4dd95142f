"""How the process of a rank ended, and the texts that describe it.

`UncaughtException` is what the script reports of the exception that ends it, or of the text of
`sys.exit`; `ExitStatus` has all that is known of the end: exit code, signal, exception, crash.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ..base.dataclass import dataclass
from ..base.patterns import pattern
from ..base.process import ABORT, FROM_OUTSIDE, KILL, signal_name, signal_of_code
from ..base.text import cut, digits, escape_control
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
    is_of_distboot,
    is_of_others,
    speaks_of_peer,
)

FATAL = "Fatal Python error: "  # how faulthandler begins
# What a rank reports that waited in init() for one that ended
BEFORE_START = "ended before the framework could start"
_LONGEST_EXCERPT = 4000  # characters
_LONGEST_PART = 400  # characters of a type, of the first line of a message, of a place
_LONGEST_CAUSE = 200  # characters that are shown
_LONGEST_LINE = 200
# The exit code of a job that no failure gives one: 128 + SIGTERM, for platforms "try again"
STOPPED = 143
_FAILURES = range(1, 256)  # exit codes
# Of a job, by whether the rank has raised an exception, where its exit code is not known
_CODES_WITHOUT_STATUS = {
    True: 1,
    False: STOPPED,
}
LONGEST_HEADLINE = 160  # characters of a headline
_MOST_LINES = 12  # of a traceback, on the ranks that did not write it
_LEFT_OUT = "…"
# What may have sent a signal, or why it ended the process
_KILLED: dict[str, str] = {
    "SIGKILL": " (out of memory, or kill -9)",
    "SIGUSR1": " (no handler; see DISTBOOT_STOP_SIGNALS)",
    "SIGUSR2": " (no handler; see DISTBOOT_STOP_SIGNALS)",
    "SIGXCPU": " (CPU time limit; see DISTBOOT_STOP_SIGNALS)",
}
# The exit code of a shell whose command was killed
_KILLED_BELOW: dict[int, str] = {128 + KILL: " (SIGKILL: out of memory, or kill -9)"}
_UNKNOWN = (
    "exited without reporting a status: killed by SIGKILL (out of memory?) or called os._exit"
)
# A frame and its lines of code
_FRAME = pattern(r'^  File "([^"]+)", line .*\n(?:    .*\n)*', re.MULTILINE)
_SEVERAL_LEFT_OUT = pattern(rf"^(?:{_LEFT_OUT}\n)+", re.MULTILINE)
_CODE_ALONE = pattern(r"\A(?:    .*\n){1,2}")  # lines of code without their place
_DISTBOOT_ERROR = "distboot.DistbootError"
_ERROR = pattern(r"\A(error\[[a-z-]+\]: )(?:(?:(?:rank|node) \d+ )?on \S+: )?")
# How c10 of torch begins an error: its own source file, and the expression that was false
_C10 = pattern(r"\[enforce fail at [^\]]+\] (?:.*?\. )?")
# Of `init()`, and not of a barrier that has waited for this rank
_MISSING_AT_START = pattern(
    r"\Aerror\[missing-rank\]: (?:rank \d+ on \S+: )?"
    r"(?:\d+ of \d+ (?:rank|node)s joined|(?:rank|node) 0 did not answer at) "
)
_UNCAUGHT = "uncaught exception: "
# What the text of an exception can do without, where it is too long; the first goes first
LEAST_MISSED_OF_EXCEPTION = (
    pattern(rf"\A{_UNCAUGHT}"),
    pattern(r"error\[rank-failed\]: (?=.*: the block failed on )"),
    pattern(r"(?:local_)?main_first\(\)(?: on node \d+)?: the (?=block failed on )"),
)
# See `key_texts.leader_failed`: what is before the reason, unless that is the end of the leader
BLOCK_FAILED = pattern(
    r"(?:distboot\.DistbootError: )?error\[rank-failed\]: .*"
    rf"the block failed on rank \d+(?: \(node \d+\))?: (?!{EXIT})"
)
_SHORT = 70  # characters: of a text with fewer, only the beginning is kept, which has the type
# Of faulthandler
_PLACE = pattern(r'^ +File "([^"]+)", line (\d+),? in (.+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class UncaughtException:
    """The exception that ends a script, as the script reports it."""

    # Whether it only tells that a peer is gone or did not answer
    is_secondary: bool = of(flag, default=False)
    # Whether it tells that it has waited for peers in vain
    has_waited: bool = of(flag, default=False)
    more: int = of(number, default=0)  # other members of its group
    type: str = of(text(_LONGEST_PART), default="")  # with its module
    message: str = of(text(_LONGEST_PART), default="")  # its first line
    place: str = of(text(_LONGEST_PART), default="")  # "load (data.py:41)"; empty: not known
    excerpt: str = of(text(_LONGEST_EXCERPT), default="")  # the last lines of its traceback

    @classmethod
    def received(cls, data: str) -> UncaughtException | None:
        """Read what `Description.encode` of a script has made; None: it is something else."""
        names = cls.__slots__
        parts = data.split("\n", len(names) - 1)
        values: list[object] = [*parts]
        if len(values) != len(names):
            return None
        fields = dict(zip(names, values, strict=True))
        fields["is_secondary"] = fields["is_secondary"] == "1"
        fields["has_waited"] = fields["has_waited"] == "1"
        fields["more"] = digits(str(fields["more"]))
        try:
            return _checked(fields)
        except ValueError:
            return None

    @classmethod
    def described(cls, found: Description) -> UncaughtException:
        """The one of this process."""
        data = found.encode(_LONGEST_EXCERPT).decode()
        received = cls.received(data)
        if received is None:
            return cls(type=found.type)
        return received


# An exception with which a framework tells that a peer is gone: Gloo has a RuntimeError
_OF_FRAMEWORK = pattern(
    r"^(?:RuntimeError|SystemExit"
    r"|(?:distboot|deepspeed|horovod|jax\w*|mpi4py|tensorflow|torch)\.).*",
    re.MULTILINE,
)
_checked: Callable[[object], UncaughtException] = nested(UncaughtException)
_NO_EXCEPTION = UncaughtException()


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How the process of a rank ended. Without exit code and signal that is not known."""

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
        """From an exit code as `subprocess` has it: negative for a signal."""
        if code < 0:
            signal = -code
            return cls(signal=signal)
        return cls(code=code)

    # What it means

    @property
    def succeeded(self) -> bool:
        """Whether the rank was done."""
        return (self.code, self.stopped_by_us) == (0, False)

    @property
    def terminated_by(self) -> int | None:
        """The signal from outside that stopped it; None if it ended in another way."""
        if self.external_signal is not None:
            return self.external_signal
        # A shell, and a script that does as shells do, ends with the code of a signal.
        signals = {self.signal, signal_of_code(self.code)}
        from_outside = signals.intersection(FROM_OUTSIDE)
        return next(iter(from_outside), None)

    @property
    def is_failure(self) -> bool:
        """Whether it ended neither well nor because it was stopped."""
        return not any((self.succeeded, self.stopped_by_us, self.terminated_by))

    @property
    def hides_failure(self) -> bool:
        """Whether it ended well, although a Python below it had not."""
        return (self.succeeded, self.exception is None) == (True, False)

    @property
    def is_secondary(self) -> bool:
        """Whether its exception only tells that a peer is gone or did not answer."""
        return self._exception.is_secondary

    @property
    def is_of_peer(self) -> bool:
        """Whether a framework tells that a peer is gone, and not a service that the script uses."""
        if not self.is_secondary:
            return False
        exception = self._exception
        said = f"{exception.type}: {exception.message}\n{exception.excerpt}"
        said, failed_blocks = BLOCK_FAILED.subn("", said)
        told = _OF_FRAMEWORK.findall(said)
        is_of_framework = _OF_FRAMEWORK.match(exception.type) is not None
        # The leader may have caught why its block failed, and still run
        is_of_framework &= not failed_blocks
        return is_of_framework or any(map(speaks_of_peer, told))

    @property
    def has_missed_peer(self) -> bool:
        """Whether a peer was gone, also in a later `init()`, which has waited for it in vain."""
        return any((self.is_of_peer, self.has_missed_init))

    @property
    def has_missed_init(self) -> bool:
        """Whether it has waited in `init()` for a rank that did not come there."""
        return _MISSING_AT_START.match(self._exception.message) is not None

    @property
    def is_before_start(self) -> bool:
        """Whether it has failed in `init()`, as a rank did not come there, or left it."""
        has_left = BEFORE_START in self._exception.message
        return any((has_left, self.has_missed_init))

    @property
    def may_be_consequence(self) -> bool:
        """Whether a peer, or a signal that had asked it to stop, may be why it failed."""
        was_told_to_stop = self.external_signal is not None
        return any((self.is_secondary, was_told_to_stop))

    @property
    def has_waited(self) -> bool:
        """Whether its exception tells that it has waited for others for too long."""
        return self._exception.has_waited

    @property
    def may_have_waited(self) -> bool:
        """Whether it ended of a timeout, or of SIGABRT, as NCCL's watchdog ends a process."""
        is_abort = self.signal == ABORT
        first_line, _, _ = self.crash.partition("\n")
        has_aborted = "Aborted" in first_line
        return any((self.has_waited, is_abort, has_aborted))

    @property
    def status(self) -> int | None:
        """The exit code as a shell has it: 128 + n for signal n."""
        if self.signal is None:
            return self.code
        return 128 + self.signal

    @property
    def tells_code_of_job(self) -> bool:
        """Whether it ends the job with a code of its own.

        A signal after an uncaught exception does not: a framework may abort while Python ends.
        """
        has_signal = self.signal is not None
        has_exception = self.exception is not None
        is_aborted = all((has_signal, has_exception))
        return all((self.is_failure, not is_aborted))

    @property
    def code_of_job(self) -> int:
        """The exit code of a job in which a rank failed first, and so."""
        code = self.status
        if code is None:
            return _CODES_WITHOUT_STATUS[self._has_raised]
        if code not in _FAILURES:
            return STOPPED
        return code

    @property
    def _exception(self) -> UncaughtException:
        return self.exception or _NO_EXCEPTION

    @property
    def _has_raised(self) -> bool:
        """Whether an uncaught exception was first; a signal or `os._exit` may have ended it then."""
        is_other = any((self.cause, self.crash))
        return self.exception is not None and not is_other

    # How it is described

    @property
    def traceback(self) -> str:
        """The last lines of its traceback, or the first ones of a crash."""
        return self.crash or self._exception.excerpt

    @property
    def place(self) -> str:
        """Where in the code it has failed: `"load (data.py:41)"`; empty: not known.

        That is in the script's own code, if any is.
        """
        if not self.crash:
            return escape_control(self._exception.place)
        frames = _PLACE.findall(self.crash)
        frames.sort(key=lambda frame: is_of_others(frame[0]))  # the script's own first
        if not frames:
            return ""
        file, line, function = frames[0]
        _, _, name = file.rpartition("/")
        place = f"{function} ({name}:{line})"
        return escape_control(place)

    def describe(self) -> str:
        """`"exit code 3"`, `"killed by SIGSEGV"`."""
        if self.cause:
            cause = escape_control(self.cause)
            return cut(cause, _LONGEST_CAUSE)
        if self.signal is not None:
            name = signal_name(self.signal)
            by_whom = _KILLED.get(name, "")
            return f"killed by {name}{by_whom}"
        if self.code is not None:
            by_whom = _KILLED_BELOW.get(self.code, "")
            return f"exit code {self.code}{by_whom}"
        return _UNKNOWN

    def failure_text(self, most: int = LONGEST_HEADLINE) -> str:
        """How it failed, in at most so many characters.

        `"uncaught exception: ValueError: …"`, `"error[usage]: …"`, `"exited: no dataset"`,
        `"exit code 3"`
        """
        if not self._has_raised:
            text = self._exit_text()
            return without_middle(text, most)
        exception = self._exception
        text = _exception_text(exception)
        more = ""
        if exception.more:
            more = f" (and {exception.more} more)"
        room = most - len(more)
        text = with_least(text, LEAST_MISSED_OF_EXCEPTION, room)
        text = without_middle(text, room)
        return text + more

    def _exit_text(self) -> str:
        """How it ended; if that is only an exit code, with what the script wrote last."""
        text = self.describe()
        exit_code = f"exit code {self.code}"
        if self.last_line and text == exit_code:
            line = escape_control(self.last_line)
            text += f", last line on stderr: {line}"
        return text

    def excerpt(self) -> list[str]:
        """What all ranks show of a traceback; of a long one without distboot's own frames."""
        lines = self.traceback.splitlines()
        is_exit = self.traceback.startswith(EXIT)
        if is_exit and len(lines) == 1:  # the headline has it
            return []
        if len(lines) <= _MOST_LINES:
            return lines
        if self.crash:  # the innermost frame comes first
            first = lines[:_MOST_LINES]
            return [*first, _LEFT_OUT]
        kept = _without_distboot(lines)
        if len(kept) <= _MOST_LINES:
            return kept
        last = kept[-_MOST_LINES:]
        end = "\n".join(last)
        end = _CODE_ALONE.sub("", end)
        return [_LEFT_OUT, *end.split("\n")]

    def as_details(self) -> dict[str, object]:
        """For the event of its end."""
        return {
            "exit_code": self.status,
            "signal": self.signal,
            "stopped_by_us": self.stopped_by_us,
            "external_signal": self.terminated_by,
            "at": self.when,
        }


def _exception_text(exception: UncaughtException) -> str:
    kind = escape_control(exception.type)
    message = escape_control(exception.message)
    if kind == EXIT:
        return f"exited: {message}"
    if kind == _DISTBOOT_ERROR:
        # Without its rank, which the headline has
        found, count = _ERROR.subn(
            r"\1",
            message,
        )
        if count:
            return found
    text = f"{_UNCAUGHT}{kind}"
    if message:
        message = _C10.sub("", message, count=1)
        text += f": {message}"
    return text


def shown(words: str) -> str:
    """A traceback for the terminal, indented and without control characters."""
    text = ""
    for line in filter(str.strip, words.splitlines()):
        line_shown = cut(escape_control(line), _LONGEST_LINE)
        text += f"\n  | {line_shown}"
    return text


def _without_distboot(lines: list[str]) -> list[str]:
    """A traceback without the frames of this package."""

    def replaced(frame: re.Match[str]) -> str:
        if is_of_distboot(frame[1]):
            return f"{_LEFT_OUT}\n"
        return frame[0]

    text = "\n".join([*lines, ""])
    text = _FRAME.sub(replaced, text)
    text = _SEVERAL_LEFT_OUT.sub(f"{_LEFT_OUT}\n", text)
    return text.splitlines()


def fitting(message: str, most: int = LONGEST_HEADLINE) -> str:
    """A text of at most so many characters."""
    return cut(message, most)


def with_least(message: str, least_missed: Iterable[re.Pattern[str]], most: int) -> str:
    """A text without more and more of what it can do without, until it has so many characters."""
    for part in least_missed:
        if len(message) > most:
            message = part.sub("", message)
    return message


def without_middle(message: str, most: int, least: int = _SHORT) -> str:
    """A text of at most so many characters, with its end, which often has the cause.

    Only the beginning if that is fewer than `least` characters.
    """
    if len(message) <= most or most < least:
        return fitting(message, most)
    tail = most // 4
    head = most - tail - 1
    begin = message[:head]
    end = message[len(message) - tail :]
    return f"{begin}…{end}"
