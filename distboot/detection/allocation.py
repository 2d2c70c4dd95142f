"""The tasks and hosts of a batch system or a hostfile that a job leaves unused.

A batch script is one process, whatever the allocation has: a launcher in it starts the ranks. A
script that is started without one trains alone on the first host, and nothing fails. So this file
counts what the allocation has, and what a job leaves unused. It is not an error: a step of a batch
script may be meant to be alone.

Hosts are counted everywhere. Tasks are counted only where the user asked for tasks: SLURM_NTASKS,
and the lines of PBS Professional's node file (`mpiprocs`). What Torque (PBS_NP), LSF, Grid Engine
(NSLOTS) and OAR count are processors, which one process uses with its threads as often as not.

All is pure: `texts` has what the files hold that variables name, by variable, and `surroundings`
reads those. A text that cannot be read counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ..base.text import counted, digits
from .env_reader import variable
from .placement import NO_LAUNCHER, WRAPPER, Placement

# A batch script of Flux has no variable with the number of its hosts (flux-environment(7)). In
# `texts` this name has what `flux getattr size` prints: the number of brokers, one on each host.
FLUX = "FLUX_URI"

_HOSTFILE = "OMPI_MCA_orte_default_hostfile"
_HOSTFILE_OF_5 = "PRTE_MCA_prte_default_hostfile"
# Variables that name files
_FILES = (
    "PBS_NODEFILE",
    "LSB_DJOB_HOSTFILE",
    "OAR_NODEFILE",
    "OAR_NODE_FILE",
    "PE_HOSTFILE",
    _HOSTFILE,
)
_FETCHED = (*_FILES, FLUX)  # what is in `texts`
_OWN = "python -m distboot --nproc-per-node N train.py …"


class Source(NamedTuple):
    """A variable that counts tasks or hosts."""

    name: str
    count: Callable[[str], int]  # from its value, or from the file that it names; 0: unknown
    unless: str = ""  # a variable with which it counts something else


class Count(NamedTuple):
    """A number of tasks or hosts, and who says it."""

    number: int = 0  # 0: unknown, or all are used
    source: str = ""  # for example "SLURM_NTASKS='4'"


class BatchSystem(NamedTuple):
    """One batch system."""

    title: str  # what people call it
    marker: str  # a variable that it sets in every job
    start: str  # a command that starts {} processes
    start_nodes: str  # what starts a command on each of {} hosts
    hosts: tuple[Source, ...] = ()  # in the order of trust
    tasks: tuple[Source, ...] = ()
    instead: str = ""  # what another launcher wants in `start_nodes`


class PossiblePeers(NamedTuple):
    """What shows processes beside the ranks of this job, which may belong to it."""

    found: str  # for example "the Slurm allocation has 4 tasks (SLURM_NTASKS='4')"
    remedy: str  # what to type


def find_unused(
    placement: Placement, environ: Mapping[str, str], texts: Mapping[str, str]
) -> PossiblePeers | None:
    """What the environment reserves and this job leaves unused; None: nothing is known of that."""
    ignored = _ignored_hostfile(placement, environ, texts)
    if ignored is not None:
        return ignored
    if _is_step(environ):
        return None
    system = _system(environ)
    nothing = Count()
    tasks = _count(system.tasks, environ, texts)
    hosts = _count(system.hosts, environ, texts)
    if not _leaves_tasks(placement, tasks.number):
        tasks = nothing
    if not _leaves_hosts(placement, hosts.number):
        hosts = nothing
    if (tasks, hosts) == (nothing, nothing):
        return None
    found = _found(system, tasks, hosts)
    remedy = _remedy(system, placement, tasks, hosts)
    return PossiblePeers(found, remedy)


def files(environ: Mapping[str, str]) -> list[str]:
    """The variables that name files which `find_unused` needs."""
    names = [_HOSTFILE]
    for source in _system(environ).hosts:
        names.append(source.name)
    wanted = environ.keys() & set(_FILES)
    return [name for name in names if name in wanted]


def _system(environ: Mapping[str, str]) -> BatchSystem:
    """The one that started this job; one that counts nothing if there is none."""
    marker = next(filter(environ.__contains__, _BY_MARKER), "")
    return _BY_MARKER.get(marker, _NO_SYSTEM)


def _is_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process: then the user said how many."""
    name = "SLURM_STEP_ID"
    if name not in environ:
        return False
    from .launchers.slurm import INTERACTIVE_STEP

    step = environ[name]
    return step != INTERACTIVE_STEP


def _count(
    sources: Sequence[Source], environ: Mapping[str, str], texts: Mapping[str, str]
) -> Count:
    """The number of the first of these sources that can be read."""
    fetched = dict.fromkeys(_FETCHED, "")
    known = {**environ, **fetched, **texts}
    for source in sources:
        counts_other = source.unless in environ
        if counts_other or source.name not in environ:
            continue
        text = known[source.name]
        number = source.count(text)
        if number:
            shown = variable(environ, source.name)
            return Count(number, shown)
    return Count()


def _leaves_tasks(placement: Placement, tasks: int) -> bool:
    """Whether tasks have no rank. Other launchers than these were told how many ranks to start."""
    launcher = placement.launcher
    ranks = placement.world_size
    if launcher not in (NO_LAUNCHER, WRAPPER):
        return False
    return ranks < tasks


def _leaves_hosts(placement: Placement, hosts: int) -> bool:
    """Whether hosts have no rank.

    Some may have been left out on purpose where a launcher has reached other hosts.
    """
    nodes = placement.num_nodes or hosts
    if nodes >= hosts:
        return False
    is_one_node = nodes == 1
    is_wrapper = placement.launcher == WRAPPER
    return is_one_node or is_wrapper


def _found(system: BatchSystem, tasks: Count, hosts: Count) -> str:
    listed = []
    if tasks.number:
        listed.append(f"{counted(tasks.number, 'task')} ({tasks.source})")
    if hosts.number:
        listed.append(f"{counted(hosts.number, 'host')} ({hosts.source})")
    return f"the {system.title} allocation has {' and '.join(listed)}"


def _remedy(system: BatchSystem, placement: Placement, tasks: Count, hosts: Count) -> str:
    """`"start a process for each task: srun python train.py …; or start the ranks here: …"`."""
    from ..base.table import first_that_holds  # here, as few jobs leave something unused

    start_nodes = system.start_nodes.format(hosts.number)
    on_nodes = f"start this on each host{system.instead}: {start_nodes}"
    in_wrapper = f"{on_nodes} {_OWN}"
    if not hosts.number:
        in_wrapper = f"start the ranks here: {_OWN.replace('N', str(tasks.number))}"
    what = "host"
    if tasks.number:
        what = "task"
    start = system.start.format(tasks.number or hosts.number)
    return first_that_holds(
        (placement.launcher == WRAPPER, in_wrapper),
        (placement.has_launcher, f"{on_nodes} …"),
        (
            True,
            (
                f"start a process for each {what}: {start}; or {in_wrapper}; or set "
                "DISTBOOT_LAUNCHER=none if this process is meant to be alone"
            ),
        ),
    )


def _ignored_hostfile(
    placement: Placement, environ: Mapping[str, str], texts: Mapping[str, str]
) -> PossiblePeers | None:
    """A hostfile of Open MPI 4, which Open MPI 5 does not read: it starts all ranks on its host."""
    # PMIX_NAMESPACE=prterun-nodea-22774@1; Open MPI 4 has a number there.
    is_5 = environ.get("PMIX_NAMESPACE", "").startswith("prterun-")
    is_open_mpi_5 = placement.launcher == "openmpi" and is_5
    if _HOSTFILE_OF_5 in environ or not is_open_mpi_5:
        return None
    hosts = _lines_of_hosts(texts.get(_HOSTFILE, ""))
    if not _leaves_hosts(placement, hosts):
        return None
    shown = variable(environ, _HOSTFILE)
    path = environ[_HOSTFILE]
    return PossiblePeers(
        f"the file {shown} names {counted(hosts, 'host')}, "
        "and Open MPI 5 does not read that variable",
        f"name the file in {_HOSTFILE_OF_5}; or mpirun --hostfile {path} …",
    )


def _number(text: str) -> int:
    return digits(text.strip()) or 0


def _words(text: str) -> int:
    return len(text.split())


def _different_words(text: str) -> int:
    return len(set(text.split()))


def _hosts_with_slots(text: str) -> int:
    """`"h1 2 h2 1 "` has 2."""
    hosts = text.split()[::2]
    return len(set(hosts))


def _lines_of_hosts(text: str) -> int:
    """How many different hosts begin a line: `"nodea slots=1"`, `"h1 8 all.q@h1 UNDEFINED"`."""
    hosts = set()
    for line in text.splitlines():
        without_comment, _, _ = line.partition("#")
        words = without_comment.split()
        hosts.update(words[:1])
    return len(hosts)


_MPI_NODES = "mpirun -n {} --map-by node"  # Open MPI's option for one process on each host
BATCH_SYSTEMS = (
    # Its batch scripts have no SLURM_*, also where Slurm started the brokers (flux-environment(7)).
    BatchSystem(
        "Flux",
        "FLUX_URI",
        "flux run -n {} python train.py …",
        "flux run --nodes={0} --ntasks={0}",
        (Source(FLUX, _number), Source("FLUX_JOB_NNODES", _number)),
    ),
    # Slurm 22.05.8, sbatch -N2 --ntasks-per-node=2:
    #   SLURM_JOB_NUM_NODES=2   SLURM_NTASKS=4 (not without an option for tasks)
    # Never read: SLURM_TASKS_PER_NODE, which may count CPUs where no tasks were asked for.
    BatchSystem(
        "Slurm",
        "SLURM_JOB_ID",
        "srun python train.py …",
        # With SLURM_NTASKS of the allocation, srun ignores --ntasks-per-node alone.
        "srun --ntasks={0} --ntasks-per-node=1",
        (Source("SLURM_JOB_NUM_NODES", _number), Source("SLURM_NNODES", _number)),
        (Source("SLURM_NTASKS", _number), Source("SLURM_NPROCS", _number)),
    ),
    # PBS Professional, -l select=2:ncpus=8:mpiprocs=4:
    #   PBS_NODEFILE=/var/spool/pbs/aux/1.srv, in which a host is once for each process
    # Torque, -l nodes=2:ppn=8, where a host is in it once for each processor:
    #   PBS_NUM_NODES=2   PBS_NUM_PPN=8   PBS_NP=16
    BatchSystem(
        "PBS",
        "PBS_JOBID",
        "mpiexec -n {} python train.py …",
        "mpiexec -n {} --ppn 1",
        (
            Source("PBS_NODEFILE", _lines_of_hosts),
            Source("PBS_NUM_NODES", _number),
        ),
        (Source("PBS_NODEFILE", _words, unless="PBS_NP"),),
        instead=", with Open MPI --map-by node for --ppn 1",
    ),
    # LSF 10.1, bsub -n 3:
    #   LSB_MCPU_HOSTS="h1 2 h2 1 "   LSB_HOSTS="h1 h1 h2" (not where that would be too long)
    #   LSB_DJOB_HOSTFILE=/home/user/.lsbatch/1.1.hostfile, with a host once for each processor
    BatchSystem(
        "LSF",
        "LSB_JOBID",
        "mpirun -n {} python train.py … (or jsrun)",
        _MPI_NODES,
        (
            Source("LSB_MCPU_HOSTS", _hosts_with_slots),
            Source("LSB_HOSTS", _different_words),
            Source("LSB_DJOB_HOSTFILE", _lines_of_hosts),
        ),
    ),
    # OAR 2.5, oarsub -l nodes=2:
    #   OAR_NODEFILE=OAR_NODE_FILE=/var/lib/oar/8, in which a host is once for each core
    BatchSystem(
        "OAR",
        "OAR_JOB_ID",
        "mpirun -n {} --hostfile $OAR_NODEFILE python train.py …",
        f"{_MPI_NODES} --hostfile $OAR_NODEFILE",
        (
            Source("OAR_NODEFILE", _lines_of_hosts),
            Source("OAR_NODE_FILE", _lines_of_hosts),
        ),
    ),
    # Grid Engine, qsub -pe mpi 16:
    #   NSLOTS=16   NHOSTS=2   PE_HOSTFILE=/opt/sge/spool/h1/active_jobs/8.1/pe_hostfile
    BatchSystem(
        "Grid Engine",
        "SGE_ROOT",
        "mpirun -n {} python train.py …",
        _MPI_NODES,
        (
            Source("NHOSTS", _number),
            Source("PE_HOSTFILE", _lines_of_hosts),
        ),
    ),
)
_NO_SYSTEM = BatchSystem("", "", "", "")
_BY_MARKER = {system.marker: system for system in BATCH_SYSTEMS}
