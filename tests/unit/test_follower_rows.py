"""What any other agent than rank 0's does, as rows of events and effects, and when it may exit."""

import pytest
from follower_rows import (
    NOT_FROM_RANK_0,
    ROWS,
    STARTING,
    STAYS,
    PureFollower,
    Rows,
    Stay,
)


def _follow(follower: PureFollower, rows: Rows) -> None:
    for event, effects in rows:
        assert follower.after(event) == list(effects), event


@pytest.mark.parametrize("rows", list(ROWS.values()), ids=list(ROWS))
def test_event_leads_to_effects(rows: Rows) -> None:
    _follow(PureFollower(), rows)


@pytest.mark.parametrize("rows", list(STARTING.values()), ids=list(STARTING))
def test_event_before_all_are_ready(rows: Rows) -> None:
    follower = PureFollower()
    follower.facts.is_starting = True
    _follow(follower, rows)


@pytest.mark.parametrize("message", NOT_FROM_RANK_0, ids=lambda each: type(each).__name__)
def test_rank_0_must_not_say_that(message: object) -> None:
    assert PureFollower().refuses(message)


@pytest.mark.parametrize("stay", list(STAYS.values()), ids=list(STAYS))
def test_agent_stays_for_the_others(stay: Stay) -> None:
    follower = PureFollower(is_held=stay.is_held, may_restart=stay.may_restart)
    for event in stay.events:
        follower.after(event)
    assert follower.job.stays_until() - follower.now == pytest.approx(stay.seconds)
