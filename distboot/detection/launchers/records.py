"""The launchers of MPI and their kin, whose variables say plainly what they say: records, read by one function."""

from __future__ import annotations

from functools import partial

from ...base.internal_variables import RANK
from ..env_reader import EnvReader
from . import Launcher, has_any

_mpi = partial(Launcher, uses_daemons=True, nodes_are_hosts=True)

# mpirun, which is also the daemon of its own host, and the daemons of the other hosts; 5 runs prterun in its place.
_OF_OPENMPI = (
    *("prterun", "prted", "prte", "orterun", "orted"),
    *("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi"),
)
# One on each host, which starts the processes
_HYDRA = ("hydra_pmi_proxy", "hydra_bstrap_proxy")


# Open MPI 5.0.11 (mpirun, mpiexec, prterun --personality ompi; also Azure ML's MPI jobs and the MPI operator), 3 + 1
# processes, rank 3:
#   OMPI_COMM_WORLD_RANK=3         OMPI_COMM_WORLD_SIZE=4
#   OMPI_COMM_WORLD_LOCAL_RANK=0   OMPI_COMM_WORLD_LOCAL_SIZE=1   OMPI_UNIVERSE_SIZE=4
#   PMIX_NAMESPACE=prterun-nodea-22774@1
# Open MPI 4.1.4 has the same four, and
#   PMIX_NAMESPACE=283049985       OMPI_MCA_ess_base_jobid=283049985
# OMPI_WORLD_SIZE and OMPI_WORLD_LOCAL_SIZE are of 5 only. A process does not know which nodes the other ranks are on:
# the node rank, and rank 0's host, stay unknown when there are several nodes.
# No two processes of a node have the same local rank, but they need not be in the order of ranks: 0, 2, 1, 3 of four
# processes on two slots, on two packages, or with --rank-by (5.0.8 and 5.0.11).
# Never read: OMPI_COMM_WORLD_NODE_RANK (the local rank again); OMPI_MCA_orte_hnp_uri and the host in PMIX_NAMESPACE
# (mpirun's host, which need not be rank 0's); OMPI_MCA_orte_num_nodes (counts a host several times with --map-by seq).
OPENMPI = _mpi(
    name="openmpi",
    numbers=(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    instead={"OMPI_COMM_WORLD_RANK": "PMIX_RANK"},
    same={
        "PMIX_RANK": "OMPI_COMM_WORLD_RANK",
        "OMPI_WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "OMPI_WORLD_LOCAL_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    job_id=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    in_order=(),
    title="Open MPI (mpirun, mpiexec)",
    markers=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    source="captures of 4.1.4 and 5.0.11; Open MPI FAQ, 'environment variables that Open MPI defines'",
    programs=_OF_OPENMPI,
    env_forwarding_hint="mpirun -x NAME=VALUE …",
)

# flux run -N2 -n4, rank 3:
#   FLUX_TASK_RANK=3   FLUX_TASK_LOCAL_ID=1   FLUX_JOB_SIZE=4   FLUX_JOB_NNODES=2   FLUX_JOB_ID=ƒD2e73NP
#   PMI_RANK=3   PMI_SIZE=4
# There is no node index and no count of the tasks here: --taskmap may place them in any order. A batch script or the
# shell of `flux alloc` is not a task. FLUX_JOB_ID_PATH has the ids of all jobs around this one, too: a job's own id is
# unique in its instance of Flux only.
FLUX = _mpi(
    name="flux",
    numbers=(
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        "FLUX_TASK_LOCAL_ID",
        None,
        None,
        "FLUX_JOB_NNODES",
    ),
    same={"PMI_RANK": "FLUX_TASK_RANK", "PMI_SIZE": "FLUX_JOB_SIZE"},
    job_id=("FLUX_JOB_ID_PATH", "FLUX_JOB_ID"),
    title="Flux jobs (flux run, flux submit)",
    markers=("FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    source="documentation: flux-core, flux-environment(7)",
    programs=("flux-shell",),
    env_forwarding_hint="flux run --env=NAME=VALUE …",
)


# `python -m distboot --nproc-per-node`, two nodes with 2 + 1 ranks, rank 2:
#   DISTBOOT_RANK=2         DISTBOOT_WORLD_SIZE=3         DISTBOOT_LOCAL_RANK=0
#   DISTBOOT_NODE_RANK=1    DISTBOOT_NUM_NODES=2          DISTBOOT_LOCAL_WORLD_SIZE=1
# The agent of a node is not a daemon of another launcher: what started it is further out.
DISTBOOT = Launcher(
    name="distboot",
    title="python -m distboot --nproc-per-node",
    markers=RANK[:2],
    numbers=RANK,
    source="captures of 0.1.0; distboot/cli/run.py",
)

# Intel MPI 2021.19, -machinefile with nodea:1 nodeb:1 nodea:2, rank 3:
#   PMI_RANK=3   PMI_SIZE=4   MPI_LOCALRANKID=2   MPI_LOCALNRANKS=3   HYDRA_BSTRAP_NODE_ID=0
#   I_MPI_HYDRA_UUID=cb680000-d51a-633c-c060-060095bab106
# Unlike MPICH it has one proxy a host, however often the host is listed. With -genvnone there is no I_MPI_HYDRA_UUID.
INTELMPI = _mpi(
    name="intelmpi",
    numbers=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "HYDRA_BSTRAP_NODE_ID"),
    job_id=("I_MPI_HYDRA_UUID",),
    in_order=("node_rank",),
    title="Intel MPI 2021 (mpiexec.hydra, mpirun)",
    markers=("I_MPI_HYDRA_UUID", "HYDRA_BSTRAP_NODE_ID"),
    source="captures of 2021.8 to 2021.19",
    programs=_HYDRA,
    env_forwarding_hint="mpiexec -genv NAME VALUE …",
)


# MPICH 4.0.2, mpiexec -hosts nodea:1,nodeb:1,nodea:2 -n 4, rank 3 (which is the third process on nodea):
#   PMI_RANK=3   PMI_SIZE=4   MPI_LOCALRANKID=1   MPI_LOCALNRANKS=2   PMI_FD=7
# Never a marker: PMI_RANK, which Slurm, Flux and PALS set too. There is no job id and no node index.
def _read_mpich(reader: EnvReader) -> None:
    """The local numbers are those of a *proxy*, of which a host that is listed twice has several."""
    local_rank, local_size = reader.integer("MPI_LOCALRANKID"), reader.integer("MPI_LOCALNRANKS")
    if local_size == reader.number("world_size"):
        reader.put("MPI_LOCALRANKID", local_rank=local_rank)
        reader.put("MPI_LOCALNRANKS", local_world_size=local_size)
    elif local_size is not None:
        reader.notes.append(
            "MPI_LOCALRANKID and MPI_LOCALNRANKS ignored: a host that is listed twice has two of each"
        )


MPICH = _mpi(
    name="mpich",
    numbers=("PMI_RANK", "PMI_SIZE"),
    more=_read_mpich,
    title="MPICH 3, 4 and 5 (mpiexec, mpirun)",
    markers=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    source="captures of 3.4.3 to 5.0.2; MPICH, src/pm/hydra/proxy/pmip_cb.c",
    local_count="MPI_LOCALNRANKS",
    programs=_HYDRA,
    env_forwarding_hint="mpiexec -genv NAME VALUE …",
)


# MVAPICH2 2.3.7, mpirun_rsh -np 4 nodea nodea nodea nodeb, rank 3:
#   MV2_COMM_WORLD_RANK=3   MV2_COMM_WORLD_SIZE=4   MV2_COMM_WORLD_LOCAL_RANK=0   MV2_COMM_WORLD_LOCAL_SIZE=1
#   MV2_NODE_ID=1   MV2_NUM_NODES_IN_JOB=2   MPDMAN_KVS_TEMPLATE=kvs_393_nodea_997   MPISPAWN_MPIRUN_RANK_0=3
# MV2_NODE_ID counts host names in the order in which the list of hosts, and so the ranks, first reach them.
def _check_mvapich(reader: EnvReader) -> None:
    """mpirun_rsh tells each rank the whole layout of its node."""
    name = f"MPISPAWN_MPIRUN_RANK_{reader.number('local_rank')}"
    reader.agree(name, reader.number("rank"), "MV2_COMM_WORLD_RANK")


MVAPICH = _mpi(
    name="mvapich",
    numbers=(
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        "MV2_NODE_ID",
        "MV2_NUM_NODES_IN_JOB",
    ),
    job_id=("MPDMAN_KVS_TEMPLATE",),
    more=_check_mvapich,
    title="MVAPICH2 (mpirun_rsh)",
    markers=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    source="captures of 2.3.7; MVAPICH2, src/pm/mpirun/mpispawn.c",
    programs=("mpispawn",),
    env_forwarding_hint="mpirun_rsh … NAME=VALUE program …",
)


# PALS, mpiexec -n 4 --ppn 2, rank 3:
#   PALS_RANKID=3   PALS_NODEID=1   PALS_LOCAL_RANKID=1   PALS_LOCAL_SIZE=2   PALS_APID=0f3b9c7e-…
#   PMI_RANK=3   PMI_SIZE=4   PMI_LOCAL_RANK=1   PMI_LOCAL_SIZE=2
# No PALS variable has the number of ranks (PALS_NRANKS is an option of mpiexec, and a user may set it): PMI_SIZE has.
# Slurm (`--mpi=cray_shasta`) and Flux set PALS_* too, for Cray's MPI library; they are asked first.
def _read_pals(reader: EnvReader) -> None:
    if reader.number("world_size") is None:
        reader.remedy = (
            "PALS itself does not say how many ranks there are: start them with mpiexec --pmi=cray …, which sets "
            "PMI_SIZE; or pass the number: mpiexec --env WORLD_SIZE=N …"
        )
    node, rank = reader.integer("PALS_NODEID"), reader.number("rank")
    # Else the user mapped the ranks to nodes
    if rank is not None and node is not None and node <= rank:
        reader.put("PALS_NODEID", node_rank=node)


PALS = _mpi(
    name="pals",
    numbers=("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    instead={"PMI_SIZE": "WORLD_SIZE"},  # which scripts set, as --pmi=pmix sets no PMI_SIZE
    same={
        "PMI_RANK": "PALS_RANKID",
        "PMI_LOCAL_RANK": "PALS_LOCAL_RANKID",
        "PMI_LOCAL_SIZE": "PALS_LOCAL_SIZE",
    },
    job_id=("PALS_APID",),
    optional=("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    more=_read_pals,
    title="PALS (mpiexec and aprun on HPE Cray)",
    markers=("PALS_RANKID", "PALS_NODEID"),
    source="documentation: HPE pals.h, 'Environment variables available for applications'",
    claim=lambda environ: (
        has_any(environ, ("PALS_RANKID", "PALS_NODEID")) and "SLURM_STEP_ID" not in environ
    ),
    env_forwarding_hint="mpiexec --env NAME=VALUE …",
)

# jsrun (the job step manager JSM of Summit, Sierra and their kind), rank 3 of 4 with two a node:
#   JSM_NAMESPACE_RANK=3   JSM_NAMESPACE_SIZE=4   JSM_NAMESPACE_LOCAL_RANK=1   JSM_NAMESPACE_LOCAL_SIZE=2
#   LSB_JOBID=1234
# It also sets Open MPI's variables, for Spectrum MPI. A plain `bsub` job is not a launcher.
LSF = _mpi(
    name="lsf",
    numbers=(
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
    ),
    same={
        "OMPI_COMM_WORLD_RANK": "JSM_NAMESPACE_RANK",
        "OMPI_COMM_WORLD_SIZE": "JSM_NAMESPACE_SIZE",
    },
    job_id=("LSB_JOBID",),
    optional=("JSM_NAMESPACE_LOCAL_SIZE",),
    title="LSF job steps (jsrun)",
    markers=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    source="documentation: PyTorch Lightning's LSFEnvironment ('JSM_NAMESPACE_LOCAL_RANK: the node local rank')",
    env_forwarding_hint="jsrun -E NAME=VALUE …",
)

# mpiexec -n 4 docker run -e PMI_RANK -e PMI_SIZE …, rank 3:
#   PMI_RANK=3   PMI_SIZE=4
# MPICH, Intel MPI, PALS or `srun --mpi=pmi2` have set them. They are enough; the local numbers are not known. Those in
# `_KNOWN` set these two, too, and know more; where none of them has claimed the process, it is the shell of a step.
_KNOWN = (
    "FLUX_TASK_RANK",
    "FLUX_TASK_LOCAL_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "PALS_RANKID",
    "PALS_NODEID",
)
PMI = _mpi(
    name="pmi",
    numbers=("PMI_RANK", "PMI_SIZE"),
    title="an MPI launcher or srun --mpi=pmi2, of which only PMI_RANK and PMI_SIZE are left",
    markers=("PMI_RANK", "PMI_SIZE"),
    source="captures of MPICH, Intel MPI, and Slurm with --mpi=pmi2",
    programs=(*_HYDRA, "slurmstepd"),
    claim=lambda environ: (
        has_any(environ, ("PMI_RANK", "PMI_SIZE")) and not has_any(environ, _KNOWN)
    ),
)

# Under which mpi4py can be asked
MPI_LAUNCHERS = tuple(one.name for one in (OPENMPI, INTELMPI, MPICH, MVAPICH, PMI))
