"""DeepSpeed's own launcher (`deepspeed`, locally and over pdsh), which numbers the nodes as well.

Its other runners start the processes with `mpirun`, `mpiexec` or `srun`, and those own the rank
then. A node has consecutive ranks, and LOCAL_RANK is RANK % LOCAL_SIZE: a different one for each
process of the node, but not in the order of ranks where the nodes before have other sizes.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..env_reader import EnvReader
from ..left_over import LeftOver
from . import Launcher, Numbers, has_any

_OWN = ("CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE")


def _claim(environ: Mapping[str, str]) -> bool:
    # Names without a prefix of its own: one of them alone is of another program, or left over.
    found = environ.keys() & {*_OWN}
    return len(found) > 1 and has_any(environ, ("RANK", "WORLD_SIZE"))


def _check(reader: EnvReader) -> None:
    rank = reader.number("rank")
    here = reader.number("local_world_size")
    if rank is not None and here:
        reader.agree("LOCAL_RANK", rank % here, "RANK % LOCAL_SIZE")
    reader.expect("MASTER_ADDR", "MASTER_PORT")


DEEPSPEED = Launcher(
    name="deepspeed",
    title="DeepSpeed's launcher (deepspeed: local, pdsh)",
    source="captures of 0.19.8; DeepSpeed, deepspeed/launcher/launch.py",
    sample=(
        "RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local} LOCAL_SIZE={per_node} "
        "CROSS_RANK={node} CROSS_SIZE={nodes} MASTER_ADDR=10.77.0.11 MASTER_PORT=29500"
    ),
    markers=("CROSS_RANK", "CROSS_SIZE"),
    claim=_claim,
    numbers=Numbers(
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size="LOCAL_SIZE",
        node_rank="CROSS_RANK",
        num_nodes="CROSS_SIZE",
    ),
    in_order=("node_rank",),
    read=_check,
    nodes_are_hosts=True,
    sets_torch_vars=True,
    owns_torch_vars=True,
    own_mark="LOCAL_SIZE",
    left_over=(LeftOver("CROSS_RANK", "DeepSpeed", ("RANK", "WORLD_SIZE")),),
    of_one_process="LOCAL_SIZE$|CROSS_(RANK|SIZE)$",
    programs=("deepspeed.launcher.launch",),
    mpi="no",
    told_ranks_per_node=True,
    same_port_for_all_jobs=True,  # 29500
)
