"""MVAPICH2: `mpirun_rsh`, which groups the ranks by host name and tells each the whole layout of its node."""

from __future__ import annotations

from collections.abc import Mapping

from ..placement import Placement
from ..reading import Reading
from ._launcher import Launcher, claims

# MVAPICH2 2.3.7, mpirun_rsh -np 4 nodea nodea nodea nodeb, rank 3:
#   MV2_COMM_WORLD_RANK=3   MV2_COMM_WORLD_SIZE=4   MV2_COMM_WORLD_LOCAL_RANK=0   MV2_COMM_WORLD_LOCAL_SIZE=1
#   MV2_NODE_ID=1   MV2_NUM_NODES_IN_JOB=2   MPDMAN_KVS_TEMPLATE=kvs_393_nodea_997   MPISPAWN_MPIRUN_RANK_0=3
# MV2_NODE_ID counts host names in the order in which the list of hosts, and so the ranks, first reach them.
_MARKERS = ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS):
        return None
    reading = Reading(environ, "mvapich")
    rank = reading.integer("MV2_COMM_WORLD_RANK", "rank")
    reading.integer("MV2_COMM_WORLD_SIZE", "world_size")
    local_rank = reading.integer("MV2_COMM_WORLD_LOCAL_RANK", "local_rank")
    reading.integer("MV2_COMM_WORLD_LOCAL_SIZE", "local_world_size")
    reading.integer("MV2_NODE_ID", "node_rank")
    reading.integer("MV2_NUM_NODES_IN_JOB", "num_nodes")
    reading.agree(f"MPISPAWN_MPIRUN_RANK_{local_rank}", rank, "MV2_COMM_WORLD_RANK")
    reading.job_id("MPDMAN_KVS_TEMPLATE")
    return reading.placement(nodes_are_hosts=True)


MVAPICH = Launcher(
    name="mvapich",
    title="MVAPICH2 (mpirun_rsh)",
    markers=_MARKERS,
    read=_read,
    source="captures of 2.3.7; MVAPICH2, src/pm/mpirun/mpispawn.c",
    has_daemons=True,
    passing="mpirun_rsh … NAME=VALUE program …",
)
