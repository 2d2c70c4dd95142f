"""Whether a failed round is followed by another one, as rank 0 decides it."""

import pytest
from supervised import raised

from distboot.agent.restarts import Restarts
from distboot.base.settings import RestartSettings
from distboot.job.exit_status import ExitStatus
from distboot.job.restarts import Decision, RestartPolicy
from distboot.job.root_cause import (
    BY_HANG_STOP,
    Circumstances,
    RankState,
    RootCause,
    from_exit,
)

_MOST = 5


def _policy(*, of_launcher: bool = False) -> RestartPolicy:
    return RestartPolicy(RestartSettings(_MOST, 0.0, 60.0), of_launcher=of_launcher)


def _cause(end: ExitStatus, rank: int) -> RootCause:
    return from_exit(RankState(rank, "a", 0, rank), end, 0.0)


def _decide(
    policy: RestartPolicy,
    end: ExitStatus,
    *,
    rank: int = 1,
    is_asked: bool = False,
    is_orphaned: bool = False,
    is_unfit: bool = False,
) -> Decision:
    return policy.decide(
        _cause(end, rank),
        end,
        10.0,
        Circumstances(is_asked, is_orphaned, is_unfit),
        has_mpi=False,
    )


def _raised(words: str, line: int = 7) -> ExitStatus:
    return raised(words, place=f"step (train.py:{line})")


_OF_A_SERVICE = _raised("ConnectionRefusedError: [Errno 111] Connection refused")
_OF_A_PEER = _raised("RuntimeError: Connection closed by peer")


@pytest.mark.parametrize(
    ("first", "second", "of_launcher", "goes_on"),
    [
        (_raised("ValueError: 1"), _raised("ValueError: 2"), False, False),
        (_raised("ValueError: 1"), _raised("ValueError: 1", line=8), False, True),
        (_OF_A_PEER, _OF_A_PEER, False, True),
        (_OF_A_SERVICE, _OF_A_SERVICE, False, True),  # which may be back by then
        (ExitStatus(code=3), ExitStatus(code=3), False, False),
        # Of a shell: which signal has ended a program
        (ExitStatus(code=137), ExitStatus(code=137), False, True),
        # Which ends alike for all that happens
        (ExitStatus(code=1), ExitStatus(code=1), True, True),
    ],
)
def test_second_failure_at_one_place_is_a_bug(
    first: ExitStatus, second: ExitStatus, of_launcher: bool, goes_on: bool
) -> None:
    policy = _policy(of_launcher=of_launcher)
    for round_, end in enumerate((first, second)):
        policy.begin(round_, _MOST)
        decision = _decide(policy, end)
    assert decision.restarts is goes_on
    assert (decision.text is None) is goes_on


@pytest.mark.parametrize(
    ("end", "goes_on"), [(ExitStatus(code=1), True), (_raised("ValueError: 1"), False)]
)
def test_exit_code_counts_for_its_rank(end: ExitStatus, goes_on: bool) -> None:
    policy = _policy()
    for round_, rank in enumerate((1, 2)):
        policy.begin(round_, _MOST)
        decision = _decide(policy, end, rank=rank)
    assert decision.restarts is goes_on


def test_failure_on_an_unfit_node_is_no_bug() -> None:
    policy = _policy()
    goes_on = []
    for round_, is_unfit in enumerate((False, True, False)):
        policy.begin(round_, _MOST)
        decision = _decide(policy, _raised("ValueError: 1"), is_unfit=is_unfit)
        goes_on.append(decision.restarts)
    assert goes_on == [True, True, False]


def test_stop_calls_the_next_round_off_once() -> None:
    policy = _policy()
    end = ExitStatus(code=137)
    asked = [False, False, True, True]
    decisions = [_decide(policy, end, is_asked=is_asked) for is_asked in asked]
    assert [each.is_first for each in decisions] == [True, False, False, False]
    assert [each.restarts for each in decisions] == [True, True, False, False]
    stopped = "no restart: the job was asked to stop"
    assert [each.text for each in decisions] == [None, None, stopped, None]


def test_no_round_follows_the_end_of_the_launcher() -> None:
    decision = _decide(_policy(), ExitStatus(code=137), is_orphaned=True)
    assert decision == Decision(
        restarts=False, text="no restart: the launcher of rank 0 is gone", is_first=True
    )


def test_rank_0_allows_the_rounds() -> None:
    policy = _policy()
    policy.begin(1, 1)
    decision = _decide(policy, ExitStatus(code=137))
    reached = "the limit of 1 restart (--max-restarts or DISTBOOT_MAX_RESTARTS) is reached"
    assert decision.text == f"no restart: {reached}"


@pytest.mark.parametrize(
    ("text", "how"),
    [
        ("rank 1 failed first: exit code 3, on vm", "failed"),
        (
            f"rank 1 (vm) held up the job for 9 s: it is in main (f.py:4){BY_HANG_STOP}",
            "held it up",
        ),
        ("rank 1 (vm) held up the job for 9 s: it is there; then rank 0 failed", "held it up"),
        (f"the ranks have waited for each other for 9 s: rank 1 waits{BY_HANG_STOP}", "hung"),
    ],
)
def test_announcement_tells_how_a_round_ended(
    capfd: pytest.CaptureFixture[str], text: str, how: str
) -> None:
    restarts = Restarts(RestartSettings(_MOST), {}, who=None, of_launcher=False)
    restarts.begin(0, _MOST, met_at=0.0)
    restarts.ended(RootCause((1,), is_failure=True, text=text))
    restarts.announce()
    said = capfd.readouterr().err
    assert said.endswith(f" s, as rank 1 {how}\n"), said
