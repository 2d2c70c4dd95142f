"""What the time of a job was spent on, over all of its rounds: pure functions of its events.

| time of a round     | from                                    | to                          |
|---------------------|-----------------------------------------|-----------------------------|
| start               | the roll call                           | all ranks have their group  |
| training            | then                                    | the first failure, the end  |
| hang, of that       | ranks begin to wait for a late one      | that one has moved          |
| failure             | the first failure                       | the next round              |

Goodput is the part of it that was training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..base.units import duration
from ..rendezvous.events import GROUP, Event, size_of

_LEAST_OF_GOODPUT = 60.0  # seconds of a job that says what they were spent on
# Kinds of a root cause that are failures; any other is an order to stop
FAILURES = ("failed", "lost", "late", "check")


class Spent(NamedTuple):
    """Seconds of all rounds so far."""

    start: float = 0.0
    training: float = 0.0
    hang: float = 0.0
    failure: float = 0.0
    until: float = 0.0  # seconds since the epoch; 0.0: no round has begun

    def by_kind(self) -> dict[str, float]:
        """The seconds, by what they were spent on."""
        seconds = self._asdict()
        del seconds["until"]
        return seconds

    def with_round(self, round_: RoundTime, now: float) -> Spent:
        """These seconds, and those of the round after them."""
        of_round = round_.spent(now)
        between = 0.0
        if self.until and round_.begun:
            between = max(round_.begun - self.until, 0.0)
        return Spent(
            start=self.start + of_round.start,
            training=self.training + of_round.training,
            hang=self.hang + of_round.hang,
            failure=self.failure + between + of_round.failure,
            until=max(of_round.until, self.until),
        )


class RoundTime:
    """What the time of one round was spent on, from its events."""

    def __init__(self, events: Iterable[Event] = (), world_size: int = 0) -> None:
        self.begun = 0.0  # seconds since the epoch, as all times here; 0.0: not yet
        self.world_size = world_size
        self._registered: dict[int | None, float] = {}  # when each rank was watched first
        self._grouped: dict[int | None, float] = {}  # when each rank had started its group
        self._hangs: list[tuple[float, float]] = []  # begin and end of those that are over
        self._hangs_since = 0.0  # 0.0: no rank is late
        self._stopped_at = 0.0  # of training; 0.0: it goes on
        self._has_failed = False
        self._handlers: dict[str, Callable[[Event], None]] = {
            "rendezvous_started": self._begun,
            "registered": self._started,
            "phases": self._took_steps,
            "late": self._late,
            "late_over": self._late_over,
            "root_cause": self._concluded,
            "start_failed": self._stopped,
            "ended": self._stopped,
        }
        for event in events:
            self.take(event)

    def take(self, event: Event) -> None:
        """Take the next event of the round."""
        handler = self._handlers.get(event.event)
        if handler is not None:
            handler(event)

    @property
    def is_running(self) -> bool:
        """Whether all ranks have started."""
        return len(self._registered) >= self.world_size > 0

    def spent(self, now: float) -> Spent:
        """The seconds of this round until `now`."""
        if not self.begun:
            return Spent()
        end = self._stopped_at or now
        running = end
        if self.is_running:
            running = max(*self._registered.values(), *self._grouped.values(), self.begun)
        running = min(running, end)
        hangs = [*self._hangs]
        if self._hangs_since:
            hangs.append((self._hangs_since, now))
        hung = 0.0  # what lies before belongs to the start
        for begin, until in hangs:
            hung += max(min(until, end) - max(begin, running), 0.0)
        failure = 0.0
        if self._has_failed:
            failure = now - end
        return Spent(
            start=max(running - self.begun, 0.0),
            training=max(end - running - hung, 0.0),
            hang=hung,
            failure=failure,
            until=now,
        )

    def _begun(self, event: Event) -> None:
        self.begun = event.time
        self.world_size = self.world_size or size_of(event)

    def _started(self, event: Event) -> None:
        self._registered.setdefault(event.rank, event.time)

    def _took_steps(self, event: Event) -> None:
        """A rank has started its group; later ones of the same script are part of its training."""
        if GROUP in event.details:
            self._grouped.setdefault(event.rank, event.time)

    def _late(self, event: Event) -> None:
        since = event.time - event.details["seconds"]
        self._hangs_since = self._hangs_since or since

    def _late_over(self, event: Event) -> None:
        if self._hangs_since:
            self._hangs.append((self._hangs_since, event.time))
            self._hangs_since = 0.0

    def _concluded(self, event: Event) -> None:
        self._stopped(event)
        if event.details["kind"] in FAILURES:
            self._has_failed = True

    def _stopped(self, event: Event) -> None:
        self._late_over(event)
        self._stopped_at = self._stopped_at or event.time


NO_ROUND = Spent()


def goodput_line(spent: Spent) -> str:
    """`"goodput: 82 % of 1 h 31 min was training; start 41 s, failures 16 min 20 s"`.

    Empty for a short job, whose start is most of it.
    """
    total = sum(spent.by_kind().values())
    if total < _LEAST_OF_GOODPUT:
        return ""
    percent = round(100 * spent.training / total)
    lost = []
    for seconds, name in (
        (spent.start, "start"),
        (spent.hang, "hangs"),
        (spent.failure, "failures"),
    ):
        if seconds >= 1:
            lost.append(f"{name} {duration(seconds)}")
    line = f"goodput: {percent} % of {duration(total)} was training"
    return "; ".join(filter(None, (line, ", ".join(lost))))
