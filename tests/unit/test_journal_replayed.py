"""Real jobs that failed, from their journals: the job of rank 0 comes to the same conclusion again."""

from pathlib import Path

import pytest
from replayed import Replay, last_round

JOURNALS = sorted((Path(__file__).parents[1] / "journals").glob("*.jsonl"))
# Records that follow from what was heard, and from nothing else
DECIDED = ("registered", "failing", "exited", "root_cause")


@pytest.mark.parametrize("path", JOURNALS, ids=lambda path: path.stem)
def test_recorded_job_comes_to_the_same_conclusion(path: Path) -> None:
    round_ = last_round(path)
    (recorded,) = [one for one in round_.events if one.event == "root_cause"]
    replay = Replay(round_)
    assert replay.cause is not None
    assert replay.cause.headline == recorded.details["text"]
    assert list(replay.cause.ranks) == recorded.details["ranks"]
    expected = [(one.event, one.rank) for one in round_.events if one.event in DECIDED]
    assert [one for one in replay.records if one[0] in DECIDED] == expected


def test_recorded_jobs_are_of_five_kinds() -> None:
    kinds = [
        (one.details["kind"], len(one.details["ranks"]))
        for path in JOURNALS
        for one in last_round(path).events
        if one.event == "root_cause"
    ]
    assert len(kinds) == 5
    assert {kind for kind, _ in kinds} == {"failed", "lost", "stopped"}
