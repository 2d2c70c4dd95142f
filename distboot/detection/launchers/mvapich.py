"""MVAPICH2: `mpirun_rsh`.

MV2_NODE_ID counts host names in the order in which the list of hosts, and so the ranks, first reach
them.
"""

from __future__ import annotations

from ..env_reader import EnvReader
from ..left_over import LeftOver
from . import Launcher, Numbers


def _check(reader: EnvReader) -> None:
    """mpirun_rsh gives each rank the whole layout of its node."""
    name = f"MPISPAWN_MPIRUN_RANK_{reader.number('local_rank')}"
    reader.agree(name, reader.number("rank"), "MV2_COMM_WORLD_RANK")


MVAPICH = Launcher(
    name="mvapich",
    title="MVAPICH2 (mpirun_rsh)",
    source="captures of 2.3.7; MVAPICH2, src/pm/mpirun/mpispawn.c",
    sample=(
        "MV2_COMM_WORLD_RANK={rank} MV2_COMM_WORLD_SIZE={size} MV2_COMM_WORLD_LOCAL_RANK={local} "
        "MV2_COMM_WORLD_LOCAL_SIZE={per_node} MV2_NODE_ID={node} MV2_NUM_NODES_IN_JOB={nodes} "
        "MPDMAN_KVS_TEMPLATE=kvs_393_nodea_997 MPISPAWN_MPIRUN_RANK_{local}={rank}"
    ),
    markers=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    numbers=Numbers(
        rank="MV2_COMM_WORLD_RANK",
        world_size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_world_size="MV2_COMM_WORLD_LOCAL_SIZE",
        node_rank="MV2_NODE_ID",
        num_nodes="MV2_NUM_NODES_IN_JOB",
    ),
    job_id_variables=("MPDMAN_KVS_TEMPLATE",),
    read=_check,
    nodes_are_hosts=True,
    uses_daemons=True,
    left_over=(
        LeftOver(
            "MV2_COMM_WORLD_LOCAL_RANK", "MVAPICH2", ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE")
        ),
    ),
    of_one_process="MV2_COMM_WORLD_",
    programs=("mpispawn",),
    mpi="yes",
    read_by=("horovod", "jax"),
    unbind="MV2_ENABLE_AFFINITY=0",
    env_forwarding_hint="mpirun_rsh … NAME=VALUE program …",
)
