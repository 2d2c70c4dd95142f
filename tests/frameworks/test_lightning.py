"""PyTorch Lightning with `DistbootEnvironment`, and without it under the wrapper; and what that exports for it."""

import json
import sys
import types
from collections.abc import Mapping
from importlib.metadata import entry_points

import pytest
from captured import one
from conftest import Run
from inside import alone, frameworks, variables
from launched import MPI_ENV, TWO_OF_MPIRUN, all_with, json_lines, needs_mpirun
from ranks import BEGIN, WRAPPER, RunRanks

from distboot import DistbootError, detect
from distboot.lightning import callbacks

# A rank that trains on data of its own must end with the weights of all.
_BEGIN = (
    BEGIN
    + """
def fitted(Module, Trainer, **options):
    import torch
    class Model(Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)
        def training_step(self, batch):
            return self.layer(batch[0]).sum()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = Trainer(accelerator="cpu", max_epochs=1, **dict.fromkeys(quiet, False), **options)
    torch.manual_seed(0)
    model = Model()
    own = torch.utils.data.TensorDataset(torch.full((4, 4), float(trainer.global_rank + 1)))
    trainer.fit(model, torch.utils.data.DataLoader(own, batch_size=4))
    weights = [parameter.sum().item() for parameter in model.parameters()]
    found = torch.tensor(weights)
    torch.distributed.all_reduce(found)
    assert torch.allclose(found / trainer.world_size, torch.tensor(weights))
    numbers = [trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size]
    return type(trainer.strategy.cluster_environment).__name__, numbers, torch.distributed.get_backend()
def refused(call):
    try:
        call()
    except distboot.DistbootError as error:
        return [error.code, error.message, error.hint]
"""
)


@all_with("lightning")
@needs_mpirun
def test_plugin_under_mpirun(run: Run) -> None:
    script = """
from lightning.pytorch import LightningModule, Trainer
from distboot.lightning import DistbootEnvironment
environment = DistbootEnvironment()
say(
    rank=environment.context.rank,
    too_many=refused(lambda: Trainer(plugins=[environment], accelerator="cpu", devices=3)),
    too_few=refused(lambda: environment.validate_settings(1, 2)),
    framework=environment.context.framework,
    fitted=fitted(LightningModule, Trainer, plugins=[environment], devices=2),
)
"""
    command = [*TWO_OF_MPIRUN, sys.executable, "-c", _BEGIN + script]
    result = run(*command, env=MPI_ENV, timeout=180)
    fits = "Trainer(devices=2, num_nodes=1), or start another number of ranks"
    job = "are not the ranks of this job: the job has 2 on 1 node"
    assert json_lines(result) == [
        {
            "rank": rank,
            "too_many": ["usage", f"devices × num_nodes = 3 {job}", fits],
            "too_few": ["usage", f"devices=1 on each of num_nodes=2 {job}", fits],
            "framework": "none",
            "fitted": ["DistbootEnvironment", [rank, rank, 0, 2], "gloo"],
        }
        for rank in range(2)
    ]
    assert "all ended well" in result.stderr  # says failure detection


# By Lightning's own arithmetic, node rank times devices, rank 0 would be rank 1, and the other way round.
_REVERSED = (
    {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1"},
    {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "0"},
)


@all_with("lightning")
def test_plugin_uses_the_group_of_init(run_ranks: RunRanks) -> None:
    script = """
ctx = distboot.init(join_timeout=60)
import torch
group = torch.distributed.group.WORLD
from pytorch_lightning import LightningModule, Trainer  # which is not lightning.pytorch
from distboot.lightning import DistbootEnvironment
environment = DistbootEnvironment()
assert environment.context is ctx
found = fitted(LightningModule, Trainer, plugins=[environment], devices=1, num_nodes=2)
assert torch.distributed.group.WORLD is group
say(rank=ctx.rank, fitted=found)
ctx.close()
"""
    ended = run_ranks(_BEGIN + script, places=_REVERSED)
    assert [rank.line() for rank in ended] == [
        {"rank": 0, "fitted": ["DistbootEnvironment", [0, 0, 1, 2], "gloo"]},
        {"rank": 1, "fitted": ["DistbootEnvironment", [1, 0, 0, 2], "gloo"]},
    ]


@all_with("lightning")
def test_unmodified_script_under_the_wrapper(run_ranks: RunRanks) -> None:
    script = """
from lightning.pytorch import LightningModule, Trainer
found = fitted(LightningModule, Trainer, devices=1, num_nodes=2)
say(rank=int(os.environ["RANK"]), fitted=found)
"""
    ended = run_ranks(_BEGIN + script, before=WRAPPER, places=_REVERSED)
    assert [rank.line()["fitted"] for rank in ended] == [
        ["TorchElasticEnvironment", [0, 0, 1, 2], "gloo"],
        ["TorchElasticEnvironment", [1, 0, 0, 2], "gloo"],
    ]


# Its own launcher would start the second process; and of 3 devices each rank would train a third of the batches.
_WRONG_SIZE = """
from lightning.pytorch import LightningModule, Trainer
fitted(LightningModule, Trainer, devices=int(os.environ["DEVICES"]))
"""


@all_with("lightning")
@pytest.mark.parametrize("init", ["", "distboot.init()\n"], ids=["wrapper", "init"])
def test_lightning_is_to_start_processes_itself(run: Run, init: str) -> None:
    script = _BEGIN + init + _WRONG_SIZE
    before = [sys.executable] if init else WRAPPER
    done = run(*before, "train.py", train=script, env={"DEVICES": "2"}, timeout=180)
    assert done.returncode == 1
    assert "does not match the world size (1)" in done.stderr
    hint = (
        "distboot: hint: devices=1, num_nodes=1 fit the job, or start 2 ranks "
        "here: python -m distboot --nproc"
    )
    assert done.stderr.rpartition("world size (1)")[2].count(hint) == 1, done.stderr


_needs_entry_points = pytest.mark.skipif(
    not any(entry_points(group="lightning.pytorch.callbacks_factory", name="distboot")),
    reason="distboot was installed before it had entry points (pip install -e .)",
)


@all_with("lightning")
@pytest.mark.parametrize(
    ("init", "devices", "said"),
    [
        (
            True,
            3,
            [
                "does not match the world size (2)",
                "hint: devices=2, num_nodes=1 fit the job, or start another",
            ],
        ),
        pytest.param(
            False,
            1,
            ["num_nodes = 1 are not the ranks of this job, which has 2"],
            marks=_needs_entry_points,
        ),
    ],
    ids=["init", "wrapper"],
)
def test_wrong_devices_in_a_job_of_several(
    run_ranks: RunRanks, init: bool, devices: int, said: list[str]
) -> None:
    first = "distboot.init(join_timeout=120)\n" if init else ""
    before = [sys.executable] if init else WRAPPER
    ended = run_ranks(_BEGIN + first + _WRONG_SIZE, before=before, DEVICES=str(devices))
    assert all(rank.code for rank in ended)
    for text in said:
        assert any(text in rank.err for rank in ended), ended[0].err


def test_size_check_covers_only_jobs_of_distboot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", types.SimpleNamespace(Callback=object))
    for name, value in variables(detect(one("openmpi-4.1.4/1node_4procs", 3)), {}).items():
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(
            name, raising=False
        )
    (check,) = callbacks()
    trainer = types.SimpleNamespace(num_devices=1, num_nodes=1)
    check.setup(trainer, None, "test")  # type: ignore[attr-defined]
    check.setup(types.SimpleNamespace(num_devices=4, num_nodes=1), None, "fit")  # type: ignore[attr-defined]
    with pytest.raises(
        DistbootError, match=r"rank 3 on .* = 1 are not the ranks of this job, which has 4"
    ) as refusal:
        check.setup(trainer, None, "fit")  # type: ignore[attr-defined]
    assert refusal.value.hint.startswith(
        "Trainer(devices=4, num_nodes=1), or start another number of ranks"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")  # of a torchrun that the script has started, say
    assert callbacks() == []
    monkeypatch.delenv("DISTBOOT_PLACEMENT")
    assert callbacks() == []


def test_master_port_is_free_after_init_none(run_ranks: RunRanks) -> None:
    script = """
import socket
with distboot.init("none", join_timeout=60) as ctx:
    ctx.barrier()
    if ctx.is_main:
        socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))).close()
    ctx.barrier()
    say(rank=ctx.rank, port=ctx.master_port)
"""
    lines = [rank.line() for rank in run_ranks(_BEGIN + script)]
    assert lines[0]["port"] == lines[1]["port"]


def test_ranks_that_each_worked_alone_are_warned_of(run_ranks: RunRanks) -> None:
    # What is there of Lightning without Lightning.
    fake = """
import abc, types
class ClusterEnvironment(abc.ABC):
    pass
sys.modules["lightning.fabric.plugins.environments"] = types.SimpleNamespace(ClusterEnvironment=ClusterEnvironment)
from distboot.lightning import DistbootEnvironment
"""
    script = """
environment = DistbootEnvironment()
assert isinstance(environment, ClusterEnvironment)
say(rank=environment.context.rank)
"""
    ended = run_ranks(_BEGIN + fake + script)
    said = (
        "warning: Lightning was set up for one device, and each of the 2 ranks worked alone: Trainer(devices=2, "
        "num_nodes=1), or start another number of ranks"
    )
    assert [said in rank.err for rank in ended] == [True, False]
    assert [rank.line() for rank in ended] == [{"rank": 0}, {"rank": 1}]


def test_lightning_is_not_installed(run: Run) -> None:
    script = """
import importlib.util
importlib.util.find_spec = lambda name: None
from distboot.lightning import DistbootEnvironment
say(refused=refused(DistbootEnvironment))
"""
    result = run(sys.executable, "-c", _BEGIN + script)
    said = [
        "framework-not-installed",
        "Lightning is not installed in this Python",
        "pip install lightning",
    ]
    assert json.loads(result.stdout) == {"refused": said}


def _exported(environ: Mapping[str, str]) -> dict[str, str]:
    return frameworks.exports("torch", alone(detect(environ), 1.0), environ)


def test_exports_for_lightning_only_where_none_are_set() -> None:
    assert _exported({}) == {
        "TORCHELASTIC_RUN_ID": "none",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
    }
    assert _exported(one("torchrun-2.13.0/uneven_3_1_c10d", 3)) == {}
    # As `srun --ntasks-per-node` has it, Lightning's own plugin works, and can requeue the job.
    slurm = one("slurm-srun-22.05.8/2nodes_2procs", 2)
    assert _exported({**slurm, "SLURM_NTASKS_PER_NODE": "2"}) == {}
    slurm.pop("SLURM_NTASKS_PER_NODE", None)
    assert _exported(slurm) == {
        "TORCHELASTIC_RUN_ID": detect(slurm).job_id,
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
    }
