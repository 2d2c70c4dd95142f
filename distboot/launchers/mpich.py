"""MPICH 3, 4 and 5: `mpiexec` and `mpirun` of the Hydra process manager.

One process knows its rank. Its local numbers are those of its *proxy*, of which a host that is listed twice
has several; so they are believed only when it has all ranks. There is no job id and no node index.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..placement import Placement
from ..reading import Reading
from ._launcher import Launcher, claims

# MPICH 4.0.2, mpiexec -hosts nodea:1,nodeb:1,nodea:2 -n 4, rank 3 (which is the third process on nodea):
#   PMI_RANK=3   PMI_SIZE=4   MPI_LOCALRANKID=1   MPI_LOCALNRANKS=2   PMI_FD=7
# Never a marker: PMI_RANK, which Slurm, Flux and PALS set too.
_MARKERS = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS):
        return None
    reading = Reading(environ, "mpich")
    reading.integer("PMI_RANK", "rank")
    size = reading.integer("PMI_SIZE", "world_size")
    local_rank, local_size = reading.integer("MPI_LOCALRANKID"), reading.integer("MPI_LOCALNRANKS")
    if local_size == size:
        reading.put("local_rank", local_rank, "MPI_LOCALRANKID")
        reading.put("local_world_size", local_size, "MPI_LOCALNRANKS")
    else:
        reading.notes.append("MPI_LOCALRANKID and MPI_LOCALNRANKS ignored: a host that is listed twice has two of each")
    return reading.placement(nodes_are_hosts=True)


MPICH = Launcher(
    name="mpich",
    title="MPICH 3, 4 and 5 (mpiexec, mpirun)",
    markers=_MARKERS,
    read=_read,
    source="captures of 3.4.3 to 5.0.2; MPICH, src/pm/hydra/proxy/pmip_cb.c",
    has_daemons=True,
    local_count="MPI_LOCALNRANKS",
    passing="mpiexec -genv NAME VALUE …",
)
