"""Google's platforms that number nodes: Vertex AI, and TPU slices of several hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...base.text import short_repr
from ..env_reader import EnvReader, variable
from ..node_platform import NodePlatform
from ..parse import parse_address, parse_hosts, repeated_host
from . import has_any

# Vertex AI custom training, the first worker of two:
#   CLUSTER_SPEC={"cluster": {"workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
#                             "workerpool1": ["cmle-training-workerpool1-ab-0:2222", "…-1:2222"]},
#                 "environment": "cloud", "task": {"type": "workerpool1", "index": 0}}
# The one replica of workerpool0 is node 0, those of workerpool1 follow. Pools 2 and 3 are parameter servers,
# reductions and evaluators, which are no nodes of the job.
_SPEC = "CLUSTER_SPEC"
_NODES = ("workerpool0", "workerpool1")
_LONGEST = 1_000_000  # characters; the whole job may be in it


def _claim_vertex(environ: Mapping[str, str]) -> bool:
    text = environ.get(_SPEC)
    if text is None or has_any(environ, ("RANK", "LOCAL_RANK", "TF_CONFIG")):
        return False
    try:
        nodes, _ = _nodes_of(text)
    except ValueError:
        return True  # `_read_vertex` says what is wrong
    return len(nodes) != 1


def _read_vertex(reader: EnvReader) -> None:
    found = reader.parsed(_SPEC, _nodes_of, required=True)
    if found is None:
        return
    nodes, own = found
    reader.put(f"task of {_SPEC}", rank=own)
    reader.put(f"replicas of {_SPEC}", world_size=len(nodes), num_nodes=len(nodes))
    reader.own_address = (nodes[0], f"workerpool0 of {_SPEC}")
    reader.port_seed = reader.own_address
    reader.node_level = (
        f"{_SPEC} counts replicas, and nothing says how many processes each is to run"
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
        if not isinstance(address, str):
            raise ValueError(f"has {short_repr(address)} for a host in {name!r}")  # noqa: TRY004
        hosts.append(parse_address(address)[0])
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
    import json  # only here, so that other launchers do not pay for it

    if len(text) > _LONGEST:
        raise ValueError(f"has {len(text)} characters; the longest that is read has {_LONGEST}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError("is not a JSON object")  # noqa: TRY004 - of a text
    return found


VERTEX = NodePlatform(
    name="vertex",
    title="Vertex AI custom training",
    page="https://docs.cloud.google.com/vertex-ai/docs/training/distributed-training",
    index_variable=_SPEC,
    count_variable="",
    job_id=("CLOUD_ML_JOB_ID",),
    read=_read_vertex,
    claim=_claim_vertex,
    env_forwarding_hint="an env entry in the containerSpec",
    sample=(
        'CLUSTER_SPEC={"cluster":{"workerpool0":["pool0-0:2222"],"workerpool1":["pool1-0:2222"]},'
        '"task":{"type":"workerpool1","index":0}} CLOUD_ML_JOB_ID=123'
    ),
    note="`TF_CONFIG`, or `RANK` and `WORLD_SIZE`, come before it where they are set.",
)


# TPU_WORKER_ID=1   TPU_WORKER_HOSTNAMES=js-0-0.js,js-0-1.js   and with several slices
# MEGASCALE_NUM_SLICES=2   MEGASCALE_SLICE_ID=1   MEGASCALE_COORDINATOR_ADDRESS=js-slice-0-0.js
# JAX's own order of processes (jax/_src/clusters/cloud_tpu_cluster.py): slice by slice.
def _claim_tpu(environ: Mapping[str, str]) -> bool:
    if has_any(environ, ("RANK", "LOCAL_RANK")):
        return False
    words = environ.get("TPU_WORKER_HOSTNAMES", "").replace(",", " ").lower().split()
    hosts = {host for host in words if host != "localhost"}
    several_slices = environ.get("MEGASCALE_NUM_SLICES", "1") not in ("", "1")
    is_second = environ.get("TPU_WORKER_ID", "") not in ("", "0")
    return len(hosts) > 1 or several_slices or is_second


def _read_tpu(reader: EnvReader) -> None:
    worker = reader.integer("TPU_WORKER_ID", required=True)
    listed = reader.parsed("TPU_WORKER_HOSTNAMES", parse_hosts, required=True) or []
    hosts = list(dict.fromkeys(host.lower() for host in listed))
    slices, own = _slices(reader)
    if worker is None or not hosts:
        return
    if worker >= len(hosts):
        names = variable(reader.environ, "TPU_WORKER_HOSTNAMES")
        reader.reject("TPU_WORKER_ID", f"is not below the {len(hosts)} different hosts of {names}")
        return
    count = len(hosts) * slices
    reader.put("TPU_WORKER_ID", rank=own * len(hosts) + worker)
    reader.put("TPU_WORKER_HOSTNAMES", world_size=count, num_nodes=count)
    reader.own_address = (listed[0], "first host of TPU_WORKER_HOSTNAMES")
    if slices > 1:
        name = "MEGASCALE_COORDINATOR_ADDRESS"
        address = reader.parsed(name, parse_address)
        reader.own_address = None
        if address is not None:
            reader.own_address = (address[0], name)
    reader.port_seed = reader.own_address


def _slices(reader: EnvReader) -> tuple[int, int]:
    """The number of slices, and that of this one."""
    if "MEGASCALE_NUM_SLICES" not in reader.environ:
        return 1, 0
    slices = reader.integer("MEGASCALE_NUM_SLICES", required=True)
    own = reader.integer("MEGASCALE_SLICE_ID", required=True)
    if slices is None or own is None:
        return 1, 0
    if own >= slices:
        reader.reject("MEGASCALE_SLICE_ID", f"is not below the {slices} there are")
    return slices, own


TPU = NodePlatform(
    name="tpu",
    title="Cloud TPU slices of several hosts (GKE)",
    page="https://github.com/jax-ml/jax/blob/main/jax/_src/clusters/cloud_tpu_cluster.py",
    index_variable="TPU_WORKER_ID",
    count_variable="",
    marks=("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES"),
    triggers=("MEGASCALE_NUM_SLICES",),
    hosts="TPU_WORKER_HOSTNAMES",
    also=("MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID", "MEGASCALE_COORDINATOR_ADDRESS"),
    one_rank=True,
    claim=_claim_tpu,
    read=_read_tpu,
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
    sample="TPU_WORKER_ID=1 TPU_WORKER_HOSTNAMES=job-slice-0-0.svc,job-slice-0-1.svc",
    note=(
        "One process uses all chips of a host. With several slices, the hosts of slice 0 come "
        "first."
    ),
)
