"""The framework matrix: every framework of the examples, under every launcher. What a cell is, and how it is run."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hosts import Slurm, side_by_side
from launched import MPI_ENV, MPIRUN, debians_mpi
from tensorflows import tasks

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
EXAMPLES = ROOT / "examples"
LEAST = 0.93  # accuracy
SPREAD = 0.02  # by which the cells of a row may differ
LIMIT = 240  # seconds for a cell, on a machine that has other work, too

Command = tuple[list[str], dict[str, str]]  # with its variables


@dataclass(frozen=True)
class Row:
    """One framework.

    Attributes:
        name: as the page has it.
        example: file in examples/, and its arguments.
        wrapped: value of the wrapper's --framework for an unmodified script; empty: the script calls init.
        ranks: how many.
        needs_mpi: whether it makes sense under MPI launchers only.
    """

    name: str
    example: str
    wrapped: str = ""
    ranks: int = 2
    needs_mpi: bool = False

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
    Row("TensorFlow, parameter server", "tensorflow_parameter_server.py", ranks=3),
    Row("Lightning", "lightning_trainer.py"),
    Row("Transformers `Trainer`, through the wrapper", "transformers_trainer.py", wrapped="torch"),
    Row("Accelerate, through the wrapper", "accelerate_loop.py", wrapped="torch"),
    Row("JAX", "jax_data_parallel.py"),
    Row("mpi4py", "mpi_reduce.py", needs_mpi=True),
)

MPI = ("Open MPI 5", "Open MPI 4", "MPICH", "srun", "Azure ML MPI")
LAUNCHERS = (
    "one process", "by hand", "torchrun", "torch.distributed.launch", *MPI[:4], "horovodrun", "deepspeed", MPI[4],
    "Azure ML PyTorch", "Azure ML TensorFlow",
)  # fmt: skip


@dataclass
class Outcome:
    """What became of a cell: the numbers of its last line, how it ended, and what it printed."""

    ranks: int
    accuracy: float
    exit_code: int
    output: str


def senseless(row: Row, launcher: str) -> str:
    """The code of the error with which this pair is refused; empty if it is to train."""
    return "mpi-mismatch" if row.needs_mpi and launcher not in (*MPI, "one process") else ""


def missing_for(launcher: str) -> str | None:
    programs = {
        "Open MPI 5": MPIRUN, "Azure ML MPI": MPIRUN, "Open MPI 4": shutil.which("mpirun.openmpi"),
        "MPICH": shutil.which("mpiexec.mpich"), "horovodrun": shutil.which("horovodrun", path=str(BIN)),
        "deepspeed": shutil.which("deepspeed", path=str(BIN)),
    }  # fmt: skip
    return f"no {launcher} here" if programs.get(launcher, "") is None else None


def run(row: Row, launcher: str, env: Mapping[str, str], port: int, *, slurm: Slurm | None, folder: Path) -> Outcome:
    variables = {**_VARIABLES, **(debians_mpi(launcher, folder) if row.needs_mpi else {})}
    if slurm is not None:
        done = slurm.srun(
            [f"-n{row.ranks}", f"-N{row.ranks if row.ranks == 2 else 1}", "--overcommit", *_MPI_PLUGIN[row.needs_mpi],
             *row.command()],
            {**variables, "PYTHONPATH": str(ROOT)}, timeout=LIMIT,
        )  # fmt: skip
        return _outcome(done.returncode, done.stdout + done.stderr)
    path = f"{BIN}{os.pathsep}{env['PATH']}"
    started = [
        (command, {**env, "PATH": path, **variables, **more}) for command, more in _commands(row, launcher, port)
    ]
    ended = side_by_side(started, LIMIT)
    return _outcome(next(filter(None, (code for code, _ in ended)), 0), "".join(output for _, output in ended))


def _outcome(exit_code: int, output: str) -> Outcome:
    found = [line[line.index("result {") + 7 :] for line in output.splitlines() if "result {" in line]
    result = json.loads(found[-1]) if len(found) == 1 else {}
    return Outcome(result.get("ranks", 0), result.get("accuracy", 0.0), exit_code, output)


def _commands(row: Row, launcher: str, port: int) -> list[Command]:
    """What is typed: one command, or one for each rank where nothing starts them; with its variables."""
    script, count = row.command(), str(row.ranks)
    mpirun, own_port = [str(MPIRUN), "--map-by", ":OVERSUBSCRIBE"], str(port)
    torch_port = ["--master-port", own_port, "--use-env"]
    deepspeed_options = ["--hostfile", "/nonexistent", "--master_port", own_port, "--no_local_rank", "--no_python"]
    azure = {"AZUREML_RUN_ID": f"digits_{port}"}
    one: dict[str, Command] = {
        "one process": (script, {}),
        "torchrun": ([*_TORCHRUN, "--standalone", f"--nproc-per-node={count}", "--no-python", *script], {}),
        "torch.distributed.launch": ([*_LAUNCH, *torch_port, f"--nproc-per-node={count}", "--no-python", *script], {}),
        "Open MPI 5": ([*mpirun, "-n", count, *script], MPI_ENV),
        "Open MPI 4": (["mpirun.openmpi", "--oversubscribe", "-n", count, *script], MPI_ENV),
        "MPICH": (["mpiexec.mpich", "-n", count, *script], {"MASTER_PORT": own_port}),
        "horovodrun": (["horovodrun", "--gloo", "-np", count, *script], {}),
        "deepspeed": (["deepspeed", "--num_gpus", count, *deepspeed_options, *script], {}),
        "Azure ML MPI": (
            [*mpirun, "-n", count, *script], {**MPI_ENV, **azure, "AZ_BATCHAI_MPI_MASTER_NODE": "localhost"}
        ),
    }  # fmt: skip
    if launcher in one:
        return [one[launcher]]
    if launcher == "Azure ML TensorFlow":
        cluster = {"worker": row.ranks} if row.ranks == 2 else {"chief": 1, "worker": row.ranks - 2, "ps": 1}
        return [(script, {**azure, **task}) for task in tasks(**cluster)]
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": own_port, "WORLD_SIZE": count}
    where |= {**azure, "NODE_RANK": "0"} if launcher == "Azure ML PyTorch" else {}
    return [(script, {**where, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(row.ranks)]


_TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
_LAUNCH = [sys.executable, "-m", "torch.distributed.launch"]
_VARIABLES = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
_MPI_PLUGIN = {True: ["--mpi=pmix"], False: []}
