"""The captures: environments of real launchers, with what is really so beside them (captures/README.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distboot import Placement

_FOLDER = Path(__file__).parent / "captures"

# Families of variables by which a launcher around the tests and benchmarks themselves could leak into what they start.
_LAUNCHER_PREFIXES = (
    "ALPS_", "AWS_BATCH_", "AZ_", "AZUREML_", "CROSS_", "DISTBOOT_", "FLUX_", "GROUP_", "HOROVOD_", "HYDRA_", "I_MPI_",
    "JOB_COMPLETION_INDEX", "JSM_", "KUBERNETES_", "LOCAL_", "LSB_", "LSF_", "MASTER_", "MPI_", "MV2_", "NODE_RANK",
    "OMPI_", "PALS_", "PBS_", "PET_", "PMIX_", "PMI_", "PRTE_", "RANK", "ROLE_", "SLURM_", "SM_", "TF_CONFIG",
    "TORCHELASTIC_", "TRAINING_JOB_NAME", "VC_", "VK_", "WORLD_SIZE",
)  # fmt: skip

# field of Placement -> name in a capture's `expected`
NUMBERS = {
    "rank": "rank",
    "world_size": "size",
    "local_rank": "local_rank",
    "local_world_size": "local_size",
    "node_rank": "node_rank",
    "num_nodes": "nnodes",
}


@dataclass(frozen=True)
class Process:
    """One process of a captured run."""

    environ: dict[str, str]
    expected: dict[str, int | str]


@dataclass(frozen=True)
class Capture:
    """One captured run, its processes in rank order."""

    name: str
    processes: tuple[Process, ...]


def _load(path: Path) -> Capture:
    ranks = json.loads(path.read_text())["ranks"]
    processes = tuple(Process({**rank["inherited"], **rank["env"]}, rank["expected"]) for rank in ranks)
    return Capture(f"{path.parent.name}/{path.stem}", processes)


ALL = [_load(path) for path in sorted(_FOLDER.glob("*/*.json"))]


def one(name: str, rank: int) -> dict[str, str]:
    """A fresh copy of the environment of one captured process."""
    return dict(next(capture for capture in ALL if capture.name == name).processes[rank].environ)


def wrong_numbers(placement: Placement, expected: dict[str, int | str]) -> dict[str, tuple[object, object]]:
    """Every number that is stated and not so: field -> (stated, true). Unknown (None) is not wrong."""
    pairs = {field: (getattr(placement, field), expected[name]) for field, name in NUMBERS.items()}
    return {field: pair for field, pair in pairs.items() if pair[0] is not None and pair[0] != pair[1]}


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """A copy of an environment without any launcher's variables."""
    return {name: value for name, value in environ.items() if not name.startswith(_LAUNCHER_PREFIXES)}
