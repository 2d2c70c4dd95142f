"""Rank 0's job under random schedules of events: what has to hold in any order.

DISTBOOT_SCHEDULES=1000000 make test ARGS="-n 0 tests/unit/test_job_schedules.py"     the long run
"""

import os
from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from job_rows import JobOfRank0, PureJob, Wait
from job_schedules import KEY_TIMEOUT, ONE, RANKS, Schedule

SCHEDULES = int(os.environ.get("DISTBOOT_SCHEDULES", "1000"))
OVER_CONNECTIONS = 50
Events = list[tuple[str, int, int]]


def follow(job: PureJob | JobOfRank0, events: Events) -> list[str]:
    """What a schedule has led to, once all ranks have ended; it is checked on the way."""
    schedule = Schedule(job)
    for one in events:
        schedule.follow(*one)
        early = {rank for rank in RANKS if schedule.answers[rank] > schedule.arrivals[rank]}
        assert not early, f"ranks {early} were answered and had not asked"
    for _ in range(3):
        schedule.happen(Wait(KEY_TIMEOUT))
    assert not schedule.waiting(), "a rank waits beyond the timeout of its key"
    for rank in RANKS:
        schedule.follow("ends well", rank, 0)
    for _ in range(3):
        schedule.happen(Wait(KEY_TIMEOUT))
    kinds = Counter(effect for effect in schedule.effects if "root_cause" in effect)
    assert kinds.total() <= 1, kinds
    assert job.is_over, "rank 0 does not end"
    before = len(schedule.effects)
    schedule.happen(Wait(KEY_TIMEOUT))
    assert schedule.effects[before:] == [], "it goes on after its end"
    return schedule.effects


@settings(max_examples=SCHEDULES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ONE, max_size=25))
def test_any_schedule_ends_with_one_cause(events: Events) -> None:
    effects = follow(PureJob(), events)
    assert effects == follow(PureJob(), events), "the same events had other effects"


@settings(max_examples=OVER_CONNECTIONS, deadline=None)
@given(st.lists(ONE, max_size=25))
def test_schedule_ends_alike_over_real_connections(events: Events) -> None:
    job = JobOfRank0()
    try:
        follow(job, events)
    finally:
        job.close()
