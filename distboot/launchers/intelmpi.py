"""Intel MPI 2021: `mpiexec.hydra` and `mpirun`. MPICH's variables, and the index of the node."""

from __future__ import annotations

from collections.abc import Mapping

from ..placement import Placement
from ..reading import Reading
from ._launcher import Launcher, claims

# Intel MPI 2021.19, -machinefile with nodea:1 nodeb:1 nodea:2, rank 3:
#   PMI_RANK=3   PMI_SIZE=4   MPI_LOCALRANKID=2   MPI_LOCALNRANKS=3   HYDRA_BSTRAP_NODE_ID=0
#   I_MPI_HYDRA_UUID=cb680000-d51a-633c-c060-060095bab106
# Unlike MPICH it has one proxy a host, however often the host is listed. With -genvnone there is no I_MPI_HYDRA_UUID.
_MARKERS = ("I_MPI_HYDRA_UUID", "HYDRA_BSTRAP_NODE_ID")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS):
        return None
    reading = Reading(environ, "intelmpi")
    reading.integer("PMI_RANK", "rank")
    reading.integer("PMI_SIZE", "world_size")
    reading.integer("MPI_LOCALRANKID", "local_rank")
    reading.integer("MPI_LOCALNRANKS", "local_world_size")
    reading.integer("HYDRA_BSTRAP_NODE_ID", "node_rank")
    reading.job_id("I_MPI_HYDRA_UUID")
    return reading.placement(nodes_are_hosts=True)


INTELMPI = Launcher(
    name="intelmpi",
    title="Intel MPI 2021 (mpiexec.hydra, mpirun)",
    markers=_MARKERS,
    read=_read,
    source="captures of 2021.8 to 2021.19",
    has_daemons=True,
    passing="mpiexec -genv NAME VALUE …",
)
