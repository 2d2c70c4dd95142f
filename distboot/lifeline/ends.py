"""How the process of a rank ended, and what is said of it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..ending import FROM_OUTSIDE
from ..errors import printable

FATAL = "Fatal Python error: "  # how faulthandler begins
_LONGEST_WORDS = 4000  # characters
_LONGEST_CAUSE = _LONGEST_LINE = 200  # characters that are shown
_KILLED = "by the kernel when memory ran out, or by hand"
# How a rank speaks of a peer that has gone before: what is found in such an exception is a consequence.
# Gloo, the kernel, NCCL, torch's store, MPI; TensorFlow of gRPC; Horovod, which does not say why.
_OF_A_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "connection refused",
    "ncclremoteerror",
    "remote process exited",
    "failed to recv",
    "timed out waiting",
    "errors_impl.unavailableerror",
    "horovod has been shut down",
    "error[rank-failed]",
    "ended, or closed its context",  # at our gate
)


@dataclass(frozen=True, slots=True)
class End:
    """How the process of a rank ended.

    Attributes:
        code: its exit code; None if a signal ended it, or nobody saw it.
        signal: the signal that ended it; None likewise.
        asked: the signal with which somebody outside had asked it to stop; None if nobody had.
        told: whether it had been told to stop because of another rank.
        cause: why it cannot go on, although it has not ended; empty if it has, or is about to.
        words: the last lines of its traceback; empty if there is none.
        when: seconds since the epoch.
    """

    code: int | None = None
    signal: int | None = None
    asked: int | None = None
    told: bool = False
    cause: str = ""
    words: str = ""
    when: float = 0.0

    @property
    def is_well(self) -> bool:
        """Whether the rank was done."""
        return self.code == 0 and not self.told

    @property
    def stopped_by(self) -> int | None:
        """The signal from outside that made it stop; None if it ended in another way."""
        if self.asked is not None:
            return self.asked
        if self.signal in FROM_OUTSIDE:
            return self.signal
        code = 0 if self.code is None else self.code - 128  # of a shell, or of a script that does as shells do
        return code if code in FROM_OUTSIDE else None

    @property
    def is_failure(self) -> bool:
        """Whether it ended neither well nor because somebody stopped it."""
        return not (self.is_well or self.told or self.stopped_by)

    @property
    def is_consequence(self) -> bool:
        """Whether it says itself that a peer had gone before."""
        message = " ".join(line for line in self.words.splitlines() if not line.startswith(" ")).lower()
        return any(text in message for text in _OF_A_PEER)

    @property
    def is_crash(self) -> bool:
        """Whether the words are those of `faulthandler`."""
        return self.words.startswith(FATAL)

    @property
    def status(self) -> int | None:
        """The exit code as a shell has it: 128 + n for signal n; None if nobody saw it."""
        return self.code if self.signal is None else 128 + self.signal

    def said(self) -> str:
        """`"exit code 3"`, `"killed by SIGSEGV"`, say."""
        if self.cause:
            return printable(self.cause)[:_LONGEST_CAUSE]
        if self.signal is not None:
            name = signal_name(self.signal)
            return f"killed by {name}" + (f" ({_KILLED})" if self.signal == signal.SIGKILL else "")
        if self.code is not None:
            return f"exit code {self.code}"
        return f"ended without a word: killed ({_KILLED}), or os._exit"

    def as_message(self) -> dict[str, object]:
        """As plain JSON types."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: object) -> End:
        """What a peer sent, who may send anything.

        Raises:
            TypeError: it is none.
        """
        if not isinstance(message, dict) or message.keys() != set(cls.__slots__) or not _is_end(message):
            raise TypeError("sends a broken end")
        return cls(**message)


def _is_end(message: Mapping[str, Any]) -> bool:
    numbers = (message["code"], message["signal"], message["asked"])
    texts, when = (message["words"], message["cause"]), message["when"]
    return (
        all(value is None or (type(value) is int and 0 <= value < 1 << 32) for value in numbers)
        and all(isinstance(text, str) and len(text) <= _LONGEST_WORDS for text in texts)
        and type(message["told"]) is bool
        and isinstance(when, int | float)
        and 0 <= when < 1 << 33
    )


def signal_name(number: int) -> str:
    """`"SIGTERM"`; `"signal 34"` for those without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shown(words: str) -> str:
    """A traceback for the terminal, indented and without control characters."""
    return "".join(f"\n  | {printable(line)[:_LONGEST_LINE]}" for line in words.splitlines() if line.strip())
