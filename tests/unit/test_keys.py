"""Keys, where ranks wait for each other: who may come, who is named, and whom rank 0 tells what."""

from typing import Any

import pytest
from rendezvous_peers import record

from distboot.job.effects import Say
from distboot.job.keys import Keys
from distboot.rendezvous.join_table import JoinTable
from distboot.rendezvous.membership import Membership
from distboot.rendezvous.messages import (
    BARRIER,
    LOCAL_MAIN_FIRST,
    MAIN_FIRST,
    READY,
    Arrive,
    Go,
    Key,
    Ready,
    Release,
)
from distboot.rendezvous.protocol import ProtocolError, decode, encode

THERE = Key(BARRIER)
FIRST = Key(MAIN_FIRST)


class Job:
    """Four ranks on two nodes."""

    def __init__(self) -> None:
        register = JoinTable(4)
        for rank in range(4):
            register.add(record(rank, 4, "ab"[rank // 2]))
        self.keys = Keys(
            Membership(("a", "b"), ((0, 1), (2, 3))),
            register,
        )

    @property
    def said(self) -> list[str]:
        return [one.text for one in self.keys.effects if isinstance(one, Say)]

    def sent(self) -> dict[int, Any]:
        """What was sent since, by rank; a rank gets one answer at a time."""
        found: dict[int, Any] = {}
        for rank, message in self.keys.outbox:
            ranks = range(4) if rank is None else [rank]
            assert found.keys().isdisjoint(ranks)
            found |= dict.fromkeys(ranks, message)
        self.keys.outbox = []
        return found

    def arrive(
        self, *ranks: int, key: Key = THERE, limit: float = 10.0, now: float = 0.0, **more: Any
    ) -> dict[int, Any]:
        for rank in ranks:
            self.keys.arrive(rank, Arrive(key, limit, **more), now)
        return self.sent()

    def ready(self, *ranks: int, **more: Any) -> dict[int, Any]:
        for rank in ranks:
            self.keys.get_ready(rank, Ready(**more), 0.0)
        return self.sent()


def _why(message: Any) -> str:
    return str(message.problem[1])


def test_awaited_ranks_are_named_now_and_then() -> None:
    job = Job()
    job.arrive(0, limit=100.0)
    for now in (9.9, 10.0, 15.0, 20.0):
        job.keys.expire(now)
    assert job.said == [
        "barrier(): 1/4 ranks are here; missing: ranks 1-3 (nodes 0-1); giving up in 90 s",
        "barrier(): 1/4 ranks are here; missing: ranks 1-3 (nodes 0-1); giving up in 80 s",
    ]
    assert min(job.keys.due()) == 40.0


def test_ranks_that_still_start_are_named_late() -> None:
    job = Job()
    job.ready(0, 2, 3, limit=300.0)
    for now in (1.0, 14.9, 15.0, 29.0, 30.0):
        job.keys.expire(now)
    assert job.said == [
        "all ranks joined; rank 1 (node 0) is still starting (limit 285 s)",
        "all ranks joined; rank 1 (node 0) is still starting (limit 270 s)",
    ]


def test_nodes_have_leaders_of_their_own() -> None:
    job = Job()
    key = Key(LOCAL_MAIN_FIRST, 1)
    assert job.arrive(3, key=key) == {}
    assert job.arrive(2, key=key, leads=True) == dict.fromkeys((2, 3), Release(key))


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        (1, Arrive(FIRST, 1.0, leads=True)),  # rank 0 leads there
        (3, Arrive(Key(LOCAL_MAIN_FIRST, 1), 1.0, leads=True)),  # rank 2 does
        (3, Arrive(Key(LOCAL_MAIN_FIRST, 0), 1.0)),  # another node's
        (3, Arrive(Key(LOCAL_MAIN_FIRST, 7), 1.0)),
        (3, Arrive(Key(READY), 1.0)),
    ],
)
def test_what_no_rank_of_ours_says_is_refused(rank: int, message: Arrive) -> None:
    with pytest.raises(ProtocolError):
        Job().keys.arrive(rank, message, 0.0)


def test_keys_are_bounded() -> None:
    job = Job()

    def come() -> None:
        for count in range(1, 5000):
            job.arrive(1, key=Key(BARRIER, None, count))

    with pytest.raises(ProtocolError, match="too many keys"):
        come()


def test_each_of_1250_nodes_has_its_key() -> None:
    nodes = tuple((2 * node, 2 * node + 1) for node in range(1250))
    keys = Keys(Membership(("a",) * 1250, nodes), JoinTable(2500))
    for node, (_, waits) in enumerate(nodes):
        keys.arrive(waits, Arrive(Key(LOCAL_MAIN_FIRST, node), 10.0), 0.0)
    assert keys.outbox == []
    for node, (leads, waits) in enumerate(nodes):
        key = Key(LOCAL_MAIN_FIRST, node)
        keys.arrive(leads, Arrive(key, 0.0, leads=True), 1.0)
        assert keys.outbox[-2:] == [(waits, Release(key)), (leads, Release(key))]


def test_leader_is_answered_beside_too_many_keys() -> None:
    job = Job()
    for count in range(1, 1003):
        job.arrive(3, key=Key(LOCAL_MAIN_FIRST, 1, count))
    released = Key(LOCAL_MAIN_FIRST, 1, 1)
    answers = job.arrive(2, key=released, leads=True)
    assert answers == dict.fromkeys((2, 3), Release(released))


@pytest.mark.parametrize(
    "key",
    [
        Key("elsewhere()"),
        Key(BARRIER, -1),
        Key(BARRIER, None, 0),
        Key(BARRIER, None, 10**30),
        {"name": BARRIER},
        None,
        [BARRIER, None, 1],
    ],
    ids=range(7),
)
def test_broken_keys_are_refused(key: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(Arrive(key, 1.0)), Arrive)


def test_closing_a_context_keeps_others_getting_ready() -> None:
    job = Job()
    job.ready(0, 1, 2, 3)
    job.keys.leave(3, has_ended=False)
    assert job.ready(0, 1, 2, count=2) == {}
    assert job.ready(3, count=2).keys() == {0, 1, 2, 3}
    job.keys.leave(3)
    sent = job.ready(2, count=3)
    assert (
        "rank 3 (process 1003 on 'b') joined, and ended before the framework could start"
        in _why(sent[2])
    )


@pytest.mark.parametrize("begun", [False, True])
def test_ended_ready_rank_is_named_before_slow_one(begun: bool) -> None:
    job = Job()
    if begun:
        job.ready(0, 1, 2, 3)
    job.ready(0, 1, count=1 + begun)
    job.keys.leave(1)
    sent = job.sent()
    assert sent[0].problem[0] == "rank-failed"
    assert _why(sent[0]).startswith("rank 1 (process ")


def test_rank_leaving_with_other_count_harms_no_key() -> None:
    job = Job()
    job.ready(0)
    job.ready(1, count=2)
    job.keys.leave(1)
    assert job.sent().keys() == {0, 1, 2, 3}


def test_keys_of_a_gone_leader_are_not_kept() -> None:
    job = Job()
    job.keys.leave(0, has_ended=False)
    for number in range(1, 1500):
        (answer,) = job.arrive(1, key=Key(MAIN_FIRST, None, number)).values()
        assert answer.problem is not None


def test_late_rank_learns_of_each_failed_block() -> None:
    job = Job()
    for count in (1, 2):
        why = f"no disk {count}"
        job.arrive(0, key=Key(MAIN_FIRST, None, count), leads=True, failure=why)
    third = Key(MAIN_FIRST, None, 3)
    job.arrive(0, key=third, leads=True)
    for count in (1, 2):
        (answer,) = job.arrive(1, key=Key(MAIN_FIRST, None, count)).values()
        assert _why(answer).endswith(f"no disk {count}")
    assert job.arrive(1, key=third) == {1: Release(third)}


def test_no_block_that_failed_is_run_later() -> None:
    job = Job()
    for count in range(1, 5000):
        job.arrive(0, key=Key(MAIN_FIRST, None, count), leads=True, failure="no\x07 disk")
    for count in (1, 2500, 4999):
        (answer,) = job.arrive(1, key=Key(MAIN_FIRST, None, count)).values()
        assert _why(answer).endswith("no\\x07 disk")
    assert len(job.keys._failed[FIRST.place]._errors) == 100


def test_second_context_below_one_wrapper_starts_anew() -> None:
    job = Job()
    job.ready(0, 1, 2, 3)
    job.arrive(0, key=FIRST, leads=True, failure="no disk")
    job.arrive(1, 2, now=0.0)
    job.keys.expire(10.0)
    job.sent()
    job.ready(0, 1, 2, 3, count=2)
    assert job.arrive(1, key=FIRST) == job.arrive(0, 1, 2) == {}
    assert job.arrive(0, key=FIRST, leads=True) == {0: Release(FIRST), 1: Release(FIRST)}
    assert job.arrive(3) == dict.fromkeys(range(4), Release(THERE))


@pytest.mark.parametrize("begun", [False, True])
def test_an_init_after_one_that_has_failed(begun: bool) -> None:
    job = Job()
    first = 2 if begun else 1
    if begun:
        job.ready(0, 1, 2, 3)
    job.ready(1, count=first, problem=("device-failed", "no driver", ""))
    assert _why(job.ready(0, count=first)[0]).endswith("no driver")
    assert _why(job.ready(2, count=first)[2]).endswith("no driver")
    assert job.ready(0, 1, 2, count=first + 1) == {}
    assert job.ready(3, count=first + 1) == dict.fromkeys(range(4), Go())
    assert job.ready(0, count=first) == {}, (
        "another process below the same wrapper, which counts from 1"
    )


def test_rank_that_missed_barriers_waits_at_none() -> None:
    job = Job()
    for count in (1, 2):
        job.arrive(0, 1, 2, key=Key(BARRIER, None, count))
        job.keys.expire(10.0)
        assert job.sent().keys() == {0, 1, 2}
    assert all(
        "timed out" in _why(job.arrive(3, key=Key(BARRIER, None, count))[3]) for count in (1, 2)
    )


def test_ranks_with_a_smaller_count_are_awaited() -> None:
    job = Job()
    job.ready(0, 1, 2)
    job.ready(3, count=2)
    assert job.keys.unready == [0, 1, 2]
