"""LSF: `jsrun`, with the job step manager JSM of Summit, Sierra and their kind.

jsrun sets Open MPI's variables, too, for Spectrum MPI. A plain `bsub` job is not a launcher.
"""

from __future__ import annotations

from ..env_reader import EnvReader
from ..left_over import LeftOver
from . import Launcher, Numbers

_RANK = "JSM_NAMESPACE_RANK"
_SIZE = "JSM_NAMESPACE_SIZE"


def _read(reader: EnvReader) -> None:
    """A job of LSF may have several job steps: JSM serves PMIx, in which each is a namespace."""
    name = reader.first("LSB_BATCH_JID", "LSB_JOBID")
    job = reader.environ.get(name)
    step = reader.environ.get("PMIX_NAMESPACE")
    if job and step:
        reader.record(f"{name} and PMIX_NAMESPACE", job_id=f"{job}.{step}")


LSF = Launcher(
    name="lsf",
    title="LSF job steps (jsrun)",
    source=(
        "documentation: PyTorch Lightning's LSFEnvironment "
        "('JSM_NAMESPACE_LOCAL_RANK: the node local rank')"
    ),
    sample=(
        "JSM_NAMESPACE_RANK={rank} JSM_NAMESPACE_SIZE={size} JSM_NAMESPACE_LOCAL_RANK={local} "
        "JSM_NAMESPACE_LOCAL_SIZE={per_node} LSB_JOBID=1234"
    ),
    markers=(_RANK, _SIZE),
    numbers=Numbers(
        rank=_RANK,
        world_size=_SIZE,
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_world_size="JSM_NAMESPACE_LOCAL_SIZE",
    ),
    must_equal={"OMPI_COMM_WORLD_RANK": _RANK, "OMPI_COMM_WORLD_SIZE": _SIZE},
    read=_read,
    optional=("JSM_NAMESPACE_LOCAL_SIZE",),
    nodes_are_hosts=True,
    uses_daemons=True,
    starts_daemons=True,
    left_over=(LeftOver("JSM_NAMESPACE_LOCAL_RANK", "LSF's jsrun", (_RANK, _SIZE)),),
    mpi="maybe",
    unbind="jsrun --bind none",
    env_forwarding_hint="jsrun -E NAME=VALUE …",
)
