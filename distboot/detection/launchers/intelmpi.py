"""Intel MPI: `mpiexec.hydra`, `mpirun`. It comes from MPICH, and sets its variables, too.

Unlike MPICH it has one proxy on each host, however often the host is listed. With -genvnone there
is no I_MPI_HYDRA_UUID.
"""

from __future__ import annotations

from . import Launcher, Numbers

INTELMPI = Launcher(
    name="intelmpi",
    title="Intel MPI 2021 (mpiexec.hydra, mpirun)",
    source="captures of 2021.8 to 2021.19",
    sample=(
        "PMI_RANK={rank} PMI_SIZE={size} MPI_LOCALRANKID={local} MPI_LOCALNRANKS={per_node} "
        "HYDRA_BSTRAP_NODE_ID={node} I_MPI_HYDRA_UUID=cb680000-d51a-633c-c060-060095bab106"
    ),
    markers=("I_MPI_HYDRA_UUID", "HYDRA_BSTRAP_NODE_ID"),
    numbers=Numbers(
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size="MPI_LOCALNRANKS",
        node_rank="HYDRA_BSTRAP_NODE_ID",
    ),
    job_id_variables=("I_MPI_HYDRA_UUID",),
    in_order=("node_rank",),
    nodes_are_hosts=True,
    uses_daemons=True,
    of_one_process="HYDRA_BSTRAP_|I_MPI_HYDRA_UUID$",
    programs=("hydra_pmi_proxy", "hydra_bstrap_proxy"),  # one on each host
    mpi="yes",
    read_by=("horovod", "jax"),
    unbind="I_MPI_PIN=0",
    env_forwarding_hint="mpiexec -genv NAME VALUE …",
)
