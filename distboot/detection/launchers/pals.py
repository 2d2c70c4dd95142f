"""PALS on HPE Cray: `mpiexec`, `aprun`.

No variable of PALS has the number of ranks (PALS_NRANKS is an option of mpiexec, and a user may set
it): PMI_SIZE has it. Slurm (`--mpi=cray_shasta`) and Flux set PALS_* for Cray's MPI library, too,
and come first.
"""

from __future__ import annotations

from ..env_reader import EnvReader
from ..left_over import LeftOver
from . import Launcher, Numbers


def _read(reader: EnvReader) -> None:
    if reader.number("world_size") is None:
        reader.remedy = (
            "PALS itself does not say how many ranks there are: start them with mpiexec --pmi=cray "
            "…, which sets PMI_SIZE; or pass the number: mpiexec --env WORLD_SIZE=N …"
        )
    node = reader.integer("PALS_NODEID")
    rank = reader.number("rank")
    if rank is None or node is None:
        return
    if node <= rank:  # else the user mapped the ranks to nodes
        reader.record("PALS_NODEID", node_rank=node)


PALS = Launcher(
    name="pals",
    title="PALS (mpiexec and aprun on HPE Cray)",
    source="documentation: HPE pals.h, 'Environment variables available for applications'",
    sample=(
        "PALS_RANKID={rank} PALS_NODEID={node} "
        "PALS_LOCAL_RANKID={local} PALS_LOCAL_SIZE={per_node} "
        "PALS_APID=f3b9c7e2-0a53-4d2f-9a7e-2f1f4f0a7f00 PMI_RANK={rank} PMI_SIZE={size} "
        "PMI_LOCAL_RANK={local} PMI_LOCAL_SIZE={per_node}"
    ),
    markers=("PALS_RANKID", "PALS_NODEID"),
    unless=("SLURM_STEP_ID",),
    numbers=Numbers(
        rank="PALS_RANKID",
        world_size="PMI_SIZE",
        local_rank="PALS_LOCAL_RANKID",
        local_world_size="PALS_LOCAL_SIZE",
    ),
    fallbacks={"PMI_SIZE": "WORLD_SIZE"},  # which scripts set, as --pmi=pmix sets no PMI_SIZE
    must_equal={
        "PMI_RANK": "PALS_RANKID",
        "PMI_LOCAL_RANK": "PALS_LOCAL_RANKID",
        "PMI_LOCAL_SIZE": "PALS_LOCAL_SIZE",
    },
    job_id_variables=("PALS_APID",),
    optional=("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    read=_read,
    nodes_are_hosts=True,
    uses_daemons=True,
    starts_daemons=True,
    left_over=(
        LeftOver(
            "PALS_LOCAL_RANKID",
            "PALS (aprun, mpiexec on Cray)",
            ("PMI_RANK", "PMI_SIZE"),
            in_shell=True,
        ),
    ),
    mpi="maybe",
    unbind="mpiexec --cpu-bind none",
    env_forwarding_hint="mpiexec --env NAME=VALUE …",
)
