"""All launchers, and the one order in which they are asked.

To add a launcher: write one file beside this one, import its record here, and put it where it belongs in
`INNERMOST_FIRST`, with the reason. Launchers never import each other.
"""

from __future__ import annotations

from ._launcher import Launcher
from .awsbatch import AWSBATCH
from .deepspeed import DEEPSPEED
from .flux import FLUX
from .horovodrun import HOROVODRUN
from .intelmpi import INTELMPI
from .kubeflow import KUBEFLOW
from .lightning import LIGHTNING
from .lsf import LSF
from .mpich import MPICH
from .mvapich import MVAPICH
from .openmpi import OPENMPI
from .pals import PALS
from .sagemaker import SAGEMAKER
from .single import SINGLE
from .slurm import SLURM
from .tf_config import TF_CONFIG
from .torch import TORCH
from .torchrun import TORCHRUN
from .volcano import VOLCANO

# The innermost launcher, the one that started this very process, owns its rank: whatever an outer launcher
# said is inherited by all processes alike and wrong for most of them.
INNERMOST_FIRST: tuple[Launcher, ...] = (
    # Everybody starts torchrun's agents: srun, mpirun, an operator. Nobody starts mpirun from a torchrun worker.
    TORCHRUN,
    # Its launcher runs once a node, under pdsh, and starts the processes itself.
    DEEPSPEED,
    # horovodrun and the MPI launchers start their daemons with srun inside an allocation, and the processes
    # inherit the step of the daemon, in which every node has "one task". So all of them come before slurm.
    HOROVODRUN,
    # jsrun sets Open MPI's variables too, for Spectrum MPI, but not all of them.
    LSF,
    OPENMPI,
    # Intel MPI and MVAPICH come from MPICH, set its variables too, and know more than it does.
    INTELMPI,
    MVAPICH,
    MPICH,
    # Flux is often started by Slurm. Both set PALS_* for Cray's MPI library, so PALS itself is asked after them.
    FLUX,
    SLURM,
    PALS,
    # An operator's RANK counts pods. It must not be taken for that of a process, as TORCH would.
    KUBEFLOW,
    VOLCANO,
    # NODE_RANK and LOCAL_RANK without RANK: for TORCH that is half a launcher.
    LIGHTNING,
    # RANK and WORLD_SIZE are plain names that any shell, image or operator may set; a launcher with names of
    # its own knows better. When both speak and disagree, `detect` refuses.
    TORCH,
    # An operator sets TF_CONFIG once a pod; where RANK is there as well (Vertex AI) it is the more exact one.
    TF_CONFIG,
    # Platforms that start one container a node: whatever was started inside knows better.
    SAGEMAKER,
    AWSBATCH,
    # Nobody claims the process, and no half of a launcher is left over.
    SINGLE,
)

__all__ = ["INNERMOST_FIRST", "Launcher"]
