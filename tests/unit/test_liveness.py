"""What is found out about a peer that may be gone, without a socket or a clock."""

from __future__ import annotations

import pytest
from liveness_rows import ROWS, Finding, Liveness, Signs, play


@pytest.mark.parametrize("name", ROWS)
def test_findings(name: str) -> None:
    assert play(ROWS[name]) == ROWS[name]


@pytest.mark.parametrize(
    ("silence", "heard", "rests_until"),
    [
        pytest.param(3.0, 100.0, 108.25, id="until its host can be suspect"),
        pytest.param(1.0, 70.0, 104.5, id="until its process can be frozen"),
    ],
)
def test_silent_peer_rests_until_it_can_be_lost(
    silence: float, heard: float, rests_until: float
) -> None:
    liveness = Liveness(15.0, 0.0)
    liveness.observe(Signs(heard, silence), 100.0)
    assert liveness.no_fault_before == pytest.approx(rests_until)
    liveness.expect_confirmation(101.0)
    assert liveness.no_fault_before == 0.0, "it is asked often for what is sent to it"


@pytest.mark.parametrize(
    ("silence", "confirmed", "after", "doubtful"),
    [
        pytest.param(8.4, True, 0.0, False, id="a heartbeat is nearly due"),
        pytest.param(8.6, True, 0.0, True, id="a heartbeat is due"),
        pytest.param(1.0, False, 1.0, False, id="asked a moment ago"),
        pytest.param(1.0, False, 2.5, False, id="nobody looked meanwhile"),
    ],
)
def test_host_that_may_just_have_died(
    silence: float, confirmed: bool, after: float, doubtful: bool
) -> None:
    liveness = Liveness(15.0, 100.0)
    signs = Signs(100.0, silence, confirmed)
    assert liveness.is_unusually_silent(signs, 100.0 + after) is doubtful


def test_silence_while_stopped_does_not_count() -> None:
    liveness = Liveness(15.0, 0.0)
    signs = Signs(100.0, 20.0)
    assert liveness.is_unusually_silent(signs, 100.0)
    liveness.woken_at = 99.0
    assert not liveness.is_unusually_silent(signs, 100.0)


def test_host_that_confirms_nothing_may_have_died() -> None:
    liveness = Liveness(15.0, 100.0)
    for second in (1, 2):
        liveness.observe(Signs(100.0, 1.0, is_confirmed=False), 100.0 + second)
    unconfirmed = Signs(100.0, 1.0, is_confirmed=False)
    assert liveness.is_unusually_silent(unconfirmed, 102.5)


@pytest.mark.parametrize(
    ("silence", "answers", "found"),
    [
        pytest.param(3.0, False, None, id="not silent at all"),
        pytest.param(9.0, True, None, id="the host answers"),
        pytest.param(
            9.0,
            False,
            Finding("silent", "it did not answer any more when SIGTERM arrived"),
            id="the host does not answer",
        ),
    ],
)
def test_question_after_a_signal(silence: float, answers: bool, found: Finding | None) -> None:
    liveness = Liveness(15.0, 100.0)
    liveness.question(Signs(100.0, silence), 109.0)
    assert liveness.is_suspect is (silence > 8.5)
    assert liveness.observe(Signs(100.0, silence), 109.05) is None
    signs = Signs(100.0, silence + 0.1, host_answers=answers)
    assert liveness.observe(signs, 109.1) == found
    assert not liveness.is_suspect


def test_message_answers_a_question() -> None:
    liveness = Liveness(15.0, 100.0)
    liveness.question(Signs(100.0, 9.0), 109.0)
    liveness.trust()
    assert not liveness.is_suspect
    assert liveness.observe(Signs(109.0, 11.3), 120.3) is None
    assert liveness.is_suspect, "as without the question"
