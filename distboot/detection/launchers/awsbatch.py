"""AWS Batch multi-node parallel jobs: one container per node, and no number of processes for each.

Only the address of the main node is known to all, so the main node is node 0. AWS_BATCH_JOB_ID is
a7182d0e-7e9e-44a1-8417-3b7d8dac9a42#2 on node 2: the part before # is the job. The main node is not
told its own address.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from ..env_reader import EnvReader
from ..left_over import LeftOver
from ..node_platform import NodePlatform
from ..parse import is_loopback, parse_address
from . import has_any

_MAIN_NODE = "AWS_BATCH_JOB_MAIN_NODE_INDEX"
_MAIN_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"


def _claim(environ: Mapping[str, str]) -> bool:
    return has_any(environ, ("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"))


def _read(reader: EnvReader) -> None:
    node = reader.integer("AWS_BATCH_JOB_NODE_INDEX", required=True)
    nodes = reader.integer("AWS_BATCH_JOB_NUM_NODES", "world_size")
    main = reader.integer(_MAIN_NODE, required=True)
    reader.put("AWS_BATCH_JOB_NUM_NODES", num_nodes=nodes)
    if nodes is not None and main is not None and main >= nodes:
        reader.reject(_MAIN_NODE, f"is not below AWS_BATCH_JOB_NUM_NODES={nodes}")
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
        reader.take_own_address(_MAIN_ADDRESS)
    elif is_main:
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
    also=(_MAIN_NODE, "AWS_BATCH_JOB_ID", "HOSTNAME"),
    read=_read,
    claim=_claim,
    left_over=(
        LeftOver(
            _MAIN_NODE,
            "an AWS Batch multi-node job",
            ("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES"),
        ),
    ),
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
