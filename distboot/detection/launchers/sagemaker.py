"""SageMaker without a distribution: the script starts once on each host of the cluster.

With the distribution MPI or torch_distributed `mpirun` or torchrun starts the processes, and owns
the rank. Under mpirun SM_CURRENT_HOST is the first host's on every rank: it comes with the
variables of mpirun's own host.
"""

from __future__ import annotations

from ..env_reader import EnvReader, variable
from ..node_platform import NodePlatform
from ..parse import json_hosts, parse_number
from . import always


def _read(reader: EnvReader) -> None:
    hosts = reader.parsed("SM_HOSTS", json_hosts, required=True)
    current = reader.text("SM_CURRENT_HOST", required=True)
    gpus = reader.given("SM_NUM_GPUS", parse_number)
    if not hosts:
        return
    count = len(hosts)
    if current in hosts:
        reader.record("SM_CURRENT_HOST in SM_HOSTS", rank=hosts.index(current))
        reader.record("SM_HOSTS", world_size=count, num_nodes=count)
    elif current is not None:
        shown = variable(reader.environ, "SM_HOSTS")
        reader.reject("SM_CURRENT_HOST", f"is not in {shown}")
    reader.own_address = (hosts[0], "first host of SM_HOSTS")
    if gpus and min(gpus, count) > 1:
        shown = variable(reader.environ, "SM_NUM_GPUS")
        reader.node_level = f"{shown}, and one process was started on each host"


SAGEMAKER = NodePlatform(
    name="sagemaker",
    title="SageMaker training jobs without a distribution, one process per host",
    source="https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md",
    index_variable="SM_CURRENT_HOST",
    count_variable="SM_HOSTS",
    hosts="SM_HOSTS",
    per_node=("SM_NUM_GPUS",),
    job_id_variables=("TRAINING_JOB_NAME",),
    read=_read,
    claim=always,  # also by markers that contradict each other, which is an error
    unless=(),
    nodes_are_hosts=True,
    env_forwarding_hint="an entry NAME: VALUE in the estimator's environment",
    sample=(
        'SM_HOSTS=["algo-1","algo-2"] SM_CURRENT_HOST=algo-2 SM_NUM_GPUS=8 '
        "TRAINING_JOB_NAME=digits-2026-11-21-09-12-41-001"
    ),
    note="The number of a node is the place of its host in the list.",
)
