"""`Placement`: what the environment of one process proves about its place in the job, with sources.

And the platforms, one of which it may name. A platform owns the machines, and no rank; it may know
the address of rank 0 and the job's id.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

NO_LAUNCHER = "single"  # the launcher of a process that none has started
OFF = "none"  # what a user names for a process that is alone, whatever its environment has
WRAPPER = "distboot"  # the launcher of a rank that the node's wrapper started

# The numeric fields, in the order of `Launcher.numbers`
NUMBERS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank", "num_nodes")
OPTIONAL_NUMBERS = NUMBERS[2:]  # may be None
SIZES = {"rank": "world_size", "local_rank": "local_world_size", "node_rank": "num_nodes"}

# The variables in which PyTorch, and whatever imitates it, expects the fields.
_EXPORTED = (
    "rank",
    "local_rank",
    "node_rank",
    "world_size",
    "local_world_size",
    "master_addr",
    "master_port",
)
VARIABLES = {field: field.upper() for field in _EXPORTED}


class Placement(NamedTuple):
    """This process's place in the job. A field is None when the environment alone cannot prove it.

    Attributes:
        launcher: what started this process and owns its rank, for example "openmpi" or "single".
        platform: what owns the machines, for example "azureml", or None.
        rank: 0 to world_size - 1.
        world_size: number of processes of the job.
        local_rank: 0 to local_world_size - 1, or None. No other process of the job has it on this
            node; where the launcher hands them out (Open MPI, Intel MPI, DeepSpeed), not always in
            the order of ranks.
        local_world_size: number of the job's processes on this node, or None.
        node_rank: 0 to num_nodes - 1; nodes are counted in the order in which the ranks first reach
            them. Or None.
        num_nodes: number of nodes that have a rank, or None.
        master_addr: host name or address of rank 0 without brackets or port, or None.
        master_port: 1 to 65535, or None.
        job_id: what the launcher or the platform calls this job, or None.
        sources: field name -> where its value came from, for example "OMPI_COMM_WORLD_RANK".
        notes: remarks for people, for example why an allocation was not taken for a launcher.
        node_level: why this process stands for a whole node or pod and is to start the ranks there,
            for example "PET_NPROC_PER_NODE='4' asks for 4 processes in each pod"; the numbers above
            then count such processes. None: it is itself one of the job's ranks.
    """

    launcher: str
    platform: str | None
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    num_nodes: int | None
    master_addr: str | None
    master_port: int | None
    job_id: str | None
    sources: Mapping[str, str] = MappingProxyType({})
    notes: tuple[str, ...] = ()
    node_level: str | None = None

    @property
    def who(self) -> str | None:
        """This process as messages name it: "rank 3", or "node 2"; None when it is alone."""
        if self.world_size == 1:
            return None
        if self.node_level is None:
            return f"rank {self.rank}"
        return f"node {self.rank}"

    @property
    def has_launcher(self) -> bool:
        """Whether a launcher started this process, and it is not just a process on its own."""
        return self.launcher != NO_LAUNCHER

    def with_fields(self, source: str, fields: Mapping[str, object]) -> Placement:
        """A copy with these fields, those of them that are new having come from `source`."""
        new = {name: value for name, value in fields.items() if getattr(self, name) != value}
        sources = MappingProxyType({**self.sources, **dict.fromkeys(new, source)})
        return self._replace(**new, sources=sources)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, object]:
        """All fields as plain JSON types, `sources` as a dict and `notes` as a list."""
        return {**self._asdict(), "sources": dict(self.sources), "notes": list(self.notes)}


# In the order in which they are shown to people.
FIELDS = tuple(
    field for field in Placement._fields if field not in ("sources", "notes", "node_level")
)


class Platform(NamedTuple):
    """One platform, as data."""

    name: str  # the value of `Placement.platform`
    title: str  # what people call it
    markers: tuple[str, ...]  # any one of these variables means this platform
    # The variables that hold rank 0's address, in the order of trust. One of loopback says that the
    # job has one node.
    addresses: tuple[str, ...] = ()
    lists_hosts: bool = False  # whether they are JSON lists, of which the first host is rank 0's
    # A variable that says "true" when the addresses may be those of machines that have no rank
    silenced_by: str = ""
    # The variables that hold the job's id, in the order of trust
    job_id_variables: tuple[str, ...] = ()
    source: str = ""  # where these facts are from
    # A variable that only shows an allocation, an index or a host -> what to tell a process that no
    # launcher has started
    notes_without_launcher: Mapping[str, str] = {}


# Azure Machine Learning also runs on Kubernetes, and Slurm too: what the job was submitted to comes
# first.
PLATFORMS = (
    Platform(
        name="azureml",
        title="Azure Machine Learning",
        markers=("AZUREML_RUN_ID", "AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"),
        # AZ_BATCH_MASTER_NODE='10.0.0.4:6000' AZ_BATCHAI_MPI_MASTER_NODE='10.0.0.4' or 'localhost'
        # Of AZ_BATCH_MASTER_NODE only the host is taken: "Do not use the port specified here for
        # MPI or NCCL communication - it is reserved for the Azure Batch service". Neither exists in
        # a single-node job.
        addresses=("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"),
        job_id_variables=("AZUREML_RUN_ID",),
        source=(
            "Azure Batch runtime environment variables; "
            "distributed GPU training guide of Azure Machine Learning"
        ),
    ),
    Platform(
        name="sagemaker",
        title="Amazon SageMaker",
        markers=("SM_HOSTS", "TRAINING_JOB_NAME"),
        # SM_HOSTS='["algo-1","algo-2"]': mpirun starts the ranks in this order. With instance
        # groups of several kinds the first host may be in a group that has no ranks.
        addresses=("SM_HOSTS",),
        lists_hosts=True,
        silenced_by="SM_IS_HETERO",
        job_id_variables=("TRAINING_JOB_NAME",),
        source="SageMaker Training Toolkit: environment variables, mpi.py",
    ),
    # No address: under mpirun the SLURM_STEP_NODELIST is that of mpirun's own daemons, and rank 0
    # need not be on the first host of SLURM_JOB_NODELIST. The slurm launcher reads its own step's
    # list itself.
    Platform(
        name="slurm",
        title="a Slurm allocation",
        markers=("SLURM_JOB_ID",),
        job_id_variables=("SLURM_JOB_ID",),
        source="srun(1), Slurm 22.05",
        notes_without_launcher={
            "SLURM_JOB_ID": (
                "SLURM_* ignored: this is an allocation, a batch script or an interactive shell, "
                "not a step; start the script with srun to run one process a task"
            )
        },
    ),
    Platform(
        name="flux",
        title="a Flux instance",
        markers=("FLUX_URI",),
        source="flux-environment(7)",
        notes_without_launcher={
            "FLUX_URI": (
                "FLUX_* ignored: this is a batch script or a shell, not a task; "
                "start the script with flux run"
            )
        },
    ),
    # No addresses for these: their lists begin with the host of the job script, which need not have
    # a rank.
    Platform(
        name="pbs",
        title="a PBS or Torque job",
        markers=("PBS_JOBID",),
        job_id_variables=("PBS_JOBID",),
        source="qsub(1), OpenPBS and Torque",
        notes_without_launcher={
            "PBS_JOBID": (
                "PBS_* ignored: this is a job script, not a process of mpiexec; "
                "PBS numbers no ranks itself"
            )
        },
    ),
    Platform(
        name="lsf",
        title="an LSF job",
        markers=("LSB_JOBID",),
        # LSB_BATCH_JID="42[2]" in an array, whose elements have one LSB_JOBID
        job_id_variables=("LSB_BATCH_JID", "LSB_JOBID"),
        source="IBM Spectrum LSF, 'Environment variables set for job execution'",
        notes_without_launcher={
            "LSB_JOBID": (
                "LSB_* ignored: this is a job script, not a step; "
                "start the script with jsrun or mpirun"
            )
        },
    ),
    # AWS_BATCH_JOB_ID is another on each node: the launcher of that name reads it.
    Platform(
        name="awsbatch",
        title="AWS Batch",
        markers=("AWS_BATCH_JOB_ID",),
        source="AWS Batch, 'Environment variables'",
    ),
    Platform(
        name="kubernetes",
        title="Kubernetes",
        markers=("KUBERNETES_SERVICE_HOST",),
        source="Kubernetes documentation, Service: environment variables",
        notes_without_launcher={
            "JOB_COMPLETION_INDEX": (
                "JOB_COMPLETION_INDEX ignored: it counts pods of the Job, and nothing says how many"
            )
        },
    ),
)


# What names an allocation or a run, whichever launcher has started a process in it, and however often
JOB_IDS_OF_PLATFORMS = {name for platform in PLATFORMS for name in platform.job_id_variables}
_BY_MARKER = {marker: platform for platform in PLATFORMS for marker in platform.markers}


def names_one_job(source: str | None) -> bool:
    """Whether a job id from this source is that of one start of ranks, and not of an allocation."""
    return source not in (None, *JOB_IDS_OF_PLATFORMS)


def recognize(environ: Mapping[str, str]) -> Platform | None:
    """The platform that owns this machine, or None."""
    marker = next(filter(environ.__contains__, _BY_MARKER), "")
    return _BY_MARKER.get(marker)
