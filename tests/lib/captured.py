"""The captures: environments of real launchers, with what is really so beside them (captures/README.md)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inside import INNERMOST_FIRST
from inside import NUMBERS as _FIELDS

from distboot import DistbootError, Placement, detect

_FOLDER = Path(__file__).parents[1] / "captures"

# The variables by which a launcher around the tests and benchmarks themselves could leak into what they
# start: those of platforms, and of every launcher in the order.
_OF_PLATFORMS = (
    *("ALPS_", "AZ_", "AZUREML_", "KUBERNETES_", "LSB_", "LSF_", "PBS_"),
    *("AWS_BATCH_", "I_MPI_", "LOCAL_", "MASTER_", "PRTE_", "TRAINING_JOB_NAME"),
)


def _prefix(variable: str) -> str:
    """OMPI is a family, TF_CONFIG a whole name."""
    if "_" in variable or variable == "RANK":
        return variable
    return f"{variable}_"


_OF_LAUNCHERS = [variable for entry in INNERMOST_FIRST for variable in entry.variables]
_LAUNCHER_PREFIXES = (*_OF_PLATFORMS, *map(_prefix, _OF_LAUNCHERS))

# field of Placement -> name in a capture's `expected`
NUMBERS = dict(
    zip(_FIELDS, ("rank", "size", "local_rank", "local_size", "node_rank", "nnodes"), strict=True)
)


@dataclass(frozen=True)
class Process:
    environ: dict[str, str]
    expected: dict[str, int | str]

    @property
    def own_local_rank(self) -> int | None:
        """What Open MPI or DeepSpeed gave it: unique on the node, too, but not always in the order of ranks."""
        name = "LOCAL_RANK" if "CROSS_SIZE" in self.environ else "OMPI_COMM_WORLD_LOCAL_RANK"
        text = None if "TORCHELASTIC_RUN_ID" in self.environ else self.environ.get(name)
        return None if text is None else int(text)


# The beginning of a capture's name -> the launcher that owns its ranks, where its first word does not say that.
_LAUNCHERS = {
    "accelerate-1.15.0/cpu_num_processes_2": "single",
    "accelerate-1.15.0/cpu_mpirun_hostfile_mpich": "mpich",
    "accelerate-1.15.0/use_deepspeed_pdsh": "deepspeed",
    "accelerate": "torchrun",
    "deepspeed-0.19.8/slurm": "slurm",
    "deepspeed-0.19.8/openmpi4": "openmpi",
    "deepspeed-0.19.8/mpich": "mpich",
    "deepspeed-0.19.8/impi": "intelmpi",
    "horovodrun-0.28.1/mpi": "openmpi",
    "lightning": "torchrun",
    "mvapich": "mvapich",
    "plain-python": "single",
    "ray": "torch",
    "slurm-interactive-22.05.8/uis_salloc_shell_typed_srun": "slurm",
    "slurm-interactive": "single",
    "slurm-salloc-22.05.8/salloc_shell": "single",
    "slurm-sbatch+openmpi": "openmpi",
    "slurm-sbatch+mpich": "mpich",
    "slurm-sbatch+intelmpi": "intelmpi",
    "slurm-sbatch+torchrun": "torchrun",
    "slurm-salloc+torchrun": "torchrun",
    "slurm-sbatch-22.05.8/batch_step": "single",
    "slurm-": "slurm",
    "torch": "torchrun",
}


@dataclass(frozen=True)
class Capture:
    """One captured run, its processes in rank order."""

    name: str
    processes: tuple[Process, ...]

    @property
    def launcher(self) -> str:
        found = (
            launcher for prefix, launcher in _LAUNCHERS.items() if self.name.startswith(prefix)
        )
        return next(found, self.name.partition("-")[0])


def _load(path: Path) -> Capture:
    ranks = json.loads(path.read_text())["ranks"]
    processes = tuple(
        Process({**rank["inherited"], **rank["env"]}, rank["expected"]) for rank in ranks
    )
    return Capture(f"{path.parent.name}/{path.stem}", processes)


ALL = [_load(path) for path in sorted(_FOLDER.glob("*/*.json"))]


def one(name: str, rank: int) -> dict[str, str]:
    """A fresh copy of the environment of one captured process."""
    return dict(next(capture for capture in ALL if capture.name == name).processes[rank].environ)


def wrong_numbers(placement: Placement, process: Process) -> dict[str, tuple[object, object]]:
    """Every number that is stated and not so: field -> (stated, true). Unknown (None) is not wrong.

    The local rank is that in the order of ranks or the launcher's own; `shared_local_ranks` tells if two are the same.
    """
    pairs = {
        field: (getattr(placement, field), process.expected[name])
        for field, name in NUMBERS.items()
    }
    if placement.local_rank == process.own_local_rank:
        del pairs["local_rank"]
    return {
        field: pair for field, pair in pairs.items() if pair[0] is not None and pair[0] != pair[1]
    }


def shared_local_ranks(
    placements: Sequence[Placement], processes: Sequence[Process]
) -> list[tuple[object, int]]:
    """The pairs of node and local rank that several of these processes of one job say to be theirs."""
    pairs = zip(placements, processes, strict=True)
    said = [
        (process.expected["node_rank"], one.local_rank)
        for one, process in pairs
        if one.local_rank is not None
    ]
    return [pair for pair in said if said.count(pair) > 1]


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in environ.items() if not name.startswith(_LAUNCHER_PREFIXES)
    }


def refused(environ: Mapping[str, str], **options: str) -> DistbootError:
    try:
        placement = detect(environ, **options)
    except DistbootError as error:
        return error
    raise AssertionError(f"not refused: {placement}")
