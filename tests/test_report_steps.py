"""The steps of each rank in a report: which are taken, on whose clock their times are, and who was slowest."""

from __future__ import annotations

from typing import Any

import pytest
from rollcalls import record

from distboot.report.content import of_rank
from distboot.report.history import Arrival, Clock, History
from distboot.report.steps import own_steps, slowest, spans
from distboot.rollcall.seen import Seen


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        {"group_ready": "now"},
        {"group_ready": True},
        {"group_ready": -1.0},
        {"group_ready": 1e300},
        {"group_ready": float("nan")},
        {str(number): 1.0 for number in range(100)},
    ],
)
def test_steps_that_are_none_are_refused(message: object) -> None:
    with pytest.raises(TypeError):
        own_steps(message)


def test_steps_of_a_newer_distboot_are_left_out() -> None:
    assert own_steps({"group_ready": 5, "coffee_made": "yes"}) == {"group_ready": 5.0}


def test_clock_of_a_rank_is_read_between_two_moments_of_rank_0() -> None:
    assert Clock.read(107.0, before=100.0, after=101.0) == Clock(ahead=6.5, within=0.5)
    seen = Seen(record(0, 3))
    seen.joined(record(1, 3, clock=1000.0), welcomed=0.0)
    seen.joined(record(2, 3, node="b", clock=1000.0), welcomed=0.0)
    assert seen.skews()[1] == 0.0  # on rank 0's own host
    assert seen.skews()[2] < -1e8


def test_times_of_a_rank_are_put_on_the_clock_of_rank_0() -> None:
    arrival = Arrival("node-1", 1, 0, 7, started=107.0, detected=108.0, joined=12.0, clock=Clock(ahead=97.5))
    history = History(2, "torch", 10.0, 13.0, {1: arrival})
    steps: Any = of_rank(history, 1, {"group_ready": 112.5})["steps"]
    assert {name: when[17:23] for name, when in steps.items()} == {
        "process_start": "09.500",
        "detected": "10.500",
        "joined": "12.000",
        "all_joined": "13.000",
        "group_ready": "15.000",
    }


def test_phases_are_between_what_is_known() -> None:
    assert spans({}) == {}
    assert spans({"detected": 5.0, "joined": 6.0, "all_joined": 9.0, "framework_imported": 12.0}) == {
        "join": (5.0, 6.0),
        "wait": (6.0, 9.0),
        "import": (9.0, 12.0),
    }
    assert spans({"joined": 6.0, "all_joined": 5.9}) == {"wait": (5.9, 5.9)}  # clocks differ a little


def test_slowest_of_a_phase_is_named_with_the_usual_time() -> None:
    ranks = {rank: {"process_start": 1.0, "detected": 2.0 + 5 * (rank == 2), "joined": 9.0} for rank in range(4)}
    launch, begin, join = slowest(ranks)
    assert (launch.rank, launch.seconds, begin.rank, begin.seconds, begin.median) == (0, 0.0, 2, 6.0, 1.0)
    assert (join.rank, join.seconds) == (0, 7.0)
