"""torchrun, `torch.distributed.run` and `torch.distributed.launch`, in all flags; `accelerate launch` runs on it."""

from __future__ import annotations

import re
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
# With --virtual-local-rank LOCAL_RANK is 0 for all, and each sees one device. The true one is in the name of
#   TORCHELASTIC_ERROR_FILE=/tmp/torchelastic_2bxcjlcq/none_vf65h9kz/attempt_0/1/error.json
_ERROR_FILE = re.compile(r".*/attempt_[0-9]+/([0-9]{1,8})/error\.json", re.ASCII | re.DOTALL)
_MARKERS = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


def _read(environ: Mapping[str, str]) -> Placement | None:
    if not claims(environ, _MARKERS):
        return None
    reading = Reading(environ, "torchrun")
    reading.integer("RANK", "rank")
    reading.integer("WORLD_SIZE", "world_size")
    local_rank = reading.integer("LOCAL_RANK")
    local_world_size = reading.integer("LOCAL_WORLD_SIZE", "local_world_size")
    if local_rank or local_world_size == 1:
        reading.put("local_rank", local_rank, "LOCAL_RANK")
    else:
        _find_local_rank(reading)
    reading.integer("GROUP_RANK", "node_rank")
    reading.integer("GROUP_WORLD_SIZE", "num_nodes")
    reading.text("TORCHELASTIC_RUN_ID")
    reading.job_id("TORCHELASTIC_RUN_ID")
    reading.text("MASTER_ADDR")
    reading.text("MASTER_PORT")
    return reading.placement()


def _find_local_rank(reading: Reading) -> None:
    """LOCAL_RANK is 0, which with --virtual-local-rank it is for every process."""
    match = _ERROR_FILE.fullmatch(reading.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if match:
        number = int(match[1])
        source = "LOCAL_RANK" if number == 0 else "TORCHELASTIC_ERROR_FILE: LOCAL_RANK is virtual"
        reading.put("local_rank", number, source)


TORCHRUN = Launcher(
    name="torchrun",
    title="torchrun, torch.distributed.run and .launch, accelerate launch",
    markers=_MARKERS,
    read=_read,
    source="captures of 2.13.0; PyTorch documentation, 'torchrun (Elastic Launch): Environment Variables'",
    rewrites=True,
    reads_plain=True,
    local_index="LOCAL_RANK",
)
