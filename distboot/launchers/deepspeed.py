"""DeepSpeed's own launcher (`deepspeed`, locally and over pdsh), which numbers the nodes as well.

Its other runners start the processes with `mpirun`, `mpiexec` or `srun`, and those own the rank then.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..placement import Placement
from ..reading import Reading
from ._launcher import Launcher, claims

# DeepSpeed 0.19.8, deepspeed --hostfile (2 + 2), rank 3:
#   RANK=3   WORLD_SIZE=4   LOCAL_RANK=1   LOCAL_SIZE=2   CROSS_RANK=1   CROSS_SIZE=2
#   MASTER_ADDR=10.77.0.11   MASTER_PORT=29500
_MARKERS = ("CROSS_RANK", "CROSS_SIZE")


def _read(environ: Mapping[str, str]) -> Placement | None:
    # Names without a prefix of its own: one of them alone is somebody else's, or left over.
    if sum(name in environ for name in (*_MARKERS, "LOCAL_SIZE")) < 2 or not claims(environ, ("RANK", "WORLD_SIZE")):
        return None
    reading = Reading(environ, "deepspeed")
    rank = reading.integer("RANK", "rank")
    size = reading.integer("WORLD_SIZE", "world_size")
    reading.integer("LOCAL_RANK")
    here = reading.integer("LOCAL_SIZE", "local_world_size")
    node = reading.integer("CROSS_RANK", "node_rank")
    nodes = reading.integer("CROSS_SIZE", "num_nodes")
    # LOCAL_RANK is RANK % LOCAL_SIZE, which starts anywhere when the nodes before have other sizes. But a node has
    # consecutive ranks: the first node begins with rank 0, and the last one ends with the last rank.
    if rank is not None and size is not None and here is not None and node is not None and nodes is not None:
        first = 0 if node == 0 else size - here if node == nodes - 1 else rank if here == 1 else None
        if first is not None and 0 <= rank - first < here:
            reading.put("local_rank", rank - first, "derived: RANK counted from the first of this node")
        elif first is not None:
            reading.problems.append(f"RANK={rank} is not one of the LOCAL_SIZE={here} on node CROSS_RANK={node}")
        else:
            reading.notes.append("LOCAL_RANK ignored: DeepSpeed counts it as if all nodes had the same size")
    reading.text("MASTER_ADDR")
    reading.text("MASTER_PORT")
    return reading.placement(nodes_are_hosts=True)


DEEPSPEED = Launcher(
    name="deepspeed",
    title="DeepSpeed's launcher (deepspeed: local, pdsh)",
    markers=_MARKERS,
    read=_read,
    source="captures of 0.19.8; DeepSpeed, deepspeed/launcher/launch.py",
    rewrites=True,
    reads_plain=True,
    local_index="LOCAL_RANK",
)
