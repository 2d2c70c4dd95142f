"""`horovodrun --gloo`, also elastic. With `--mpi` and `--js` mpirun or jsrun starts the processes.

HOROVOD_CROSS_RANK and HOROVOD_CROSS_SIZE count the hosts that have a process of the same local
rank: all hosts for local rank 0 only. A host that -H names twice has two sets of local numbers.
HOROVOD_GLOO_RENDEZVOUS_ADDR is the host of horovodrun, and need not be that of rank 0.
"""

from __future__ import annotations

from typing import NamedTuple

from ..env_reader import EnvReader
from ..left_over import LeftOver
from ..parse import is_loopback, parse_address
from . import Launcher, Numbers

_PLACE = (
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
)
_SERVER = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_SERVER_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"


class _Place(NamedTuple):
    """The numbers in the variables of `_PLACE`."""

    local_rank: int
    here: int
    cross_rank: int
    cross_size: int


def _read(reader: EnvReader) -> None:
    found = [reader.integer(name) for name in _PLACE]
    server = reader.parsed(_SERVER, _numeric_address)
    port = reader.text(_SERVER_PORT)
    if server is None:
        return
    if port:
        source = f"{_SERVER} and {_SERVER_PORT}"
        reader.port_seed = (f"{server}:{port}", source)
    if is_loopback(server):
        # Every process calls horovodrun's server there, whatever names -H gives this host.
        source = f"{_SERVER} is a loopback address"
        reader.record(source, num_nodes=1)
        return
    if _put_place(reader, found):
        return
    if _PLACE[0] in reader.environ:
        reader.notes.append(
            "HOROVOD_LOCAL_RANK and _LOCAL_SIZE ignored: a host that -H names twice has two of each"
        )
        local_rank, _, _, hosts = found
        if local_rank == 0:
            reader.record("HOROVOD_CROSS_SIZE", num_nodes=hosts)


def _numeric_address(text: str) -> str:
    host, _ = parse_address(text)
    digits = host.replace(".", "")
    is_ipv6 = ":" in host
    if is_ipv6 or digits.isdigit():
        return host
    raise ValueError("is not a numeric address, as horovodrun writes it")


def _put_place(reader: EnvReader, found: list[int | None]) -> bool:
    """Record the local numbers and the nodes, and return True, if they are those of the host."""
    known = [number for number in found if number is not None]
    rank = reader.number("rank")
    size = reader.number("world_size")
    is_complete = len(known) == len(_PLACE)
    if reader.problems or not is_complete:
        return False
    place = _Place(*known)
    if not _is_whole_host(place, rank, size):
        return False
    local_rank, here, cross_rank, cross_size = _PLACE
    reader.record(local_rank, local_rank=place.local_rank)
    reader.record(here, local_world_size=place.here)
    reader.record(cross_rank, node_rank=place.cross_rank)
    reader.record(cross_size, num_nodes=place.cross_size)
    return True


def _is_whole_host(place: _Place, rank: int | None, size: int | None) -> bool:
    """Whether -H cannot name this process's host a second time (nodea:1,nodeb:1,nodea:2).

    The local numbers would start again for each mention, and HOROVOD_CROSS_RANK be that of the last
    one. The first and the last mention of all tell by it whether there is another; and where as
    many hosts as can be have a process of the highest local rank, no other one follows.
    """
    local_rank, here, cross_rank, cross_size = place
    if local_rank == 0:
        end = (rank or 0) + here
        ends_job = end == size
        is_last = ends_job and cross_rank < cross_size
        checks = [
            cross_rank == 0,
            is_last,
            cross_size == size,
        ]
    else:
        has_highest = local_rank == here - 1
        processes = here * cross_size
        checks = [
            here == size,
            has_highest and processes == size,
        ]
    return any(checks)


HOROVODRUN = Launcher(
    name="horovodrun",
    title="horovodrun --gloo, static and elastic",
    source=("captures of 0.28.1; Horovod, horovod/runner/gloo_run.py and common/util/hosts.py"),
    sample=(
        "HOROVOD_RANK={rank} HOROVOD_SIZE={size} "
        "HOROVOD_LOCAL_RANK={local} HOROVOD_LOCAL_SIZE={per_node} "
        "HOROVOD_CROSS_RANK={node} HOROVOD_CROSS_SIZE={nodes} HOROVOD_HOSTNAME=node-{node} "
        "HOROVOD_GLOO_RENDEZVOUS_ADDR=10.77.0.11 HOROVOD_GLOO_RENDEZVOUS_PORT=15863"
    ),
    markers=("HOROVOD_RANK", "HOROVOD_SIZE"),
    numbers=Numbers(rank="HOROVOD_RANK", world_size="HOROVOD_SIZE"),
    read=_read,
    nodes_are_hosts=True,
    local_count="HOROVOD_LOCAL_SIZE",
    own_mark=_SERVER_PORT,  # distboot exports that of another server
    uses_daemons=True,
    left_over=(
        LeftOver("HOROVOD_LOCAL_RANK", "horovodrun", ("HOROVOD_RANK", "HOROVOD_SIZE")),
        LeftOver("HOROVOD_CROSS_RANK", "horovodrun", ("HOROVOD_RANK", "HOROVOD_SIZE")),
    ),
    of_one_process="HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)$|GLOO_RENDEZVOUS_)",
    # The process that the user starts; it starts the ranks of its own host only
    programs=("horovodrun", "horovod.runner.launch"),
    mpi="no",
    read_by=("horovod",),
    configures_horovod=True,
    env_forwarding_hint="export NAME=VALUE before horovodrun …",
)
