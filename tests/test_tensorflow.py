"""`init("tensorflow")` on the real TensorFlow: strategies, `TF_CONFIG`, who serves and until when, signals, proxies."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import pytest
from conftest import Run
from launched import MPI_ENV, MPIRUN, json_lines, needs_mpirun
from lifelines import until

from distboot import DistbootError
from distboot.frameworks import _tf_cluster
from distboot.frameworks._options import Options
from distboot.frameworks._tf_cluster import Cluster, Plan, Task
from distboot.frameworks._tf_devices import own_gpus
from distboot.placement import Placement
from distboot.rendezvous import free_port
from distboot.rollcall.meeting import Meeting
from distboot.roster import Roster

pytestmark = pytest.mark.skipif(
    not any(Path(path, "tensorflow").is_dir() for path in sys.path), reason="tensorflow is not installed"
)

LIMIT = 180  # seconds for a job, on a machine that has other work, too
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}  # errors only
# Nobody listens there: with a way to the peers through it, TensorFlow waits for ever.
PROXY = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "example.org"}


class Ranks:
    """Processes started side by side in one folder, each with its output in a file."""

    def __init__(self, folder: Path, command: Sequence[str], environs: Sequence[Mapping[str, str]]) -> None:
        self.folder = folder
        self.processes = []
        for rank, environ in enumerate(environs):
            with open(folder / f"output-{rank}", "wb") as output:
                self.processes.append(
                    subprocess.Popen(
                        command, env=environ, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                        start_new_session=True,
                    )
                )  # fmt: skip

    def wait_for(self, name: str) -> None:
        """Wait for a file that a script makes."""
        path = self.folder / name
        until(lambda: path.exists() or any(process.poll() is not None for process in self.processes), LIMIT)
        assert path.exists(), "\n".join(self.output(rank) for rank in range(len(self.processes)))

    def codes(self) -> list[int]:
        return [process.wait(LIMIT) for process in self.processes]

    def output(self, rank: int) -> str:
        return (self.folder / f"output-{rank}").read_text(errors="replace")

    def lines(self) -> list[dict[str, Any]]:
        """The JSON lines of ranks that must all have ended well."""
        codes = self.codes()
        outputs = [self.output(rank) for rank in range(len(codes))]
        assert codes == [0] * len(codes), "\n".join(outputs)
        found = [json.loads(line) for text in outputs for line in text.splitlines() if line.startswith("{")]
        return sorted(found, key=lambda line: int(line["rank"]))


class ByHand(Protocol):
    """Starts a script in several ranks, with `RANK` and its like or with what `each` of them is to have."""

    def __call__(
        self,
        script: str,
        ranks: int = 2,
        *,
        env: Mapping[str, str] = ...,
        each: Sequence[Mapping[str, str]] = ...,
        wrapper: Sequence[str] = ...,
    ) -> Ranks: ...


@contextmanager
def _started(ranks: Ranks) -> Iterator[Ranks]:
    try:
        yield ranks
    finally:
        for process in ranks.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def by_hand(clean_env: dict[str, str], port: int, tmp_path: Path) -> Iterator[ByHand]:
    with ExitStack() as stack:

        def begin(
            script: str,
            ranks: int = 2,
            *,
            env: Mapping[str, str] = {},
            each: Sequence[Mapping[str, str]] = (),
            wrapper: Sequence[str] = (),
        ) -> Ranks:
            (tmp_path / "train.py").write_text(script)
            job = {**clean_env, **QUIET, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **env}
            environs = [{**job, **own} for own in each or _by_rank(ranks)]
            return stack.enter_context(_started(Ranks(tmp_path, [sys.executable, *wrapper, "train.py"], environs)))

        yield begin


def _by_rank(ranks: int) -> list[dict[str, str]]:
    return [
        {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
        for rank in range(ranks)
    ]


def _tasks(**cluster: int) -> list[dict[str, str]]:
    """A TF_CONFIG for each task of a cluster on this host: the number of tasks by type."""
    ports: set[int] = set()
    while len(ports) < sum(cluster.values()):
        ports.add(free_port())
    free = iter(ports)
    addresses = {kind: [f"127.0.0.1:{next(free)}" for _ in range(count)] for kind, count in cluster.items()}
    tasks = [{"type": kind, "index": index} for kind, count in cluster.items() for index in range(count)]
    return [{"TF_CONFIG": json.dumps({"cluster": addresses, "task": task})} for task in tasks]


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
    # Without the lifeline nobody has a handler of SIGTERM but TensorFlow.
    env = {**MPI_ENV, **QUIET, **PROXY, "DISTBOOT_LIFELINE": "0"}
    (tmp_path / "train.py").write_text(_WORKER.replace("{}", '{"backend": "ring", "timeout": 120}', 1))
    command = [str(MPIRUN), "--map-by", ":OVERSUBSCRIBE", "-n", "2", sys.executable, "train.py"]
    done = run(*command, env=env, timeout=LIMIT)
    lines: list[dict[str, Any]] = json_lines(done)
    assert [line["task"] for line in lines] == [["worker", 0], ["worker", 1]]
    assert {(line["launcher"], line["strategy"]) for line in lines} == {("openmpi", "CollectiveAllReduceStrategy")}
    assert [line["total"] for line in lines] == [3.0, 3.0]
    assert all(line["handled"] for line in lines)
    clusters = [line["config"]["cluster"] for line in lines]
    assert clusters[0] == clusters[1]
    assert [len(addresses) for addresses in clusters[0].values()] == [2]
    assert [line["no_proxy"] for line in lines] == ["example.org,127.0.0.1"] * 2
    assert not re.search("^E[0-9]{4} ", done.stderr, re.MULTILINE), done.stderr


def test_given_tf_config_is_used_and_keras_3_is_named(by_hand: ByHand) -> None:
    script = (
        _WORKER
        + """
sys.stdout.flush()
with ctx.strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(tf.ones((4, 2)), tf.ones((4, 1)), verbose=0)
"""
    )
    tasks = _tasks(chief=1, worker=1)
    ranks = by_hand(script, each=tasks, env={"DISTBOOT_LIFELINE": "0"})
    assert ranks.codes() == [1, 1]
    for rank, task in enumerate(("chief", "worker")):
        line = json.loads(next(line for line in ranks.output(rank).splitlines() if line.startswith("{")))
        assert (line["launcher"], line["task"], line["total"]) == ("tf_config", [task, 0], 3.0)
        assert line["config"] == json.loads(tasks[rank]["TF_CONFIG"])
        hint = f"distboot: rank {rank} on {os.uname().nodename}: hint: fit() of Keras 3 does not work under Multi"
        assert hint in ranks.output(rank)
        assert "TF_USE_LEGACY_KERAS=1" in ranks.output(rank)


def test_wrapper_makes_tf_config_for_a_script_as_it_is(by_hand: ByHand) -> None:
    script = """
import json, os, sys
import tensorflow as tf
strategy = tf.distribute.MultiWorkerMirroredStrategy()
one = lambda: tf.distribute.get_replica_context().all_reduce("sum", tf.constant(1.0))
line = {"rank": strategy.cluster_resolver.task_id, "total": float(tf.function(lambda: strategy.run(one))())}
sys.stdout.write(json.dumps(line) + "\\n")
"""
    ranks = by_hand(script, env=PROXY, wrapper=["-m", "distboot", "run", "--framework", "tensorflow"])
    assert ranks.lines() == [{"rank": 0, "total": 2.0}, {"rank": 1, "total": 2.0}]


_SERVERS = """
import json, os, sys
from pathlib import Path
import distboot
ctx = distboot.init("tensorflow", strategy="parameter_server", ps=1, evaluator=os.environ["EVALUATOR"] == "1")
import tensorflow as tf
with ctx.main_first():  # nobody else comes
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
    ranks = by_hand(_SERVERS, each=_tasks(chief=1, worker=1, ps=1), env={"EVALUATOR": "0"})
    ranks.wait_for("trained")
    ranks.processes[2].kill()
    assert ranks.codes()[0] != 0
    assert re.search(r"^distboot: rank 0 on \S+: rank 2 failed first: killed by SIGKILL", ranks.output(0), re.MULTILINE)


# Rank 0 waits in a collective operation, in C, for a rank that never comes to it.
_WAITING = """
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


@pytest.mark.parametrize("lifeline", ["1", "0"])
def test_sigterm_ends_a_rank_that_waits_for_others(by_hand: ByHand, lifeline: str) -> None:
    ranks = by_hand(_WAITING, env={"DISTBOOT_LIFELINE": lifeline, "DISTBOOT_GRACE": "600"})
    ranks.wait_for("ready-0")
    ranks.wait_for("ready-1")
    if lifeline == "1":
        ranks.processes[1].kill()  # and the lifeline sends SIGTERM
    else:
        ranks.processes[0].send_signal(signal.SIGTERM)
    assert ranks.processes[0].wait(60) == -signal.SIGTERM, ranks.output(0)


_FAILING = """
import json, os, sys
import distboot
before = dict(os.environ)
exec(os.environ.get("FIRST", ""))
try:
    distboot.init("tensorflow", join_timeout=90, **json.loads(os.environ.get("ARGUMENTS", "{}")))
except distboot.DistbootError as error:
    sys.stdout.write(json.dumps({"rank": int(os.environ.get("RANK", 0)), "code": error.code, "text": str(error),
                                 "same": dict(os.environ) == before, "imported": "tensorflow" in sys.modules}) + "\\n")
"""


def test_tensorflow_used_before(by_hand: ByHand) -> None:
    first, second = _by_rank(2)
    lines = by_hand(_FAILING, each=[first, {**second, "FIRST": "import tensorflow as tf; tf.constant(1)"}]).lines()
    assert [line["code"] for line in lines] == ["already-initialized"] * 2
    assert all("was used before init()" in line["text"] for line in lines)


def test_broken_tf_config_beside_a_launcher(by_hand: ByHand) -> None:
    broken = {"cluster": {"worker": ["127.0.0.1", "b:99999"]}, "task": {"type": "worker", "index": 0}}
    lines = by_hand(_FAILING, env={"TF_CONFIG": json.dumps(broken)}).lines()
    assert [(line["code"], line["same"]) for line in lines] == [("broken-environment", True)] * 2
    assert all("worker 0 is not 'host:port'" in line["text"] for line in lines), lines
    assert all("worker 1 is not a port" in line["text"] for line in lines), lines


@pytest.mark.parametrize(
    ("arguments", "more", "code", "said"),
    [
        ({"strategy": "mirored"}, {}, "usage", "strategy='mirored' is none: multi_worker_mirrored, parameter_server"),
        ({"strategy": "mirrored"}, {}, "usage", "for one process, and the job has 2"),
        ({"backend": "gloo"}, {}, "usage", "backend='gloo' is none of TensorFlow's: auto, ring, nccl"),
        ({"ps": 1}, {}, "usage", "are for strategy='parameter_server', and strategy=None"),
        ({"strategy": "parameter_server", "timeout": 5}, {}, "usage", "are for strategy='multi_worker_mirrored'"),
        ({"strategy": "parameter_server", "ps": 1}, {}, "usage", "start at least 3 ranks"),
        ({}, {"DISTBOOT_ROLL_CALL": "0"}, "roll-call-needed", "there is no TF_CONFIG"),
    ],
)
def test_refused_before_tensorflow_is_imported(
    by_hand: ByHand, arguments: dict[str, object], more: dict[str, str], code: str, said: str
) -> None:
    lines = by_hand(_FAILING, env={"NODE_RANK": "0", "ARGUMENTS": json.dumps(arguments), **more}).lines()
    assert [(line["code"], line["imported"], line["same"]) for line in lines] == [(code, False, True)] * 2
    assert all(said in line["text"] for line in lines), lines


def test_addresses_that_lead_nowhere(by_hand: ByHand) -> None:
    script = """
import distboot
from distboot.frameworks import tensorflow
deadline = tensorflow.deadline
tensorflow.deadline = lambda limit, *errors: deadline(3.0, *errors)
distboot.init("tensorflow", join_timeout=90)
"""
    nowhere = {"worker": [f"192.0.2.1:{free_port()}", f"192.0.2.1:{free_port()}"]}  # RFC 5737: for documentation only
    tasks = [{"TF_CONFIG": json.dumps({"cluster": nowhere, "task": {"type": "worker", "index": i}})} for i in (0, 1)]
    each = [{**task, **place} for task, place in zip(tasks, _by_rank(2), strict=True)]
    ranks = by_hand(script, each=each, env={"DISTBOOT_LIFELINE": "0"})
    assert ranks.codes() == [-signal.SIGKILL] * 2
    for rank in (0, 1):
        said = (
            rf"^distboot: error\[join-timeout\]: rank {rank} on \S+: TensorFlow's tasks did not find each other within"
        )
        assert re.search(said, ranks.output(rank), re.MULTILINE), ranks.output(rank)


def test_one_process(run: Run) -> None:
    script = """
import os
import distboot
with distboot.init("tensorflow") as ctx:
    print(type(ctx.strategy).__name__, ctx.task_type, ctx.task_id, "TF_CONFIG" in os.environ)
    with ctx.main_first():
        ctx.barrier()
with distboot.init("tensorflow", strategy="multi_worker_mirrored") as ctx:
    print(type(ctx.strategy).__name__, ctx.strategy.num_replicas_in_sync)
"""
    done = run(sys.executable, "-c", script, env=QUIET)
    expected = ["_DefaultDistributionStrategy worker 0 False", "CollectiveAllReduceStrategy 1"]
    assert done.stdout.splitlines() == expected, done.stderr


# ── pieces, without TensorFlow


def _meeting(rank: int, world_size: int, *nodes: Sequence[int]) -> Meeting:
    placement = Placement("torch", None, rank, world_size, None, None, None, None, "127.0.0.1", 29500, None)
    meeting = Meeting(placement, 10.0)
    nodes = nodes or (range(world_size),)
    meeting.roster = Roster(tuple(f"node{index}" for index, _ in enumerate(nodes)), tuple(map(tuple, nodes)))
    return meeting


def _plan(rank: int, world_size: int, offers: Mapping[int, str] = {}, **more: Any) -> Plan:
    meeting = _meeting(rank, world_size)
    meeting.offers = dict(offers)
    return Plan(meeting, more.pop("environ", {}), Options("tensorflow", **more))


def test_roles_follow_the_ranks() -> None:
    plan = _plan(3, 6, {rank: f"a:{rank + 1}" for rank in range(5)}, strategy="parameter_server", ps=2, evaluator=True)
    assert plan.kinds == ["chief", "worker", "worker", "ps", "ps", "evaluator"]
    cluster = plan.completed()
    assert cluster.addresses == {"chief": ["a:1"], "worker": ["a:2", "a:3"], "ps": ["a:4", "a:5"]}
    assert json.loads(cluster.config or "")["task"] == {"type": "ps", "index": 0}


def test_rank_of_tf_config_must_be_that_of_the_launcher() -> None:
    with pytest.raises(DistbootError, match="torch says rank 0 of 2, but TF_CONFIG says rank 1 of 2: task worker 1"):
        _plan(0, 2, environ=_tasks(worker=2)[1])


@pytest.mark.parametrize(
    ("environ", "offers", "said"),
    [
        (_tasks(worker=3)[0], {1: "127.0.0.1:5", 2: "given 5c2f10aa"}, "ranks 0, 2 have a TF_CONFIG, and rank 1 has"),
        ({}, {0: "127.0.0.1:4", 1: "127.0.0.1:5", 2: "given 5c2f10aa"}, "rank 2 has a TF_CONFIG, and ranks 0-1 have"),
        (_tasks(worker=3)[0], {1: "given 5c2f10aa", 2: "given 5c2f10aa"}, "TF_CONFIG of ranks 1-2 is another one"),
    ],
)
def test_ranks_with_different_clusters(environ: dict[str, str], offers: dict[int, str], said: str) -> None:
    plan = _plan(0, 3, offers, environ=environ)
    if plan.offer is not None:
        plan = _plan(0, 3, {0: plan.offer, **offers}, environ=environ)
    with pytest.raises(DistbootError, match=said) as refusal:
        plan.completed()
    assert refusal.value.code == "roster-mismatch"


def test_address_of_a_task_on_ipv6() -> None:
    plan = _plan(0, 2)
    plan._meeting.own_address = "fd00::1"
    port = plan.hold()
    assert port is not None
    with port:
        assert plan.offer == f"[fd00::1]:{port.getsockname()[1]}"


def test_port_of_tf_config_that_is_taken() -> None:
    environ = _tasks(worker=2)[1]
    address = json.loads(environ["TF_CONFIG"])["cluster"]["worker"][1]
    said = f"TF_CONFIG has {address} for worker 1, and this process cannot listen"
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))), pytest.raises(DistbootError, match=said):
        _plan(1, 2, environ=environ).hold()


def test_port_is_held_for_the_server_of_tensorflow_alone() -> None:
    with _tf_cluster._held(0) as held:
        address = ("127.0.0.1", held.getsockname()[1])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            server.bind(address)
            server.listen()
            socket.create_connection(address, timeout=10).close()


@pytest.mark.parametrize(
    ("environ", "exported"),
    [
        ({"no_proxy": "example.org"}, {}),
        ({"https_proxy": "http://p:1"}, {"no_grpc_proxy": "a,b"}),
        ({"grpc_proxy": "http://p:1", "no_proxy": "c,a"}, {"no_grpc_proxy": "c,a,b"}),
        ({"http_proxy": "http://p:1", "no_proxy": "c", "no_grpc_proxy": "b,d"}, {"no_grpc_proxy": "b,d,a"}),
        ({"http_proxy": "http://p:1", "no_proxy": "b,a"}, {}),
        ({"http_proxy": ""}, {}),
    ],
)
def test_proxies(environ: dict[str, str], exported: dict[str, str]) -> None:
    config = json.dumps({"cluster": {"worker": ["a:1", "b:2", "a:3"]}, "task": {"type": "worker", "index": 0}})
    assert Cluster(Task("worker", 0), config, is_given=True).exports(environ) == exported


@pytest.mark.parametrize(
    ("rank", "options", "own"),
    [
        (0, {}, [0]),
        (2, {}, [1]),
        (1, {}, [0, 1]),  # alone on its node
        (0, {"strategy": "parameter_server", "ps": 1, "evaluator": True}, []),  # chief
        (1, {"strategy": "parameter_server", "ps": 1, "evaluator": True}, [0, 1]),  # worker, alone on its node
        (2, {"strategy": "parameter_server", "ps": 1, "evaluator": True}, [0]),  # worker
        (3, {"strategy": "parameter_server", "ps": 1, "evaluator": True}, []),  # ps
        (4, {"strategy": "parameter_server", "ps": 1, "evaluator": True}, [1]),  # evaluator
    ],
)
def test_gpus_of_a_rank(rank: int, options: dict[str, Any], own: list[int]) -> None:
    world_size, nodes = (5, ([0, 2, 3, 4], [1])) if options.get("evaluator") else (3, ([0, 2], [1]))
    shown: list[object] = []
    config = SimpleNamespace(
        list_physical_devices=lambda _: ["gpu0", "gpu1"], set_visible_devices=lambda gpus, _: shown.append(gpus)
    )
    meeting, chosen = _meeting(rank, world_size, *nodes), Options("tensorflow", **options)
    plan = Plan(meeting, {}, chosen)
    assert own_gpus(SimpleNamespace(config=config), meeting, plan, chosen, {}) == own
    assert shown == ([] if len(own) == 2 else [[f"gpu{index}" for index in own]])


@pytest.mark.parametrize(("environ", "enough"), [({}, False), ({"CUDA_VISIBLE_DEVICES": "1"}, True)])
def test_too_few_gpus(environ: dict[str, str], enough: bool) -> None:
    tf = SimpleNamespace(config=SimpleNamespace(list_physical_devices=lambda _: ["gpu0"]))
    meeting, options = _meeting(1, 2), Options("tensorflow")
    plan = Plan(meeting, environ, options)
    if enough:  # each process sees only its own, as number 0
        assert own_gpus(tf, meeting, plan, options, environ) == [0]
        return
    with pytest.raises(DistbootError, match="2 ranks of this node use GPUs, and this one sees 1"):
        own_gpus(tf, meeting, plan, options, environ)
