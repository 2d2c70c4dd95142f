"""Which launcher wins, and where its record is.

The innermost launcher, the one that started this very process, owns its rank: what an outer
launcher has set is inherited by all processes alike and wrong for most of them. So launchers are
asked in the order of `INNERMOST_FIRST`, and the first one that claims the process wins.

A launcher's file is loaded only where one of its variables is set: most processes load one or two.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import NamedTuple

from .launchers import Launcher, of_platform
from .node_platform import NodePlatform


class Entry(NamedTuple):
    """A launcher in the order."""

    name: str  # of its record, in capital letters there
    # Variables with which the file is loaded: families (what comes before the first "_") and whole
    # names, where the family is a common word
    variables: tuple[str, ...]
    file: str


def _launcher(name: str, variables: str) -> Entry:
    names = variables.split()
    return Entry(name, tuple(names), file=name)


def _platform(name: str, variables: str) -> Entry:
    """A row of the table of `node_platforms`."""
    names = variables.split()
    return Entry(name, tuple(names), file="node_platforms")


INNERMOST_FIRST: tuple[Entry, ...] = (
    # srun, mpirun and operators all start torchrun's agents. No torchrun worker starts mpirun.
    _launcher("torchrun", "TORCHELASTIC GROUP ROLE"),
    # Its launcher runs once a node, under pdsh, and starts the processes itself.
    _launcher("deepspeed", "CROSS LOCAL_SIZE"),
    # horovodrun and the MPI launchers start their daemons with srun inside an allocation, and the
    # processes inherit the step of the daemon, in which every node has "one task". So all of them
    # come before slurm.
    _launcher("horovodrun", "HOROVOD"),
    # jsrun sets Open MPI's variables too, for Spectrum MPI, but not all of them.
    _launcher("lsf", "JSM"),
    _launcher("openmpi", "OMPI PMIX"),
    # Intel MPI and MVAPICH come from MPICH, set its variables too, and know more than it does.
    _launcher("intelmpi", "I_MPI_HYDRA_UUID HYDRA"),
    _launcher("mvapich", "MV2"),
    _launcher("mpich", "MPI"),
    # Flux is often started by Slurm. Both set PALS_* for Cray's MPI library, so PALS itself is
    # asked after them.
    _launcher("flux", "FLUX"),
    _launcher("slurm", "SLURM"),
    _launcher("pals", "PALS"),
    # PMI_RANK alone does not identify the launcher; those above set more.
    _launcher("pmi", "PMI"),
    # The agent of a node clears the variables of its own launcher. A launcher that a rank starts is
    # one of those above.
    _launcher("distboot", "DISTBOOT"),
    # They number processes, and platforms that number nodes start one on each.
    _launcher("jax", "JAX"),
    _launcher("jaxjob", "COORDINATOR_ADDRESS COORDINATOR_PORT NUM_PROCESSES PROCESS_ID"),
    # An operator's RANK counts pods. It must not be taken for that of a process, as torch would.
    # ModelArts is built on Volcano, and knows more.
    _launcher("kubeflow", "PET"),
    _platform("modelarts", "VC MA"),
    _launcher("volcano", "VC VK"),
    _launcher("pods", "NPROC_PER_NODE"),
    # Platforms with names of their own; where RANK or LOCAL_RANK is set, something has numbered
    # processes.
    _platform("skypilot", "SKYPILOT"),
    _platform("dstack", "DSTACK"),
    _platform("lepton", "LEPTON"),
    _platform("metaflow", "MF"),
    _platform("lws", "LWS"),
    _platform("volcengine", "MLP"),
    _platform("baseten", "BT"),
    _platform("ngc", "NGC"),
    _platform("nsml", "NSML"),
    _platform("beaker", "BEAKER"),
    _platform("htcondor", "_CONDOR_PROCNO _CONDOR_NPROCS"),
    _launcher("tpu", "TPU MEGASCALE"),
    _launcher("vertex", "CLUSTER_SPEC"),
    # The same with plain names, which a user may have set from the names above.
    _launcher("nodes", "NODE_RANK JOB_COMPLETION_INDEX"),
    # NODE_RANK and LOCAL_RANK without RANK: for torch that is half a launcher.
    _launcher("lightning", "LOCAL_RANK NODE_RANK"),
    # RANK and WORLD_SIZE are plain names that any shell, image or operator may set; a launcher with
    # names of its own knows better. When both are set and disagree, `detect` refuses.
    _launcher("torch", "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK"),
    # An operator sets TF_CONFIG once a pod; where RANK is there as well (Vertex AI) it is the more
    # exact one.
    _launcher("tf_config", "TF_CONFIG"),
    # Platforms that start one container per node: whatever was started inside knows better.
    _launcher("sagemaker", "SM"),
    _launcher(
        "awsbatch",
        "AWS_BATCH_JOB_NODE_INDEX AWS_BATCH_JOB_NUM_NODES AWS_BATCH_JOB_MAIN_NODE_INDEX",
    ),
    # No launcher claims the process, and no half of one is left over.
    _launcher("single", "LSF_PM_TASKID ALPS_APP_PE PBS_TASKNUM"),
)

_ENTRIES = {entry.name: entry for entry in INNERMOST_FIRST}
_PLACES = {name: place for place, name in enumerate(_ENTRIES)}

# `Entry.variables` -> the names of the launchers
_BY_VARIABLE: dict[str, list[str]] = {}
for _entry in INNERMOST_FIRST:
    for _variable in _entry.variables:
        _BY_VARIABLE.setdefault(_variable, []).append(_entry.name)


class _Launchers(Mapping[str, Launcher]):
    """The records by name, the innermost first, each loaded when it is asked for."""

    def __getitem__(self, name: str) -> Launcher:
        return _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_ENTRIES)

    def __len__(self) -> int:
        return len(_ENTRIES)


@cache
def _load(name: str) -> Launcher:
    entry = _ENTRIES[name]
    file = import_module(f".launchers.{entry.file}", __package__)
    record: Launcher | NodePlatform = getattr(file, entry.name.upper())
    if isinstance(record, NodePlatform):
        record = of_platform(record)
    return record


LAUNCHERS = _Launchers()


def with_any_variable(environ: Collection[str]) -> list[Launcher]:
    """The launchers that have any variable there, the innermost first."""
    families = {name.partition("_")[0] for name in environ}
    keys = families.union(environ)
    found = keys & _BY_VARIABLE.keys()
    names: set[str] = set()
    names.update(*map(_BY_VARIABLE.__getitem__, found))
    in_order = sorted(names, key=_PLACES.__getitem__)
    return list(map(LAUNCHERS.__getitem__, in_order))


def with_marker(environ: Mapping[str, str]) -> list[Launcher]:
    """The launchers that have a marker or trigger there, the innermost first.

    Only these may have started a process with this environment.
    """
    names = environ.keys()
    found = []
    for launcher in with_any_variable(environ):
        asked_for = launcher.markers + launcher.triggers
        is_present = not names.isdisjoint(asked_for)
        if is_present:
            found.append(launcher)
    return found


def node_platforms(launchers: Iterable[Launcher]) -> list[NodePlatform]:
    """Those of these launchers that are platforms which number nodes."""
    found = []
    for launcher in launchers:
        platform = launcher.nodes
        if platform is not None:
            found.append(platform)
    return found
