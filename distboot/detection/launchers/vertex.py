"""Vertex AI custom training: a description of the cluster in CLUSTER_SPEC.

The one replica of workerpool0 is node 0, those of workerpool1 follow. Pools 2 and 3 are parameter
servers, reductions and evaluators, which are no nodes of the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...base.text import short_repr
from ..env_reader import EnvReader
from ..node_platform import NodePlatform
from ..parse import json_value, parse_address, repeated_host

_SPEC = "CLUSTER_SPEC"
_NODES = ("workerpool0", "workerpool1")
_LONGEST = 1_000_000  # characters; the whole job may be in it


def _claim(environ: Mapping[str, str]) -> bool:
    try:
        nodes, _ = _nodes_of(environ[_SPEC])
    except ValueError:
        return True  # `_read` says what is wrong
    return len(nodes) != 1


def _read(reader: EnvReader) -> None:
    text = reader.text(_SPEC, required=True)
    if text is None:
        return
    try:
        nodes, own = _nodes_of(text)
    except ValueError as cause:
        # Without its text: its "job" has the arguments and the environment of the containers
        reader.problems.append(f"{_SPEC}, {len(text)} characters, {cause}")
        return
    reader.record(f"task of {_SPEC}", rank=own)
    reader.record(f"replicas of {_SPEC}", world_size=len(nodes), num_nodes=len(nodes))
    reader.own_address = (nodes[0], f"workerpool0 of {_SPEC}")
    reader.port_seed = reader.own_address
    reader.node_level = (
        f"{_SPEC} counts replicas, and no variable has the number of processes per node"
    )


def _nodes_of(text: str) -> tuple[list[str], int]:
    """The hosts of all nodes, and the number of this one; ValueError: the text does not say it."""
    spec = _json_object(text)
    first, others = (_pool(spec, name) for name in _NODES)
    if not first:
        raise ValueError("has no list of hosts in 'workerpool0'")
    hosts = [*first, *others]
    twice = repeated_host(hosts)
    if twice is not None:
        raise ValueError(f"names a host twice: {twice}")
    return hosts, _own_number(spec, first, others)


def _object(spec: Mapping[str, object], name: str) -> dict[str, object]:
    found = spec.get(name)
    if not isinstance(found, dict):
        raise ValueError("has no 'cluster' and 'task' objects")  # noqa: TRY004 - of a text
    return found


def _pool(spec: Mapping[str, object], name: str) -> list[str]:
    """The hosts of a pool, which may be missing."""
    addresses = _object(spec, "cluster").get(name, [])
    if not isinstance(addresses, list):
        raise ValueError(f"has no list of hosts in {name!r}")  # noqa: TRY004 - of a text
    hosts = []
    for address in addresses:
        what = f"has {short_repr(address)} for a host in {name!r}"
        if not isinstance(address, str):
            raise ValueError(what)  # noqa: TRY004 - of a text
        try:
            host, _ = parse_address(address)
        except ValueError as cause:
            raise ValueError(f"{what}, which {cause}") from None
        hosts.append(host)
    return hosts


def _own_number(spec: Mapping[str, object], first: Sequence[str], others: Sequence[str]) -> int:
    """The number of this node, by its task."""
    task = _object(spec, "task")
    kind = task.get("type")
    if kind not in _NODES:
        raise ValueError(
            f"has the task {short_repr(kind)}, which is not a node of the training job"
        )
    pool = first
    before = 0
    if kind != _NODES[0]:
        pool = others
        before = len(first)
    index = task.get("index")
    if type(index) is not int or not 0 <= index < len(pool):
        raise ValueError(f"has the task index {short_repr(index)}, which is not in its pool")
    return before + index


def _json_object(text: str) -> dict[str, object]:
    if len(text) > _LONGEST:
        raise ValueError(f"is too long: the longest that is read has {_LONGEST}")
    found = json_value(text)
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")  # noqa: TRY004 - of a text
    return found


VERTEX = NodePlatform(
    name="vertex",
    title="Vertex AI custom training",
    source="https://docs.cloud.google.com/vertex-ai/docs/training/distributed-training",
    index_variable=_SPEC,
    count_variable="",
    job_id_variables=("CLOUD_ML_JOB_ID",),
    read=_read,
    unless=("RANK", "LOCAL_RANK", "TF_CONFIG"),
    claim=_claim,
    env_forwarding_hint="an env entry in the containerSpec",
    sample=(
        'CLUSTER_SPEC={"cluster":{"workerpool0":["pool0-0:2222"],"workerpool1":["pool1-0:2222"]},'
        '"task":{"type":"workerpool1","index":0}} CLOUD_ML_JOB_ID=123'
    ),
    note="`TF_CONFIG`, or `RANK` and `WORLD_SIZE`, come before it where they are set.",
)
