"""Cloud TPU slices of several hosts, as GKE sets them up: one process uses all chips of a host.

The processes of several slices are in JAX's own order (jax/_src/clusters/cloud_tpu_cluster.py):
slice by slice. With several slices there are MEGASCALE_NUM_SLICES=2, MEGASCALE_SLICE_ID=1 and
MEGASCALE_COORDINATOR_ADDRESS=js-slice-0-0.js, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..env_reader import EnvReader, variable
from ..node_platform import NodePlatform
from ..parse import parse_hosts

_WORKER = "TPU_WORKER_ID"
_HOSTS = "TPU_WORKER_HOSTNAMES"
_SLICES = "MEGASCALE_NUM_SLICES"
_SLICE = "MEGASCALE_SLICE_ID"
_COORDINATOR = "MEGASCALE_COORDINATOR_ADDRESS"


def _claim(environ: Mapping[str, str]) -> bool:
    listed = environ.get(_HOSTS, "").replace(",", " ").lower()
    hosts = {*listed.split()} - {"localhost"}
    checks = (
        len(hosts) > 1,
        environ.get(_SLICES, "1") not in ("", "1"),
        environ.get(_WORKER, "") not in ("", "0"),
    )
    return any(checks)


def _read(reader: EnvReader) -> None:
    worker = reader.integer(_WORKER, required=True)
    listed = reader.parsed(_HOSTS, parse_hosts, required=True)
    slices, own = _slices(reader)
    if worker is None or listed is None:
        return
    hosts = list(dict.fromkeys(host.lower() for host in listed))
    here = len(hosts)
    if worker >= here:
        names = variable(reader.environ, _HOSTS)
        reader.reject(_WORKER, f"is not below the {here} different hosts of {names}")
        return
    count = here * slices
    reader.record(_WORKER, rank=own * here + worker)
    reader.record(_HOSTS, world_size=count, num_nodes=count)
    reader.own_address = (listed[0], f"first host of {_HOSTS}")
    if slices > 1:
        reader.take_own_address(_COORDINATOR)
    reader.port_seed = reader.own_address


def _slices(reader: EnvReader) -> tuple[int, int]:
    """The number of slices, and that of this one."""
    if _SLICES not in reader.environ:
        return 1, 0
    slices = reader.integer(_SLICES, required=True)
    own = reader.integer(_SLICE, required=True)
    if slices is None or own is None:
        return 1, 0
    if own >= slices:
        reader.reject(_SLICE, f"is not below the {slices} there are")
    return slices, own


TPU = NodePlatform(
    name="tpu",
    title="Cloud TPU slices of several hosts (GKE)",
    source="https://github.com/jax-ml/jax/blob/main/jax/_src/clusters/cloud_tpu_cluster.py",
    index_variable=_WORKER,
    count_variable="",
    own_markers=(_WORKER, _HOSTS),
    triggers=(_SLICES,),
    hosts=_HOSTS,
    also_reads=(_SLICES, _SLICE, _COORDINATOR),
    one_rank=True,
    unless=("RANK", "LOCAL_RANK"),
    claim=_claim,
    read=_read,
    env_forwarding_hint="an env entry NAME=VALUE in the pod template",
    sample="TPU_WORKER_ID=1 TPU_WORKER_HOSTNAMES=job-slice-0-0.svc,job-slice-0-1.svc",
    note=(
        "One process uses all chips of a host. With several slices, the hosts of slice 0 come "
        "first."
    ),
)
