"""Cloud TPU slices of several hosts, as GKE sets them up: one process uses all chips of a host.

The processes of several slices are in JAX's own order (jax/_src/clusters/cloud_tpu_cluster.py): slice
by slice. With several slices there are MEGASCALE_NUM_SLICES=2, MEGASCALE_SLICE_ID=1 and
MEGASCALE_COORDINATOR_ADDRESS=js-slice-0-0.js, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..env_reader import EnvReader, variable
from ..node_platform import NodePlatform
from ..parse import parse_hosts
from . import has_any


def _claim(environ: Mapping[str, str]) -> bool:
    if has_any(environ, ("RANK", "LOCAL_RANK")):
        return False
    words = environ.get("TPU_WORKER_HOSTNAMES", "").replace(",", " ").lower().split()
    hosts = {host for host in words if host != "localhost"}
    several_slices = environ.get("MEGASCALE_NUM_SLICES", "1") not in ("", "1")
    is_second = environ.get("TPU_WORKER_ID", "") not in ("", "0")
    return len(hosts) > 1 or several_slices or is_second


def _read(reader: EnvReader) -> None:
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
        reader.own_address = None
        reader.take_own_address("MEGASCALE_COORDINATOR_ADDRESS")
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
    claim=_claim,
    read=_read,
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
    sample="TPU_WORKER_ID=1 TPU_WORKER_HOSTNAMES=job-slice-0-0.svc,job-slice-0-1.svc",
    note=(
        "One process uses all chips of a host. With several slices, the hosts of slice 0 come "
        "first."
    ),
)
