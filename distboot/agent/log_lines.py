r"""`PrefixedLines`: how one stream of a rank reads with `--log-prefix`. Pure: bytes and times in, bytes out.

Several ranks write to one console, so everything that is shown has to be a line of its own, with two
exceptions. A prompt has no newline and waits for an answer: the text is shown as it is, and what
follows continues it. A progress bar overwrites itself with `\r`: two of them would overwrite each
other, so only its states are shown, each as a line: the last one, and before that one now and then.
A `\r` right before the newline is part of the end of the line, as on Windows.
"""

from __future__ import annotations

from math import inf

# Seconds between two lines of one progress bar
BAR_INTERVAL = 10.0
# Bytes of one state of a progress bar
_LONGEST_STATE = 1 << 12


class PlainLines:
    """Shows what a rank writes as it is."""

    due = inf

    def feed(self, data: bytes, now: float) -> bytes:  # noqa: ARG002
        return data

    def release(self, now: float) -> bytes:  # noqa: ARG002
        return b""

    def close(self) -> bytes:
        return b""


class PrefixedLines:
    """Turns what a rank writes to one stream into prefixed lines."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._state = b""  # of a progress bar: what the terminal would show now, not shown yet
        self._shown_state: bytes | None = None  # the last state of this bar that became a line
        self._is_continued = False  # whether the text shown last had no newline
        self.due = inf  # when `release` has a state to show

    def feed(self, data: bytes, now: float) -> bytes:
        """What to show after the rank has written `data`."""
        *lines, rest = data.split(b"\n")
        shown = list(map(self._whole_line, lines))
        if rest:
            partial = self._partial_line(rest, now)
            shown.append(partial)
        return b"".join(shown)

    def release(self, now: float) -> bytes:
        """The state of a progress bar that has not been shown for a while, as a line."""
        if now < self.due:
            return b""
        state = self._state.rstrip(b"\r")
        self._state = b"\r"  # what comes next overwrites it
        self._shown_state = state
        self.due = inf
        return self._prefix + state + b"\n"

    def close(self) -> bytes:
        """The last state of a progress bar, if the stream ends without a newline."""
        if not self._state.strip(b"\r"):
            return b""
        return self._whole_line(b"")

    def _whole_line(self, text: bytes) -> bytes:
        line = self._state + text
        state = _last_state(line)
        is_bar = state != line
        was_shown = self._was_shown(state)
        begin = self._begin()
        if is_bar:
            begin = self._begin_anew() + self._prefix
        self._state = b""
        self._shown_state = None
        self._is_continued = False
        self.due = inf
        if was_shown:
            return b""
        return begin + state + b"\n"

    def _was_shown(self, state: bytes) -> bool:
        """Whether the last state of a bar is a line already, or was only wiped away since."""
        if self._shown_state is None:
            return False
        return state.rstrip(b"\r") == self._shown_state or not state.strip()

    def _partial_line(self, text: bytes, now: float) -> bytes:
        line = self._state + text
        if b"\r" not in line:
            begin = self._begin()
            self._is_continued = True
            return begin + line
        self._state = _last_state(line)[:_LONGEST_STATE]
        if self.due == inf and self._state.strip():
            self.due = now + BAR_INTERVAL
        begin = self._begin_anew()
        self._is_continued = False
        return begin + self.release(now)

    def _begin(self) -> bytes:
        """What comes before a text: nothing, where it continues the one shown last."""
        if self._is_continued:
            return b""
        return self._prefix

    def _begin_anew(self) -> bytes:
        """What ends the text shown last, where that had no newline."""
        if self._is_continued:
            return b"\n"
        return b""


def _last_state(line: bytes) -> bytes:
    r"""What a terminal shows of a line that overwrites itself.

    A `\r` at its end overwrites nothing yet.
    """
    whole = line.rstrip(b"\r")
    start = whole.rfind(b"\r") + 1
    return line[start:]
