"""Run one small training four ways, and compare: without a launcher, torchrun, mpirun as Azure ML starts it, the wrapper.

    python examples/demo.py --epochs 20

Every row is a child process with a clean environment and a time limit. The demo passes when all four rows end well
and reach the same accuracy.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
PLAIN, WITH_DISTBOOT = "examples/train_digits.py", "examples/train_digits_distboot.py"
# All rows train on the same global batches, so they differ by rounding only: at worst a test image or two that lie on
# the border between two digits. Ranks that train by themselves, or a lost part of the data, show as more than a point.
TOLERANCE = 0.01
GRACE = 10.0  # seconds between TERM and KILL: mpirun and torchrun need some to end their ranks

# What a launcher or a platform around this demo may have set, and what would make a row believe in it.
LAUNCHER_VARIABLES = frozenset(
    """RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE LOCAL_SIZE NODE_RANK GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK
    ROLE_WORLD_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT TF_CONFIG""".split()
)
LAUNCHER_PREFIXES = (
    *("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_LOCAL", "MPIR_", "I_MPI_", "HYDRA_", "HYDI_", "MV2_", "PALS_", "FLUX_"),
    *("SLURM_", "SLURMD_", "LSB_", "LSF_", "JSM_", "PBS_", "TORCHELASTIC_", "PET_", "HOROVOD_", "DISTBOOT_"),
    *("AZ_BATCH", "AZUREML_", "SM_", "AWS_BATCH_", "VC_", "VK_"),
)


@dataclass
class Row:
    """One way to start the training: `letter`, `name` and `ranks` for the table, the command and what it needs set."""

    letter: str
    name: str
    ranks: int
    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """How a row ended; `failure` is None when it ended well, and then loss and accuracy are its result."""

    seconds: float
    failure: str | None
    loss: float = 0.0
    accuracy: float = 0.0


def main() -> int:
    """Run the rows, print the table, and say whether they agree."""
    parser = argparse.ArgumentParser(description="Run one small training under four launchers and compare.")
    parser.add_argument("--epochs", type=int, help="passed on to the training; its own default otherwise")
    parser.add_argument("--time-limit", type=float, default=180.0, help="seconds for each row (180)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that `finally` ends the child
    missing = missing_pieces()
    if missing:
        print(f"demo: not installed here: {', '.join(missing)}. Run `make demo`, which installs all it needs first.")
        return 1
    extra = [] if args.epochs is None else ["--epochs", str(args.epochs)]
    outcomes = [(row, run(row, args.time_limit)) for row in rows(extra)]
    print_table(outcomes)
    return verdict(outcomes)


def mpirun() -> str | None:
    """The mpirun of this virtual environment, else the one on PATH."""
    beside = Path(sys.executable).parent / "mpirun"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")


def missing_pieces() -> list[str]:
    """What the rows need and this Python does not have."""
    modules = {"torch": "torch", "sklearn": "scikit-learn", "distboot": "distboot"}
    missing = [package for module, package in modules.items() if importlib.util.find_spec(module) is None]
    return missing if mpirun() else [*missing, "mpirun (Open MPI)"]


def rows(extra: list[str]) -> list[Row]:
    """The four rows. `extra` goes to every training."""
    python = sys.executable
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    # Two ranks on a machine with one core are fine here; Open MPI refuses them unless told.
    mpi = [mpirun() or "mpirun", "--map-by", ":OVERSUBSCRIBE", "-n", "2", python]
    # Root in a container is fine for a demo; Open MPI wants to hear it twice.
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    azure = {
        "AZUREML_RUN_ID": "distboot-demo",
        "AZ_BATCH_MASTER_NODE": f"127.0.0.1:{free_port()}",
        "AZ_BATCHAI_MPI_MASTER_NODE": "127.0.0.1",
    }
    return [
        Row("a", "no launcher, plain script", 1, [python, PLAIN, *extra]),
        Row("b", "torchrun, distboot.init()", 2, [*torchrun, WITH_DISTBOOT, *extra]),
        Row("c", "mpirun as on Azure ML, distboot.init()", 2, [*mpi, WITH_DISTBOOT, *extra], azure | root),
        Row("d", "mpirun, plain script in the wrapper", 2, [*mpi, "-m", "distboot", PLAIN, *extra], root),
    ]


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clean_environment() -> dict[str, str]:
    """This process's environment without any trace of a launcher, for the same start everywhere."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith(LAUNCHER_PREFIXES)
    }
    kept["CUDA_VISIBLE_DEVICES"] = ""  # like with like, and two ranks cannot share the one GPU of a workstation
    kept.pop("PYTHONUNBUFFERED", None)  # it writes the end of a line by itself, and two ranks' lines then mix
    return kept


def run(row: Row, time_limit: float) -> Outcome:
    """Run one row to its end, its output on the terminal as it comes."""
    print(f"\n({row.letter}) {row.name}\n({row.letter}) $ {shown(row)}", flush=True)
    start = time.monotonic()
    # A session of its own: the whole row can be ended by one process group id, and nothing else is hit.
    with subprocess.Popen(
        row.command,
        cwd=ROOT,
        env=clean_environment() | row.variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as child:
        results: list[str] = []
        reader = threading.Thread(target=copy_lines, args=(child.stdout, row.letter, results), daemon=True)
        reader.start()
