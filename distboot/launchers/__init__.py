"""All launchers, and the one order in which they are asked.

To add a launcher: write one file beside this one, import its record here, and put it where it belongs in
`INNERMOST_FIRST`, with the reason. Launchers never import each other.
"""

from __future__ import annotations

from ._launcher import Launcher
from ._unsupported import HOROVODRUN, HYDRA, MVAPICH
from .openmpi import OPENMPI
from .single import SINGLE
from .slurm import SLURM
from .tf_config import TF_CONFIG
from .torch import TORCH
from .torchrun import TORCHRUN

# The innermost launcher, the one that started this very process, owns its rank: whatever an outer launcher
# said is inherited by all processes alike and wrong for most of them.
INNERMOST_FIRST: tuple[Launcher, ...] = (
    # Everybody starts torchrun's agents: srun, mpirun, an operator. Nobody starts mpirun from a torchrun worker.
    TORCHRUN,
    # horovodrun and the MPI launchers start their daemons with srun inside an allocation, and the processes
    # inherit the step of the daemon, in which every node has "one task". So all of them come before slurm.
    HOROVODRUN,
    OPENMPI,
    HYDRA,
    MVAPICH,
    SLURM,
    # RANK and WORLD_SIZE are plain names that any shell, image or operator may set; a launcher with names of
    # its own knows better. When both speak and disagree, `detect` refuses.
    TORCH,
    # An operator sets TF_CONFIG once a pod; where RANK is there as well (Vertex AI) it is the more exact one.
    TF_CONFIG,
    # Nobody claims the process, and no half of a launcher is left over.
    SINGLE,
)

__all__ = ["INNERMOST_FIRST", "Launcher"]
