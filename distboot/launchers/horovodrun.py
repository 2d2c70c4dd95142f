"""`horovodrun --gloo`, also elastic. With `--mpi` and `--js` it is mpirun or jsrun that starts the processes.

HOROVOD_CROSS_RANK and HOROVOD_CROSS_SIZE count the hosts that have a process of the same local rank: all hosts
for local rank 0 only.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..placement import Placement
from ..reading import Reading
from ._launcher import Launcher, claims

# Horovod 0.28.1, horovodrun --gloo -np 4 -H nodea:3,nodeb:1, rank 1:
#   HOROVOD_RANK=1   HOROVOD_SIZE=4   HOROVOD_LOCAL_RANK=1   HOROVOD_LOCAL_SIZE=3
#   HOROVOD_CROSS_RANK=0   HOROVOD_CROSS_SIZE=1   HOROVOD_HOSTNAME=nodea
#   HOROVOD_GLOO_RENDEZVOUS_ADDR=10.77.0.11 (horovodrun's own host, not rank 0's)   HOROVOD_GLOO_RENDEZVOUS_PORT=15863
_MARKERS = ("HOROVOD_RANK", "HOROVOD_SIZE")
_SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS):
        return None
    reading = Reading(environ, "horovodrun")
    reading.integer("HOROVOD_RANK", "rank")
    size = reading.integer("HOROVOD_SIZE", "world_size")
    local_rank = reading.integer("HOROVOD_LOCAL_RANK", "local_rank")
    here = reading.integer("HOROVOD_LOCAL_SIZE", "local_world_size")
    cross_rank = reading.integer("HOROVOD_CROSS_RANK")
    cross_size = reading.integer("HOROVOD_CROSS_SIZE")
    last_of_equals = (
        local_rank is not None
        and here is not None
        and cross_size is not None
        and local_rank == here - 1
        and here * cross_size == size
    )
    if local_rank == 0 or last_of_equals:
        reading.put("node_rank", cross_rank, "HOROVOD_CROSS_RANK")
        reading.put("num_nodes", cross_size, "HOROVOD_CROSS_SIZE")
    server = ":".join(environ.get(name, "") for name in _SERVER)
    return reading.placement(port_seed=(server, " and ".join(_SERVER)), nodes_are_hosts=True)


HOROVODRUN = Launcher(
    name="horovodrun",
    title="horovodrun --gloo, static and elastic",
    markers=_MARKERS,
    read=_read,
    source="captures of 0.28.1; Horovod, horovod/runner/gloo_run.py and common/util/hosts.py",
    passing="export NAME=VALUE before horovodrun …",
)
