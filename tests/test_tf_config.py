"""TF_CONFIG: roles become ranks, and every problem is named at once."""

from __future__ import annotations

import pytest
from documented import tf_config

from distboot import DistbootError, detect
from distboot.address import DERIVED_PORTS

_WITH_PS = {"chief": ["a:1"], "worker": ["b:1", "b:2"], "ps": ["c:1"]}


@pytest.mark.parametrize(
    ("task", "index", "rank", "local", "node_rank"),
    [("chief", 0, 0, (0, 1), 0), ("worker", 0, 1, (0, 2), 1), ("worker", 1, 2, (1, 2), 1), ("ps", 0, 3, (0, 1), 2)],
)
def test_tasks_are_ranked_chief_workers_ps(
    task: str, index: int, rank: int, local: tuple[int, int], node_rank: int
) -> None:
    placement = detect(tf_config(task, index, **_WITH_PS))
    assert (placement.launcher, placement.rank, placement.world_size) == ("tf_config", rank, 4)
    assert (placement.local_rank, placement.local_world_size) == local
    assert (placement.node_rank, placement.num_nodes) == (node_rank, 3)
    assert placement.master_addr == "a"
    assert placement.master_port in DERIVED_PORTS, "the port in TF_CONFIG belongs to TensorFlow's own server"


def test_all_tasks_derive_the_same_port() -> None:
    tasks = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
    assert len({detect(tf_config(task, index, **_WITH_PS)).master_port for task, index in tasks}) == 1


def test_first_task_is_rank_0_also_where_the_platform_names_another_node() -> None:
    placement = detect({**tf_config("worker", 0, **_WITH_PS), "AZ_BATCH_MASTER_NODE": "10.0.0.9:6000"})
    assert (placement.platform, placement.master_addr) == ("azureml", "a")


def test_evaluator_runs_alone() -> None:
    placement = detect(tf_config("evaluator", 0))
    assert (placement.rank, placement.world_size) == (0, 1)
    assert placement.notes


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"TF_CONFIG": "{"}, "is not JSON"),
        ({"TF_CONFIG": ""}, "is not JSON"),
        ({"TF_CONFIG": "[" * 100_000}, "is not JSON"),
        ({"TF_CONFIG": "[]"}, "is not a JSON object"),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, "no 'task'"),
        ({"TF_CONFIG": '{"task": {"type": "worker", "index": 0}}'}, "no 'cluster'"),
        ({"TF_CONFIG": '{"sparseCluster": {}, "task": {"type": "worker", "index": 0}}'}, "no fixed ranks"),
        ({"TF_CONFIG": "{" + " " * 5_000_000}, "the longest that is read"),
        (tf_config("worker", 2), "'worker' 2 is not in its cluster"),
        (tf_config("worker", "0"), "task index '0'"),
        (tf_config("worker", True), "task index True"),
        (tf_config("worker", -1), "task index -1"),
        (tf_config("evaluator", "x"), "task index 'x'"),
        (tf_config("master", 0, master=["a:1"]), "rename it"),
        (tf_config("worker", 0, worker=["a:1", "a:1"]), "both worker 0 and worker 1"),
        (tf_config("worker", 0, worker=["A:1", "a:1"]), "both worker 0 and worker 1"),
        (tf_config("worker", 0, worker=["[fd00::4]:1", "[fd00:0::4]:1"]), "both worker 0 and worker 1"),
        (tf_config("worker", 0, worker=["a:1", "127.0.0.1:2"]), "mixes the loopback address '127.0.0.1'"),
        (tf_config("worker", 0, worker=["a"]), "not 'host:port'"),
        (tf_config("worker", 0, worker=["a:99999"]), "not a port"),
        (tf_config("worker", 0, worker=[]), "not a list"),
        (tf_config("chief", 0, chief=["a:1", "b:1"]), "more than one chief"),
        (tf_config("worker", 0, worker=["a:1"], cook=["b:1"]), "unknown type 'cook'"),
        (
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}, "task": {"type": ["worker"], "index": 0}}'},
            "not in its cluster",
        ),
    ],
)
def test_broken_tf_config_is_refused(environ: dict[str, str], problem: str) -> None:
    with pytest.raises(DistbootError) as refusal:
        detect(environ)
    assert refusal.value.code == "broken-environment"
    assert problem in refusal.value.message


def test_broken_address_of_the_own_task_is_one_problem() -> None:
    with pytest.raises(DistbootError) as refusal:
        detect(tf_config("worker", 0, worker=["a"]))
    assert "not in its cluster" not in refusal.value.message


def test_all_problems_of_tf_config_come_at_once() -> None:
    with pytest.raises(DistbootError) as refusal:
        detect(tf_config("worker", 7, worker=["a:0", "b"], cook=["c:1"]))
    for problem in ("'a:0'", "'b'", "'cook'", "'worker' 7"):
        assert problem in refusal.value.message
