"""`init("tensorflow")` on the real TensorFlow: strategies, `TF_CONFIG`, who serves and until when, signals, proxies."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from inside import free_port
from launched import MPI_ENV, TWO_OF_MPIRUN, json_lines, needs_mpirun
from supervised import until
from tensorflows import LIMIT, QUIET, ByHand, Ranks, by_rank, needs_tensorflow, tasks

pytestmark = [pytest.mark.all, needs_tensorflow]

# Nobody listens there: with a way to the peers through it, TensorFlow waits for ever.
PROXY = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "example.org"}

# What a rank of MultiWorkerMirroredStrategy sees. TensorFlow's own handler of SIGTERM is seen from C only.
_WORKER = """
import ctypes, json, os, signal, sys
import distboot
def handler():
    action = ctypes.create_string_buffer(512)
    ctypes.CDLL(None).sigaction(signal.SIGTERM, None, action)
    return action.raw[:8]  # where it begins, or SIG_DFL
arguments = {}
before = handler()
ctx = distboot.init("tensorflow", join_timeout=90, **arguments)
handled = handler() == before
import tensorflow as tf
def total():
    return tf.distribute.get_replica_context().all_reduce("sum", tf.constant(ctx.rank + 1.0))
line = {
    "rank": ctx.rank, "launcher": ctx.launcher, "task": [ctx.task_type, ctx.task_id], "handled": handled,
    "strategy": type(ctx.strategy).__name__, "total": float(tf.function(lambda: ctx.strategy.run(total))()),
    "config": json.loads(os.environ.get("TF_CONFIG", "null")), "no_proxy": os.environ.get("no_grpc_proxy"),
}
with ctx.main_first():
    pass
ctx.barrier()
sys.stdout.write(json.dumps(line) + "\\n")
"""


@needs_mpirun
def test_multi_worker_under_mpirun(run: Run, tmp_path: Path) -> None:
    # Without failure detection nobody has a handler of SIGTERM but TensorFlow.
    env = {**MPI_ENV, **QUIET, **PROXY, "DISTBOOT_FAILURE_DETECTION": "0"}
    (tmp_path / "train.py").write_text(
        _WORKER.replace("{}", '{"backend": "ring", "timeout": 120}', 1)
    )
    command = [*TWO_OF_MPIRUN, sys.executable, "train.py"]
    done = run(*command, env=env, timeout=LIMIT)
    lines: list[dict[str, Any]] = json_lines(done)
    assert [line["task"] for line in lines] == [["worker", 0], ["worker", 1]]
    assert {(line["launcher"], line["strategy"]) for line in lines} == {
        ("openmpi", "CollectiveAllReduceStrategy")
    }
    assert [line["total"] for line in lines] == [3.0, 3.0]
    assert all(line["handled"] for line in lines)
    clusters = [line["config"]["cluster"] for line in lines]
    assert clusters[0] == clusters[1]
    assert [len(addresses) for addresses in clusters[0].values()] == [2]
    assert [line["no_proxy"] for line in lines] == ["example.org,127.0.0.1"] * 2
    assert not re.search("^E[0-9]{4} ", done.stderr, re.MULTILINE), done.stderr


_FITS = """
sys.stdout.flush()
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(tf.ones((4, 2)), tf.ones((4, 1)), verbose=0)
"""
_MIRRORED = """
import json, os, sys
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
one = lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))
line = {"rank": strategy.cluster_resolver.task_id, "total": float(tf.function(lambda: strategy.run(one))())}
sys.stdout.write(json.dumps(line) + "\\n")
"""


def _first_line(ranks: Ranks, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        next(line for line in ranks.output(rank).splitlines() if line.startswith("{"))
    )
    return found


def _keras_3_is_named(ranks: Ranks, rank: int) -> bool:
    hint = (
        f"distboot: rank {rank} on {os.uname().nodename}: hint: fit() of Keras 3 "
        "does not work under a strategy"
    )
    return ranks.output(rank).count(hint) == 1


# Azure ML's empty list of parameter servers makes TensorFlow crash.
def test_given_tf_config_wins_and_warns_of_keras(by_hand: ByHand) -> None:
    given = tasks(chief=1, worker=1, ps=0)
    ranks = by_hand(
        _WORKER + "strategy = ctx.strategy" + _FITS,
        each=given,
        env={"DISTBOOT_FAILURE_DETECTION": "0"},
    )
    assert ranks.codes() == [1, 1]
    for rank, task in enumerate(("chief", "worker")):
        line = _first_line(ranks, rank)
        config = json.loads(given[rank]["TF_CONFIG"])
        assert (line["launcher"], line["task"], line["total"]) == ("tf_config", [task, 0], 3.0)
        assert config["cluster"].pop("ps") == []
        assert line["config"] == config
        assert _keras_3_is_named(ranks, rank)


def test_the_same_for_a_script_as_it_is(by_hand: ByHand) -> None:
    wrapper = ["-m", "distboot", "run", "--", sys.executable]  # as in an ENTRYPOINT
    ranks = by_hand(
        _MIRRORED + _FITS, each=tasks(worker=2, ps=0), wrapper=wrapper, env={"DISTBOOT_GRACE": "1"}
    )
    assert all(ranks.codes())
    assert [_first_line(ranks, rank) for rank in (0, 1)] == [
        {"rank": 0, "total": 2.0},
        {"rank": 1, "total": 2.0},
    ]
    assert any(_keras_3_is_named(ranks, rank) for rank in (0, 1))


def test_wrapper_makes_tf_config_for_an_unmodified_script(by_hand: ByHand) -> None:
    ranks = by_hand(
        _MIRRORED, env=PROXY, wrapper=["-m", "distboot", "run", "--framework", "tensorflow"]
    )
    assert ranks.lines() == [{"rank": 0, "total": 2.0}, {"rank": 1, "total": 2.0}]


@pytest.mark.parametrize("supervision", ["1", "0"])
def test_sigterm_ends_a_rank_that_waits_for_others(by_hand: ByHand, supervision: str) -> None:
    # Rank 0 waits in a collective operation, in C, for a rank that never comes to it.
    script = """
import os, time
from pathlib import Path
import distboot
ctx = distboot.init("tensorflow", join_timeout=90)
import tensorflow as tf
def total():
    return tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))
reduce = tf.function(lambda: ctx.strategy.run(total))
reduce()
Path(f"ready-{ctx.rank}").touch()
if ctx.rank == 0:
    reduce()
time.sleep(600)
"""
    ranks = by_hand(
        script, env={"DISTBOOT_FAILURE_DETECTION": supervision, "DISTBOOT_GRACE": "600"}
    )
    ranks.wait_for("ready-0")
    ranks.wait_for("ready-1")
    if supervision == "1":
        ranks.processes[1].kill()  # and failure detection sends SIGTERM
    else:
        ranks.processes[0].send_signal(signal.SIGTERM)
    assert ranks.processes[0].wait(60) == -signal.SIGTERM, ranks.output(0)


_FAILING = """
import json, os, sys
import distboot
exec(os.environ.get("FIRST", ""))
for arguments, more in json.loads(os.environ.get("ATTEMPTS", "[[{}, {}]]")):
    earlier = dict(os.environ)
    os.environ.update(more)
    before = dict(os.environ)
    try:
        distboot.init("tensorflow", join_timeout=90, **arguments)
    except distboot.DistbootError as error:
        line = {"rank": os.environ["RANK"], "code": error.code, "text": str(error), "same": dict(os.environ) == before}
        sys.stdout.write(json.dumps({**line, "imported": "tensorflow" in sys.modules}) + "\\n")
    os.environ.clear()
    os.environ.update(earlier)
"""


def test_tensorflow_used_before(by_hand: ByHand) -> None:
    first, second = by_rank(2)
    lines = by_hand(
        _FAILING, each=[first, {**second, "FIRST": "import tensorflow as tf; tf.constant(1)"}]
    ).lines()
    assert [line["code"] for line in lines] == ["already-initialized"] * 2
    assert all("was used before init()" in line["text"] for line in lines)


_BROKEN = {"cluster": {"worker": ["127.0.0.1", "b:99999"]}, "task": {"type": "worker", "index": 0}}
_REFUSED: list[tuple[dict[str, object], dict[str, str], str, list[str]]] = [
    (
        {"strategy": "mirored"},
        {},
        "usage",
        [("strategy='mirored' is not one of multi_worker_mirrored, ")],
    ),
    ({"strategy": "mirrored"}, {}, "usage", ["for one process, and the job has 2"]),
    (
        {"backend": "gloo"},
        {},
        "usage",
        [("backend='gloo' is not one of TensorFlow's: auto, ring, nccl")],
    ),
    (
        {"strategy": "parameter_server", "timeout": 5},
        {},
        "usage",
        ["not for strategy='parameter_server'"],
    ),
    (
        {"strategy": "parameter_server"},
        {},
        "usage",
        [("needs a TF_CONFIG with the tasks chief, worker and ps")],
    ),
    ({}, {"DISTBOOT_RENDEZVOUS": "0"}, "rendezvous-needed", ["there is no TF_CONFIG"]),
    (
        {},
        {"TF_CONFIG": json.dumps(_BROKEN)},
        "broken-environment",
        ["worker 0 is not 'host:port'", "worker 1 is not a port"],
    ),
]


def test_refused_before_tensorflow_is_imported(by_hand: ByHand) -> None:
    attempts = json.dumps([row[:2] for row in _REFUSED])
    lines = by_hand(_FAILING, env={"NODE_RANK": "0", "ATTEMPTS": attempts}).lines()
    found = [(line["code"], line["imported"], line["same"]) for line in lines]
    assert found == [(code, False, True) for _, _, code, _ in _REFUSED] * 2, lines
    for line, (_, _, _, said) in zip(lines, _REFUSED * 2, strict=True):
        assert [text for text in said if text not in line["text"]] == []


def test_addresses_that_lead_nowhere(by_hand: ByHand) -> None:
    script = """
import distboot
from distboot.frameworks import tensorflow
deadline = tensorflow.deadline
tensorflow.deadline = lambda limit, *errors, **more: deadline(3.0, *errors, **more)
distboot.init("tensorflow", join_timeout=90)
"""
    # RFC 5737: for documentation only
    nowhere = {"worker": [f"192.0.2.1:{free_port()}", f"192.0.2.1:{free_port()}"]}
    tasks = [
        {"TF_CONFIG": json.dumps({"cluster": nowhere, "task": {"type": "worker", "index": i}})}
        for i in (0, 1)
    ]
    each = [{**task, **place} for task, place in zip(tasks, by_rank(2), strict=True)]
    ranks = by_hand(script, each=each)
    assert 128 + signal.SIGKILL in ranks.codes()
    said = (
        r"^distboot: error\[join-timeout\]: rank \d on \S+: TensorFlow's tasks did "
        r"not find each other within"
    )
    assert any(re.search(said, ranks.output(rank), re.MULTILINE) for rank in (0, 1)), ranks.output(
        0
    )
    # And not only that it was killed.
    said = r": (?:rank \d )?failed first: error\[join-timeout\]: "
    until(lambda: re.search(said, ranks.output(0)))  # its agent says it, which may end after it


def test_one_process(run: Run) -> None:
    script = """
import os
import distboot
with distboot.init("tensorflow") as ctx:
    print(type(ctx.strategy).__name__, ctx.task_type, ctx.task_id, "TF_CONFIG" in os.environ)
    with ctx.main_first():
        pass
    ctx.barrier()
with distboot.init("tensorflow", strategy="multi_worker_mirrored") as ctx:
    print(type(ctx.strategy).__name__, ctx.strategy.num_replicas_in_sync)
"""
    done = run(sys.executable, "-c", script, env=QUIET)
    expected = ["_DefaultDistributionStrategy worker 0 False", "CollectiveAllReduceStrategy 1"]
    assert done.stdout.splitlines() == expected, done.stderr


_SERVERS = """
import json, os, sys
from pathlib import Path
import distboot
ctx = distboot.init("tensorflow")
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
    if "FOREVER" in os.environ:
        Path("trained").touch()
        while True:
            coordinator.schedule(step)
            coordinator.join()
sys.stdout.write(json.dumps(line) + "\\n")
"""


def test_parameter_servers_end_with_the_chief(by_hand: ByHand) -> None:
    (chief,) = by_hand(_SERVERS, each=tasks(chief=1, worker=2, ps=1)).lines()
    assert (chief["rank"], chief["task"]) == (0, ["chief", 0])
    assert chief["strategy"] == "ParameterServerStrategyV2"
    assert (chief["weight"], "/job:ps/" in chief["device"]) == (4.0, True)


def test_evaluator_of_a_cluster_with_servers_is_alone(by_hand: ByHand) -> None:
    config = json.loads(tasks(chief=1, worker=1, ps=1)[0]["TF_CONFIG"])
    config["task"] = {"type": "evaluator", "index": 0}
    (line,) = by_hand(_SERVERS, each=[{"TF_CONFIG": json.dumps(config)}]).lines()
    assert (line["task"], line["strategy"]) == (["evaluator", 0], "_DefaultDistributionStrategy")


# As in TensorFlow's guide: a server has no end.
_UNMODIFIED = """
import json, os, sys
import tensorflow as tf
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    spec = resolver.cluster_spec()
    tf.distribute.Server(spec, job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc").join()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weight = tf.Variable(1.0)
coordinator.schedule(tf.function(lambda: weight.assign_add(1.0)))
coordinator.join()
line = {"rank": int(os.environ["RANK"]), "task": resolver.task_type, "weight": weight.numpy().item()}
sys.stdout.write(json.dumps(line) + "\\n")
"""
_WRAPPER = ["-m", "distboot", "run", "--framework", "tensorflow"]


def test_servers_of_an_unmodified_script_end_with_chief(by_hand: ByHand) -> None:
    ranks = by_hand(_UNMODIFIED, each=tasks(worker=2, ps=1), wrapper=_WRAPPER)
    assert ranks.lines() == [{"rank": 0, "task": "chief", "weight": 2.0}]
    assert "all ended well; exit codes: 0 (ranks 0-2)" in ranks.output(0)


def test_parameter_servers_without_a_worker(by_hand: ByHand) -> None:
    ranks = by_hand(_UNMODIFIED, each=tasks(worker=1, ps=1), wrapper=_WRAPPER)
    assert ranks.codes() == [78, 78]
    assert "TF_CONFIG has no chief, which ParameterServerStrategy needs" in ranks.output(0)
    assert "worker_count: 2" in ranks.output(1)


def test_killed_server_ends_the_chief(by_hand: ByHand) -> None:
    # As Azure ML has it: no chief
    ranks = by_hand(_SERVERS, each=tasks(worker=2, ps=1), env={"FOREVER": "1"})
    ranks.wait_for("trained")
    ranks.processes[2].kill()
    assert ranks.codes()[0] != 0
    assert re.search(
        r"^distboot: rank 0 on \S+: rank 2 failed first: killed by SIGKILL",
        ranks.output(0),
        re.MULTILINE,
    )


def test_unsupervised_server_fails_when_the_chief_is_killed(
    by_hand: ByHand,
) -> None:
    alone = {"FOREVER": "1", "DISTBOOT_FAILURE_DETECTION": "0"}
    ranks = by_hand(_SERVERS, each=tasks(chief=1, worker=1, ps=1), env=alone)
    ranks.wait_for("trained")
    ranks.processes[0].kill()
    assert ranks.codes()[1:] == [75, 75]
    assert "error[rank-failed]" in ranks.output(1)


def test_chief_that_cannot_start_fails_its_servers(by_hand: ByHand) -> None:
    fails = """
import tensorflow as tf
def fail(*_):
    raise RuntimeError("no such thing")
if '"type": "chief"' in os.environ["TF_CONFIG"]:
    tf.distribute.ParameterServerStrategy = fail
"""
    ranks = by_hand("import os\n" + fails + _SERVERS, each=tasks(chief=1, worker=1, ps=1))
    assert all(ranks.codes())
    assert "error[strategy-failed]: rank 0 on" in ranks.output(0)
    assert "TensorFlow could not start ParameterServerStrategy: no such thing" in ranks.output(0)
    assert "rank 0 failed first" in ranks.output(2)
