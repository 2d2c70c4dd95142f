"""Ranks that train a model each: what one rank sees of itself, and when rank 0 warns of them."""

import os
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from inside import Detach, Exited, ExitStatus, SeparateModel, separate_model
from job_rows import USUAL, Event, PureJob, Row, Take, Wait

CONNECTED = separate_model.CONNECTED
HOROVOD = separate_model.HOROVOD
JAX = separate_model.JAX
MPI = separate_model.MPI
NO_COLLECTIVE = separate_model.NO_COLLECTIVE
NO_GROUP = separate_model.NO_GROUP
TENSORFLOW = separate_model.TENSORFLOW

RECORDED = "record: separate_models"
OVER = [
    "say: the warning of separate training no longer holds: the ranks have a way to connect",
    "record: separate_models_over",
]


def reports(rank: int, reason: str = NO_GROUP) -> Event:
    return Take(rank, SeparateModel(reason))


def warning(ranks: str) -> str:
    return (
        f"say: warning: {ranks} train separately: no process group of torch connects them; "
        "start one (distboot.init(), or torch.distributed.init_process_group), and wrap the model "
        "(DistributedDataParallel, …)"
    )


TABLE: dict[str, list[Row]] = {
    "all are named at once, and once": [
        (reports(0), []),
        (reports(3), []),
        (reports(1), []),
        (reports(2), [warning("ranks 0-3"), RECORDED]),
        (reports(2, NO_COLLECTIVE), [RECORDED]),
        (Wait(60), []),
    ],
    "others are waited for": [
        (reports(1), []),
        (Wait(5), []),
        (reports(2), []),
        (Wait(29), []),
        (Wait(1), [warning("ranks 1-2"), RECORDED]),
        (reports(0), [RECORDED]),
    ],
    "one rank may train while the others wait": [
        (reports(0), []),
        (Wait(60), []),
    ],
    "what is taken back in time is not said": [
        (reports(0), []),
        (reports(1), []),
        (reports(1, CONNECTED), []),
        (Wait(60), []),
    ],
    "what is taken back later is over": [
        *[(reports(rank), []) for rank in range(3)],
        (reports(3), [warning("ranks 0-3"), RECORDED]),
        *[(reports(rank, CONNECTED), [RECORDED]) for rank in range(2)],
        (reports(2, CONNECTED), OVER),
        (reports(3, CONNECTED), []),
        (reports(2), []),
        (reports(3), []),
        (Wait(30), [warning("ranks 2-3"), RECORDED]),
    ],
    "a rank that has ended is not waited for": [
        (reports(0), []),
        (reports(1), []),
        (reports(2), []),
        (
            Take(3, Exited(ExitStatus(code=0, when=1.0))),
            [warning("ranks 0-2"), "record: exited 3", RECORDED],
        ),
    ],
    "a reason of another version is left out": [
        *[(reports(rank, "moon"), []) for rank in range(4)],
        (Wait(60), []),
    ],
}


@pytest.mark.parametrize("name", TABLE)
def test_rank_0_warns_of_a_model_each(name: str) -> None:
    job = PureJob(USUAL)
    for event, effects in TABLE[name]:
        assert job.after(event) == list(effects), event


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    """A mock of a framework: this test has to run without them, and in one process."""
    module = ModuleType(name)
    vars(module).update(content)
    monkeypatch.setitem(sys.modules, name, module)


def of_tensorflow(tasks: int | None) -> dict[str, Any]:
    """What the module has in which TensorFlow keeps its cluster; None: no strategy has made one."""
    server = tasks and SimpleNamespace(
        cluster=SimpleNamespace(job=[SimpleNamespace(tasks={}.fromkeys(range(tasks)))])
    )
    context = SimpleNamespace(_server_def=None, _collective_ops_server_def=server)
    return {"context": lambda: context}


def of_size(size: int) -> dict[str, Any]:
    return {"size": lambda: size}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has distboot, and perhaps frameworks; the script of this test has none."""
    monkeypatch.setattr("distboot.script.training._has_seen_gradient", False)
    roots = {*separate_model.UNKNOWN, "distboot", "mpi4py", "jax", "tensorflow", "horovod", "keras"}
    for name in [*sys.modules]:
        if name in roots or name.partition(".")[0] in {*roots, "torch"}:
            monkeypatch.delitem(sys.modules, name)


def looks(
    counts: Mapping[str, int] = {},
    *,
    times: int = 10,
    groups: int = 0,
    moves: bool = True,
    line: str = "",
) -> list[Any]:
    """What is reported in this many looks, and when."""
    model = separate_model.SeparateModel({}, 0.0)
    found = []
    for number in range(1, times + 1):
        now = number * 2.0
        stack = f"{number * moves}{line}"
        reason = model.look(counts, now, trains=True, stack=stack, groups=groups)
        if reason is not None:
            found.append((now, reason))
    return found


def test_script_without_a_group_is_reported_once() -> None:
    assert looks(times=100) == [(10.0, NO_GROUP)]


def test_one_step_is_no_training() -> None:
    model = separate_model.SeparateModel({}, 0.0)
    found = [model.look({}, now, trains=now < 4, stack="", groups=0) for now in range(2, 100)]
    assert set(found) == {None}


def test_unused_group_is_reported_after_a_minute() -> None:
    model = separate_model.SeparateModel({"0": 7}, 0.0)
    times = (2.0, 30.0, 58.0, 60.0, 62.0)
    found = [model.look({"0": 7}, now, trains=True, stack=str(now), groups=1) for now in times]
    assert found == [None, None, None, NO_COLLECTIVE, None]
    assert model.look({"0": 8}, 64.0, trains=True, stack="", groups=1) == CONNECTED
    assert model.is_over


def test_rank_that_hangs_is_not_reported() -> None:
    assert looks(groups=1, counts={"0": 0}, times=100, moves=False) == []


def test_new_group_alone_connects_nothing() -> None:
    model = separate_model.SeparateModel({}, 0.0)
    found = [
        model.look({"0": 0}, now, trains=True, stack=str(now), groups=1) for now in range(2, 80, 2)
    ]
    assert set(found) == {None, NO_COLLECTIVE}


def test_collective_operations_end_the_look() -> None:
    model = separate_model.SeparateModel({"0": 7}, 0.0)
    assert model.look({"0": 9}, 2.0, trains=True, stack="", groups=1) == CONNECTED
    assert model.is_over


@pytest.mark.parametrize("counts", [{}, {"0": 0}])
def test_group_that_does_not_count_is_not_reported(counts: dict[str, int]) -> None:
    assert looks(counts, groups=2, times=100) == [(2.0, CONNECTED)]


@pytest.mark.parametrize(
    ("module", "content", "reason"),
    [
        ("horovod.torch.mpi_ops", of_size(1), HOROVOD),
        ("horovod.torch.mpi_ops", of_size(4), None),
        ("horovod.torch.mpi_ops", {}, NO_GROUP),
        ("horovod.tensorflow.mpi_ops", of_size(1), HOROVOD),
        (
            "mpi4py.MPI",
            {
                "Is_initialized": lambda: True,
                "Is_finalized": lambda: False,
                "COMM_WORLD": SimpleNamespace(Get_size=lambda: 1),
            },
            MPI,
        ),
        ("mpi4py.MPI", {}, NO_GROUP),
        ("jax._src.distributed", {"global_state": SimpleNamespace(num_processes=2)}, None),
        ("jax._src.distributed", {"global_state": SimpleNamespace(num_processes=1)}, NO_GROUP),
        ("tensorflow.python.eager.context", of_tensorflow(None), TENSORFLOW),
        ("tensorflow.python.eager.context", of_tensorflow(1), TENSORFLOW),
        ("tensorflow.python.eager.context", of_tensorflow(2), None),
        ("keras", {"backend": SimpleNamespace(backend=lambda: "jax")}, None),  # a JAX not known
        ("keras", {"backend": SimpleNamespace(backend=lambda: "torch")}, NO_GROUP),
        ("ray", {}, None),
        ("ray", {"__file__": "/p/site-packages/ray.py"}, None),
        ("ray", {"__path__": ["/p/site-packages/ray"]}, None),
        ("distributed", {"__file__": os.path.abspath("distributed.py")}, NO_GROUP),  # the script's
        ("distributed", {"__path__": [os.path.abspath("distributed")]}, NO_GROUP),
        ("ray", {"__path__": [os.path.abspath("ray")]}, None),  # from its own checkout
        ("torch.distributed.rpc.api", {"_is_current_rpc_agent_set": lambda: True}, None),
        ("torch.distributed.rpc.api", {"_is_current_rpc_agent_set": lambda: False}, NO_GROUP),
        ("distboot", {}, None),
    ],
)
def test_world_of_each_framework_counts(
    monkeypatch: pytest.MonkeyPatch, module: str, content: dict[str, Any], reason: str | None
) -> None:
    fake(monkeypatch, module, **content)
    expected = [(2.0, CONNECTED)] if reason is None else [(10.0, reason)]
    assert looks(times=40) == expected


def test_started_module_of_horovod_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "horovod.torch.mpi_ops")  # imported, and not started
    fake(monkeypatch, "horovod.tensorflow.mpi_ops", **of_size(2))
    assert looks(times=40) == [(2.0, CONNECTED)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (" backward /p/torch/autograd/__init__.py", NO_GROUP),
        (" step /p/torch/optim/optimizer.py", NO_GROUP),
        (" fit /p/keras/src/trainers/trainer.py", TENSORFLOW),
    ],
)
def test_what_trains_decides_beside_tensorflow(
    monkeypatch: pytest.MonkeyPatch, line: str, reason: str
) -> None:
    """TensorFlow imports Keras, and may be there for the data alone."""
    fake(monkeypatch, "tensorflow.python.eager.context", **of_tensorflow(None))
    fake(monkeypatch, "keras", backend=SimpleNamespace(backend=lambda: "tensorflow"))
    assert looks(times=40, line=line) == [(10.0, reason)]


def test_jax_of_one_process_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(num_processes=1)
    fake(monkeypatch, "jax._src.distributed", global_state=alone)
    cache = SimpleNamespace(misses=0)
    gradients = SimpleNamespace(cache_info=lambda: cache)
    fake(monkeypatch, "jax._src.interpreters.ad", _linearize_jaxpr=gradients)
    fake(monkeypatch, "keras", backend=SimpleNamespace(backend=lambda: "jax"))
    assert looks(times=40) == [], "its first batch is still being compiled"
    cache.misses = 1
    assert looks(times=40) == [(10.0, JAX)]
    cache.misses = 0  # by `jax.clear_caches()`
    fake(monkeypatch, "tensorflow.python.eager.context", **of_tensorflow(None))  # for its data
    assert looks(times=40) == [(10.0, JAX)]
    alone.num_processes = 2
    assert looks(times=40) == [(2.0, CONNECTED)]


def test_rank_that_has_left_is_not_awaited() -> None:
    job = PureJob(USUAL)
    for rank in range(3):
        assert job.after(reports(rank)) == []
    assert job.after(Take(3, Detach()))[0] == warning("ranks 0-2")
