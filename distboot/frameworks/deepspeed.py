"""`init("deepspeed")`: DeepSpeed on the process group that torch has started at the place where the ranks have met.

Its own way would be `mpi_discovery`, which needs mpi4py, runs `hostname -I` and overwrites RANK and MASTER_ADDR. It is
never reached, as DeepSpeed takes a process group that is there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..agent.session import Session
from ..context import Context
from ..detection import inherited
from ..detection.export import EnvTransaction, variables
from . import Options, _process_group, _torch
from ._base import imported, in_our_words

# deepspeed/runtime/engine.py, _configure_with_arguments, asserts that this is LOCAL_RANK if it is there, as it is for
# the processes that torchrun has started inside mpirun.
_MPIRUNS_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"


def on_cpu(options: Options) -> bool:
    """Asking for a CPU backend, or DeepSpeed for the CPU, means training on the CPU."""
    return _torch.on_cpu(_chosen(options))


def exports(job: Session, environ: Mapping[str, str]) -> dict[str, str]:
    """What DeepSpeed's launcher sets, as far as DeepSpeed needs it; and what it would stumble over.

    Its parallel checkpoint writer reads the number of this node and of all nodes. Not LOCAL_SIZE: on CPUs that makes
    it allocate 66 MB of shared memory a rank, which Docker's default of 64 MB has not, and which is never removed.
    """
    placement, (bare, _) = job.placement, inherited.strip(environ)
    local_rank = str(variables(placement, environ)["LOCAL_RANK"])
    needed = {"CROSS_RANK": str(placement.node_rank), "CROSS_SIZE": str(placement.num_nodes)}
    if _MPIRUNS_LOCAL_RANK in bare:
        needed[_MPIRUNS_LOCAL_RANK] = local_rank
    needed |= _torch.exports(job, environ)
    return {name: value for name, value in needed.items() if bare.get(name) != value}


def start(job: Session, exported: EnvTransaction, options: Options) -> Context:
    """Start torch's process group, and let DeepSpeed use it."""
    others = exports(job, exported.environ_before())
    prepare = partial(imported, "deepspeed")
    return _process_group.start(
        job, exported, _chosen(options), prepare=prepare, adopt=_adopt, others=others
    )


def _chosen(options: Options) -> Options:
    """The options with the backend of the CPU, if DeepSpeed is to use that."""
    on_cpu = options.backend is None and os.environ.get("DS_ACCELERATOR") == "cpu"
    return options._replace(backend="gloo") if on_cpu else options


def _adopt(deepspeed: Any, backend: str) -> Callable[[], None]:
    """Let DeepSpeed use the group; what ends it, with what DeepSpeed remembers of it."""
    problem = f"DeepSpeed could not use the process group on {backend!r}"
    hint = "if it speaks of building deepspeed_shm_comm, install DeepSpeed with DS_BUILD_SHM_COMM=1, or a compiler"
    # What it builds at this moment for the CPU fails in many ways.
    with in_our_words("process-group-failed", problem, hint, Exception):
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    destroy: Callable[[], None] = deepspeed.comm.destroy_process_group
    return destroy
