"""Rank 0's job under random schedules of events: what has to hold in any order. `make schedules` runs a million."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import schedules
from hypothesis import HealthCheck, given, settings
from job_rows import SETTINGS, Event, JobOfRank0, PureJob, Setup, Take, Wait
from job_schedules import Plan, follow, plan_of_seed, plans

BY_NUMBER = 300
EXAMPLES = 150
OVER_CONNECTIONS = 30
# What the ends of real connections here do not do. Rank 0's agent also answers itself how far its scripts have read
_NOT_OVER_CONNECTIONS = (
    "registers",
    "is terminated",
    "asks to stop",
    "is abandoned",
    "greets",
    "returns",
    "does not answer",
    "answers again",
    "is orphaned",
    "next round",
)
_INSTANT = 1e-6  # seconds: the clock of rank 0's agent is not at 0, and floats are rounded


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans())
def test_any_schedule_ends_with_one_cause(plan: Plan) -> None:
    assert follow(plan).lines == follow(plan).lines, "the same events had other effects"


def test_schedules_by_number_end_with_one_cause(capsys: pytest.CaptureFixture[str]) -> None:
    assert schedules.run(0, BY_NUMBER), capsys.readouterr().out


def test_schedules_have_every_message_of_a_rank() -> None:
    said = set()
    for number in range(BY_NUMBER):
        happened = follow(plan_of_seed(number)).happened
        said |= {type(event.message) for event in happened if isinstance(event, Take)}
    handled = set(PureJob().job._handlers)
    assert handled - said == set(), "add them to the table of `tests/lib/job_schedules.py`"


def test_order_of_hashes_changes_no_effect() -> None:
    digests = {_digest(hash_seed) for hash_seed in ("1", "2")}
    assert len(digests) == 1


def _digest(hash_seed: str) -> str:
    script = Path(schedules.__file__)
    command = [sys.executable, str(script), "--count", "50"]
    environ = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    return done.stdout.rpartition(" ")[2]


def test_schedule_that_fails_is_printed_and_shrunk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PureJob, "_lose", lambda *_: 1 / 0)
    assert not schedules.run(0, BY_NUMBER)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.endswith("fails: ZeroDivisionError: division by zero")
    assert "Lose(rank=" in lines[-1]
    assert sum("->" in line for line in lines) <= 2


def test_loop_that_cannot_sleep_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("job_rows.Job.due", lambda _: 0.0)
    assert not schedules.run(0, 1)


@settings(max_examples=OVER_CONNECTIONS, deadline=None, suppress_health_check=list(HealthCheck))
@given(plans())
def test_agent_concludes_the_same_over_real_connections(plan: Plan) -> None:
    events = [one for one in plan.events if one[0] not in _NOT_OVER_CONNECTIONS]
    check = plan.setup.settings.check
    setup = Setup(has_begun=plan.setup.has_begun, settings=SETTINGS._replace(check=check))
    happened = follow(Plan(setup, is_orderly=True, events=events)).happened
    pure = PureJob(setup)
    real = JobOfRank0(setup)
    try:
        for event in happened:
            later = _later(event)  # for both: 43.5 s left are 44 s in a text, and a bit less 43 s
            assert _own(real.after(later)) == _own(pure.after(later)), event
    finally:
        real.close()


def _own(effects: list[str]) -> list[str]:
    """What is printed, recorded and concluded; of the summary, only the agent knows."""
    kinds = ("say:", "record:", "conclude:")
    own = [effect for effect in effects if effect.startswith(kinds)]
    return [effect for effect in own if not effect.startswith("say: summary: ")]


def _later(event: Event) -> Event:
    if isinstance(event, Wait):
        return Wait(event.seconds + _INSTANT)
    return event


def test_number_makes_the_same_schedule() -> None:
    assert plan_of_seed(7) == plan_of_seed(7)
    assert plan_of_seed(7) != plan_of_seed(8)
