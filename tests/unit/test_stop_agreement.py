"""The agreed stop without processes: random schedules of the real protocol, and its bounds."""

import os
import random
import time
from collections import deque

import pytest

from distboot.agent.stop_pages import StopPages
from distboot.job.messages import StopAt
from distboot.job.stop_agreement import StopAgreement
from distboot.rendezvous.protocol import decode, encode
from distboot.script.stop_page import ASKED, LARGEST, READS, STOP, Page, answer, mapped

SCHEDULES = int(os.environ.get("SCHEDULES", "3000"))  # 1,000,000 take 10 minutes of CPU
IN_TIME = 0  # as `now` of a read: before any limit


class Pages(StopPages):
    """One agent's, whose page is not shared with another process."""

    def __init__(self) -> None:
        super().__init__(limit=60.0)
        self.page: Page = [0, 0, 0, 0]
        self.pages[0] = self.page
        self._open.add(0)


class Schedule:
    """A few ranks that train, their agents and rank 0; what happens next is always drawn.

    A rank reads once a step: it says so in its page, and looks only then. A step may have a collective operation, which
    ends when all that still train are in it. Messages to and from an agent keep their order, and nothing else does.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.draw = random.Random(seed)
        self.ranks = range(self.draw.randint(1, 5))
        self.in_step = self.draw.random() < 0.8  # whether they train together
        # What comes to no read: it has ended before, or it serves the others. It takes part in no collective.
        self.readers = [rank for rank in self.ranks if self.draw.random() < 0.9] or [0]
        self.agents = [Pages() for _ in self.ranks]
        self.rank_0 = StopAgreement(self.ranks, limit=60.0)
        self.to_agent: list[deque[int]] = [deque() for _ in self.ranks]  # 0: count; else the answer
        # Reads; None: it is asked to stop
        self.to_rank_0: list[deque[int | None]] = [deque() for _ in self.ranks]
        self.reads = dict.fromkeys(self.readers, 0)  # begun
        # Whether it has said that it reads, and has no answer yet
        self.looks = dict.fromkeys(self.readers, False)
        self.true_at: dict[int, int] = {}
        self.left = self.draw.randint(1, 4)  # requests to come

    def run(self) -> None:
        for _ in range(2000):
            steps = [
                *(step for rank in self.ranks for step in self.of_agent(rank)),
                *(
                    (self.read, rank)
                    for rank in self.readers
                    if rank not in self.true_at and self.may_read(rank)
                ),
                *([(self.request, self.draw.choice(self.ranks))] if self.left else []),
            ]
            if not steps or (len(self.true_at) == len(self.readers) and not self.left):
                break
            step, rank = self.draw.choice(steps)
            step(rank)
        assert sorted(self.true_at) == self.readers, f"a deadlock: seed {self.seed}"
        assert set(self.true_at.values()) == {self.rank_0.read}, (
            f"not the same read: seed {self.seed}"
        )

    def of_agent(self, rank: int) -> list[tuple]:  # type: ignore[type-arg]
        counts = self.agents[rank].due < float("inf")
        queued = [(self.hear, rank)] * bool(self.to_agent[rank]) + [(self.take, rank)] * bool(
            self.to_rank_0[rank]
        )
        return [
            *queued,
            *(
                [(self.count, rank)]
                if counts and self.agents[rank]._count_at < float("inf")
                else []
            ),
        ]

    def may_read(self, rank: int) -> bool:
        """Whether it is not in a collective operation that others have still to come to."""
        return (
            not self.in_step
            or self.looks[rank]
            or all(self.steps(one) >= self.reads[rank] for one in self.readers)
        )

    def steps(self, rank: int) -> int:
        """How many collective operations it has come to: one after each read that was false."""
        return self.reads[rank] - (self.looks[rank] or rank in self.true_at)

    def read(self, rank: int) -> None:
        page = self.agents[rank].page
        if not self.looks[rank]:
            self.reads[rank] += 1
            page[READS] = self.reads[rank]
            self.looks[rank] = True
        elif not page[ASKED]:
            self.looks[rank] = False
        else:
            found = answer(page, self.reads[rank], IN_TIME)
            page[READS] = self.reads[rank] - (found is None)
            self.looks[rank] = found is None
            if found:
                self.true_at[rank] = self.reads[rank]

    def request(self, rank: int) -> None:
        self.left -= 1
        if self.draw.random() < 0.5:  # the script itself knows first
            self.agents[rank].page[ASKED] = self.agents[rank].page[ASKED] or 1
        self.to_rank_0[rank].append(None)

    def take(self, rank: int) -> None:
        said = self.to_rank_0[rank].popleft()
        if said is None and not self.rank_0.is_asked:
            self.rank_0.ask(now=0.0)
            for queue in self.to_agent:
                queue.append(0)
        elif said is not None:
            self.rank_0.count(rank, said)
            for queue in self.to_agent if self.rank_0.decide(now=0.0) else ():
                queue.append(self.rank_0.read or 0)

    def hear(self, rank: int) -> None:
        said = self.to_agent[rank].popleft()
        if said:
            self.agents[rank].stop_at(said)
            self.agents[rank].publish()
        else:
            self.agents[rank].ask(now=0.0)

    def count(self, rank: int) -> None:
        counted = self.agents[rank].counted([0], now=1.0)
        self.to_rank_0[rank].append(counted[0])


def test_random_schedules_stop_all_at_the_same_read() -> None:
    for seed in range(SCHEDULES):
        Schedule(seed).run()


@pytest.mark.parametrize(
    ("asked", "stop", "count", "now", "expected"),
    [
        (10, 0, 5, 9, None),  # the answer has not come
        (10, 0, 5, 10, True),  # nor has it in time
        (10, 6, 5, 9, False),
        (10, 6, 6, 9, True),
        (10, 6, 7, 9, True),
        (10, 6, 5, 99, False),  # the others wait for this rank in the step before their read 6
        (10, 6, 4, 99, True),  # they do not: it is not in step with them
    ],
)
def test_read_is_true_from_the_answer_on(
    asked: int, stop: int, count: int, now: int, expected: bool | None
) -> None:
    page: Page = [count, asked, stop]
    assert answer(page, count, now) is expected


def test_reads_of_the_last_context_do_not_count() -> None:
    agreement = StopAgreement(range(2), limit=10.0)
    agreement.ask(now=1.0, lasts=False)
    assert not agreement.begin()
    agreement.count(1, 40)  # under way when the ranks got ready
    agreement.ask(now=3.0, lasts=False)
    agreement.count(0, 2)
    assert not agreement.decide(now=4.0)
    agreement.count(1, 3)
    assert agreement.decide(now=4.0)
    assert agreement.read == 4


@pytest.mark.parametrize("stops", [True, False])
def test_pending_stop_is_in_the_new_page(stops: bool) -> None:
    pages = StopPages(limit=60.0)
    file = pages.new(0, stops=stops)
    assert file is not None
    page = mapped(file)
    assert (page[ASKED] != 0) == stops
    assert not stops or answer(page, 1, time.monotonic_ns())


def test_third_of_a_grace_has_one_decimal() -> None:
    pages = Pages()
    pages.limit = 5 / 3
    pages.page[READS] = 7
    pages.ask(now=0.0)
    pages.stop_at(9)
    pages.publish()
    (said,) = pages.late([0], now=2.0).values()
    assert "its next read of ctx.preempted within 1.7 s: it is at read 7" in said


def test_agent_names_a_script_that_never_reads() -> None:
    pages = Pages()
    pages.page[READS] = 7
    pages.ask(now=0.0)
    assert pages.counted([0], now=1.0) == {0: 7}
    pages.stop_at(9)
    pages.publish()
    assert pages.late([0], now=59.0) == {}
    (said,) = pages.late([0], now=60.0).values()
    assert (
        "its next read of ctx.preempted within 60 s: it is at read 7, and all ranks stop at read 9"
        in said
    )
    assert pages.due == float("inf")


def test_closed_context_is_late_for_no_read() -> None:
    pages = Pages()
    pages.page[READS] = 7
    pages.ask(now=0.0)
    pages.stop_at(9)
    pages.publish()
    pages.close(0)
    assert pages.late([0], now=60.0) == {}


def test_reads_go_on_when_rank_0_has_gone() -> None:
    pages = Pages()
    pages.release()
    assert pages.page[STOP] == 0
    pages.ask(now=0.0)
    pages.release()
    assert answer(pages.page, 1, IN_TIME)


def test_answer_to_nonsense_fits_into_all_pages() -> None:
    pages = Pages()
    rank_0 = StopAgreement([0], limit=60.0)
    pages.page[READS] = LARGEST
    pages.ask(0.0)
    rank_0.ask(0.0)
    rank_0.count(0, pages.counted([0], 1.0)[0])
    assert rank_0.decide(1.0)
    assert StopAt(rank_0.read or 0) == decode(encode(StopAt(LARGEST)), StopAt)
