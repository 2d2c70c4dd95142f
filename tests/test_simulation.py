"""The simulation behind docs/explanation/scale.md: where it can be compared with the real thing, it does the same."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rollcalls import Rank, Rank0, record

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

from simulate import first, written
from simulate_costs import Costs
from simulate_lifeline import lifeline, silence_noticed
from simulate_rollcall import Setting, simulated

from distboot.rollcall.connections import Connections, Peer
from distboot.rollcall.ready import Ready

MICRO = 1e-6
COSTS = Costs(
    turn=10 * MICRO, accept=11 * MICRO, hello=19 * MICRO, record=23 * MICRO, entry=18 * MICRO, drop=18 * MICRO,
    ready=22 * MICRO, send=13 * MICRO, byte=0.3e-9, roster=10 * MICRO, read_roster=0.2 * MICRO, beat=14 * MICRO,
    wake=0.2 * MICRO, watch=22 * MICRO, end=12 * MICRO, tell=17 * MICRO, peer=36 * MICRO, memory=1700, base=22e6,
    hello_bytes=78, challenge_bytes=65, record_bytes=626, ready_bytes=76, go_bytes=43, beat_bytes=26,
    verdict_bytes=168, roster_bytes=7.3,
)  # fmt: skip


def test_messages_are_those_that_the_real_server_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    got: Counter[str] = Counter()
    take = Connections.__init__

    def counting(self: Connections, *arguments: object) -> None:
        listener, ranks, handle, lost, say = arguments

        def counted(peer: Peer, message: dict[str, object]) -> None:
            got[next(kind for kind in ("nonce", "record", "ready") if kind in message)] += 1
            handle(peer, message)  # type: ignore[operator]

        take(self, listener, ranks, counted, lost, say)  # type: ignore[arg-type]

    monkeypatch.setattr(Connections, "__init__", counting)
    rank_0 = Rank0(record(0, 16), ready=Ready())
    ranks = [Rank(rank_0.port, record(rank, 16), ready=Ready()) for rank in range(1, 16)]
    for each in (*ranks, rank_0):
        each.met()
    rank_0.close()
    ours = simulated(Setting(16), COSTS).messages
    assert (ours["hello"], ours["record"], ours["ready"]) == (got["nonce"], got["record"], got["ready"])
    assert ours["roster"] == ours["go"] == len(ranks)


def test_a_tree_has_one_line_a_node() -> None:
    found = simulated(Setting(64, 8), COSTS)
    assert found.roster is not None
    assert found.messages["record"] == found.messages["roster"] == found.files == 8


def test_what_a_speaker_has_not_heard_in_time_follows() -> None:
    found = simulated(Setting(64, 8, pace=0.2), COSTS)
    assert found.messages["record"] == 63
    assert found.messages["roster"] == 8


@pytest.mark.parametrize("ranks_a_line", [1, 8])
def test_the_dead_on_arrival_are_named_at_the_join_timeout(ranks_a_line: int) -> None:
    found = simulated(Setting(1000, ranks_a_line, dead=0.01, join_timeout=60), COSTS)
    assert found.roster is None
    assert found.told is not None
    assert 60 <= found.told < 61
    assert found.unanswered == 0
    assert " ranks joined within 60 s, missing " in found.text
    assert "(node 1" in found.text


def test_a_queue_that_is_full_sends_ranks_away_and_they_come_again() -> None:
    slow = replace(COSTS, accept=1e-3)
    found = simulated(Setting(6000), slow)
    assert found.gave_up > 0
    assert found.messages["record"] == 5999
    assert found.roster is not None


def test_answers_that_the_link_does_not_carry_in_time_are_counted() -> None:
    found = simulated(Setting(4000, link=50e6), COSTS)
    assert found.roster is None
    assert 0 < found.unanswered < 4000


def test_one_seed_one_outcome() -> None:
    setting = Setting(2000, slow=0.01, dead=0.001, seed=7)
    assert simulated(setting, COSTS) == simulated(setting, COSTS)
    assert simulated(setting, COSTS) != simulated(replace(setting, seed=8), COSTS)


def test_beats_are_rarer_in_large_jobs_and_a_vanished_host_is_noticed_later() -> None:
    small, large = lifeline(COSTS, 1000), lifeline(COSTS, 100_000)
    assert small.interval == 1.0
    assert large.interval == 50.0
    assert large.silent[1] > small.silent[1]
    assert silence_noticed(1.0, 15.0) == pytest.approx((14.6, 15.6), abs=0.1)
    assert lifeline(COSTS, 100_000, 8).told < large.told


def test_the_first_size_beyond_a_limit_is_found() -> None:
    found = first((64, 1000, 10_000), lambda size: size >= 3000)
    assert found is not None
    assert 3000 <= found <= 3100
    assert first((64, 1000), lambda _: False) is None


def test_figures_go_between_their_markers() -> None:
    page = "a\n<!-- simulate: x -->\nold\n<!-- end: x -->\nb\n"
    assert written(page, {"x": "new"}) == "a\n<!-- simulate: x -->\n\nnew\n\n<!-- end: x -->\nb\n"
    with pytest.raises(SystemExit, match="no place for y"):
        written(page, {"y": "new"})
