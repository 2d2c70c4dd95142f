"""The framework matrix: every example under every launcher trains, and to the same accuracy.

`make test-all` takes two cells of each row, and each launcher. `make matrix` runs all of it, some 40 minutes, and
writes docs/matrix.md; with ARGS="-k …" only the cells that were run.
"""

import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import ROOT
from hosts import Slurm, missing_for_slurm, side_by_side
from launched import BIN, MPI_ENV, MPIRUN, debians_mpi, needs_torch
from page_of_cells import Tables
from tensorflows import tasks

pytestmark = [pytest.mark.all, needs_torch]

EXAMPLES = ROOT / "examples"
LEAST = 0.93  # accuracy
SPREAD = 0.02  # by which the cells of a row may differ
LIMIT = 240  # seconds for a cell, on a machine that has other work, too

Command = tuple[list[str], dict[str, str]]  # with its variables


class Row(NamedTuple):
    """One framework."""

    name: str  # as the page has it
    example: str  # file in examples/, and its arguments
    # Value of the wrapper's --framework for an unmodified script; empty: the script calls init
    wrapped: str = ""
    ranks: int = 2
    needs_mpi: bool = False  # whether it makes sense under MPI launchers only
    needs_cluster: bool = False  # whether it needs a TF_CONFIG with parameter servers

    @property
    def title(self) -> str:
        script = self.example.split()[0]
        return f"{self.name} ([{script}](../examples/{script}))"

    def command(self) -> list[str]:
        script, *arguments = self.example.split()
        wrapper = ["-m", "distboot", "run", "--framework", self.wrapped] if self.wrapped else []
        return [sys.executable, *wrapper, str(EXAMPLES / script), *arguments]


ROWS = (
    Row("torch", "train_digits_distboot.py"),
    Row("torch, through the wrapper", "train_digits.py", wrapped="torch"),
    Row("torch.amp, accumulated gradients", "torch_amp.py"),
    Row("DeepSpeed, ZeRO 1", "deepspeed_zero.py --stage 1"),
    Row("DeepSpeed, ZeRO 3", "deepspeed_zero.py --stage 3"),
    Row("Horovod, torch", "horovod_torch.py"),
    Row("Horovod, TensorFlow", "horovod_tensorflow.py"),
    Row("TensorFlow, multi-worker", "tensorflow_multi_worker.py"),
    Row(
        "TensorFlow, parameter server",
        "tensorflow_parameter_server.py",
        ranks=3,
        needs_cluster=True,
    ),
    Row("Lightning", "lightning_trainer.py"),
    Row("Transformers `Trainer`, through the wrapper", "transformers_trainer.py", wrapped="torch"),
    Row("Accelerate, through the wrapper", "accelerate_loop.py", wrapped="torch"),
    Row("JAX", "jax_data_parallel.py"),
    Row("mpi4py", "mpi_reduce.py", needs_mpi=True),
)

MPI = ("Open MPI 5", "Open MPI 4", "MPICH", "srun", "Azure ML MPI")
LAUNCHERS = (
    "one process",
    "by hand",
    "torchrun",
    "torch.distributed.launch",
    *MPI[:4],
    "horovodrun",
    "deepspeed",
    MPI[4],
    "Azure ML PyTorch",
    "Azure ML TensorFlow",
)


class Outcome(NamedTuple):
    """What became of a cell: the numbers of its last line, how it ended, and what it printed."""

    ranks: int
    accuracy: float
    exit_code: int
    output: str


def senseless(row: Row, launcher: str) -> str:
    """The code of the error with which this pair is refused; empty if it is to train."""
    if row.needs_mpi and launcher not in (*MPI, "one process"):
        return "mpi-mismatch"
    if row.needs_cluster and launcher not in ("Azure ML TensorFlow", "one process"):
        return "usage"
    return ""


def missing_for(launcher: str) -> str | None:
    programs = {
        "Open MPI 5": MPIRUN,
        "Azure ML MPI": MPIRUN,
        "Open MPI 4": shutil.which("mpirun.openmpi"),
        "MPICH": shutil.which("mpiexec.mpich"),
        "horovodrun": shutil.which("horovodrun", path=str(BIN)),
        "deepspeed": shutil.which("deepspeed", path=str(BIN)),
    }
    return f"no {launcher} here" if programs.get(launcher, "") is None else None


def run(
    row: Row, launcher: str, env: Mapping[str, str], port: int, *, slurm: Slurm | None, folder: Path
) -> Outcome:
    variables = {**_VARIABLES, **(debians_mpi(launcher, folder) if row.needs_mpi else {})}
    if slurm is not None:
        done = slurm.srun(
            [
                f"-n{row.ranks}",
                f"-N{row.ranks if row.ranks == 2 else 1}",
                "--overcommit",
                *_MPI_PLUGIN[row.needs_mpi],
                *row.command(),
            ],
            {**variables, "PYTHONPATH": str(ROOT)},
            timeout=LIMIT,
        )
        return _outcome(done.returncode, done.stdout + done.stderr)
    path = f"{BIN}{os.pathsep}{env['PATH']}"
    started = [
        (command, {**env, "PATH": path, **variables, **own})
        for command, own in _commands(row, launcher, port)
    ]
    ended = side_by_side(started, LIMIT)
    return _outcome(
        next(filter(None, (code for code, _ in ended)), 0), "".join(output for _, output in ended)
    )


def _outcome(exit_code: int, output: str) -> Outcome:
    found = [
        line[line.index("result {") + 7 :] for line in output.splitlines() if "result {" in line
    ]
    result = json.loads(found[-1]) if len(found) == 1 else {}
    return Outcome(result.get("ranks", 0), result.get("accuracy", 0.0), exit_code, output)


def _commands(row: Row, launcher: str, port: int) -> list[Command]:
    """What is typed: one command, or one for each rank where nothing starts them; with its variables."""
    script = row.command()
    count = str(row.ranks)
    mpirun = [str(MPIRUN), "--map-by", ":OVERSUBSCRIBE"]
    own_port = str(port)
    torch_port = ["--master-port", own_port, "--use-env"]
    deepspeed_options = [
        "--hostfile",
        "/nonexistent",
        "--master_port",
        own_port,
        "--no_local_rank",
        "--no_python",
    ]
    azure = {"AZUREML_RUN_ID": f"digits_{port}"}
    one: dict[str, Command] = {
        "one process": (script, {}),
        "torchrun": (
            [*_TORCHRUN, "--standalone", f"--nproc-per-node={count}", "--no-python", *script],
            {},
        ),
        "torch.distributed.launch": (
            [*_LAUNCH, *torch_port, f"--nproc-per-node={count}", "--no-python", *script],
            {},
        ),
        "Open MPI 5": ([*mpirun, "-n", count, *script], MPI_ENV),
        "Open MPI 4": (["mpirun.openmpi", "--oversubscribe", "-n", count, *script], MPI_ENV),
        "MPICH": (["mpiexec.mpich", "-n", count, *script], {"MASTER_PORT": own_port}),
        "horovodrun": (["horovodrun", "--gloo", "-np", count, *script], {}),
        "deepspeed": (["deepspeed", "--num_gpus", count, *deepspeed_options, *script], {}),
        "Azure ML MPI": (
            [*mpirun, "-n", count, *script],
            {**MPI_ENV, **azure, "AZ_BATCHAI_MPI_MASTER_NODE": "localhost"},
        ),
    }
    if launcher in one:
        return [one[launcher]]
    if launcher == "Azure ML TensorFlow":
        cluster = (
            {"worker": row.ranks}
            if row.ranks == 2
            else {"chief": 1, "worker": row.ranks - 2, "ps": 1}
        )
        return [(script, {**azure, **task}) for task in tasks(**cluster)]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": own_port, "WORLD_SIZE": count}
    where |= {**azure, "NODE_RANK": "0"} if launcher == "Azure ML PyTorch" else {}
    return [
        (script, {**where, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(row.ranks)
    ]


_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
_LAUNCH = [sys.executable, "-m", "torch.distributed.launch"]
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}
_MPI_PLUGIN = {True: ["--mpi=pmix"], False: []}


DOCS = ROOT / "docs" / "matrix.md"
WRITE = bool(os.environ.get("DISTBOOT_WRITE_MATRIX"))
# Two launchers for each row, so that each launcher has its turn.
USUAL = {
    row.name: (LAUNCHERS[1 + index % 12], LAUNCHERS[1 + (index + 5) % 12])
    for index, row in enumerate(ROWS)
}
CELLS = [
    (row, launcher)
    for row in ROWS
    for launcher in LAUNCHERS
    if WRITE or launcher in USUAL[row.name]
]

_TABLES = Tables("framework", {row.name: row.title for row in ROWS}, ("",), LAUNCHERS, missing="-")
_texts: dict[tuple[str, str, str], str] = {}


@pytest.mark.parametrize(
    ("row", "launcher"), CELLS, ids=[f"{row.name}-{launcher}" for row, launcher in CELLS]
)
def test_cell(request: pytest.FixtureRequest, tmp_path: Path, row: Row, launcher: str) -> None:
    clean_env, port = (request.getfixturevalue(name) for name in ("clean_env", "port"))
    missing = missing_for_slurm() if launcher == "srun" else missing_for(launcher)
    if missing:
        pytest.skip(missing)
    slurm = request.getfixturevalue("slurm") if launcher == "srun" else None
    outcome = run(
        row,
        launcher,
        clean_env,
        port,
        slurm=slurm,
        folder=tmp_path,
    )
    if launcher == "deepspeed":  # which leaves its shared memory behind
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
            left.unlink()
    _texts[row.name, "", launcher] = "**failed**"  # unless it is as it should be
    sys.stdout.write(outcome.output[-8000:])
    refusal = senseless(row, launcher)
    if refusal:
        assert outcome.exit_code != 0
        assert f"error[{refusal}]" in outcome.output
    else:
        assert (outcome.exit_code, outcome.ranks) == (
            0,
            1 if launcher == "one process" else row.ranks,
        )
        assert outcome.accuracy >= LEAST
    found = f"{outcome.ranks}: {outcome.accuracy:.3f}"
    _texts[row.name, "", launcher] = f"refused: `{refusal}`" if refusal else found


def test_page_has_all_cells() -> None:
    page = _TABLES.checked(DOCS, _texts, write=WRITE)
    assert f"at least {LEAST}, and within {SPREAD} of all other cells of its row" in page
    found = {**_TABLES.cells(page), **_texts}
    for row in ROWS:
        mine = [found.get((row.name, "", launcher), "-") for launcher in LAUNCHERS]
        reached = [float(one.split(": ")[1]) for one in mine if one[:1].isdigit()]
        assert max(reached, default=0) - min(reached, default=0) <= SPREAD, f"{row.name}: {reached}"
