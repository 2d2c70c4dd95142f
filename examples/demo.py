"""Run one small training four ways and compare: no launcher, torchrun, mpirun as on Azure ML, the wrapper.

    python examples/demo.py --epochs 20

Each row is a child process with a clean environment and a time limit. All must end well and agree on accuracy.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
PLAIN, WITH_DISTBOOT = "examples/train_digits.py", "examples/train_digits_distboot.py"
# All rows train on the same global batches, so only rounding differs: at worst an image or two on the border
# between two digits, of 357. A rank that trains by itself shows in the number of ranks or of results instead.
TOLERANCE = 0.01
GRACE = 10.0  # seconds from TERM to KILL, in which mpirun and torchrun end their ranks

# What the launcher or the platform around this demo may have set: no row must believe in it.
LAUNCHER_VARIABLE = re.compile(
    r"((LOCAL_|NODE_|GROUP_|CROSS_|ROLE_)?(RANK|WORLD_SIZE)|(LOCAL|CROSS)_SIZE|MASTER_(ADDR|PORT)|TF_CONFIG)$"
    r"|(OMPI|PMIX|PMI|PRTE|I_MPI|HYDRA|HYDI|MV2|PALS|FLUX|SLURM|SLURMD|LSB|LSF|JSM|PBS|TORCHELASTIC|PET|"
    r"HOROVOD|AZUREML|SM|AWS_BATCH|VC|VK|DISTBOOT)_|AZ_BATCH|MPI_LOCAL"
)


@dataclass
class Row:
    """One way to start the training, with the variables that this way sets, and how it went."""

    letter: str
    launcher: str
    ranks: int
    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str = ""
    loss: float = 0.0
    accuracy: float = 0.0


def main() -> int:
    """Run the rows one after the other, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        description="Run one small training under four launchers and compare."
    )
    parser.add_argument(
        "--epochs", type=int, help="passed to the training scripts (default: theirs)"
    )
    parser.add_argument(
        "--time-limit", type=float, default=180, help="seconds for each row (default: 180)"
    )
    args = parser.parse_args()
    for kind in (signal.SIGINT, signal.SIGTERM):
        # Unwinds, and so ends the child
        signal.signal(kind, lambda number, _: sys.exit(128 + number))
    if missing := missing_pieces():
        print(
            f"demo: not installed: {', '.join(missing)}. Run `make demo`: it installs what it needs."
        )
        return 1
    options = [] if args.epochs is None else ["--epochs", str(args.epochs)]
    rows = []
    for row in all_rows(options):
        run(row, args.time_limit)
        rows.append(row)
    return report(rows)


def find_mpirun() -> str | None:
    """Return the mpirun of this virtual environment, else the one on PATH."""
    return shutil.which("mpirun", path=Path(sys.executable).parent) or shutil.which("mpirun")


def missing_pieces() -> list[str]:
    """Return the names of what the rows need and do not find."""
    packages = {"torch": "torch", "sklearn": "scikit-learn", "distboot": "distboot"}
    missing = [
        package for module, package in packages.items() if importlib.util.find_spec(module) is None
    ]
    return missing if find_mpirun() else [*missing, "mpirun (Open MPI)"]


def all_rows(options: list[str]) -> Iterator[Row]:
    """Yield the four rows; `options` go to each training script."""
    python = sys.executable
    yield Row("a", "none, plain script", 1, [python, PLAIN, *options])
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    yield Row("b", "torchrun, distboot.init()", 2, [*torchrun, WITH_DISTBOOT, *options])
    # Two ranks on one core and root in a container are fine for a demo. Open MPI refuses both unless told.
    mpirun = [find_mpirun() or "mpirun", "--map-by", ":OVERSUBSCRIBE", "-n", "2", python]
    root = (
        {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if os.geteuid() == 0
        else {}
    )
    with socket.create_server(("127.0.0.1", 0)) as probe:  # a port that is free now
        ip, port = probe.getsockname()
    azure = {
        "AZ_BATCH_MASTER_NODE": f"{ip}:{port}",
        "AZ_BATCHAI_MPI_MASTER_NODE": ip,
        "AZUREML_RUN_ID": "demo",
    }
    yield Row(
        "c",
        "mpirun, Azure ML, distboot.init()",
        2,
        [*mpirun, WITH_DISTBOOT, *options],
        azure | root,
    )
    yield Row(
        "d", "mpirun, plain script, wrapper", 2, [*mpirun, "-m", "distboot", PLAIN, *options], root
    )


def clean_environment() -> dict[str, str]:
    """Return this process's environment without any launcher's variables."""
    clean = {name: value for name, value in os.environ.items() if not LAUNCHER_VARIABLE.match(name)}
    # Like with like; and two ranks cannot share a workstation's only GPU.
    return clean | {"CUDA_VISIBLE_DEVICES": ""}


def run(row: Row, time_limit: float) -> None:
    """Run a row to its end, or to the time limit, with its output on the terminal as it comes."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in row.command]
    shown = [*(f"{name}={value}" for name, value in row.variables.items()), shlex.join(words)]
    print(f"\n({row.letter}) {row.launcher}\n({row.letter}) $ {' '.join(shown)}", flush=True)
    start = time.monotonic()
    child = subprocess.Popen(
        row.command,
        cwd=ROOT,
        env=clean_environment() | row.variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # a process group of its own, by whose id the row can be ended
    )
    results: list[str] = []
    # In a thread, because a rank that outlives its launcher would keep the pipe open and the reader waiting.
    reader = threading.Thread(
        target=copy_lines, args=(child.stdout, row.letter, results), daemon=True
    )
    reader.start()
    try:
        with suppress(subprocess.TimeoutExpired):
            child.wait(time_limit)
        late = child.poll() is None
    finally:
        end(child)
    row.seconds = time.monotonic() - start
    reader.join(GRACE)
    if late:
        row.failure = (
            f"not done after {time_limit:g} s, then ended with exit code {child.returncode}"
        )
    elif child.returncode:
        row.failure = f"exit code {child.returncode}"
    else:
        read_result(row, results)


def copy_lines(output: IO[str], letter: str, results: list[str]) -> None:
    """Print each line with the row's letter, and collect what follows the word `result`."""
    for line in output:
        print(f"({letter}) {line.rstrip()}", flush=True)
        if line.startswith("result "):
            results.append(line.removeprefix("result "))


def end(child: subprocess.Popen[str]) -> None:
    """End the process group of a child that still runs."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            os.killpg(child.pid, kind)
            with suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)


def read_result(row: Row, results: list[str]) -> None:
    """Take the result of a row with exit code 0, which may still have been two worlds of one rank."""
    if len(results) != 1:
        row.failure = f"exit code 0, but {len(results)} result lines instead of 1"
        return
    result = json.loads(results[0])
    row.loss, row.accuracy = result["loss"], result["accuracy"]
    if result["ranks"] != row.ranks:
        row.failure = f"exit code 0, but a world of {result['ranks']} instead of {row.ranks}"


def report(rows: list[Row]) -> int:
    """Print the table, say whether all rows ended well and agree, and return the exit code."""
    width = max(len(row.launcher) for row in rows)
    print(f"\n     {'launcher':{width}}  ranks     loss  accuracy  seconds")
    for row in rows:
        result = f"{'failed':>17}" if row.failure else f"{row.loss:7.5f}  {row.accuracy:8.2%}"
        print(
            f"({row.letter})  {row.launcher:{width}}  {row.ranks:5}  {result}  {row.seconds:7.1f}"
        )
    print()
    failed = [row for row in rows if row.failure]
    for row in failed:
        print(f"demo: row ({row.letter}), {row.launcher}, failed: {row.failure}")
    if failed:
        return 1
    accuracies = [row.accuracy for row in rows]
    apart = max(accuracies) - min(accuracies)
    word = "agree" if apart <= TOLERANCE else "DISAGREE"
    print(
        f"demo: the four rows {word} on accuracy: {100 * apart:.2f} percentage points apart, at most"
    )
    print(
        f"      {100 * TOLERANCE:g} allowed: they train on the same batches, so only rounding differs"
    )
    return 0 if apart <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
