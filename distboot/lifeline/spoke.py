"""The side of every other rank: it tells rank 0 how this one ends, and hears from it who failed first."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from ..rollcall.wire import WireError
from .ends import End
from .line import Line, LineEndedError, end_politely
from .role import AFTER_THE_FIRST, Order, Role
from .settings import Settings
from .verdict import Seat, Verdict, lost, pid_of

_VERDICT = 1.0  # seconds after our end to hear why
_GOODBYE = 1.0  # seconds for rank 0 to take our last word
_EXPLANATION = 11.0  # seconds, where a peer that is about to end may be the cause
_LAST_WORD = 3.0  # seconds beyond the grace for rank 0 to let us out


@dataclass
class Spoke(Role):
    """The side of a rank other than 0.

    Args:
        rank: of this process.
        rank_0: where rank 0 is.
        line: to rank 0.
        settings: of this rank.
        held: whether the exit of this rank waits for us, as in the wrapper.
        say: prints a line.
    """

    rank: int
    rank_0: Seat
    line: Line | None
    settings: Settings
    held: bool
    say: Callable[[str], None]
    verdict: Verdict | None = None
    order: Order | None = None

    def __post_init__(self) -> None:
        self._is_behind_relay = self.line is not None and self.line.is_local
        self._end: End | None = None
        self._troubled = self._has_left = False
        self._ended_at = self._closed_at = self._decided_at = 0.0
        self._left: Line | None = None  # not used any more, and open: its end would be an alarm over there

    def lines(self) -> Collection[Line]:
        return [] if self.line is None else [self.line]

    def start(self, pid: int) -> None:
        self._send("watch", {"pid": pid})

    def read(self, line: Line, now: float) -> None:
        if self.line is not line:  # dropped in this very round
            return
        try:
            for kind, content in line.receive(now):
                self._take(kind, content, now)
        except LineEndedError:
            self._drop(now)
            if self._end is None and self.verdict is None:
                self._decide(self._lost("the connection ended without a word"), now)
        except (WireError, TypeError) as error:
            self._leave(str(error))

    def tick(self, now: float) -> None:
        if self.line is not None:
            self.read(self.line, now)
        line = self.line
        if line is not None and self._end is None:
            line.beat(now)
            self._check(line, now)

    def turn(self, now: float) -> None:
        if self.line is not None and self.line.is_suspect and self._end is None:
            self._check(self.line, now)

    def due(self, now: float) -> float:
        if self._end is not None:
            return max(self._limit(), now)
        return now + (0.1 if self.line is not None and self.line.is_suspect else 3600)

    def steps(self, taken: Mapping[str, float]) -> None:
        self._send("steps", dict(taken))

    def trouble(self, end: End, now: float) -> None:  # noqa: ARG002 - as Role has it
        self._troubled = not end.cause
        self._send("trouble", end.as_message())

    def ending(self, now: float) -> None:  # noqa: ARG002
        self._send("ending", None)

    def stopping(self, number: int, now: float) -> None:
        if self.line is not None and self.line.is_unusually_quiet(now):  # then this may be the launcher's answer
            self._decide(self._lost("nothing was heard of it any more when SIGTERM came"), now)
        self._send("stopping", number)

    def ended(self, end: End, now: float) -> None:
        self._end, self._ended_at = end, now
        self._send("end", end.as_message())
        # Why we failed, perhaps; rank 0 will not say it.
        if not end.is_well and self.verdict is None and self.line and self.line.is_unusually_quiet(now):
            self._decide(self._lost("nothing was heard of it any more"), now)

    def leave(self) -> None:
        self._send("bye", None)
        self._has_left = True

    def hurry(self) -> None:
        self._has_left = True

    def over(self, now: float) -> bool:
        return self._has_left or (self._end is not None and now >= self._limit())

    def finish(self) -> None:
        """See that our last word arrives, if rank 0 is there."""
        if self.line is not None and not self.line.is_unusually_quiet(time.monotonic()):
            end_politely([self.line], _GOODBYE)

    def close(self) -> None:
        for line in (self.line, self._left):
            if line is not None:
                line.close()

    def _limit(self) -> float:
        """When we need not wait for rank 0 any more, once we have ended."""
        assert self._end is not None
        if self._end.is_well:
            return self._ended_at
        verdict = self.verdict
        if verdict is None:
            patience = _EXPLANATION if self._end.is_consequence else _VERDICT
            return self._ended_at + (0.0 if self.line is None else patience)
        if not self.held or not verdict.is_failure:
            return max(self._ended_at, self._decided_at + (AFTER_THE_FIRST if self._end.is_consequence else 0.0))
        if self.line is not None:
            return self._ended_at + self.settings.grace + _LAST_WORD
        return self._closed_at + (0.0 if self.rank in verdict.ranks else AFTER_THE_FIRST)

    def _take(self, kind: str, content: object, now: float) -> None:
        if kind == "watch":
            self.rank_0 = replace(self.rank_0, pid=pid_of(content))
        elif kind == "first":
            self._decide(Verdict.from_message(content), now)
        elif kind == "bye":
            if content and self._end is None:
                self.say("rank 0 has ended: from now on no rank is told how another one ends")
            self._drop(now)
        else:
            raise WireError(f"sends a broken {kind}")

    def _decide(self, verdict: Verdict, now: float) -> None:
        is_new = self.verdict is None
        if self._end is None:
            self.order = Order.after(verdict, self.rank, self._troubled, now, self.order)
        if is_new:
            self.verdict, self._decided_at = verdict, now
            if self.rank not in verdict.ranks:
                self.say(verdict.text)

    def _check(self, line: Line, now: float) -> None:
        complaint = line.complaint(now, self.settings.bound)
        if complaint is None:
            return
        if not complaint.is_lost:
            self._leave(complaint.why)
            return
        self._decide(self._lost(complaint.why), now)
        self._drop(now)

    def _lost(self, why: str) -> Verdict:
        """What it means that the other end of the line has gone: a relay says so itself when that is rank 0."""
        if self._is_behind_relay:
            return Verdict((), True, f"this rank is cut off from the others: the relay of its node has gone ({why})")
        return lost([self.rank_0], why)

    def _send(self, kind: str, content: object) -> None:
        if self.line is not None:
            self.line.send(kind, content)

    def _leave(self, why: str) -> None:
        """Go on without the lifeline."""
        self.say(f"warning: rank 0 {self.rank_0.said()} {why}; this rank goes on without the lifeline")
        self._send("bye", None)
        self._left, self.line = self.line, None
        self._closed_at = time.monotonic()

    def _drop(self, now: float) -> None:
        line, self.line = self.line, None
        self._closed_at = now
        if line is not None:
            line.close()
