"""Nodes that are numbered by variables without a prefix, as several platforms and people set them.

RunPod, node 1 of 2 with 8 GPUs each, where WORLD_SIZE counts GPUs:
  NODE_RANK=1 NUM_NODES=2 NUM_TRAINERS=8 WORLD_SIZE=16 PRIMARY_ADDR=10.65.0.2 MASTER_ADDR=10.65.0.2
MosaicML, the same, with LOCAL_WORLD_SIZE=0 on nodes without GPUs:
  NODE_RANK=1 WORLD_SIZE=16 LOCAL_WORLD_SIZE=8 MASTER_ADDR=10.0.0.4
A command that Azure ML starts once on each of two nodes:
  NODE_RANK=1 WORLD_SIZE=2 MASTER_ADDR=10.0.0.4
An Indexed Job of Kubernetes:
  JOB_COMPLETION_INDEX=1 NNODES=2 NPROC_PER_NODE=8 MASTER_ADDR=job-0.svc
"""

from __future__ import annotations

from collections.abc import Mapping

from ..env_reader import EnvReader
from ..node_platform import (
    NODES_OF_WORLD_SIZE,
    NodePlatform,
    check_world_size,
    locate,
    node_level,
)
from ..parse import parse_number
from . import has_any

_COUNTS = ("NUM_NODES", "NNODES", "NODE_COUNT")
_SIZES_OF_A_NODE = ("NUM_TRAINERS", "LOCAL_WORLD_SIZE")
_PER_NODE = (*_SIZES_OF_A_NODE, "NPROC_PER_NODE", "GPUS_PER_NODE")
_COMPLETION = "JOB_COMPLETION_INDEX"


def _claim(environ: Mapping[str, str]) -> bool:
    # An index of a Job's pods is that of a node where something counts several
    counts = {environ.get(name, "1") for name in _COUNTS}
    return "NODE_RANK" in environ or counts != {"1"}


def _read(reader: EnvReader) -> None:
    reader.remedy = (
        "without RANK a process stands for its node: set NUM_NODES to the number of nodes, and let "
        "the wrapper start the ranks (NUM_NODES=2 python -m distboot run --nproc-per-node auto -- "
        "python train.py); or set RANK and WORLD_SIZE for every process"
    )
    index = reader.first("NODE_RANK", _COMPLETION)
    node = reader.integer(index, "rank")
    nodes = _number_of_nodes(reader)
    locate(NODES, reader, nodes)
    ranks = reader.environ.get("WORLD_SIZE", "1")
    if (nodes, ranks) == (1, "1"):
        return
    level = node_level(NODES, reader)
    if level is not None and not has_any(reader.environ, _PER_NODE):
        level = f"{index}={node} is set, and RANK is not"
    reader.node_level = level


def _number_of_nodes(reader: EnvReader) -> int | None:
    """Record the number of nodes; WORLD_SIZE may count nodes, processes or GPUs."""
    counts = list(filter(reader.environ.__contains__, _COUNTS))
    if counts:
        return _counted_nodes(reader, counts)
    for name in _SIZES_OF_A_NODE:
        size = reader.given(name, parse_number)
        if size:
            return _nodes_of_ranks(reader, name, size)
    return _nodes_of_world_size(reader)


def _counted_nodes(reader: EnvReader, counts: list[str]) -> int | None:
    """The number in these variables, which must be the same in all."""
    first, *others = counts
    nodes = reader.integer(first, "world_size")
    for name in others:
        reader.agree(name, nodes, first)
    check_world_size(reader, nodes)
    reader.record(first, num_nodes=nodes)
    return nodes


def _nodes_of_ranks(reader: EnvReader, name: str, size: int) -> int | None:
    """WORLD_SIZE divided by the ranks of a node, which variable `name` has."""
    ranks = reader.parsed("WORLD_SIZE", parse_number, required=True)
    if ranks is None:
        return None
    if ranks % size != 0:
        reader.reject("WORLD_SIZE", f"is not a multiple of {name}={size}, the ranks of a node")
        return None
    nodes = ranks // size
    reader.record(f"WORLD_SIZE / {name}", world_size=nodes, num_nodes=nodes)
    return nodes


def _nodes_of_world_size(reader: EnvReader) -> int | None:
    if "WORLD_SIZE" not in reader.environ:
        reader.problems.append("NUM_NODES is missing")
        return None
    nodes = reader.integer("WORLD_SIZE", "world_size")
    reader.record(NODES_OF_WORLD_SIZE, num_nodes=nodes)
    reader.notes.append(
        f"WORLD_SIZE={nodes} is taken for the number of nodes, as nothing else says it: "
        "set NUM_NODES if it counts processes or GPUs"
    )
    return nodes


NODES = NodePlatform(
    name="nodes",
    title=(
        "plain NODE_RANK and NUM_NODES (RunPod, MosaicML, OCI, Azure ML commands, Indexed Jobs, "
        "by hand)"
    ),
    source="https://docs.runpod.io/instant-clusters/configuration",
    index_variable="NODE_RANK",
    count_variable="NUM_NODES",
    own_markers=("NODE_RANK",),
    triggers=(_COMPLETION,),
    per_node=_PER_NODE,
    also_reads=(*_COUNTS[1:], "WORLD_SIZE", _COMPLETION),
    unless=("RANK", "LOCAL_RANK"),
    claim=_claim,
    read=_read,
    job_id_variables=("PET_RDZV_ID",),  # of --rdzv-id
    owns_torch_vars=True,
    compared_with_signs=True,
    sample=(
        "NODE_RANK=1 NUM_NODES=2 NUM_TRAINERS=8 WORLD_SIZE=16 MASTER_ADDR=10.65.0.2 "
        "MASTER_PORT=29400 PRIMARY_ADDR=10.65.0.2 PRIMARY_PORT=29400 NODE_ADDR=10.65.0.3"
    ),
    note=(
        "Without a number of nodes it is `WORLD_SIZE` / `LOCAL_WORLD_SIZE`, or `WORLD_SIZE` itself "
        "where nothing says how many ranks a node has."
    ),
)
