"""PyTorch Lightning's own launcher: the first process starts the others of its node as copies of the script.

It sets no RANK. And `init` cannot serve it: the first process only becomes one of several when the Trainer starts.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..address import is_loopback
from ..placement import Placement
from ..reading import Reading, variable
from ._launcher import Launcher

# Lightning 2.6, Trainer(devices=2, strategy="ddp"), the second process:
#   LOCAL_RANK=1   NODE_RANK=0   WORLD_SIZE=2   MASTER_ADDR=127.0.0.1   MASTER_PORT=45741
# Its rank is NODE_RANK * devices + LOCAL_RANK, and nothing says how many devices: only node 0 knows its ranks.
_MARKERS = ("LOCAL_RANK", "NODE_RANK")
_ALL = (*_MARKERS, "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if "RANK" in environ or not all(marker in environ for marker in _ALL):
        return None
    reading = Reading(environ, "lightning")
    reading.integer("WORLD_SIZE", "world_size")
    local_rank = reading.integer("LOCAL_RANK", "local_rank")
    node_rank = reading.integer("NODE_RANK", "node_rank")
    if node_rank == 0:
        reading.put("rank", local_rank, "LOCAL_RANK on the first node")
    elif node_rank is not None:
        reading.problems.append(
            f"RANK is missing, and {variable(environ, 'NODE_RANK')}: Lightning does not say how many processes the "
            "nodes before have"
        )
    if is_loopback(environ["MASTER_ADDR"]):
        reading.put("num_nodes", 1, "MASTER_ADDR is a loopback address")
    return reading.placement()


LIGHTNING = Launcher(
    name="lightning",
    title="PyTorch Lightning's own launcher (Trainer, Fabric)",
    markers=_MARKERS,
    read=_read,
    source="PyTorch Lightning 2.6, strategies/launchers/subprocess_script.py",
    plain=True,
    no_init="start the script with torchrun, and Lightning uses the processes that it finds",
)
