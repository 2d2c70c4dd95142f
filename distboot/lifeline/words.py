"""What comes through the pipe of `last_words`, read on the other side."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from .ends import FATAL
from .last_words import ENDING, EXCEPTION, INTERRUPT, STEPS, TERM, without

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

    def read(self) -> list[Words]:
        """What has come and is complete."""
        self._fill()
        found = []
        for said in _SAID.finditer(self._buffer):
            kind, pid, text = said[1].decode(), int(said[2]), self._clean(said[3])[-_LONGEST:]
            if kind in (ENDING, EXCEPTION, INTERRUPT, STEPS, TERM):
                found.append(Words(kind, pid, text))
        self._buffer = _SAID.sub(b"", self._buffer)
        return found

    def take_dump(self) -> bool:
        """Whether a faulthandler has written what the process did when SIGTERM came; said once."""
        begin = self._buffer.find(FATAL.encode())
        dump = self._buffer if begin < 0 else self._buffer[:begin]
        self._buffer = self._buffer[len(dump) :]
        return bool(dump.strip())

    def crash(self) -> str:
        """What a faulthandler has written about a crash, the innermost call first; empty if it has not."""
        if not self._buffer.startswith(FATAL.encode()):
            return ""
        lines = self._clean(self._buffer)[:_LONGEST].splitlines()
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
        return without(self._secret, data.decode(errors="replace"))
