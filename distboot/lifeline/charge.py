"""The process of a rank, as whoever watches it sees it: told to stop, looked at, heard, and how it ended."""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress
from dataclasses import replace

from ..report.steps import own_steps
from .ends import End, shown
from .farewell import LAST_RESORT
from .last_words import ENDING, EXCEPTION, INTERRUPT, STEPS, TERM
from .process import Process
from .role import Order, Role
from .watcher import Watcher
from .words import Reader, Words

_JUST_NOW = 2.0  # seconds


class Charge:
    """The process of this rank.

    Args:
        process: it.
        words: what it leaves behind.
        file: the pipe from which those are read.
        watcher: the loop that runs beside it.
        role: our side of the lifeline.
        bound: seconds for which it may be stopped by a signal.

    Attributes:
        asked: the signal with which somebody outside has asked it to stop; None: nobody has.
        told: whether it was told to stop for the failure of another rank.
        has_ended: whether it has.
    """

    def __init__(
        self, process: Process, words: Reader, file: int, *, watcher: Watcher, role: Role, bound: float
    ) -> None:
        self.asked: int | None = None
        self.told = False
        self.has_ended = False
        self.process = process
        self._words, self._file, self._watcher, self._role, self._bound = words, file, watcher, role, bound
        self._is_killed = False
        self._stopped: str | None = None
        self._stopped_since = 0.0
        self._text = ""  # its traceback
        self._others_words = (0.0, "")  # when another process of this rank said something, and what
        watcher.also(file, self.hear)

    def stop(self, order: Order) -> None:
        """Ask it to end, if it has not, and if nobody else has asked."""
        if self.asked is None and not self.has_ended:
            self.told = order.is_failure
            self.asked = None if order.is_failure else int(signal.SIGTERM)
            self.process.send(signal.SIGTERM)
            self.process.send(signal.SIGCONT)

    def kill(self) -> None:
        """End it, if it has not ended."""
        self._is_killed = True
        if not self.has_ended:
            self._role.say("the script has not ended within the grace after TERM (DISTBOOT_GRACE): killed")
        if self.process.file is not None or not self.has_ended:  # else its number may be another's by now
            self.process.send(LAST_RESORT if self.process.pid == 1 else signal.SIGKILL)

    def decided(self, now: float) -> None:
        """It is clear now who failed first, or who stopped the job."""

    def look(self, now: float) -> None:
        """Whether it has been stopped for too long; once a second."""
        stopped = None if self.has_ended else self.process.stopped()
        if stopped is None or stopped != self._stopped:  # else it has not run since we looked
            self._stopped, self._stopped_since = stopped, now
        elif now >= self._stopped_since + self._bound:
            cause = f"stopped by a signal (SIGSTOP?) for {self._bound:g} s"
            self._role.trouble(End(cause=cause, when=time.time()), now)
            self._stopped = None

    def hear(self, now: float) -> None:
        """Take what it has left behind."""
        for words in self._words.read():
            if words.kind == STEPS:  # also of a Python below a shell
                self._take_steps(words.text)
            elif words.pid == self.process.pid:
                self._take(words, now)
            elif words.kind == EXCEPTION:  # of another process, which may fail without it
                self._others_words = (now, words.text)
        if self._words.take_dump():
            self.stopping(now)
        if self._words.ended:
            self._watcher.no_more(self._file)

    def stopping(self, now: float) -> None:
        """It got TERM; if not from us, then from outside."""
        if self.asked is None and not self.told and not self.has_ended:
            self.asked = int(signal.SIGTERM)
            self._watcher.kill_after_grace(now, self.kill)
            self._role.stopping(self.asked, now)

    def ended(self, how: End, now: float) -> End:
        """It has ended with this exit code or signal."""
        if not self._words.ended:
            self.hear(now)
        self.has_ended = True
        asked = None if self.told else self.asked
        # Another signal than ours was there before it.
        told = self.told and how.signal in (None, signal.SIGTERM, signal.SIGKILL if self._is_killed else None)
        end = replace(how, asked=asked, told=told, words=self._last_words(how, now), when=time.time())
        self._role.ended(end, now)
        if end.is_crash:  # which it would have printed itself, had it been asked to
            self._role.say(f"{end.said()}{shown(end.words)}")
        return end

    def _take(self, words: Words, now: float) -> None:
        if words.kind == EXCEPTION:
            self._text = words.text
            self._role.trouble(End(words=words.text, told=self.told, when=time.time()), now)
        elif words.kind == ENDING:
            self._role.ending(now)
        elif words.kind == INTERRUPT and self.asked is None and not self.told:
            self.asked = int(signal.SIGINT)
            self._role.stopping(self.asked, now)
        elif words.kind == TERM:
            self.stopping(now)

    def _take_steps(self, text: str) -> None:
        with suppress(TypeError, ValueError, RecursionError):
            self._role.steps(own_steps(json.loads(text)))

    def _last_words(self, how: End, now: float) -> str:
        if how.code == 0:
            return ""
        at, text = self._others_words
        # A shell that runs Python, say, ends with it.
        return self._words.crash() or self._text or (text if now < at + _JUST_NOW else "")
