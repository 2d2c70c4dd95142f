"""Launchers that are recognised and refused: distboot cannot read their variables yet.

They stand in the precedence tuple where they belong, because what they inherit from an outer launcher is wrong:
mpiexec.hydra inside a Slurm allocation leaves every process a Slurm step of "one task a node".
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import DistbootError
from ..placement import Placement
from ..reading import variable
from ._launcher import Launcher, claims

HINT = (
    "map its variables to RANK, WORLD_SIZE and LOCAL_RANK for every process and set DISTBOOT_LAUNCHER=torch, "
    "or DISTBOOT_LAUNCHER=single if this process is alone"
)


def _refused(name: str, title: str, markers: tuple[str, ...], source: str) -> Launcher:
    def read(environ: Mapping[str, str]) -> Placement | None:
        if not claims(environ, markers):
            return None
        marker = next(marker for marker in markers if marker in environ)
        raise DistbootError(
            "unsupported-launcher",
            f"{variable(environ, marker)}: this process was started by {title}, which distboot cannot read yet",
            HINT,
        )

    return Launcher(name, title, markers, read, source, readable=False)


HOROVODRUN = _refused("horovodrun", "horovodrun --gloo", ("HOROVOD_RANK", "HOROVOD_SIZE"), "capture of 0.28.1")
# PMI_RANK alone is not a marker: Slurm sets it as well (srun --mpi=pmi2).
HYDRA = _refused(
    "mpich",
    "MPICH or Intel MPI (mpiexec.hydra)",
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "captures of 3.4.3 and 4.0.2",
)
MVAPICH = _refused(
    "mvapich", "MVAPICH2 (mpirun_rsh)", ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"), "capture of 2.3.7"
)
