"""PyTorch Lightning's own launcher: the first process of a node starts copies of the script.

It sets no RANK. The rank is NODE_RANK * devices + LOCAL_RANK, and no variable has the number of
devices: only node 0 knows its ranks. `init` cannot serve it: the first process only becomes one of
several when the Trainer starts.
"""

from __future__ import annotations

from ..env_reader import EnvReader, variable
from ..parse import is_loopback
from . import Launcher, Numbers

# Lightning 2.6, Trainer(devices=2, strategy="ddp"), the second process:
#   LOCAL_RANK=1   NODE_RANK=0   WORLD_SIZE=2   MASTER_ADDR=127.0.0.1   MASTER_PORT=45741
_ALL = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _read(reader: EnvReader) -> None:
    node_rank = reader.number("node_rank")
    if node_rank is None:
        return
    if node_rank == 0:
        reader.record("LOCAL_RANK on the first node", rank=reader.number("local_rank"))
        if is_loopback(reader.environ["MASTER_ADDR"]):
            reader.record("MASTER_ADDR is a loopback address", num_nodes=1)
        return
    reader.remedy = (
        "set RANK (0 to WORLD_SIZE - 1) for every process that was started by hand; or let "
        "torchrun or python -m distboot --nproc-per-node start and number them"
    )
    reader.problems.append(
        f"RANK is missing, and {variable(reader.environ, 'NODE_RANK')}: Lightning does not say how "
        "many processes the nodes before have"
    )


LIGHTNING = Launcher(
    name="lightning",
    title="PyTorch Lightning's own launcher (Trainer, Fabric)",
    source="PyTorch Lightning 2.6, strategies/launchers/subprocess_script.py",
    markers=("LOCAL_RANK", "NODE_RANK"),
    needed={*_ALL},
    unless=("RANK",),
    needs_claim=True,
    numbers=Numbers(
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        node_rank="NODE_RANK",
    ),
    read=_read,
    generic_names=True,
    mpi="no",
    unsupported_reason=(
        "start the script with torchrun, and Lightning uses the processes that it finds"
    ),
)
