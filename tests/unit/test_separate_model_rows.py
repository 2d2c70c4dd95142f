"""Ranks that train a model each: what one rank sees of itself, and when rank 0 warns of them."""

import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from inside import Detach, Exited, ExitStatus, SeparateModel, separate_model
from job_rows import USUAL, Event, PureJob, Row, Take, Wait

CONNECTED = separate_model.CONNECTED
HOROVOD = separate_model.HOROVOD
MPI = separate_model.MPI
NO_COLLECTIVE = separate_model.NO_COLLECTIVE
NO_GROUP = separate_model.NO_GROUP

RECORDED = "record: separate_models"


def reports(rank: int, reason: str = NO_GROUP) -> Event:
    return Take(rank, SeparateModel(reason))


def warning(ranks: str) -> str:
    return (
        f"say: warning: {ranks} train separately: no process group of torch connects them; "
        "start one (distboot.init(), or torch.distributed.init_process_group), and wrap the model "
        "(DistributedDataParallel)"
    )


TABLE: dict[str, list[Row]] = {
    "all are named at once, and once": [
        (reports(0), []),
        (reports(3), []),
        (reports(1), []),
        (reports(2), [warning("ranks 0-3"), RECORDED]),
        (reports(2, NO_COLLECTIVE), []),
        (Wait(60), []),
    ],
    "others are waited for": [
        (reports(1), []),
        (Wait(5), []),
        (reports(2), []),
        (Wait(9), []),
        (Wait(1), [warning("ranks 1-2"), RECORDED]),
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
        *[(reports(rank, CONNECTED), []) for rank in range(2)],
        (reports(2, CONNECTED), ["record: separate_models_over"]),
        (reports(3, CONNECTED), []),
    ],
    "a rank that has ended is not waited for": [
        (reports(0), []),
        (reports(1), []),
        (reports(2), []),
        (Take(3, Exited(ExitStatus(code=0, when=1.0))), [
            warning("ranks 0-2"),
            "record: exited 3",
            RECORDED,
        ]),
    ],
    "a reason of another version is left out": [
        *[(reports(rank, "moon"), []) for rank in range(4)],
        (Wait(60), []),
    ],
}  # fmt: skip


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


def of_size(size: int) -> dict[str, Any]:
    return {"size": lambda: size}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has distboot, and perhaps frameworks; the script of this test has none."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in {"distboot", "mpi4py", "jax", "tensorflow", "horovod"}:
            monkeypatch.delitem(sys.modules, name)


def looks(
    counts: Mapping[str, int] = {},
    *,
    times: int = 10,
    step: float = 2.0,
    groups: bool = False,
    trains: bool = True,
) -> list[tuple[float, str]]:
    """What is reported in this many looks, and when."""
    model = separate_model.SeparateModel({}, 0.0)
    found = []
    for number in range(1, times + 1):
        now = number * step
        reason = model.look(counts, now, trains=trains, has_groups=groups)
        if reason is not None:
            found.append((now, reason))
    return found


def test_script_without_a_group_is_reported_once() -> None:
    assert looks(times=100) == [(10.0, NO_GROUP)]


def test_one_step_is_no_training() -> None:
    assert looks(trains=False, times=100) == []


def test_unused_group_is_reported_after_a_minute() -> None:
    model = separate_model.SeparateModel({"0": 7}, 0.0)
    found = [
        model.look({"0": 7}, now, trains=True, has_groups=True)
        for now in (2.0, 30.0, 58.0, 60.0, 62.0)
    ]
    assert found == [None, None, None, NO_COLLECTIVE, None]
    assert model.look({"0": 8}, 64.0, trains=True, has_groups=True) == CONNECTED
    assert model.is_over


def test_collective_operations_end_the_look() -> None:
    model = separate_model.SeparateModel({"0": 7}, 0.0)
    assert model.look({"0": 9}, 2.0, trains=True, has_groups=True) is None
    assert model.is_over


def test_group_that_does_not_count_is_not_reported() -> None:
    assert looks(groups=True, times=100) == []


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
        ("jax._src.distributed", {"global_state": SimpleNamespace(num_processes=None)}, NO_GROUP),
        ("ray", {}, None),
        ("torch.distributed.rpc.api", {"_is_current_rpc_agent_set": lambda: True}, None),
        ("torch.distributed.rpc.api", {"_is_current_rpc_agent_set": lambda: False}, NO_GROUP),
        ("distboot", {}, None),
    ],
)
def test_world_of_each_framework_counts(
    monkeypatch: pytest.MonkeyPatch, module: str, content: dict[str, Any], reason: str | None
) -> None:
    fake(monkeypatch, module, **content)
    expected = [] if reason is None else [(10.0, reason)]
    assert looks(times=40) == expected


def test_rank_that_has_left_is_not_awaited() -> None:
    job = PureJob(USUAL)
    for rank in range(3):
        assert job.after(reports(rank)) == []
    assert job.after(Take(3, Detach()))[0] == warning("ranks 0-2")
