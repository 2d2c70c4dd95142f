"""Save and stop with each framework's own means: what the pages show, as jobs of which one rank is told to stop.

Each is started twice in one folder: the first job is stopped in the middle, the second goes on from its checkpoint.
"""

import json
import signal
from typing import Any, NamedTuple

import pytest
from launched import needs, needs_deepspeed, needs_torch
from pages import blocks
from supervised import Job, Start, until

SECTION = "Save and stop"
BLOCKS = {(block.page.rpartition("/")[2], block.section): block for block in blocks("python")}
SHOWN = {key: block.text for key, block in BLOCKS.items() if block.section.startswith(SECTION)}
STEPS = 40
LIMIT = 180  # seconds: DeepSpeed compiles something at its first start on a machine

# What a rank does besides its training: in step 20 it waits until one has been told; it says which steps it has done.
_PACE = """
import json
steps, seen, loss = {steps}, [], None
def pace(step):
    seen.append(step)
    if step == 5:
        ready()
    if step == 20:
        until("told")
"""
_SAY = """
Path(f"seen-{rank}").write_text(json.dumps([seen[0], seen[-1], loss]))
"""
_MODEL = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
def error_of(model, step):
    pace(step)
    return (model(torch.full((2, 4), float(step % 7 + rank))) - 1).square().mean()
"""
_TRAIN = """
def train(step):
    global loss
    optimizer.zero_grad()
    error = error_of(model, step)
    error.backward()
    optimizer.step()
    loss = error.item()
"""
_PYTORCH = """
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
"""
_TRAINER = """
import transformers
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = model
    def forward(self, inputs, labels=None):
        pace(trainer.state.global_step + 1)
        return {"loss": (self.layer(inputs) - 1).square().mean()}
data = [{"inputs": torch.ones(4), "labels": torch.ones(1)}] * 2 * steps
options = transformers.TrainingArguments(
    output_dir="checkpoints", use_cpu=True, max_steps=steps, per_device_train_batch_size=1, report_to="none",
    save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
)
trainer = transformers.Trainer(Model(), options, train_dataset=data)
"""
_ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
loader = torch.utils.data.DataLoader(torch.ones(2 * steps, 4), batch_size=1)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
def train(batch):
    optimizer.zero_grad()
    accelerator.backward(error_of(model, seen[-1] + 1 if seen else done + 1))
    optimizer.step()
"""
_LIGHTNING_FIT = """
from lightning import LightningModule, Trainer
from distboot.lightning import DistbootEnvironment
class Module(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = model
    def training_step(self, batch, _):
        return error_of(self.layer, self.trainer.global_step + 1)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
    def validation_step(self, batch):
        raise AssertionError("one more validation, while it is to end")
quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
trainer = Trainer(
    plugins=[DistbootEnvironment()], callbacks=[SaveAndStop()], accelerator="cpu", devices=2, max_epochs=1,
    num_sanity_val_steps=0, **quiet,
)
data, more = (torch.utils.data.DataLoader(torch.ones(number, 4)) for number in (2 * steps, 2))
saved = "stopped.ckpt"
if Path(saved).exists():
    trainer.limit_val_batches = 0
trainer.fit(Module(), data, more, ckpt_path=saved if Path(saved).exists() else None)
"""
_DEEPSPEED = """
import deepspeed
engine, *_ = deepspeed.initialize(
    model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    config={"train_batch_size": 4, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True},
)
def train(step):
    engine.backward(error_of(engine, step))
    engine.step()
"""
_HOROVOD = """
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
optimizer = ctx.hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""
_JAX = """
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
everywhere = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec())
split = NamedSharding(Mesh(jax.devices(), ("data",)), PartitionSpec("data"))
weights = jax.device_put({"inner": jnp.ones(4), "bias": jnp.ones(())}, everywhere)
@jax.jit
def improved(weights, batch):
    slopes = jax.grad(lambda found: jnp.square(batch @ found["inner"] + found["bias"]).mean())(weights)
    return jax.tree.map(lambda weight, slope: weight - 0.01 * slope, weights, slopes)
def train(weights, step):
    pace(step)
    own = jnp.full((1, 4), float(step % 7 + rank))
    return jax.block_until_ready(improved(weights, jax.make_array_from_process_local_data(split, own)))
"""


class Way(NamedTuple):
    """A framework's own: where it is shown, and what the script has before and behind that."""

    page: str
    before: str
    behind: str = ""
    section: str = SECTION
    framework: str = "torch"
    marks: Any = ()


ALL = pytest.mark.all
PYTORCH = Way("pytorch.md", _MODEL + _PYTORCH + _TRAIN)
WAYS = {
    "transformers": Way(
        "hugging-face.md",
        _MODEL + _TRAINER,
        section=f"{SECTION}: the Trainer",
        marks=(ALL, needs("transformers")),
    ),
    "accelerate": Way(
        "hugging-face.md",
        _MODEL + _ACCELERATE,
        section=f"{SECTION}: Accelerate",
        marks=(ALL, needs("accelerate")),
    ),
    "lightning": Way(
        "lightning.md", _MODEL, _LIGHTNING_FIT, framework="none", marks=(ALL, needs("lightning"))
    ),
    "deepspeed": Way(
        "deepspeed.md", _MODEL + _DEEPSPEED, framework="deepspeed", marks=(ALL, needs_deepspeed)
    ),
    "horovod": Way(
        "horovod.md",
        _MODEL + _HOROVOD + _TRAIN,
        framework="horovod.torch",
        marks=(ALL, needs("horovod")),
    ),
    "jax": Way("jax.md", _JAX, framework="jax", marks=(ALL, needs("jax"))),
}
ENV = {
    "JAX_PLATFORMS": "cpu",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "DISTBOOT_GRACE": "30",
}


def begun(start: Start, way: Way, ranks: int) -> Job:
    script = [_PACE.format(steps=STEPS), way.before, SHOWN[way.page, way.section], way.behind, _SAY]
    return start("".join(script), ranks, init=True, framework=way.framework, **ENV)


def seen(job: Job) -> list[list[Any]]:
    """The first and the last step of each rank, and its loss in that; all have ended well."""
    assert job.codes(LIMIT) == [0] * job.ranks, "\n".join(map(job.output, range(job.ranks)))
    return [json.loads((job.folder / f"seen-{rank}").read_text()) for rank in range(job.ranks)]


def stopped_at(job: Job) -> int:
    """The step at which all ranks have stopped, one having been told to."""
    pids = [job.folder / f"pid-{rank}" for rank in range(job.ranks)]
    processes = job.processes
    until(
        lambda: (
            all(pid.exists() for pid in pids) or any(each.poll() is not None for each in processes)
        ),
        LIMIT,
    )
    job.send(1, signal.SIGTERM)
    job.touch("told")
    ((first, last),) = {(first, last) for first, last, _ in seen(job)}
    assert first == 1
    assert 5 <= last <= 22
    return int(last)


@pytest.mark.parametrize(
    "way", [pytest.param(way, id=name, marks=way.marks) for name, way in WAYS.items()]
)
def test_all_stop_after_one_step_and_resume_there(start: Start, way: Way) -> None:
    last = stopped_at(begun(start, way, 2))
    assert [steps[:2] for steps in seen(begun(start, way, 2))] == [[last + 1, STEPS]] * 2


@ALL  # twelve times an import of torch
@needs_torch
def test_resumed_training_ends_with_the_unbroken_loss(start: Start) -> None:
    last = stopped_at(begun(start, PYTORCH, 4))
    second = begun(start, PYTORCH, 4)
    resumed = seen(second)
    assert [steps[:2] for steps in resumed] == [[last + 1, STEPS]] * 4
    (second.folder / "checkpoints").rename(second.folder / "put-away")
    unbroken = seen(begun(start, PYTORCH, 4))
    assert [steps[:2] for steps in unbroken] == [[1, STEPS]] * 4
    # DistributedDataParallel lays its buckets out anew after its first step, which a resumed run
    # has at another place: Gloo then adds the gradients of 4 ranks in another order, and the last
    # bits of a float32 differ. A step that is lost or done twice more than doubles a loss.
    assert [steps[2] for steps in resumed] == pytest.approx([s[2] for s in unbroken], rel=1e-2)


def test_every_piece_is_run() -> None:
    assert {(way.page, way.section) for way in (PYTORCH, *WAYS.values())} == SHOWN.keys()
