"""What comes through the pipe of `last_words`, read on the other side."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from .ends import FATAL
from .last_words import ENDING, EXCEPTION, INTERRUPT, TERM

_MOST_KEPT = 16384  # bytes: what a faulthandler writes of many threads
_SAID = re.compile(rb"\0(\w+) (\d+)\n([^\0]*)\0")
_LONGEST = 3500  # characters


@dataclass(frozen=True, slots=True)
class Words:
    """Something that a process left behind: its kind, the process, and the text."""

    kind: str
    pid: int
    text: str = ""


class Reader:
    """Reads the pipe without waiting.

    Args:
        pipe: its reading end; stays the caller's.
        secret: not to be passed on; may be empty.
    """

    def __init__(self, pipe: int, secret: str = "") -> None:
        os.set_blocking(pipe, False)
        self.ended = False
        self._pipe = pipe
        self._secret = secret
        self._buffer = b""
        self._last = ""

    def read(self) -> list[Words]:
        """What has come and is complete."""
        self._fill()
        found = []
        for said in _SAID.finditer(self._buffer):
            kind, pid, text = said[1].decode(), int(said[2]), self._clean(said[3])
            if kind in (ENDING, EXCEPTION, INTERRUPT, TERM):
                found.append(Words(kind, pid, text))
                self._last = text or self._last
        self._buffer = _SAID.sub(b"", self._buffer)
        return found

    def dumped(self) -> bool:
        """Whether a faulthandler has written what a process did when a signal came that was to end it."""
        return bool(self._buffer) and not self._buffer.startswith(FATAL.encode())

    def last(self) -> str:
        """The last lines of a traceback that came, of whatever kind; empty if none did."""
        if not self._buffer.startswith(FATAL.encode()):
            return self._last
        # "Fatal Python error: Segmentation fault", and the stack with the innermost call first
        lines = self._clean(self._buffer[:_LONGEST]).splitlines()
        return "\n".join(line for line in lines if line and not line.startswith("Extension modules"))

    def _fill(self) -> None:
        while True:
            try:
                data = os.read(self._pipe, 65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.ended = True
                return
            self._buffer = (self._buffer + data)[:_MOST_KEPT]

    def _clean(self, data: bytes) -> str:
        text = data.decode(errors="replace")[-_LONGEST:]
        return text.replace(self._secret, "***") if self._secret else text
