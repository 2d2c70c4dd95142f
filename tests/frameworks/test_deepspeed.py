"""DeepSpeed, the real one: what it finds, and that its own discovery is never reached. It trains in test_matrix.py."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Run
from launched import BIN, MPI_ENV, TWO_OF_MPIRUN, json_lines, needs_deepspeed, needs_mpirun
from ranks import HIDE

pytestmark = [pytest.mark.all, needs_deepspeed]
LIMIT = 180  # seconds


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment in which DeepSpeed's own discovery leaves a mark: it needs `hostname` and mpi4py."""
    traps = tmp_path / "traps"
    (traps / "mpi4py").mkdir(parents=True)
    (traps / "hostname").write_text(
        f'#!/bin/sh\ntouch {tmp_path}/hostname-was-run\nexec /bin/hostname "$@"\n'
    )
    (traps / "hostname").chmod(0o755)
    touch = f"open({str(tmp_path / 'mpi4py-was-imported')!r}, 'w')"
    (traps / "mpi4py/__init__.py").write_text(f"{touch}\nraise ImportError('a trap')\n")
    paths = {"PYTHONPATH": f"{traps}:{ROOT}", "PATH": f"{traps}:{BIN}:{os.environ['PATH']}"}
    yield {**MPI_ENV, **paths, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}
    assert not list(tmp_path.glob("*-was-*")), "DeepSpeed has looked for its place by itself"


@needs_mpirun
def test_initialize_uses_what_is_there(run: Run, env: dict[str, str], tmp_path: Path) -> None:
    script = """
import argparse, json, os, subprocess, sys
import distboot
ctx = distboot.init("deepspeed", join_timeout=60, pass_local_rank=True)
import deepspeed, torch
from deepspeed.utils import groups
try:
    from deepspeed.runtime.model_checkpointing.utils import create_universal_parallel_info
except ImportError:  # which is newer than 0.15
    create_universal_parallel_info = None
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
config = {"train_batch_size": 6, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}

def engine(**how):
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(args=args, model=model, optimizer=optimizer, config=config, **how)[0]

def step(engine):
    loss = engine(torch.ones(3, 4)).sum()
    engine.backward(loss)
    engine.step()
    return engine.local_rank

group = torch.distributed.group.WORLD
deepspeed.init_distributed()
local_ranks = [step(engine(dist_init_required=required)) for required in (None, True, False)]
same = torch.distributed.group.WORLD is group
if create_universal_parallel_info is None:
    nodes = [1, 0]
else:
    parts = create_universal_parallel_info(groups, False)  # which reads what only DeepSpeed's launcher sets
    nodes = [parts.num_machines, parts.machine_rank]
nested = subprocess.run([sys.executable, "-m", "distboot", "show", "--json"], capture_output=True, text=True)
del group
ctx.close()
after = [torch.distributed.is_initialized(), deepspeed.comm.is_initialized()]
with distboot.init("deepspeed", join_timeout=60) as again:
    again.barrier()
    with again.main_first():
        pass
    again_local = step(engine())
line = {"rank": ctx.rank, "launcher": ctx.launcher, "args": args.local_rank, "local_ranks": local_ranks, "same": same,
        "nodes": nodes, "after": after, "again": again_local,
        "nested": json.loads(nested.stdout)["launcher"], "device": str(ctx.device)}
sys.stdout.write(json.dumps(line) + "\\n")
"""
    (tmp_path / "use.py").write_text(script)
    lines = json_lines(run(*TWO_OF_MPIRUN, sys.executable, "use.py", env=env, timeout=LIMIT))
    assert lines == [
        {
            "rank": rank,
            "launcher": "openmpi",
            "args": rank,
            "local_ranks": [rank] * 3,
            "same": True,
            "nodes": [1, 0],
            "after": [False, False],
            "again": rank,
            "nested": "openmpi",
            "device": "cpu",
        }
        for rank in range(2)
    ]


@needs_mpirun
def test_unmodified_script_through_the_wrapper(
    run: Run, env: dict[str, str], tmp_path: Path
) -> None:
    script = """
import json, os, sys
import deepspeed
deepspeed.init_distributed(verbose=False)
deepspeed.comm.barrier()
names = ("RANK", "LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE")
sys.stdout.write(json.dumps({name: int(os.environ[name]) for name in names}) + "\\n")
deepspeed.comm.destroy_process_group()
"""
    (tmp_path / "plain.py").write_text(script)
    wrapped = [sys.executable, "-m", "distboot", "run", "--framework", "deepspeed", "plain.py"]
    lines = json_lines(run(*TWO_OF_MPIRUN, *wrapped, env=env, timeout=LIMIT))
    assert lines == [
        {"RANK": rank, "LOCAL_RANK": rank, "CROSS_RANK": 0, "CROSS_SIZE": 1} for rank in range(2)
    ]


# As DeepSpeed's guides begin: the local rank is 0, unless the launcher passes another.
_PARSES = """
import argparse, json, sys
import deepspeed, torch
parser = argparse.ArgumentParser()
parser.add_argument('--local_rank', type=int, default=0)
args = deepspeed.add_config_arguments(parser).parse_args()
model = torch.nn.Linear(4, 2)
engine = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())[0]
sys.stdout.write(json.dumps({"rank": engine.global_rank, "local_rank": args.local_rank}) + "\\n")
"""
_CONFIG = {"train_batch_size": 2, "optimizer": {"type": "Adam", "params": {"torch_adam": True}}}


@needs_mpirun
@pytest.mark.parametrize("form", ["script", "command", "init"])
def test_script_that_parses_the_local_rank(
    run: Run, env: dict[str, str], tmp_path: Path, form: str
) -> None:
    init = "import distboot; distboot.init('deepspeed', join_timeout=120)"
    (tmp_path / "parses.py").write_text((init if form == "init" else "") + _PARSES)
    (tmp_path / "ds.json").write_text(json.dumps(_CONFIG))
    wrapper = [sys.executable, "-m", "distboot", "run", "--framework=deepspeed"]
    before = {"script": wrapper, "command": [*wrapper, "--", "python"], "init": [sys.executable]}[
        form
    ]
    done = run(
        *TWO_OF_MPIRUN,
        *before,
        "parses.py",
        "--deepspeed_config",
        "ds.json",
        env=env,
        timeout=LIMIT,
    )
    if form == "init":  # it knows of no argument
        assert "Mismatch in local rank setting" in done.stderr
        assert (
            "hint: python -m distboot run --pass-local-rank passes --local_rank=N" in done.stderr
        ), done.stderr
    else:
        assert json_lines(done) == [{"rank": rank, "local_rank": rank} for rank in range(2)]


_FAILS = """
import os, sys
import distboot
before = dict(os.environ)
try:
    distboot.init("deepspeed")
except distboot.DistbootError as error:
    import torch
    left = torch.distributed.is_initialized(), dict(os.environ) == before
    print(error.code, error.message, "|", error.hint, "|", *left)
"""


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            None,
            (
                "framework-not-installed deepspeed is not installed in "
                "this Python | pip install deepspeed"
            ),
        ),
        (
            "def init_distributed(**_): raise RuntimeError('Ninja is required\\nto load C++')",
            (
                "process-group-failed DeepSpeed could not use the process group on "
                "'gloo': Ninja is required | if it"
            ),
        ),
    ],
    ids=["missing", "unbuilt"],
)
def test_deepspeed_that_does_not_work(
    run: Run, tmp_path: Path, module: str | None, said: str
) -> None:
    script = _FAILS
    if module is None:
        script = HIDE.format(module="deepspeed") + _FAILS
    else:
        (tmp_path / "deepspeed.py").write_text(module)
    result = run(sys.executable, "-c", script)
    assert result.stdout.startswith(said), result.stdout + result.stderr
    assert result.stdout.endswith("| False True\n")
