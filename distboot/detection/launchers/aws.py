"""Amazon's platforms that number nodes: SageMaker and AWS Batch."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ..env_reader import EnvReader, variable
from ..node_platform import NodePlatform
from ..parse import is_loopback, json_hosts, parse_address
from . import has_any


# SageMaker without a distribution: the script starts once on each host of the cluster. With the distribution MPI or
# torch_distributed `mpirun` or torchrun starts the processes, and owns the rank.
# Second host of two:
#   SM_HOSTS=["algo-1","algo-2"]   SM_CURRENT_HOST=algo-2   SM_NUM_GPUS=8   TRAINING_JOB_NAME=digits-2026-11-21-09-12-41
# Under mpirun SM_CURRENT_HOST is the first host's on every rank: it comes with the variables of mpirun's own host.
def _claim_sagemaker(environ: Mapping[str, str]) -> bool:
    return has_any(environ, ("SM_HOSTS", "SM_CURRENT_HOST"))


def _read_sagemaker(reader: EnvReader) -> None:
    hosts = reader.parsed("SM_HOSTS", json_hosts, required=True)
    current = reader.text("SM_CURRENT_HOST", required=True)
    gpus = 0
    if "SM_NUM_GPUS" in reader.environ:
        gpus = reader.integer("SM_NUM_GPUS") or 0
    if not hosts:
        return
    if current in hosts:
        reader.put("SM_CURRENT_HOST in SM_HOSTS", rank=hosts.index(current))
        reader.put("SM_HOSTS", world_size=len(hosts), num_nodes=len(hosts))
    elif current is not None:
        reader.reject("SM_CURRENT_HOST", f"is not in {variable(reader.environ, 'SM_HOSTS')}")
    reader.own_address = (hosts[0], "first host of SM_HOSTS")
    if len(hosts) > 1 and gpus > 1:
        reader.node_level = (
            f"{variable(reader.environ, 'SM_NUM_GPUS')}, and one process was started on each host"
        )


SAGEMAKER = NodePlatform(
    name="sagemaker",
    title="SageMaker training jobs without a distribution, one process per host",
    page="https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md",
    index_variable="SM_CURRENT_HOST",
    count_variable="SM_HOSTS",
    hosts="SM_HOSTS",
    per_node=("SM_NUM_GPUS",),
    job_id=("TRAINING_JOB_NAME",),
    read=_read_sagemaker,
    claim=_claim_sagemaker,
    nodes_are_hosts=True,
    env_forwarding_hint="an entry NAME: VALUE in the estimator's environment",
    sample=(
        'SM_HOSTS=["algo-1","algo-2"] SM_CURRENT_HOST=algo-2 SM_NUM_GPUS=8 '
        "TRAINING_JOB_NAME=digits-2026-11-21-09-12-41-001"
    ),
    note="The number of a node is the place of its host in the list.",
)


# AWS Batch multi-node parallel jobs: one container per node, and nothing says how many processes each is to run.
# Node 2 of 3:
#   AWS_BATCH_JOB_NODE_INDEX=2   AWS_BATCH_JOB_NUM_NODES=3   AWS_BATCH_JOB_MAIN_NODE_INDEX=0
#   AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS=10.0.0.4 (not on the main node)
#   AWS_BATCH_JOB_ID=a7182d0e-7e9e-44a1-8417-3b7d8dac9a42#2 (the part before # is the job)
_MAIN_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"


def _claim_awsbatch(environ: Mapping[str, str]) -> bool:
    return has_any(environ, ("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"))


def _read_awsbatch(reader: EnvReader) -> None:
    node = reader.integer("AWS_BATCH_JOB_NODE_INDEX", required=True)
    nodes = reader.integer("AWS_BATCH_JOB_NUM_NODES", "world_size")
    main = reader.integer("AWS_BATCH_JOB_MAIN_NODE_INDEX", required=True)
    reader.put("AWS_BATCH_JOB_NUM_NODES", num_nodes=nodes)
    if nodes is not None and main is not None and main >= nodes:
        reader.reject(
            "AWS_BATCH_JOB_MAIN_NODE_INDEX", f"is not below AWS_BATCH_JOB_NUM_NODES={nodes}"
        )
    elif node is not None and main is not None:
        _number_main_first(reader, node, main)
    job_id = reader.environ.get("AWS_BATCH_JOB_ID", "").partition("#")[0]
    reader.put("AWS_BATCH_JOB_ID", job_id=job_id or None)
    if nodes != 1:
        reader.node_level = (
            "AWS Batch counts nodes, and nothing says how many processes each is to run"
        )
    _locate_main(reader, is_main=node == main)


def _number_main_first(reader: EnvReader, node: int, main: int) -> None:
    """Only the main node's address is known to all, so it is rank 0; the others keep their order."""
    rank = node
    if node == main:
        rank = 0
    elif node < main:
        rank = node + 1
    source = "AWS_BATCH_JOB_NODE_INDEX"
    if main != 0:
        source += ", the main node first"
    reader.put(source, rank=rank)


def _locate_main(reader: EnvReader, *, is_main: bool) -> None:
    if _MAIN_ADDRESS in reader.environ:
        address = reader.parsed(_MAIN_ADDRESS, parse_address)
        reader.own_address = address and (address[0], _MAIN_ADDRESS)
    elif is_main:  # which is not told its address
        with suppress(ValueError):
            host, _ = parse_address(reader.environ.get("HOSTNAME", ""))
            if not is_loopback(host):
                reader.own_address = (host, "HOSTNAME of the main node")


AWSBATCH = NodePlatform(
    name="awsbatch",
    title="AWS Batch multi-node parallel jobs",
    page="https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html",
    index_variable="AWS_BATCH_JOB_NODE_INDEX",
    count_variable="AWS_BATCH_JOB_NUM_NODES",
    address=_MAIN_ADDRESS,
    also=("AWS_BATCH_JOB_MAIN_NODE_INDEX", "AWS_BATCH_JOB_ID", "HOSTNAME"),
    read=_read_awsbatch,
    claim=_claim_awsbatch,
    nodes_are_hosts=True,
    env_forwarding_hint="an environment entry NAME=VALUE in the container properties",
    sample=(
        "AWS_BATCH_JOB_NODE_INDEX=1 AWS_BATCH_JOB_NUM_NODES=2 AWS_BATCH_JOB_MAIN_NODE_INDEX=0 "
        "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS=10.0.0.4 "
        "AWS_BATCH_JOB_ID=a7182d0e-7e9e-44a1-8417-3b7d8dac9a42#1"
    ),
    note=(
        "The main node is node 0, whatever its index; it is not told its own address, and takes "
        "its host name."
    ),
)
