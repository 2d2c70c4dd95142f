"""`horovodrun --gloo`, also elastic. With `--mpi` and `--js` it is mpirun or jsrun that starts the processes.

HOROVOD_CROSS_RANK and HOROVOD_CROSS_SIZE count the hosts that have a process of the same local rank: all hosts
for local rank 0 only.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..address import is_loopback, parse_address
from ..placement import Placement
from ..reading import Reading
from ._launcher import Launcher, claims

# Horovod 0.28.1, horovodrun --gloo -np 4 -H nodea:3,nodeb:1, rank 1:
#   HOROVOD_RANK=1   HOROVOD_SIZE=4   HOROVOD_LOCAL_RANK=1   HOROVOD_LOCAL_SIZE=3
#   HOROVOD_CROSS_RANK=0   HOROVOD_CROSS_SIZE=1   HOROVOD_HOSTNAME=nodea
#   HOROVOD_GLOO_RENDEZVOUS_ADDR=10.77.0.11 (horovodrun's own host, not rank 0's)   HOROVOD_GLOO_RENDEZVOUS_PORT=15863
_MARKERS = ("HOROVOD_RANK", "HOROVOD_SIZE")
_PLACE = ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE")
_SERVER = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS):
        return None
    reading = Reading(environ, "horovodrun")
    reading.integer("HOROVOD_RANK", "rank")
    reading.integer("HOROVOD_SIZE", "world_size")
    said = [reading.integer(name) for name in _PLACE]
    local_rank, here, cross_rank, cross_size = (-1 if number is None else number for number in said)
    server = reading.parsed(_SERVER[0], _address)
    if server is not None and is_loopback(server):
        # Every process calls horovodrun's server there, whatever names -H gives this host.
        reading.put("num_nodes", 1, f"{_SERVER[0]} is a loopback address")
    elif not reading.problems and _is_whole_host(reading, local_rank, here, cross_rank, cross_size):
        reading.put("local_rank", local_rank, "HOROVOD_LOCAL_RANK")
        reading.put("local_world_size", here, "HOROVOD_LOCAL_SIZE")
        reading.put("node_rank", cross_rank, "HOROVOD_CROSS_RANK")
        reading.put("num_nodes", cross_size, "HOROVOD_CROSS_SIZE")
    else:
        reading.notes.append("HOROVOD_LOCAL_RANK and _LOCAL_SIZE ignored: a host that -H names twice has two of each")
        if local_rank == 0:
            reading.put("num_nodes", cross_size, "HOROVOD_CROSS_SIZE")
    seed = f"{server}:{reading.text(_SERVER[1])}"
    return reading.placement(port_seed=(seed, " and ".join(_SERVER)), nodes_are_hosts=True)


def _address(text: str) -> str:
    host, _ = parse_address(text)
    if ":" not in host and not host.replace(".", "").isdigit():
        raise ValueError("is not a numeric address, as horovodrun writes it")
    return host


def _is_whole_host(reading: Reading, local_rank: int, here: int, cross_rank: int, cross_size: int) -> bool:
    """Whether -H cannot name this process's host a second time (nodea:1,nodeb:1,nodea:2).

    The local numbers would start anew for each mention, and HOROVOD_CROSS_RANK be that of the last one. The first and
    the last mention of all tell by it whether there is another; and where as many hosts as can be have a process of
    the highest local rank, there is none.
    """
    rank, size = reading.number("rank"), reading.number("world_size")
    assert rank is not None
    assert size is not None
    if local_rank == 0:
        is_last = rank + here == size and cross_rank < cross_size
        return cross_rank == 0 or is_last or cross_size == size
    return here == size or (local_rank == here - 1 and here * cross_size == size)


HOROVODRUN = Launcher(
    name="horovodrun",
    title="horovodrun --gloo, static and elastic",
    markers=_MARKERS,
    read=_read,
    source="captures of 0.28.1; Horovod, horovod/runner/gloo_run.py and common/util/hosts.py",
    has_daemons=True,
    local_count="HOROVOD_LOCAL_SIZE",
    passing="export NAME=VALUE before horovodrun …",
)
