"""AWS Batch multi-node parallel jobs: one container a node, and nothing says how many processes each is to run."""

from __future__ import annotations

from collections.abc import Mapping

from ..address import is_loopback, parse_address
from ..placement import Placement
from ..reading import Reading, variable
from ._launcher import Launcher, claims

# Node 2 of 3:
#   AWS_BATCH_JOB_NODE_INDEX=2   AWS_BATCH_JOB_NUM_NODES=3   AWS_BATCH_JOB_MAIN_NODE_INDEX=0
#   AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS=10.0.0.4 (not on the main node)
#   AWS_BATCH_JOB_ID=a7182d0e-7e9e-44a1-8417-3b7d8dac9a42#2 (the part before # is the job)
_MARKERS = ("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES")
_MAIN_ADDRESS = "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS):
        return None
    reading = Reading(environ, "awsbatch")
    node = reading.integer("AWS_BATCH_JOB_NODE_INDEX")
    nodes = reading.integer("AWS_BATCH_JOB_NUM_NODES", "world_size")
    main = reading.integer("AWS_BATCH_JOB_MAIN_NODE_INDEX")
    reading.put("num_nodes", nodes, "AWS_BATCH_JOB_NUM_NODES")
    if nodes is not None and main is not None and main >= nodes:
        name = "AWS_BATCH_JOB_MAIN_NODE_INDEX"
        reading.problems.append(f"{variable(environ, name)} is not below AWS_BATCH_JOB_NUM_NODES={nodes}")
    elif node is not None and main is not None:
        # Only the main node's address is known to all, so it is rank 0; the others keep their order.
        rank = 0 if node == main else node + 1 if node < main else node
        reading.put("rank", rank, "AWS_BATCH_JOB_NODE_INDEX" + ("" if main == 0 else ", the main node first"))
    job = environ.get("AWS_BATCH_JOB_ID", "").partition("#")[0]
    reading.put("job_id", job or None, "AWS_BATCH_JOB_ID")
    if nodes != 1:
        reading.node_level = "AWS Batch counts nodes, and nothing says how many processes each is to run"
    if _MAIN_ADDRESS in environ:
        address = reading.parsed(_MAIN_ADDRESS, parse_address)
        return reading.placement(own_address=address and (address[0], _MAIN_ADDRESS), nodes_are_hosts=True)
    own = environ.get("HOSTNAME") if node == main else None  # the main node itself is not told its address
    return reading.placement(own_address=_named(own) if own else None, nodes_are_hosts=True)


def _named(host: str) -> tuple[str, str] | None:
    try:
        name = parse_address(host)[0]
    except ValueError:
        return None
    return None if is_loopback(name) else (name, "HOSTNAME of the main node")


AWSBATCH = Launcher(
    name="awsbatch",
    title="AWS Batch multi-node parallel jobs",
    markers=_MARKERS,
    read=_read,
    source="documentation: AWS Batch, 'Environment variables' of multi-node parallel jobs",
    passing="an environment entry NAME=VALUE in the container properties",
)
