"""AWS Batch multi-node parallel jobs: one container per node, and no number of processes for each.

Only the address of the main node is known to all, so the main node is node 0. AWS_BATCH_JOB_ID is
a7182d0e-7e9e-44a1-8417-3b7d8dac9a42#2 on node 2: the part before # is the job. The main node is not
told its own address.
"""

from __future__ import annotations

from contextlib import suppress

from ..env_reader import EnvReader
from ..left_over import LeftOver
from ..node_platform import NodePlatform
from ..parse import is_loopback, parse_address
from . import always

_NODE = "AWS_BATCH_JOB_NODE_INDEX"
_NODES = "AWS_BATCH_JOB_NUM_NODES"
_MAIN_NODE = "AWS_BATCH_JOB_MAIN_NODE_INDEX"
_MAIN_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"


def _read(reader: EnvReader) -> None:
    node = reader.integer(_NODE, required=True)
    nodes = reader.integer(_NODES, "world_size")
    main = reader.integer(_MAIN_NODE, required=True)
    reader.record(_NODES, num_nodes=nodes)
    _number_main_first(reader, node, main, nodes)
    job, _, _ = reader.environ.get("AWS_BATCH_JOB_ID", "").partition("#")
    job_id = job or None
    reader.record("AWS_BATCH_JOB_ID", job_id=job_id)
    if nodes != 1:
        reader.node_level = (
            "AWS Batch counts nodes, and no variable has the number of processes per node"
        )
    is_told_address = _MAIN_ADDRESS in reader.environ
    if is_told_address:
        reader.take_own_address(_MAIN_ADDRESS)
    elif node == main:
        _take_own_name(reader)


def _number_main_first(
    reader: EnvReader, node: int | None, main: int | None, nodes: int | None
) -> None:
    """Number the main node 0, as only its address is known to all, and the others in order."""
    if node is None:
        return
    if main is None:
        return
    is_outside = nodes is not None and main >= nodes
    if is_outside:
        reader.reject(_MAIN_NODE, f"is not below {_NODES}={nodes}")
        return
    source = _NODE
    if main != 0:
        source = f"{_NODE}, the main node first"
    rank = _main_first(node, main)
    reader.record(source, rank=rank)


def _main_first(node: int, main: int) -> int:
    """The number of a node where the main node is 0 and the others follow in order."""
    if node == main:
        return 0
    if node < main:
        return node + 1
    return node


def _take_own_name(reader: EnvReader) -> None:
    """The main node is not told its own address."""
    name = reader.environ.get("HOSTNAME", "")
    source = "HOSTNAME of the main node"
    with suppress(ValueError):
        host, _ = parse_address(name)
        is_own = not is_loopback(host)
        if is_own:
            reader.own_address = (host, source)


AWSBATCH = NodePlatform(
    name="awsbatch",
    title="AWS Batch multi-node parallel jobs",
    source="https://docs.aws.amazon.com/batch/latest/userguide/job_env_vars.html",
    index_variable=_NODE,
    count_variable=_NODES,
    address=_MAIN_ADDRESS,
    also_reads=(_MAIN_NODE, "AWS_BATCH_JOB_ID", "HOSTNAME"),
    read=_read,
    unless=(),
    claim=always,
    left_over=(
        LeftOver(
            _MAIN_NODE,
            "an AWS Batch multi-node job",
            (_NODE, _NODES),
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
