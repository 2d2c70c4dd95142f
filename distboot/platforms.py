"""Platforms: what owns the machines. A platform owns no rank; it may know the address of rank 0 and the job's id."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Platform:
    """One platform, as data.

    Attributes:
        name: the value of `Placement.platform`.
        markers: any one of these variables means this platform.
        address_variables: the variables that hold rank 0's address, in the order of trust. "localhost" is none.
        job_id_variables: the variables that hold the job's id, in the order of trust.
        source: where these facts are from.
    """

    name: str
    markers: tuple[str, ...]
    address_variables: tuple[str, ...] = ()
    job_id_variables: tuple[str, ...] = ()
    source: str = ""


AZUREML = Platform(
    name="azureml",
    markers=("AZUREML_RUN_ID", "AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"),
    # AZ_BATCH_MASTER_NODE='10.0.0.4:6000'    AZ_BATCHAI_MPI_MASTER_NODE='10.0.0.4' or 'localhost'
    # Of AZ_BATCH_MASTER_NODE only the host is taken: "Do not use the port specified here for MPI or NCCL
    # communication - it is reserved for the Azure Batch service". Neither exists in a single-node job.
    address_variables=("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"),
    job_id_variables=("AZUREML_RUN_ID",),
    source="Azure Batch runtime environment variables; distributed GPU training guide of Azure Machine Learning",
)

SLURM_ALLOCATION = Platform(
    name="slurm",
    markers=("SLURM_JOB_ID",),
    # No address: under mpirun the SLURM_STEP_NODELIST is that of mpirun's own daemons, and rank 0 need not
    # be on the first host of SLURM_JOB_NODELIST. The slurm launcher reads its own step's list itself.
    source="srun(1), Slurm 22.05",
)

KUBERNETES = Platform(
    name="kubernetes",
    markers=("KUBERNETES_SERVICE_HOST",),
    source="Kubernetes documentation, Service: environment variables",
)

# Azure Machine Learning also runs on Kubernetes, and Slurm too: whoever submitted the job comes first.
PLATFORMS = (AZUREML, SLURM_ALLOCATION, KUBERNETES)


def recognise(environ: Mapping[str, str]) -> Platform | None:
    """The platform that owns this machine, or None."""
    for platform in PLATFORMS:
        if any(marker in environ for marker in platform.markers):
            return platform
    return None
