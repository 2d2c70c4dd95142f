"""torchrun, `torch.distributed.run` and `torch.distributed.launch`, in all flags; `accelerate launch` runs on it."""

from __future__ import annotations

from collections.abc import Mapping

from ..placement import Placement
from ..reading import Reading
from ._launcher import Launcher, claims

# torchrun 2.13.0, two nodes of two, rank 3:
#   TORCHELASTIC_RUN_ID=job42   TORCHELASTIC_RESTART_COUNT=0
#   RANK=3   WORLD_SIZE=4   LOCAL_RANK=1   LOCAL_WORLD_SIZE=2   GROUP_RANK=1   GROUP_WORLD_SIZE=2
#   MASTER_ADDR=nodea.cluster.test   MASTER_PORT=44801
# GROUP_RANK is the index of the node's agent; there is no NODE_RANK. MASTER_ADDR is the host of the agent of
# rank 0, whose store listens at MASTER_PORT. torch.distributed.launch sets the same (without --use-env it also
# puts --local-rank=N into argv, which needs no reading).
_MARKERS = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS):
        return None
    reading = Reading(environ, "torchrun")
    reading.integer("RANK", "rank")
    reading.integer("WORLD_SIZE", "world_size")
    reading.integer("LOCAL_RANK", "local_rank")
    reading.integer("LOCAL_WORLD_SIZE", "local_world_size")
    reading.integer("GROUP_RANK", "node_rank")
    reading.integer("GROUP_WORLD_SIZE", "num_nodes")
    reading.text("TORCHELASTIC_RUN_ID")
    reading.job_id("TORCHELASTIC_RUN_ID")
    reading.text("MASTER_ADDR")
    reading.text("MASTER_PORT")
    return reading.placement()


TORCHRUN = Launcher(
    name="torchrun",
    title="torchrun, torch.distributed.run, torch.distributed.launch",
    markers=_MARKERS,
    read=_read,
    source="captures of 2.13.0; PyTorch documentation, 'torchrun (Elastic Launch): Environment Variables'",
    rewrites=True,
)
