"""TF_CONFIG: roles become ranks, and every problem is named at once."""

import json
import sys
from typing import Any

import pytest
from captured import refused
from conftest import Run
from documented import tf_config
from inside import DERIVED_PORTS, FIELDS, corrected

from distboot import detect

_WITH_PS = {"chief": ["a:1"], "worker": ["b:1", "b:2"], "ps": ["c:1"]}


@pytest.mark.parametrize(
    ("task", "index", "rank", "local", "node_rank"),
    [
        ("chief", 0, 0, (0, 1), 0),
        ("worker", 0, 1, (0, 2), 1),
        ("worker", 1, 2, (1, 2), 1),
        ("ps", 0, 3, (0, 1), 2),
    ],
)
def test_tasks_are_ranked(
    task: str, index: int, rank: int, local: tuple[int, int], node_rank: int
) -> None:
    placement = detect(tf_config(task, index, **_WITH_PS))
    assert (placement.launcher, placement.rank, placement.world_size) == ("tf_config", rank, 4)
    assert (placement.local_rank, placement.local_world_size) == local
    assert (placement.node_rank, placement.num_nodes) == (node_rank, 3)
    assert placement.master_addr == "a"
    assert placement.master_port in DERIVED_PORTS, (
        "the port in TF_CONFIG belongs to TensorFlow's own server"
    )
    assert placement.master_port == detect(tf_config("chief", 0, **_WITH_PS)).master_port, (
        "all tasks derive the same"
    )


def test_first_task_is_rank_0_on_any_platform() -> None:
    placement = detect(
        {**tf_config("worker", 0, **_WITH_PS), "AZ_BATCH_MASTER_NODE": "10.0.0.9:6000"}
    )
    assert (placement.platform, placement.master_addr) == ("azureml", "a")


def test_evaluator_runs_alone() -> None:
    placement = detect(tf_config("evaluator", 0))
    assert (placement.rank, placement.world_size) == (0, 1)
    assert placement.notes


def _corrected(environ: dict[str, str]) -> tuple[dict[str, list[str]], list[object]]:
    """Cluster and task that TensorFlow gets: of the same rank, and with nothing left to correct."""
    after = {**environ, **corrected(environ)}
    before = detect(environ)
    now = detect(after)
    assert [getattr(now, field) for field in FIELDS] == [getattr(before, field) for field in FIELDS]
    assert not any("TF_CONFIG" in note for note in now.notes)
    assert corrected(after) == {}
    config = json.loads(after["TF_CONFIG"])
    return config["cluster"], list(config["task"].values())


def test_empty_lists_are_left_out_and_said() -> None:
    environ = tf_config("worker", 1, worker=["a:1", "b:1"], ps=[], chief=[])
    assert _corrected(environ) == ({"worker": ["a:1", "b:1"]}, ["worker", 1])
    assert detect(environ).notes[0].startswith("TF_CONFIG: the empty list of chief, ps is left out")


@pytest.mark.parametrize(
    ("given", "task"),
    [
        (("worker", 0), ["chief", 0]),
        (("worker", 1), ["worker", 0]),
        (("worker", 2), ["worker", 1]),
        (("ps", 1), ["ps", 1]),
        (("evaluator", 0), ["evaluator", 0]),
    ],
)
def test_worker_0_is_the_chief_of_parameter_servers(
    given: tuple[str, int], task: list[object]
) -> None:
    environ = tf_config(*given, ps=["a:1", "b:1"], worker=["a:2", "b:2", "c:2"])
    assert _corrected(environ) == (
        {"chief": ["a:2"], "ps": ["a:1", "b:1"], "worker": ["b:2", "c:2"]},
        task,
    )
    assert "worker 0 becomes" in detect(environ).notes[0]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"TF_CONFIG": "{"},
        {"TF_CONFIG": '{"cluster": ["ps"]}'},
        tf_config("ps", 0, chief=["a:1"], worker=["a:2", "a:3"], ps=["a:4"]),
        tf_config("ps", 0, worker=["a:2"], ps=["a:4"]),  # nobody would be left to be a worker
        tf_config("worker", 0, worker="ab", ps=["a:4"]),
    ],
)
def test_what_is_not_corrected(environ: dict[str, str]) -> None:
    assert corrected(environ) == {}


def test_corrections_reach_the_command_as_the_launchers(run: Run) -> None:
    given = tf_config("worker", 1, worker=["127.0.0.1:1", "127.0.0.1:2"], ps=[])
    command = [sys.executable, "-m", "distboot", "run", "--", sys.executable, "-m", "distboot"]
    env = {**given, "DISTBOOT_RENDEZVOUS": "0"}
    exported = json.loads(run(*command, "env", "--json", env=env).stdout)
    assert "TF_CONFIG" not in exported  # which has it already
    shown: dict[str, Any] = json.loads(run(*command, "show", "--json", env=env).stdout)
    assert (shown["launcher"], shown["rank"], shown["notes"]) == ("tf_config", 1, [])


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"TF_CONFIG": ""}, "is not JSON"),
        ({"TF_CONFIG": "[" * 100_000}, "is not JSON"),
        ({"TF_CONFIG": "[]"}, "is not a JSON object"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "no 'task'"),
        ({"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'}, "no 'cluster'"),
        (
            {"TF_CONFIG": '{"sparseCluster": {}, "task": {"type": "worker", "index": 0}}'},
            "no fixed ranks",
        ),
        ({"TF_CONFIG": "{" + " " * 5_000_000}, "the longest that is read"),
        (tf_config("worker", 2), "'worker' 2 is not in its cluster"),
        (tf_config("worker", "0"), "task index '0'"),
        (tf_config("worker", True), "task index True"),
        (tf_config("worker", -1), "task index -1"),
        (tf_config("evaluator", "x"), "task index 'x'"),
        (tf_config("worker", 0, worker=["a:1", "a:1"]), "both worker 0 and worker 1"),
        (tf_config("worker", 0, worker=["A:1", "a:1"]), "both worker 0 and worker 1"),
        (
            tf_config("worker", 0, worker=["[fd00::4]:1", "[fd00:0::4]:1"]),
            "both worker 0 and worker 1",
        ),
        (
            tf_config("worker", 0, worker=["a:1", "127.0.0.1:2"]),
            "mixes the loopback address '127.0.0.1'",
        ),
        (tf_config("worker", 0, worker=["a"]), "not 'host:port'"),
        (tf_config("worker", 0, worker=["a:99999"]), "not a port"),
        (tf_config("worker", 0, worker=[]), "'worker' 0 is not in its cluster"),
        (tf_config("worker", 0, worker="a:1"), "not a list"),
        (tf_config("chief", 0, chief=["a:1", "b:1"]), "more than one chief"),
        (tf_config("worker", 0, worker=["a:1"], cook=["b:1"]), "unknown type 'cook'"),
        (tf_config(["worker"], 0), "not in its cluster"),  # type: ignore[arg-type]
    ],
)
def test_broken_tf_config_is_refused(environ: dict[str, str], problem: str) -> None:
    refusal = refused(environ)
    assert refusal.code == "broken-environment"
    assert problem in refusal.message


def test_problems_of_tf_config_come_together_once() -> None:
    message = refused(tf_config("worker", 7, worker=["a:0", "b"], cook=["c:1"])).message
    for problem in ("'a:0'", "'b'", "'cook'", "'worker' 7"):
        assert problem in message
    assert "not in its cluster" not in refused(tf_config("worker", 0, worker=["a"])).message
