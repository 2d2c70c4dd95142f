"""What has to hold in one round of a random schedule of rank 0's job (`job_schedules`), whatever the order of events.

no exception       where ranks are *orderly*; else the job may refuse a message
one cause          at most; who failed first does not change any more, and a rank that is back in time is not lost
answers            a rank gets one for each key at which it waits, and none that it did not ask for
one outcome        a barrier is released once, when all have come, or fails, on all ranks
no wait in vain    at a key that is over, or for a rank that is gone; and a stop waits for no such rank
the time           nothing is decided before it is due; `PureJob` checks that the loop of the agent can sleep
an end             of each wait, each question, and each stop that is asked for; each report leads to a cause
no effect          after all of that
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from job_rows import Event, PureJob, Take

from distboot.job.effects import Effect, Record, Reply, Send, Tell
from distboot.job.facts import Facts
from distboot.job.messages import CountReads, Locate, Probe, Reads, StopAt
from distboot.rendezvous.messages import BARRIER, READY, Failed, Go, Key, Release

RANKS = range(4)
AFTER_ALL = 200.0  # seconds after which nothing is left to happen
_INSTANT = 1e-6  # seconds


@dataclass
class Round:
    """What has happened in a round."""

    job: PureJob
    is_orderly: bool  # whether ranks come to one key at a time, and end once
    registered: set[int]
    in_context: set[int]  # ranks whose scripts use keys
    readied: Counter[int]  # how often each rank has got ready

    # Ranks
    ended: set[int] = field(default_factory=set)
    unreaped: set[int] = field(default_factory=set)  # of these, whose launcher has not seen it
    gone: set[int] = field(default_factory=set)  # of which nothing will be heard
    failing: set[int] = field(default_factory=set)
    exiting: set[int] = field(default_factory=set)
    # Those whose connection has ended, and until when they may return
    away: dict[int, float] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)  # that do not answer

    # Keys
    left: set[int] = field(default_factory=set)  # ranks that have closed their context
    waits: dict[int, Key] = field(default_factory=dict)  # by rank
    arrivals: Counter[tuple[int, str]] = field(default_factory=Counter)
    outcomes: dict[Key, type] = field(default_factory=dict)  # of keys for all
    led: Counter[tuple[str, int | None]] = field(default_factory=Counter)  # the count, by place

    # What the job has asked
    located: int = 0  # number of the question
    probes: dict[int, int] = field(default_factory=dict)  # by rank
    is_stop_open: bool = False
    stop_until: float = 0.0  # when it no longer waits for all ranks
    unread: set[int] = field(default_factory=set)  # that have not said how far they have read
    most_read: int = 0

    # What the job has concluded
    root_causes: int = 0  # that were recorded
    causes: set[tuple[int, ...]] = field(default_factory=set)  # that all were told, by the ranks
    recorded: Counter[int | None] = field(default_factory=Counter)  # how often a rank has ended

    @property
    def facts(self) -> Facts:
        return self.job.job.facts

    @property
    def absent(self) -> set[int]:
        """Ranks that come to no key any more."""
        return self.ended | self.gone

    # Before and after each event

    def check_not_before(self, seconds: float) -> None:
        """Nothing is decided before it is due."""
        job = self.job
        due = min(job.job.due(), job.now + seconds)
        if due - _INSTANT > job.now:
            effects = job.job.tick(due - _INSTANT)
            assert effects == [], "it was decided before it was due"

    def check(self, event: Event, effects: Sequence[Effect]) -> None:
        if isinstance(event, Take) and isinstance(event.message, Reads):
            self.unread.discard(event.rank)
            self.most_read = max(self.most_read, event.message.count)
        for effect in effects:
            if isinstance(effect, Reply):
                self._check_answer(effect.rank, effect.message)
            elif isinstance(effect, Send):
                self._check_sent(effect)
            elif isinstance(effect, Record):
                self._check_record(effect)
            elif isinstance(effect, Tell):
                self._check_told(effect)
        if self.is_stop_open and self.is_orderly and not self.facts.is_undecided:
            assert self.unread - self.absent, "a stop waits for no rank"

    def _check_told(self, told: Tell) -> None:
        assert self.root_causes == 1, "all were told of a cause before it was recorded"
        self.causes.add(told.cause.ranks)
        assert len(self.causes) == 1, f"two causes: {self.causes}"

    def _check_record(self, record: Record) -> None:
        if record.event == "root_cause":
            self.root_causes += 1
            assert self.root_causes == 1, "two root causes"
            if record.details["kind"] == "lost":
                self._check_lost(record.details["ranks"])
        if record.event == "exited":
            self.recorded[record.rank] += 1
            is_first = self.recorded[record.rank] == 1
            assert is_first or not self.is_orderly, "a rank has ended twice"

    def _check_lost(self, ranks: Sequence[int]) -> None:
        """A rank is lost while its agent is away. Before it is late, only if that explains another report."""
        there = set(ranks) - self.away.keys() - self.gone
        assert not there, f"ranks {there} are lost, and there"
        is_any_reachable = any(member.is_reachable for member in self.job.members.values())
        kinds = {report.kind for report in self.facts.reports}
        if is_any_reachable and kinds == {"lost"}:
            ends = [self.away.get(report.member.rank, 0.0) for report in self.facts.reports]
            assert min(ends) <= self.job.now, "a rank is lost that may still return"

    def _check_sent(self, effect: Send) -> None:
        message = effect.message
        if isinstance(message, Locate):
            self.located = message.number or self.located
        elif isinstance(message, Probe):
            self.probes.update(dict.fromkeys(effect.ranks, message.number))
        elif isinstance(message, CountReads):
            self.is_stop_open = True
            self.stop_until = self.job.now + self.facts.settings.grace / 3
            self.unread = set(RANKS)
            self.most_read = 0
        elif isinstance(message, StopAt):
            self._check_stop(message.read)
        elif isinstance(message, Go):
            self._check_go()

    def _check_stop(self, read: int) -> None:
        assert self.is_stop_open, "no rank has asked for a stop"
        self.is_stop_open = False
        is_late = self.job.now >= self.stop_until
        have_all_said = self.unread <= self.absent
        assert is_late or have_all_said or not self.is_orderly, "a stop does not wait for all"
        assert read > self.most_read, f"all stop at read {read}, which a rank has passed"

    def _check_go(self) -> None:
        names = [key.name for key in self.waits.values()]
        are_ready = names == [READY] * len(RANKS)
        assert are_ready or not self.is_orderly, "it starts before all are ready"
        self.waits.clear()
        self.arrivals.clear()
        self.outcomes.clear()
        self.led.clear()
        self.in_context.update(RANKS)
        self.is_stop_open = False

    # Keys

    def _check_answer(self, rank: int, message: object) -> None:
        assert isinstance(message, Release | Failed)
        key = message.key
        assert key is not None
        if not self.is_orderly or rank in self.absent:
            return
        if key.name == READY:
            self._check_failed_start(rank, key)
            return
        assert self.waits.get(rank) == key, f"rank {rank} was answered, and had not asked"
        del self.waits[rank]
        if key.is_for_all:
            outcome = self.outcomes.setdefault(key, type(message))
            assert outcome is type(message), f"{key} was released, and failed"
        if isinstance(message, Release):
            assert self._is_complete(key), f"{key} was released early"

    def _check_failed_start(self, rank: int, key: Key) -> None:
        """All ranks are told that none will start, those that do not wait for that, too."""
        self.outcomes[key] = Failed
        waits = self.waits.get(rank)
        if waits is not None and waits.name == READY:
            del self.waits[rank]

    def _is_complete(self, key: Key) -> bool:
        """Whether all have come to a key that are awaited there."""
        if not key.is_for_all:
            return self.led[key.place] >= key.count
        counts = [self.arrivals[rank, key.name] for rank in RANKS]
        return min(counts) >= key.count

    def check_waits(self) -> None:
        """No rank waits at a key that is over, or for a rank that is gone. After the time for refusals."""
        for rank, key in self.waits.items():
            if key.is_for_all and rank not in self.gone and rank not in self.away:
                over = [each.count for each in self.outcomes if each.place == key.place]
                assert key.count > max(over, default=0), (
                    f"rank {rank} waits at {key}, which is over"
                )
                missing = self._gone_from(key)
                assert not missing, f"rank {rank} waits at {key} for {missing}"

    def _gone_from(self, key: Key) -> set[int]:
        """The ranks that are not at a key, and will not come."""
        here = {rank for rank, other in self.waits.items() if other == key}
        never = set(self.absent)
        if key.name == BARRIER:
            never |= self.left
        return never - here

    # The end

    def check_end(self) -> None:
        """All ranks have ended, and time has passed."""
        assert self.job.is_over, f"something is left to happen at {self.job.job.due()}"
        assert not self.facts.is_undecided, "a report has led to no cause"
        has_told = bool(self.causes)
        assert (self.facts.cause is not None) == has_told, "not all were told of the cause"
        assert not self.is_stop_open, "no read was named at which all stop"
        effects = self.job.job.tick(self.job.now + AFTER_ALL)
        assert effects == [], "it goes on after its end"
