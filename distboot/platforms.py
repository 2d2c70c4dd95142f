"""Platforms: what owns the machines. A platform owns no rank; it may know the address of rank 0 and the job's id."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from .address import parse_address
from .hostlist import json_hosts


class Platform(NamedTuple):
    """One platform, as data.

    Attributes:
        name: the value of `Placement.platform`.
        title: what people call it.
        markers: any one of these variables means this platform.
        addresses: the variables that hold rank 0's address, in the order of trust, each with the reader that takes
            the host from it or raises ValueError. "localhost" is none.
        silenced_by: a variable that says "true" when the addresses may be those of machines that have no rank.
        job_id_variables: the variables that hold the job's id, in the order of trust.
        source: where these facts are from.
    """

    name: str
    title: str
    markers: tuple[str, ...]
    addresses: tuple[tuple[str, Callable[[str], str]], ...] = ()
    silenced_by: str = ""
    job_id_variables: tuple[str, ...] = ()
    source: str = ""


def _host(text: str) -> str:
    return parse_address(text)[0]


def _first_host(text: str) -> str:
    return json_hosts(text)[0]


AZUREML = Platform(
    name="azureml",
    title="Azure Machine Learning",
    markers=("AZUREML_RUN_ID", "AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"),
    # AZ_BATCH_MASTER_NODE='10.0.0.4:6000'    AZ_BATCHAI_MPI_MASTER_NODE='10.0.0.4' or 'localhost'
    # Of AZ_BATCH_MASTER_NODE only the host is taken: "Do not use the port specified here for MPI or NCCL
    # communication - it is reserved for the Azure Batch service". Neither exists in a single-node job.
    addresses=(("AZ_BATCH_MASTER_NODE", _host), ("AZ_BATCHAI_MPI_MASTER_NODE", _host)),
    job_id_variables=("AZUREML_RUN_ID",),
    source="Azure Batch runtime environment variables; distributed GPU training guide of Azure Machine Learning",
)

SAGEMAKER = Platform(
    name="sagemaker",
    title="Amazon SageMaker",
    markers=("SM_HOSTS", "TRAINING_JOB_NAME"),
    # SM_HOSTS='["algo-1","algo-2"]': mpirun starts the ranks in this order. With instance groups of several kinds
    # the first host may be in a group that has no ranks.
    addresses=(("SM_HOSTS", _first_host),),
    silenced_by="SM_IS_HETERO",
    job_id_variables=("TRAINING_JOB_NAME",),
    source="SageMaker Training Toolkit: environment variables, mpi.py",
)

SLURM_ALLOCATION = Platform(
    name="slurm",
    title="a Slurm allocation",
    markers=("SLURM_JOB_ID",),
    # No address: under mpirun the SLURM_STEP_NODELIST is that of mpirun's own daemons, and rank 0 need not
    # be on the first host of SLURM_JOB_NODELIST. The slurm launcher reads its own step's list itself.
    job_id_variables=("SLURM_JOB_ID",),
    source="srun(1), Slurm 22.05",
)

# No addresses for these: their lists begin with the host of the job script, which need not have a rank.
PBS = Platform(
    name="pbs",
    title="a PBS or Torque job",
    markers=("PBS_JOBID",),
    job_id_variables=("PBS_JOBID",),
    source="qsub(1), OpenPBS and Torque",
)
LSF = Platform(
    name="lsf",
    title="an LSF job",
    markers=("LSB_JOBID",),
    job_id_variables=("LSB_JOBID",),
    source="IBM Spectrum LSF, 'Environment variables set for job execution'",
)
FLUX = Platform(
    name="flux",
    title="a Flux instance",
    markers=("FLUX_URI",),
    source="flux-environment(7)",
)

AWSBATCH = Platform(
    name="awsbatch",
    title="AWS Batch",
    # AWS_BATCH_JOB_ID is another on each node: the launcher of that name reads it.
    markers=("AWS_BATCH_JOB_ID",),
    source="AWS Batch, 'Environment variables'",
)

KUBERNETES = Platform(
    name="kubernetes",
    title="Kubernetes",
    markers=("KUBERNETES_SERVICE_HOST",),
    source="Kubernetes documentation, Service: environment variables",
)

# Azure Machine Learning also runs on Kubernetes, and Slurm too: whoever submitted the job comes first.
PLATFORMS = (AZUREML, SAGEMAKER, SLURM_ALLOCATION, FLUX, PBS, LSF, AWSBATCH, KUBERNETES)


def recognise(environ: Mapping[str, str]) -> Platform | None:
    """The platform that owns this machine, or None."""
    for platform in PLATFORMS:
        if any(marker in environ for marker in platform.markers):
            return platform
    return None
