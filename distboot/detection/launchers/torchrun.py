"""torchrun, `torch.distributed.run`, `torch.distributed.launch`, and `accelerate launch`.

GROUP_RANK is the index of the node's agent; there is no NODE_RANK. MASTER_ADDR is the host of the
agent of rank 0, whose store listens at MASTER_PORT. torch.distributed.launch sets the same (without
--use-env it also puts --local-rank=N into argv, which needs no reading).

With --virtual-local-rank LOCAL_RANK is 0 for all, and each sees one device. The true one is in the
name of TORCHELASTIC_ERROR_FILE=/tmp/torchelastic_2bxcjlcq/none_vf65h9kz/attempt_0/1/error.json
"""

from __future__ import annotations

import re

from ...base.patterns import pattern
from ..env_reader import EnvReader
from ..left_over import LeftOver
from . import Launcher, Numbers

_ERROR_FILE = pattern(r".*/attempt_[0-9]+/([0-9]{1,8})/error\.json", re.ASCII | re.DOTALL)
_NO_ID = "none"  # torchrun's word for no --rdzv-id
_RANK_AND_SIZE = ("RANK", "WORLD_SIZE")


def _read(reader: EnvReader) -> None:
    local_rank = reader.integer("LOCAL_RANK")
    if local_rank or reader.number("local_world_size") == 1:
        reader.record("LOCAL_RANK", local_rank=local_rank)
    else:
        _read_virtual(reader)
    if reader.text("TORCHELASTIC_RUN_ID") != _NO_ID:
        reader.job_id("TORCHELASTIC_RUN_ID")
    reader.expect("MASTER_ADDR", "MASTER_PORT")


def _read_virtual(reader: EnvReader) -> None:
    """LOCAL_RANK is 0, which with --virtual-local-rank it is for every process."""
    found = _ERROR_FILE.fullmatch(reader.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    if found is None:
        return
    true_one = int(found[1])
    source = "TORCHELASTIC_ERROR_FILE: LOCAL_RANK is virtual"
    if true_one == 0:
        source = "LOCAL_RANK"
    reader.record(source, local_rank=true_one)


TORCHRUN = Launcher(
    name="torchrun",
    title="torchrun, torch.distributed.run and .launch, accelerate launch",
    source=(
        "captures of 2.13.0; "
        "PyTorch documentation, 'torchrun (Elastic Launch): Environment Variables'"
    ),
    # 2.13.0. With a store of its own, of which MASTER_ADDR and MASTER_PORT are, it is
    # TORCHELASTIC_USE_AGENT_STORE=True.
    sample=(
        "RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local} LOCAL_WORLD_SIZE={per_node} "
        "GROUP_RANK={node} GROUP_WORLD_SIZE={nodes} "
        "ROLE_NAME=default ROLE_RANK={rank} ROLE_WORLD_SIZE={size} OMP_NUM_THREADS=1 "
        "TORCHELASTIC_RUN_ID=job42 TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=0 "
        "TORCHELASTIC_USE_AGENT_STORE=False"
    ),
    markers=("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    numbers=Numbers(
        rank="RANK",
        world_size="WORLD_SIZE",
        local_world_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
        num_nodes="GROUP_WORLD_SIZE",
    ),
    read=_read,
    sets_torch_vars=True,
    owns_torch_vars=True,
    own_mark="TORCHELASTIC_RESTART_COUNT",
    left_over=(
        LeftOver("GROUP_RANK", "torchrun, or for PyTorch Lightning", _RANK_AND_SIZE),
        LeftOver("ROLE_RANK", "torchrun", _RANK_AND_SIZE),
    ),
    of_one_process=(
        "(GROUP|ROLE)_(RANK|WORLD_SIZE|NAME)$|"
        "TORCHELASTIC_(RUN_ID|RESTART_COUNT|MAX_RESTARTS|ERROR_FILE|USE_AGENT_STORE)$"
    ),
    programs=(
        *("torchrun", "torch.distributed.run", "torch.distributed.launch"),
        *("accelerate", "accelerate-launch", "accelerate.commands.launch"),
    ),
    mpi="no",
    lightning_reads=("WORLD_SIZE",),
    serves_master_port=True,
    told_ranks_per_node=True,
    # It handles these four unless told otherwise (torch.distributed.run 2.13)
    signals_hint="start it with --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGNALS",
)
