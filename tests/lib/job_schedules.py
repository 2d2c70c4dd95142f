"""Rank 0's job under random schedules of events: what has to hold in any order.

DISTBOOT_SCHEDULES=1000000 make test ARGS="-n 0 tests/unit/test_job_schedules.py"     the long run
"""

import re
from collections import Counter

from hypothesis import strategies as st
from job_rows import Event, JobOfRank0, Lose, PureJob, Take, Wait
from supervised import raised

from distboot.job.exit_status import ExitStatus
from distboot.job.messages import Exited, Exiting, Failing, Position, Reads, Stalled, Terminating
from distboot.rendezvous.messages import BARRIER, Arrive, Detach, Key, RequestStop

RANKS = range(4)
KEY_TIMEOUT = 60.0  # seconds
ENDS = {
    "ends well": ExitStatus(code=0, when=1.0),
    "exits with 3": ExitStatus(code=3, when=1.0),
    "is killed": ExitStatus(signal=9, when=1.0),
}
RAISES = {
    "raises": raised("ValueError: boom", "train.py:7", when=1.0),
    "misses a peer": raised("RuntimeError: Connection closed by peer [10.0.0.1]:3456"),
}
KINDS = (
    *("arrives", "arrives", "arrives", *ENDS, *RAISES, "is about to end", "is terminated"),
    *("asks to stop", "has read", "has stalled", "is at", "detaches", "is lost", "time passes"),
)
ONE = st.tuples(st.sampled_from(KINDS), st.sampled_from(RANKS), st.integers(0, 40))


class Schedule:
    """Random events that ranks can bring about: none after its end, one key at a time."""

    def __init__(self, job: PureJob | JobOfRank0) -> None:
        self.job = job
        self.effects: list[str] = []
        self.gone: set[int] = set()
        self.failing: set[int] = set()
        self.arrivals: Counter[int] = Counter()
        self.answers: Counter[int] = Counter()

    def follow(self, kind: str, rank: int, number: int) -> None:
        event = self._event(kind, rank, number)
        if event is not None:
            self.happen(event)

    def happen(self, event: Event) -> None:
        for effect in self.job.after(event):
            self.effects.append(effect)
            self._count(effect)

    def waiting(self) -> set[int]:
        there = set(RANKS) - self.gone
        return {rank for rank in there if self.arrivals[rank] > self.answers[rank]}

    def _event(self, kind: str, rank: int, number: int) -> Event | None:
        if kind == "time passes":
            return Wait(float(number))
        if rank in self.gone or (kind in ("is lost", "detaches") and rank == 0):
            return None
        if kind == "is lost":
            self.gone.add(rank)
            return Lose(rank)
        message = self._message(kind, rank, number)
        return None if message is None else Take(rank, message)

    def _message(self, kind: str, rank: int, number: int) -> object:
        if kind == "arrives":
            if rank in self.waiting():
                return None
            self.arrivals[rank] += 1
            return Arrive(Key(BARRIER, None, self.arrivals[rank]), KEY_TIMEOUT)
        if kind in ENDS:
            self.gone.add(rank)
            return Exited(ENDS[kind])
        if kind in RAISES:
            if rank in self.failing:
                return None
            self.failing.add(rank)
            return Failing(RAISES[kind])
        if kind == "detaches":
            self.gone.add(rank)
            return Detach()
        return {
            "is about to end": Exiting(),
            "is terminated": Terminating(15),
            "asks to stop": RequestStop("SIGUSR1"),
            "has read": Reads(number),
            "has stalled": Stalled(),
            "is at": Position(number % 4, float(number), {"0": number}, number, 0),
        }[kind]

    def _count(self, effect: str) -> None:
        to, arrow, what = effect.partition(" <- ")
        if arrow and what.split()[0] in ("Release", "Failed"):
            ranks = list(map(int, re.findall(r"\d+", to)))
            if to == "all":
                ranks = [rank for rank in RANKS if rank not in self.gone and rank != 0]
            self.answers.update(ranks)
