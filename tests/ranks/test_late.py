"""Ranks for which others wait at a collective operation are named, with where they are; and nobody else is."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

import pytest
from conftest import Run
from inside import replace
from launched import in_both_ways, in_one_way
from supervised import Job, Start, raised, until

from distboot import DistbootError
from distboot.base.process import children_of
from distboot.base.settings import SupervisionSettings
from distboot.host import command_line, free_port
from distboot.job.effects import Conclude, Effect, Request, Say, Send
from distboot.job.exit_status import LONGEST_HEADLINE, ExitStatus
from distboot.job.facts import Facts
from distboot.job.find_late import Late, find_late, may_be_late
from distboot.job.late import LateService
from distboot.job.messages import Failing, Locate, Position, Stalled
from distboot.job.root_cause import (
    BY_HANG_STOP,
    RankState,
    RootCause,
    from_late,
    from_signal,
)
from distboot.job.stacks import Stacks, frame
from distboot.job.wait import Wait
from distboot.rendezvous.messages import AskStacks, ShowStacks
from distboot.script.progress import Movement
from distboot.tools import jobs_here, stacks

AFTER = 60.0
LOADS = Stacks((frame("load_batch", "/job/data.py", 41), frame("train", "/job/train.py", 80)))
_C10D = "/opt/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py"
REDUCES = Stacks(
    (
        frame("all_reduce", _C10D, 3252),
        frame("wrapper", _C10D, 83),
        frame("train", "/job/train.py", 84),
    )
)
SENDS = Stacks((frame("broadcast", _C10D, 2000), frame("train", "/job/train.py", 90)))
RECEIVES = Stacks((frame("recv", _C10D, 2700), frame("train", "/job/train.py", 90)))
BARRIER = Stacks((frame("barrier", _C10D, 5000), frame("main", "/job/train.py", 99)))
_TRAINER = "/opt/lib/python3.11/site-packages/lightning/trainer.py"
_FIT = (frame("fit", _TRAINER, 5), frame("main", "/job/train.py", 20))
FITS = Stacks((frame("all_reduce", _C10D, 3252), frame("log", _TRAINER, 7), *_FIT))
FITS_ELSEWHERE = Stacks((frame("all_reduce", _C10D, 3252), frame("step", _TRAINER, 9), *_FIT))
BACKWARD = Stacks(
    (
        frame(
            "_engine_run_backward", "/opt/lib/python3.11/site-packages/torch/autograd/graph.py", 9
        ),
        frame("backward", "/opt/lib/python3.11/site-packages/torch/_tensor.py", 570),
        frame("train", "/job/train.py", 81),
    )
)
KEY = Stacks(
    (
        frame("barrier", "/opt/lib/python3.11/site-packages/distboot/context.py", 200),
        frame("main", "/job/train.py", 95),
    )
)
STOPPED = Stacks(state="stopped by a signal")
COMPUTES = Stacks((frame("step", "/job/train.py", 9),))
MEMBERS = {rank: RankState(rank, f"node-{rank // 2}", rank // 2, rank % 2) for rank in range(4)}


def at(count: int, stacks: Stacks | None, since: float = AFTER, group: str = "0") -> Position:
    return Position(
        1,
        since,
        {group: count} if count else {},
        0,
        0,
        stacks,
    )


def described(late: Late, positions: dict[int, Position]) -> str:
    """The text for ranks that have waited for `AFTER` seconds."""
    return Wait(late, positions, AFTER, AFTER).describe("waiting for {}", MEMBERS, AFTER)


IDLE = [replace(at(8, BACKWARD), idle=AFTER)]
# What is said of each, if it is not said as of another one.
CASES: list[tuple[list[Position], Late | None, str]] = [
    (
        [at(1968, REDUCES), at(1968, REDUCES), at(1968, REDUCES), at(1967, LOADS)],
        Late([3], [0, 1, 2], "0"),
        (
            "waiting for rank 3 (node-1) for 60 s: it is in load_batch (data.py:41); ranks 0-2 wait in all_reduce "
            "(train.py:84), collective operation 1,968, rank 3 has begun 1,967"
        ),
    ),
    (
        [at(9, REDUCES), at(8, LOADS), at(9, None), at(8, Stacks(state="stopped by a signal"))],
        Late([1, 3], [0, 2], "0"),
        (
            "waiting for ranks 1, 3 (2 hosts) for 60 s: rank 1 is in load_batch (data.py:41), "
            "rank 3 is stopped by a signal; rank 0 waits in all_reduce (train.py:84), "
            "rank 2 waits, collective operation 9, ranks 1, 3 have begun 8"
        ),
    ),
    # It is late for its own group, and the other group waits for nobody.
    (
        [
            at(5, REDUCES, group="1"),
            at(4, LOADS, group="1"),
            at(9, REDUCES, group="2"),
            at(9, REDUCES, group="2"),
        ],
        Late([1], [0], "1"),
        "",
    ),
    # Rank 2 waits for rank 3 in their group, and rank 0 for rank 2 in another one.
    (
        [
            replace(at(5, REDUCES, group="a"), counts={"a": 5, "b": 3}),
            at(5, LOADS, 10.0, group="c"),
            replace(at(4, REDUCES, group="a"), counts={"a": 4, "d": 9}),
            at(8, LOADS, group="d"),
        ],
        Late([3], [2], "d"),
        "",
    ),
    # Two wait for each other, each in another group.
    (
        [
            replace(at(5, REDUCES), counts={"a": 5, "b": 3}),
            replace(at(5, SENDS), counts={"a": 4, "b": 4}),
        ],
        Late([], [0, 1]),
        "",
    ),
    # Just now; and all at the same collective operation, at which nobody waits, or all.
    ([at(8, REDUCES, 10), at(8, REDUCES, 10), at(8, REDUCES, 10), at(7, LOADS, 70)], None, ""),
    ([at(8, LOADS), at(8, LOADS), at(8, LOADS), at(8, LOADS)], None, ""),
    (
        [at(8, REDUCES)] * 4,
        Late([], [0, 1, 2, 3]),
        (
            "waiting for each other for 60 s: ranks 0-3 wait in all_reduce (train.py:84); "
            "the network between them, or a device, may not answer"
        ),
    ),
    # Another one, of the same number, below a function of a package.
    (
        [at(8, FITS), at(8, FITS_ELSEWHERE)],
        Late([], [0, 1]),
        (
            "waiting for each other for 60 s: ranks 0-1 wait in fit (train.py:20); there, they wait in different "
            "calls: rank 0 is in log (trainer.py:7), rank 1 is in step (trainer.py:9)"
        ),
    ),
    # Another one, of the same number.
    (
        [at(8, REDUCES), at(8, SENDS), at(8, REDUCES), at(8, REDUCES)],
        Late([], [0, 1, 2, 3]),
        (
            "waiting for each other for 60 s: rank 1 waits in broadcast (train.py:90), ranks 0, 2-3 wait in all_reduce "
            "(train.py:84)"
        ),
    ),
    # Another one, which another rank has left already.
    ([at(9, REDUCES), at(8, SENDS), at(8, REDUCES), at(8, REDUCES)], Late([], [0, 1, 2, 3]), ""),
    ([at(9, REDUCES), at(8, SENDS), at(8, LOADS), at(8, SENDS)], Late([2], [0, 1, 3], "0"), ""),
    # All have begun it, most of them in a backward() that has no frame of its own.
    (
        [at(20, BACKWARD), at(20, BARRIER), at(20, BACKWARD), at(20, BACKWARD)],
        Late([], [0, 1, 2, 3]),
        (
            "waiting for each other for 60 s: rank 1 waits in barrier (train.py:99), "
            "ranks 0, 2-3 wait in backward (train.py:81)"
        ),
    ),
    ([at(20, BACKWARD, 10), at(20, BARRIER), at(20, BARRIER), at(20, BARRIER)], None, ""),
    # In no operation that is counted, they wait for rank 0.
    ([at(20, BACKWARD), at(20, KEY), at(20, KEY), at(20, KEY)], Late([0], [1, 2, 3]), ""),
    ([at(20, LOADS), at(20, RECEIVES), at(20, KEY), at(20, KEY)], Late([0], [1, 2, 3]), ""),
    # Its last report is as old as its stop; or it has none.
    (
        [at(56, BACKWARD), at(39, STOPPED), at(56, BACKWARD), at(56, BACKWARD)],
        Late([1], [0, 2, 3], "0"),
        (
            "waiting for rank 1 (node-0) for 60 s: it is stopped by a signal; ranks 0, 2-3 wait in backward "
            "(train.py:81), collective operation 56, rank 1 has begun at least 39"
        ),
    ),
    (
        [replace(at(8, BACKWARD), idle=AFTER), at(0, STOPPED), *IDLE, *IDLE],
        Late([1], [0, 2, 3]),
        (
            "waiting for rank 1 (node-0) for 60 s: it is stopped by a signal; "
            "ranks 0, 2-3 wait in backward (train.py:81)"
        ),
    ),
    ([at(8, BACKWARD, 10), at(0, STOPPED), *IDLE, *IDLE], None, ""),
    # They compute, and it reads from a slow disk.
    ([at(8, COMPUTES), at(0, STOPPED), *IDLE, *IDLE], None, ""),
    # A place is not known.
    ([at(8, REDUCES), at(8, Stacks()), at(8, REDUCES), at(8, REDUCES)], Late([], [0, 1, 2, 3]), ""),
    # None waits for another, and none does anything.
    (
        [replace(at(8, LOADS), idle=AFTER)] * 4,
        Late([0, 1, 2, 3], []),
        "no rank has moved for 60 s: ranks 0-3 are in load_batch (data.py:41)",
    ),
    ([replace(at(8, LOADS), idle=AFTER)] * 3 + [at(8, LOADS)], None, ""),
    # Nothing is counted: only the stacks say it, and a rank without one says nothing.
    ([at(0, REDUCES), at(0, LOADS), at(0, REDUCES), at(0, REDUCES)], Late([1], [0, 2, 3]), ""),
    ([at(0, REDUCES), at(0, None), at(0, REDUCES), at(0, REDUCES)], None, ""),
    ([at(0, LOADS), at(0, LOADS), at(0, LOADS), at(0, LOADS)], None, ""),
]


@pytest.mark.parametrize(("positions", "late", "said"), CASES)
def test_ranks_that_do_not_come_are_late(
    positions: list[Position], late: Late | None, said: str
) -> None:
    found = dict(enumerate(positions))
    assert find_late(found, {}, AFTER) == late
    assert late is None or said in ("", described(late, found))


GOT = "the wrapper of node 0 got it"
SLEEPS = Stacks((frame("<module>", "/job/sleepy.py", 2),))
IN_INIT = Stacks((frame("load_all_the_shards_of_one_epoch", "/job/train_a_large_model.py", 46),))
BY_STACKS = [replace(at(0, LOADS), idle=AFTER), replace(at(0, COMPUTES), idle=AFTER)]
# How a signal from outside ends a hang
STOPPED_HANGS: list[tuple[Late, list[Position], str]] = [
    (
        Late([1], [0]),
        [at(0, REDUCES), at(0, SLEEPS)],
        (
            "after rank 1 (node-0) had held up the job for 60 s, in <module> (sleepy.py:2); "
            f"{GOT}, on node-0"
        ),
    ),
    (
        Late([], [0, 1]),
        [at(8, REDUCES), at(8, REDUCES)],
        (
            "after the ranks had waited for each other for 60 s: "
            "ranks 0-1 wait in all_reduce (train.py:84)"
        ),
    ),
    (
        Late([], [0, 1]),
        [at(8, BACKWARD), at(8, BARRIER)],
        (
            "after the ranks had waited for each other for 60 s: "
            "rank 0 waits in backward (train.py:81), rank 1 waits in barrier (train.py:99)"
        ),
    ),
    (
        Late([], [0, 1]),
        [at(8, IN_INIT), at(8, BARRIER)],
        (
            "after the ranks had waited for each other for 60 s: "
            "rank 0 in load_all_the_shards_of_one_epoch (train_a_large_model.py:46), …"
        ),
    ),
    (
        Late([0, 1], []),
        BY_STACKS,
        (
            "after no rank had moved for 60 s, judging by the stacks: "
            "rank 0 is in load_batch (data.py:41), rank 1 is in step (train.py:9)"
        ),
    ),
]


@pytest.mark.parametrize(("late", "positions", "after"), STOPPED_HANGS)
def test_signal_that_ends_a_hang_tells_where(
    late: Late, positions: list[Position], after: str
) -> None:
    wait = Wait(late, dict(enumerate(positions)), AFTER, AFTER)
    held_up = wait.held_up(MEMBERS, AFTER)
    headline = from_signal(MEMBERS[0], signal.SIGTERM, GOT, held_up).text
    assert headline == f"stopped by an external SIGTERM {after}"
    assert len(headline) <= LONGEST_HEADLINE


def test_hang_that_is_stopped_keeps_its_places() -> None:
    text = described(Late([], [0, 1]), {0: at(8, BACKWARD), 1: at(8, BARRIER)})
    text = text.replace("waiting for", "the ranks have waited for")
    cause = from_late([0, 1], text + BY_HANG_STOP)
    assert cause.text.splitlines() == [
        (
            "the ranks have waited for each other for 60 s: rank 0 in backward (train.py:81), "
            "rank 1 in barrier (train.py:99), and DISTBOOT_HANG=stop ends all ranks"
        ),
        f"  | {text}{BY_HANG_STOP}",
    ]
    assert len(cause.headline) <= LONGEST_HEADLINE


def test_busy_rank_without_numbers_waits_at_same_stack() -> None:
    spins = {0: at(0, REDUCES, 0.0), 1: at(0, LOADS)}
    assert find_late(spins, {}, AFTER) is None
    assert find_late(spins, spins, AFTER) == Late([1], [0])
    assert find_late(spins, {**spins, 0: at(0, SENDS)}, AFTER) is None
    has_left_a_barrier = replace(spins[0], keys=2)
    assert find_late({**spins, 0: has_left_a_barrier}, spins, AFTER) is None


def test_idle_ranks_at_the_same_places_stand_still() -> None:
    idle = {0: replace(at(0, LOADS), idle=AFTER), 1: replace(at(0, COMPUTES), idle=AFTER)}
    assert find_late(idle, {}, AFTER) is None
    late = find_late(idle, idle, AFTER)
    assert late == Late([0, 1], [])
    assert described(late, idle) == (
        "no rank has moved for 60 s, judging by the stacks: rank 0 is in load_batch (data.py:41), "
        "rank 1 is in step (train.py:9)"
    )
    assert find_late({**idle, 1: at(0, COMPUTES)}, idle, AFTER) is None
    assert find_late(idle, {**idle, 0: at(0, COMPUTES)}, AFTER) is None


def test_rank_at_its_end_is_late_last() -> None:
    left = replace(at(3, Stacks(state="at the end of its script")), idle=AFTER)
    waits = at(8, REDUCES)
    assert find_late({0: waits, 1: left, 2: waits}, {}, AFTER) == Late([1], [0, 2], "0")
    assert find_late({0: waits, 1: left, 2: at(7, LOADS)}, {}, AFTER) == Late([2], [0], "0")
    backward = replace(at(10, BACKWARD), idle=AFTER)
    late = find_late({0: backward, 1: backward, 2: left}, {}, AFTER)
    assert late == Late([2], [0, 1], "0"), "its numbers prove it"
    steps = replace(at(0, LOADS), steps=4)
    waits = replace(at(0, REDUCES), steps=4)
    assert find_late({0: waits, 1: replace(left, steps=3), 2: steps}, {}, AFTER) == Late([2], [0])


def test_rank_with_no_thread_at_key_is_late() -> None:
    """The main thread, which is shown, waits for the one that trains, in each rank."""
    joins = at(0, COMPUTES)
    waits = replace(joins, is_at_key=True)
    positions = {0: waits, 1: joins, 2: waits}
    assert find_late(positions, {}, AFTER) == Late([1], [0, 2])
    late_by_number = {0: at(10, REDUCES), 1: replace(at(9, LOADS), is_at_key=True)}
    assert find_late(late_by_number, {}, AFTER) == Late([1], [0], "0")
    stopped = replace(waits, stacks=STOPPED)
    assert find_late({**positions, 2: stopped}, {}, AFTER) == Late([1, 2], [0])


def test_stacks_are_read_only_where_they_help() -> None:
    assert all(
        may_be_late({0: at(8, None), 1: other}, AFTER) for other in (at(7, None, 1.0), at(8, None))
    )
    assert may_be_late({0: at(0, None, 0.0), 1: at(0, None)}, AFTER), "nothing is counted"
    assert not may_be_late({0: at(8, None), 1: at(8, None, 1.0)}, AFTER), "it moves"


def test_rank_moves_with_a_number_or_by_working() -> None:
    movement = Movement(os.getpid(), 10.0, now=0.0)
    movement.take("0 5\n1 7", now=5.0)
    assert movement.counts == {"0": 5, "1": 7}
    assert not movement.stalled((0, 0), now=14.0)
    assert movement.stalled((0, 0), now=15.0)
    assert [movement.stalled((0, 0), now=float(now)) for now in (24, 25, 44, 45)] == [
        False,
        True,
        False,
        True,
    ]
    assert not movement.stalled((0, 1), now=46.0), "it has begun a step"
    assert movement.since == 46.0
    movement.take("garbage", now=50.0)
    assert movement.since == 46.0
    movement.take("\n".join(f"{'n' * 999}{number} {10**40}" for number in range(99)), now=51.0)
    assert len(movement.counts) == 1
    assert max(movement.counts.values()) < 1 << 64, "else rank 0 would not take it"
    idle = Movement(os.getppid(), 10.0, now=0.0)
    idle.stalled((0, 0), now=1.0)
    assert idle.stalled((0, 0), now=1000.0), "the process that started this one only waits"
    busy = Movement(os.getpid(), 0.5, now=time.monotonic())
    for _ in range(3):
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        assert not busy.stalled((0, 0), now=time.monotonic())
    assert not Movement(os.getppid(), 0.0, now=0.0).stalled((0, 0), now=1e9), "0 is never"
    paused = Movement(os.getppid(), 10.0, now=0.0)
    assert not paused.stalled((0, 1), now=1.0), "it has begun a step"
    paused.skip(40.0)
    assert not paused.stalled((0, 1), now=50.0)
    assert paused.stalled((0, 1), now=51.0)


def test_process_whose_script_has_ended_moves_no_more() -> None:
    movement = Movement(os.getpid(), 10.0, now=0.0)
    movement.leave(now=5.0)
    assert movement.since == 5.0
    assert not movement.stalled((0, 0), now=14.0)
    movement.take("0 9", now=14.5)
    assert not movement.stalled((0, 0), now=24.0)
    end = time.process_time() + 0.5
    while time.process_time() < end:
        pass
    assert movement.stalled((0, 0), now=24.5), "MPI waits for the other ranks with a processor"


class Job0:
    """Rank 0's job, of which only one service is there, with ranks that are where a test says."""

    def __init__(self, positions: list[Position]) -> None:
        self.members = {
            rank: RankState(rank, "node-0", 0, rank, pid=7) for rank in range(len(positions))
        }
        settings = SupervisionSettings(30.0, late_after=AFTER)
        self.said: list[str] = []
        self.shown: list[Sequence[str]] = []
        self.blamed: list[RootCause] = []
        self.positions = positions
        self.silent = set[int]()
        self.watch = LateService(Facts(self.members, settings, is_held=False), self.happens)

    def happens(self, effect: Effect | Request) -> None:
        if isinstance(effect, Say):
            self.said.append(effect.text)
        elif isinstance(effect, Conclude):
            self.blamed.append(effect.cause)
        elif isinstance(effect, Send) and isinstance(effect.message, Locate):
            self.locate(effect.message, set(effect.ranks or ()) - self.silent)
        elif isinstance(effect, Send) and isinstance(effect.message, ShowStacks):
            self.shown.append(effect.message.lines)

    def locate(self, question: Locate, ranks: Collection[int]) -> None:
        for rank in ranks:
            stacks = self.positions[rank].stacks if question.stacks else None
            self.take(
                rank, replace(self.positions[rank], number=question.number, stacks=stacks), 100.0
            )

    def take(self, rank: int, message: object, now: float) -> None:
        self.watch.handlers[type(message)](self.members[rank], message, now)

    def stall(self, *looks: float) -> None:
        """Rank 0 says that it has stalled; the times are those at which the loop turns from then on."""
        self.take(0, Stalled(), 98.0)
        for now in looks:
            self.watch.tick(now)


def test_agent_without_an_answer_has_the_late_rank() -> None:
    job = Job0([at(8, REDUCES), at(8, REDUCES), at(8, REDUCES)])
    job.silent = {1}
    job.stall(98.0, 107.0, 107.0, 116.0, 118.0)
    (said,) = job.said
    assert "waiting for rank 1 (node-0) for " in said
    assert (
        ": it is at an unknown place (its agent did not answer); ranks 0, 2 wait in all_reduce"
        in said
    )


def test_ended_rank_is_named_where_others_wait() -> None:
    job = Job0([at(8, REDUCES), at(7, None), at(8, REDUCES)])
    job.members[1].end = ExitStatus(code=0)
    job.stall(98.0, 98.0, 98.0, 99.0, 100.0)
    assert "ranks 0, 2 wait in all_reduce (train.py:84); rank 1 ended before" in job.said[0]
    job.take(0, Position(0, 0.1, {"0": 9}, 0, 0), 101.0)
    assert job.said[1] == "the ranks continue"
    job.watch.tick(500.0)
    assert len(job.said) == 2


def test_end_of_a_waiting_rank_continues_nothing() -> None:
    job = Job0([at(8, REDUCES), at(7, None), at(8, REDUCES)])
    job.stall(98.0, 98.0, 98.0, 99.0, 100.0)
    assert "waiting for rank 1 (node-0) for " in job.said[0]
    job.members[0].end = ExitStatus(signal=9)
    job.watch.left(job.members[0], "was killed")
    assert len(job.said) == 1, "rank 1 has not moved"
    assert job.watch.wait is None


def test_rank_that_has_ended_is_not_late() -> None:
    job = Job0([at(8, REDUCES), at(7, LOADS), at(8, REDUCES)])
    job.stall(98.0, 98.0, 98.0)
    assert job.watch.wait is not None
    assert job.watch.wait.late == Late([1], [0, 2], "0")
    job.members[1].end = ExitStatus(code=0)
    job.watch.left(job.members[1], "ended")
    for now in (500.0, 500.0):
        job.watch.tick(now)
    assert job.watch.wait.late == Late([], [0, 2])


def test_question_of_a_user_keeps_pending_reports() -> None:
    job = Job0([at(8, REDUCES), at(7, LOADS), at(8, REDUCES)])
    job.stall(98.0, 98.0, 98.0)
    job.silent = {1}
    job.take(0, AskStacks(), 98.5)
    job.watch.tick(99.5)
    assert "waiting for rank 1 (node-0) for " in job.said[0]
    job.watch.tick(107.0)
    assert len(job.shown) == 1


def test_ranks_that_just_moved_are_not_reported() -> None:
    job = Job0([at(8, REDUCES), at(7, LOADS), at(8, REDUCES)])
    job.stall(98.0, 98.0)
    job.positions = [at(9, LOADS, 0.0)] * 3
    job.watch.tick(98.0)
    job.watch.tick(99.5)
    assert job.said == []
    assert job.watch.due() > 500.0


TIMED_OUT = raised(
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 400ms for recv"
)
HTTP = raised(
    "requests.exceptions.ReadTimeout: HTTPSConnectionPool: Read timed out. (read timeout=5)"
)
ABORT = ExitStatus(signal=signal.SIGABRT)


@pytest.mark.parametrize(
    ("end", "since", "is_told_before", "blamed"),
    [
        (TIMED_OUT, 30.0, False, [1]),
        (TIMED_OUT, 90.0, True, [1]),
        (TIMED_OUT, 1.0, False, None),  # the others have not said since how far they are
        (HTTP, 30.0, False, None),
        (ABORT, 30.0, False, None),
        (ABORT, 90.0, True, [1]),
    ],
)
def test_first_failure_is_the_rank_not_arriving(
    end: ExitStatus, since: float, is_told_before: bool, blamed: list[int] | None
) -> None:
    job = Job0([at(8, REDUCES, since), at(7, LOADS, 200.0), at(8, REDUCES, since)])
    if is_told_before:
        job.stall(98.0, 98.5, 99.0, 100.0, 101.0)
        assert "waiting for rank 1 " in job.said[0]
    job.members[0].failing = end
    job.take(0, Failing(end), 102.0)
    job.watch.tick(102.0)
    job.watch.tick(102.0)
    assert job.watch.explains(0, end, 102.0) == (blamed is not None)
    assert [list(cause.ranks) for cause in job.blamed] == ([blamed] if blamed else [])


# Rank 1 does something else from its sixth step on, until the file is there.
TRAIN = """
import torch, torch.distributed as dist
is_ours = not dist.is_initialized()
if is_ours:
    dist.init_process_group("gloo")
def load_batch(step):
    if step == 5 and rank == 1:
        ready()
        {does}
def train(step):
    load_batch(step)
    dist.all_reduce(torch.ones(1))
for step in range(10):
    train(step)
    if step == 3:
        rank == 1 or ready()
"""
# Gloo aborts a rank that is still busy with its group when another one has gone, and torch some when Python ends.
TOGETHER = "if is_ours:\n    dist.barrier()\n    dist.destroy_process_group()\n    os._exit(0)\n"
LATE = {"DISTBOOT_LATE_AFTER": "2"}


LOAD = "def load():\n    ready()\n    until('end')\nload()"


def notices(job: Job) -> str:
    return "\n".join(re.findall(r"^distboot: .*|^  \| .*", job.output(0), re.MULTILINE))


# test_hangs.py has it below the wrapper, too
@pytest.mark.parametrize(
    "init", [pytest.param(False, marks=pytest.mark.all), True], ids=["wrapper", "init"]
)
def test_late_rank_is_named_until_it_moves(start: Start, init: bool) -> None:
    job = start(
        TRAIN.format(does="until('end')") + TOGETHER, ranks=3, init=init, framework="torch", **LATE
    )
    until(
        lambda: f"distboot: rank 0 on {os.uname().nodename}: waiting for rank 1 (" in job.output(0)
    )
    assert job.finish() == [0, 0, 0]
    said = notices(job)
    assert re.search(
        # On a busy machine one of the others has not waited for as long yet
        r"waiting for rank 1 \(\S+\) for \d+ s: it is in until \(train.py:\d+\); "
        r"(?:ranks 0, 2 wait|rank [02] waits) in all_reduce "
        r"\(train.py:\d+\), collective operation \d+, rank 1 has begun \d+\n"
        r"  \| rank 1: until \(train.py:\d+\) < load_batch \(train.py:\d+\) < train \(train.py:\d+\) < <module> .*\n"
        r"  \| ranks 0, 2: all_reduce < train \(train.py:\d+\) < <module> \(train.py:\d+\)\n",
        said,
    ), said
    assert "rank 1 continues" in said
    events = [one for one in job.report()["events"] if one["event"].startswith("late")]
    *_, last, over = events  # before, all may have waited for a slow start of torch
    assert last["details"]["ranks"] == [1]
    assert over["event"] == "late_over"


def test_timed_out_collective_blames_the_missing_rank(start: Start) -> None:
    script = "import datetime\n" + TRAIN.replace(
        '"gloo"', '"gloo", timeout=datetime.timedelta(seconds=9)'
    )
    job = start(
        script.format(does="until('never')"), ranks=2, framework="torch", DISTBOOT_GRACE="2"
    )
    assert job.codes() == [1, 1]
    for rank in range(2):
        said = job.output(rank)
        assert re.search(r"rank 1 \(\S+\) held up the job for \d+ s: it is in until \(", said), said
    said = r"; then rank 0 failed: Timed out waiting 9000 ms \(timeout= of init\)$"
    assert re.search(said, job.output(0), re.MULTILINE), job.output(0)
    assert "agent/" not in job.output(0)
    assert "sidecar_start.py" not in job.output(0)


@pytest.mark.parametrize(
    ("script", "late", "rank", "call"),
    [
        ("if rank == 1:\n    until('never')\nctx.barrier()\n", 1, "[02]", "barrier"),
        (
            "with ctx.main_first(timeout=5):\n    if rank == 0:\n        until('never')\n",
            *(0, "[12]", "main_first"),
        ),
    ],
    ids=["barrier", "main_first"],
)
def test_own_timeout_blames_the_missing_rank(
    start: Start, script: str, late: int, rank: str, call: str
) -> None:
    script = f"import distboot\nctx = distboot.init('none', timeout=5)\n{script}"
    job = start(script, ranks=3, DISTBOOT_GRACE="2")
    job.codes()
    said = (
        rf"rank {late} \(\S+\) held up the job for \d+ s, judging by the stacks: it is in until \(.*"
        rf"; then rank {rank} failed: {call}\(\) timed out after 5 s"
    )
    for output in map(job.output, range(3)):
        assert re.search(said, output), output
    (cause,) = [one["details"] for one in job.report()["events"] if one["event"] == "root_cause"]
    assert (cause["kind"], cause["ranks"]) == ("late", [late])


@pytest.mark.all
def test_timeout_in_different_operations_blames_no_rank(start: Start) -> None:
    # A metric on rank 0 alone: no rank is late, and no peer has disconnected
    script = """
import datetime, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=9))
for _ in range(5):
    dist.all_reduce(torch.ones(1))
if rank == 0:
    dist.all_reduce(torch.ones(3))
    dist.all_reduce(torch.ones(3))
dist.barrier()
"""
    job = start(script, ranks=2, framework="torch", DISTBOOT_GRACE="2")
    assert job.codes() == [1, 1]
    said = job.output(0)
    assert re.search(r"the ranks have waited for each other for \d+ s: rank 0 waits in ", said), (
        said
    )
    assert re.search(r"; then rank [01] failed: Timed out waiting 9000 ms", said), said
    assert re.search(r"\| .*rank 0 waits in all_reduce \(.*, rank 1 waits in barrier \(", said), (
        said
    )
    assert "disconnected" not in said, said


# As a launcher that kills the ranks once it has seen the end of another one
_DIES_OF_TERM = (
    "import os, signal; "
    "signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL)); "
)


@pytest.mark.all
@pytest.mark.parametrize("before", ["", _DIES_OF_TERM], ids=["term", "kill"])
def test_hanging_job_ends_if_the_user_asks(start: Start, before: str) -> None:
    hangs = {**LATE, "DISTBOOT_HANG": "stop", "DISTBOOT_HANG_AFTER": "4", "DISTBOOT_GRACE": "2"}
    job = start(TRAIN.format(does=f"{before}until('never')"), ranks=2, framework="torch", **hangs)
    assert job.codes() == [143, 143]
    assert "exit codes: 143 (job), " in job.summary()
    assert "held up the job for " in job.first(1)
    assert ", and DISTBOOT_HANG=stop ends all ranks" in job.first(1)
    (cause,) = [one["details"] for one in job.report()["events"] if one["event"] == "root_cause"]
    assert (cause["kind"], cause["ranks"]) == ("late", [1])


@pytest.mark.all
@pytest.mark.parametrize(
    ("does", "after", "named"),
    [
        ("pass", "2", False),  # two ranks that compute
        ("time.sleep(0.1)", "2", True),
        ("time.sleep(0.1)", "0", False),
    ],
)
def test_ranks_outside_collectives_are_named_if_none_works(
    start: Start, does: str, after: str, named: bool
) -> None:
    evaluates = f"import time\nend = time.monotonic() + 6\nwhile time.monotonic() < end:\n    {does}\ntrain(99)\n"
    script = TRAIN.format(does="pass") + evaluates + TOGETHER
    job = start(script, ranks=2, framework="torch", DISTBOOT_LATE_AFTER=after)
    assert job.finish() == [0, 0], job.output(0)
    assert "waiting for " not in notices(job), notices(job)
    assert named == bool(
        re.search(r"no rank has moved for \d s: ranks 0-1 are in <module> \(", notices(job))
    )
    assert named == ("ranks 0-1 continue" in notices(job)), notices(job)


@in_one_way("waits", ["ctx.barrier()", "with ctx.main_first(): pass"])
def test_ranks_that_only_meet_at_keys_move(start: Start, waits: str, init: bool) -> None:
    script = (
        "import time, distboot\nctx = distboot.init('none', join_timeout=60)\n"
        f"for _ in range(10):\n    time.sleep(0.5)\n    {waits}\nctx.barrier()\n"
    )
    job = start(script, ranks=2, init=init, DISTBOOT_LATE_AFTER="2")
    assert job.codes() == [0, 0], job.output(0)
    assert "no rank has moved" not in job.output(0)
    assert "waiting for" not in job.output(0)


@in_both_ways
def test_stacks_of_all_ranks_are_shown_on_request(start: Start, distboot: Run, init: bool) -> None:
    # Each rank has an agent of its own: whichever is asked, rank 0's asks all.
    job = start(LOAD, ranks=3, init=init)
    pids = job.all_ready()
    for pid in (pids[2], pids[0]):
        shown = distboot("stacks", "--pid", str(pid)).stdout
        assert re.fullmatch(
            r"ranks 0-2: until \(\S+:\d+\) < load \(\S+\) < <module> \(\S+\)\n", shown
        ), shown
    os.kill(pids[1], signal.SIGSTOP)
    shown = distboot("stacks", "--pid", str(pids[2])).stdout
    assert re.match(r"rank 1: (until .*, )?stopped by a signal.*\nranks 0, 2: until ", shown), shown
    os.kill(pids[1], signal.SIGCONT)
    assert job.finish() == [0, 0, 0]
    refused = distboot("stacks", "--pid", str(pids[2]))
    assert refused.returncode == 2
    assert "no agent " in refused.stderr
    assert f" for --pid {pids[2]}, which is not a process here" in refused.stderr


def test_sigquit_to_a_wrapper_shows_the_stacks(start: Start) -> None:
    job = start(LOAD, ranks=2, init=False, DISTBOOT_SIGQUIT="stacks")
    job.all_ready()
    os.kill(job.processes[1].pid, signal.SIGQUIT)
    where = r"rank 1 on \S+: where all ranks are:\n  \| ranks 0-1: until \(\S+\) < load \(\S+\) < <module> \(\S+\)\n"
    until(lambda: re.search(where, job.output(1)))
    assert job.finish() == [0, 0]


def test_jobs_on_a_host_differ_by_id(start: Start, distboot: Run) -> None:
    job = f"job/{os.getpid()}"  # other tests have jobs, too
    for step in ("0", "1"):
        one = start(
            "Path(f'ready-{rank}-STEP').touch()\nuntil('end')".replace("STEP", step),
            ranks=2,
            AZUREML_RUN_ID=f"{job}.{step}",
            MASTER_PORT=str(free_port()),
        )
        until(lambda: len(list(one.folder.glob(f"ready-?-{step}"))) == 2)  # noqa: B023 - it is called here
    with socket.socket(socket.AF_UNIX) as other:
        other.bind("\0of another\nprogram")
        several = distboot("stacks", "--job", job)
    where = rf"\S*python.* in \S*{re.escape(one.folder.name)}"
    wanted = (
        r"2 jobs run on this host:\n"
        rf"distboot:   --job (\S+\.0-[0-9a-f]{{8}}): {where} \(process \d+, running for 0:\d\d:\d\d\)\n"
        rf"distboot:   --job \S+\.1-\w+: {where} \(process \d+, running for 0:\d\d:\d\d\)\n"
        r"distboot: hint: give one, for example --job "
    )
    listed = re.search(wanted, several.stderr)
    assert listed, several.stderr
    assert several.returncode == 2
    for name in (f"{job}.1", listed[1]):
        assert re.match("ranks 0-1: until", distboot("stacks", "--job", name).stdout)
    unknown = distboot("stacks", "--job", job[:-1]).stderr
    assert re.search(rf"no job '{job[:-1]}' is here; \d+ jobs run on this host:\n", unknown)
    assert f"--job {listed[1]}: " in unknown
    of_none = distboot("stacks", "--pid", "1").stderr
    assert re.search(r"answers for --pid 1; \d+ jobs? runs? on this host:\n", of_none)
    assert f"--job {listed[1]}: " in of_none
    assert "process 1 runs, but no agent " in of_none
    assert (
        "hint: a job of one process has no agent, nor has one whose ranks have not met" in of_none
    )
    assert "for example" not in of_none


def test_stacks_name_the_job_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stacks, "agents_here", lambda _: {"4711-8e4ba74c": ["name"]})
    monkeypatch.setattr(stacks, "ask", lambda *_: ("rank 0: load",))
    described = "distboot: job 4711-8e4ba74c: its processes belong to another user or container\n"
    for options, shown in (([], described), (["--job", "4711"], ""), (["--pid", "7"], "")):
        assert stacks.stacks(options) == 0
        assert capfd.readouterr() == ("rank 0: load\n", shown)
    monkeypatch.setattr(stacks, "ask", lambda *_: ())
    with pytest.raises(DistbootError, match="no rank of this job runs now"):
        stacks.stacks([])


# A script, and the agent beside it; the script ends at the first line that it reads
WITH_AGENT = """
import subprocess, sys
script = subprocess.Popen(["sleep", "60"])
words = "import time; time.sleep(60)", "distboot.agent.sidecar", str(script.pid)
agent = subprocess.Popen([sys.executable, "-c", *words])
print(script.pid, flush=True)
sys.stdin.readline()
script.kill()
script.wait()
print(flush=True)
sys.stdin.readline()
agent.kill()
"""


@pytest.mark.parametrize("contained", [False, True])
def test_script_of_an_agent_is_described(contained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent of a bare `init` knows its script by the number in their PID namespace."""
    words = [sys.executable, "-c", WITH_AGENT]
    if contained:
        if os.geteuid() != 0:
            pytest.skip("needs root, for a PID namespace")
        words = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *words]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, cwd="/", **pipes) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        number = int(parent.stdout.readline())
        starter = parent.pid
        if contained:
            (starter,) = children_of(parent.pid)
        script, agent = children_of(starter)
        assert contained == (script != number)
        until(lambda: "distboot.agent.sidecar" in command_line.command(agent))
        until(lambda: command_line.command(script) == ["sleep", "60"])
        monkeypatch.setattr(jobs_here, "holders", lambda _: {"name": agent})
        running = jobs_here.descriptions({"4711": ["name"]})["4711"]
        print(file=parent.stdin, flush=True)
        parent.stdout.readline()
        ended = jobs_here.descriptions({"4711": ["name"]})["4711"]
        parent.stdin.close()
    age = r"running for 0:00:\d\d\)"
    assert re.fullmatch(rf"sleep 60 in / \(process {script}, {age}", running), running
    if contained:
        assert re.fullmatch(rf"\S+ -c … in / \(process {agent}, {age}", ended), ended
    else:
        assert ended == f"its script (process {script}) has ended"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
def test_stacks_are_not_for_another_user(start: Start) -> None:
    job = start(ranks=2)
    pid = job.all_ready()[0]
    asked = [name for names in stacks.agents_here("").values() for name in names]
    (own,) = [name for name in asked if stacks.ask(name, pid) is not None]
    child = os.fork()
    if not child:
        os.setuid(65534)
        os._exit(0 if stacks.ask(own, pid) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert job.finish() == [0, 0]
