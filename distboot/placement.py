"""`Placement`: what one process's environment proves about its place in the job, and where each value came from."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

# The order in which the fields are shown to people.
FIELDS = (
    "launcher",
    "platform",
    "rank",
    "world_size",
    "local_rank",
    "local_world_size",
    "node_rank",
    "num_nodes",
    "master_addr",
    "master_port",
    "job_id",
)

# The variables in which PyTorch, and whatever imitates it, expects the fields.
VARIABLES = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "node_rank": "NODE_RANK",
    "world_size": "WORLD_SIZE",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}


class Placement(NamedTuple):
    """This process's place in the job. A field is None when the environment alone cannot prove it.

    Attributes:
        launcher: what started this process and owns its rank, for example "openmpi" or "single".
        platform: what owns the machines, for example "azureml", or None.
        rank: 0 to world_size - 1.
        world_size: number of processes of the job.
        local_rank: 0 to local_world_size - 1, or None.
        local_world_size: number of the job's processes on this node, or None.
        node_rank: 0 to num_nodes - 1; nodes are counted in the order in which the ranks first reach them. Or None.
        num_nodes: number of nodes that have a rank, or None.
        master_addr: host name or address of rank 0 without brackets or port, or None.
        master_port: 1 to 65535, or None.
        job_id: what the launcher or the platform calls this job, or None.
        sources: field name -> where its value came from, for example "OMPI_COMM_WORLD_RANK".
        notes: remarks for people, for example why an allocation was not taken for a launcher.
        node_level: why this process stands for a whole node or pod and is to start the ranks there, for example
            "PET_NPROC_PER_NODE='4' asks for 4 processes in each pod"; the numbers above then count such processes.
            None: it is itself one of the job's ranks.
    """

    launcher: str
    platform: str | None
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    node_rank: int | None
    num_nodes: int | None
    master_addr: str | None
    master_port: int | None
    job_id: str | None
    sources: Mapping[str, str] = MappingProxyType({})
    notes: tuple[str, ...] = ()
    node_level: str | None = None

    @property
    def who(self) -> str | None:
        """This process as messages name it: "rank 3", "node 2" if it stands for one; None when it is alone."""
        if self.world_size == 1:
            return None
        return f"{'rank' if self.node_level is None else 'node'} {self.rank}"

    def with_fields(self, source: str, fields: Mapping[str, object]) -> Placement:
        """A copy with these fields, those of them that are new having come from `source`."""
        new = {name: value for name, value in fields.items() if getattr(self, name) != value}
        sources = MappingProxyType({**self.sources, **dict.fromkeys(new, source)})
        return self._replace(**new, sources=sources)  # type: ignore[arg-type]

    def as_dict(self) -> dict[str, object]:
        """All fields as plain JSON types, `sources` as a dict and `notes` as a list."""
        fields: dict[str, object] = {name: getattr(self, name) for name in FIELDS}
        more = {"sources": dict(self.sources), "notes": list(self.notes), "node_level": self.node_level}
        return {**fields, **more}
