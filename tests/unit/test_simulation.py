"""The simulation behind docs/explanation/scale.md: where it can be compared with the real thing, it does the same."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rendezvous_peers import Rank0, answers, peer

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from simulate import written
from simulate_costs import Costs
from simulate_job import Setting
from simulate_messages import HELLO, lines_of, membership_bytes, membership_of_nodes
from simulate_messages import record as rank_of
from simulate_rendezvous import simulated
from simulate_supervision import supervision
from simulate_tables import crossing

from distboot.rendezvous.messages import Go, Members, Ready
from distboot.rendezvous.protocol import Channel, Frames, decode

MICRO = 1e-6
COSTS = Costs(
    turn=10 * MICRO, accept=11 * MICRO, hello=19 * MICRO, record=23 * MICRO, drop=18 * MICRO, ready=8 * MICRO,
    send=13 * MICRO, byte=0.3e-9, membership=4 * MICRO, prove=0.01 * MICRO, read_membership=0.3 * MICRO,
    idle=0.95 * MICRO, wake=0.1 * MICRO, watch=22 * MICRO, end=12 * MICRO, tell=17 * MICRO,
    peer=36 * MICRO, memory=1300, base=22e6, hello_bytes=78, challenge_bytes=65, record_bytes=450, ready_bytes=76,
    go_bytes=43, beat_bytes=26, verdict_bytes=168,
)  # fmt: skip


def test_ranks_of_the_measurement_are_taken_by_the_real_rank_0() -> None:
    first = Rank0(rank_of(0, 20), ready=Ready())
    lines = [(line, peer(first.port, HELLO)) for line in lines_of(20)]
    for line, connection in lines:
        assert b"challenge" in connection.recv(1000)
        connection.sendall(line.record)
    for line, connection in lines:
        (answer,) = Frames(1 << 20).feed(connection.recv(65536))
        assert (
            decode(answer.body, Members)
            == replace(membership_of_nodes(20), master_addr="127.0.0.1").as_message()
        )
        connection.sendall(line.ready())
    first.met()
    first.close()
    assert [answers(connection)[0] for _, connection in lines] == [Go()] * 19


def test_memberships_are_as_long_as_real_ones() -> None:
    for world_size in (8, 20_000):
        assert membership_bytes(world_size) == len(
            Channel().sign(membership_of_nodes(world_size).as_message())
        )
    assert membership_bytes(20_000) < 20_000


def test_the_dead_on_arrival_are_named_at_the_join_timeout() -> None:
    found = simulated(Setting(1000, dead=0.01, join_timeout=60), COSTS)
    assert found.membership is None
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
    assert found.membership is not None


def test_answers_that_the_link_does_not_carry_in_time_are_counted() -> None:
    found = simulated(Setting(4000, link=2e6), COSTS)
    assert found.membership is None
    assert 0 < found.unanswered < 4000


def test_one_seed_one_outcome() -> None:
    setting = Setting(2000, slow=0.01, dead=0.001, seed=7)
    assert simulated(setting, COSTS) == simulated(setting, COSTS)
    assert simulated(setting, COSTS) != simulated(replace(setting, seed=8), COSTS)


def test_heartbeats_take_no_more_of_a_core_than_promised() -> None:
    for world_size, share in ((1000, 0.001), (10_000, 0.01)):
        assert share / 2 < supervision(COSTS, world_size).share < 1.1 * share


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
