"""oneCCL, Intel's library of collectives, which torch's backend xccl uses: it wants to know the local rank."""

from __future__ import annotations

from collections.abc import Mapping

from ..accelerators import has_intel_gpu
from ..placement import Placement

# oneCCL 2021 reads the first two, which Hydra sets, the launcher of Intel MPI and MPICH. Where none of these is set
# torch's ProcessGroupXCCL tells oneCCL itself, from LOCAL_RANK and LOCAL_WORLD_SIZE. With one of the last three, as
# under Open MPI and under srun --mpi=pmi2 or pmix, it believes that Hydra has done so.
_HYDRA = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_MPI = (*_HYDRA, "PMI_RANK", "PMI_SIZE", "PMIX_RANK")


def exports(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """The same for an unmodified script, on a host where torch may use it."""
    return variables(placement, environ) if has_intel_gpu() else {}


def variables(placement: Placement, environ: Mapping[str, str]) -> dict[str, str]:
    """What to set for it, where nobody else does, and the user has not."""
    told = all(name in environ for name in _HYDRA) or not any(name in environ for name in _MPI)
    if told or placement.world_size == 1 or "CCL_PROCESS_LAUNCHER" in environ:
        return {}
    return {
        "CCL_PROCESS_LAUNCHER": "none",
        "CCL_LOCAL_RANK": str(placement.local_rank),
        "CCL_LOCAL_SIZE": str(placement.local_world_size),
    }
