"""`init("tensorflow", strategy="parameter_server")`: who serves, until when, and what a failure does."""

from __future__ import annotations

import re

from tensorflows import ByHand, needs_tensorflow, tasks

pytestmark = needs_tensorflow

_SERVERS = """
import json, os, sys
from pathlib import Path
import distboot
ctx = distboot.init("tensorflow", strategy="parameter_server", ps=1, evaluator=os.environ["EVALUATOR"] == "1")
import tensorflow as tf
with ctx.main_first():  # nobody else comes
    pass
ctx.barrier()
line = {"rank": ctx.rank, "task": [ctx.task_type, ctx.task_id], "strategy": type(ctx.strategy).__name__}
if ctx.task_type == "chief":
    coordinator = tf.distribute.coordinator.ClusterCoordinator(ctx.strategy)
    with ctx.strategy.scope():
        weight = tf.Variable(1.0)
    @tf.function
    def step():
        weight.assign_add(1.0)
    for _ in range(3):
        coordinator.schedule(step)
    coordinator.join()
    line |= {"weight": weight.numpy().item(), "device": weight.device}
    if os.environ["EVALUATOR"] == "0":
        Path("trained").touch()
        while True:
            coordinator.schedule(step)
            coordinator.join()
sys.stdout.write(json.dumps(line) + "\\n")
"""


def test_parameter_servers_end_with_the_chief(by_hand: ByHand) -> None:
    chief, evaluator = by_hand(_SERVERS, 4, env={"EVALUATOR": "1"}).lines()
    assert (chief["rank"], chief["task"], chief["strategy"]) == (0, ["chief", 0], "ParameterServerStrategyV2")
    assert (chief["weight"], "/job:ps/" in chief["device"]) == (4.0, True)
    assert (evaluator["rank"], evaluator["task"]) == (3, ["evaluator", 0])
    assert evaluator["strategy"] == "_DefaultDistributionStrategy"


def test_killed_server_ends_the_chief(by_hand: ByHand) -> None:
    ranks = by_hand(_SERVERS, each=tasks(chief=1, worker=1, ps=1), env={"EVALUATOR": "0"})
    ranks.wait_for("trained")
    ranks.processes[2].kill()
    assert ranks.codes()[0] != 0
    assert re.search(r"^distboot: rank 0 on \S+: rank 2 failed first: killed by SIGKILL", ranks.output(0), re.MULTILINE)


def test_without_the_lifeline_a_server_does_not_end_well_when_the_chief_is_killed(by_hand: ByHand) -> None:
    ranks = by_hand(_SERVERS, each=tasks(chief=1, worker=1, ps=1), env={"EVALUATOR": "0", "DISTBOOT_LIFELINE": "0"})
    ranks.wait_for("trained")
    ranks.processes[0].kill()
    assert ranks.codes()[1:] == [1, 1]
    assert "error[rank-failed]" in ranks.output(1)


def test_chief_that_cannot_start_is_no_good_end_of_the_servers(by_hand: ByHand) -> None:
    fails = """
import tensorflow as tf
def fail(*_):
    raise RuntimeError("no such thing")
if os.environ["RANK"] == "0":
    tf.distribute.ParameterServerStrategy = fail
os.environ["EVALUATOR"] = "0"
"""
    ranks = by_hand("import os\n" + fails + _SERVERS, 3)
    assert all(ranks.codes())
    assert "error[strategy-failed]: rank 0 on" in ranks.output(0)
    assert "TensorFlow could not start ParameterServerStrategy: no such thing" in ranks.output(0)
    assert "rank 0 failed first" in ranks.output(2)
