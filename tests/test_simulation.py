"""The simulation behind docs/explanation/scale.md: where it can be compared with the real thing, it does the same."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rollcalls import Rank, Rank0, answers, peer, record

sys.path.insert(0, str(Path(__file__).parent.parent / "bench"))

from simulate import written
from simulate_costs import Costs
from simulate_job import Line, Setting
from simulate_lifeline import lifeline, silence_noticed
from simulate_messages import HELLO, JOB, lines_of, roster_bytes, roster_of_nodes
from simulate_messages import record as rank_of
from simulate_rollcall import simulated
from simulate_tables import crossing

from distboot.rollcall.connections import Connections, Peer
from distboot.rollcall.ready import Ready
from distboot.rollcall.wire import Frames, Session, canonical

MICRO = 1e-6
COSTS = Costs(
    turn=10 * MICRO, accept=11 * MICRO, hello=19 * MICRO, record=23 * MICRO, drop=18 * MICRO, ready=8 * MICRO,
    send=13 * MICRO, byte=0.3e-9, roster=4 * MICRO, prove=0.01 * MICRO, read_roster=0.3 * MICRO,
    write_roster=0.01 * MICRO, beat=14 * MICRO, wake=0.1 * MICRO, watch=22 * MICRO, end=12 * MICRO, tell=17 * MICRO,
    peer=36 * MICRO, memory=1300, base=22e6, hello_bytes=78, challenge_bytes=65, record_bytes=450, ready_bytes=76,
    go_bytes=43, beat_bytes=26, verdict_bytes=168,
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


def test_relays_of_the_measurement_are_taken_by_the_real_rank_0() -> None:
    first = Rank0(rank_of(0, 20), membership=JOB, ready=Ready())
    relays = [(line, peer(first.port, HELLO)) for line in lines_of(20, 8)]
    for line, connection in relays:
        assert b"challenge" in connection.recv(1000)
        connection.sendall(line.records)
    for line, connection in relays:
        (answer,) = Frames(1 << 20).feed(connection.recv(65536))
        assert answer["roster"] == {**roster_of_nodes(20).as_message(), "master_addr": "127.0.0.1"}
        connection.sendall(line.ready())
    first.met()
    first.close()
    assert [answers(connection) for _, connection in relays] == [[{"go": [], "mac": ""}]] * 3


def test_rosters_are_as_long_as_real_ones() -> None:
    for world_size in (8, 20_000):
        message = roster_of_nodes(world_size).as_message()
        assert roster_bytes(world_size) == len(Session().sealed("roster", canonical(message)))
    assert roster_bytes(20_000) < 20_000


def test_relay_has_one_line_a_node() -> None:
    found = simulated(Setting(64, 8), COSTS)
    assert found.roster is not None
    assert found.messages["record"] == found.messages["roster"] == found.files == 8


def test_relay_reports_at_once_who_is_there_and_the_others_when_they_come() -> None:
    line = Line(0.0, [0.0, 0.0, 0.5, 3.0, 3.01], 300.0, 0.01)
    assert [(round(at, 6), ranks) for at, ranks in line.batches(1.0)] == [(1.02, 3), (3.02, 2)]


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
    found = simulated(Setting(5000), slow)
    assert found.gave_up > 0
    assert found.messages["record"] == 4999
    assert found.roster is not None


def test_answers_that_the_link_does_not_carry_in_time_are_counted() -> None:
    found = simulated(Setting(4000, link=2e6), COSTS)
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


def test_limit_is_found_between_two_sizes() -> None:
    squares = {size: (size / 30_000) ** 2 for size in (1000, 10_000, 100_000)}
    assert crossing(squares) == "30,000 ranks"
    assert crossing(squares, 1000) == "not up to 100,000"
    assert crossing(squares, 1e-6) == "below 1,000 ranks"


def test_figures_go_between_their_markers() -> None:
    page = "a\n<!-- simulate: x -->\nold\n<!-- end: x -->\nb\n"
    assert written(page, {"x": "new"}) == "a\n<!-- simulate: x -->\n\nnew\n\n<!-- end: x -->\nb\n"
    with pytest.raises(SystemExit, match="no place for y"):
        written(page, {"y": "new"})
