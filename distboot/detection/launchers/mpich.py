"""MPICH: `mpiexec`, `mpirun`, with the process manager Hydra.

Never a marker: PMI_RANK, which Slurm, Flux and PALS set, too. There is no job id and no node index.
"""

from __future__ import annotations

from ..env_reader import EnvReader
from . import Launcher, Numbers


def _read(reader: EnvReader) -> None:
    """The local numbers are those of a *proxy*, and a host that is listed twice has several."""
    local_rank = reader.integer("MPI_LOCALRANKID")
    local_size = reader.integer("MPI_LOCALNRANKS")
    if local_size is None:
        return
    if local_size == reader.number("world_size"):
        reader.record("MPI_LOCALRANKID", local_rank=local_rank)
        reader.record("MPI_LOCALNRANKS", local_world_size=local_size)
    else:
        reader.notes.append(
            "MPI_LOCALRANKID and MPI_LOCALNRANKS ignored: a host that is listed twice has two of "
            "each"
        )


MPICH = Launcher(
    name="mpich",
    title="MPICH 3, 4 and 5 (mpiexec, mpirun)",
    source="captures of 3.4.3 to 5.0.2; MPICH, src/pm/hydra/proxy/pmip_cb.c",
    # 4.0.2. With -hosts nodea:1,nodeb:1,nodea:2 the third process on nodea has
    # MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2.
    sample=(
        "PMI_RANK={rank} PMI_SIZE={size} PMI_FD=7 "
        "MPI_LOCALRANKID={local} MPI_LOCALNRANKS={per_node}"
    ),
    markers=("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    numbers=Numbers(rank="PMI_RANK", world_size="PMI_SIZE"),
    read=_read,
    nodes_are_hosts=True,
    local_count="MPI_LOCALNRANKS",
    uses_daemons=True,
    of_one_process="MPI_LOCAL(RANKID|NRANKS)$",
    programs=("hydra_pmi_proxy", "hydra_bstrap_proxy"),  # one on each host
    job_option="--control-port",  # hydra_pmi_proxy --control-port node-0:35143 --rmk user …
    mpi="yes",
    read_by=("horovod", "jax"),
    unbind="mpiexec -bind-to none",
    env_forwarding_hint="mpiexec -genv NAME VALUE …",
)
